//! One machine of a client, with the request that it has under way.

use tenure_core::Time;
use tenure_core::acquire::{self, Acquire};
use tenure_core::keeper::{self, Keeper};

use crate::errand::{Errand, Handle, Outcome, What};

#[derive(Debug)]
pub(crate) struct Task {
    /// Also the id of its claim: one acquire, one claim.
    pub(crate) id: u64,
    pub(crate) key: usize,
    pub(crate) machine: Machine,
    pub(crate) handle: Handle,
    pub(crate) errand: Option<Errand>,
    /// The connection it speaks over.
    pub(crate) link: usize,
    pub(crate) messages: u32,
    /// When its user goes away or lets go.
    pub(crate) leave_at: Time,
    pub(crate) answered: bool,
    pub(crate) done: bool,
}

#[derive(Debug)]
pub(crate) enum Machine {
    Acquire(Acquire),
    Keeper(Keeper),
}

/// What a machine wants done, whichever it is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Command {
    Ask(What, std::time::Duration),
    /// Nothing to ask; a wait under way ends.
    Watch,
    Answer(acquire::Answer),
    Lost,
    HandOff,
    Finish,
}

impl Task {
    pub(crate) fn poll_timeout(&self) -> Time {
        let machine = match &self.machine {
            Machine::Acquire(acquire) => acquire.poll_timeout(),
            Machine::Keeper(keeper) => keeper.poll_timeout(),
        };
        let limit = self.errand.map_or(Time::MAX, |errand| errand.limit_at.min(errand.again));
        machine.unwrap_or(Time::MAX).min(limit).min(self.leave_at)
    }

    pub(crate) fn handle_timeout(&mut self, now: Time) {
        match &mut self.machine {
            Machine::Acquire(acquire) => acquire.handle_timeout(now),
            Machine::Keeper(keeper) => keeper.handle_timeout(now),
        }
    }

    pub(crate) fn poll_command(&mut self) -> Option<Command> {
        match &mut self.machine {
            Machine::Acquire(acquire) => acquire.poll_command().map(of_acquire),
            Machine::Keeper(keeper) => keeper.poll_command().map(of_keeper),
        }
    }

    /// Tells the machine what became of the errand it had under way, which is over by this.
    pub(crate) fn told(&mut self, outcome: Outcome, now: Time) {
        let what = self.errand.take().map(|errand| errand.what);
        match &mut self.machine {
            Machine::Acquire(acquire) => {
                if let Some(input) = to_acquire(outcome) {
                    acquire.handle(input, now);
                }
            }
            Machine::Keeper(keeper) => {
                if let Outcome::Broken = outcome {
                    keeper.handle(keeper::Input::Broken(keeper::Loss::Disconnected), now);
                }
                if let Some(input) = to_keeper(outcome, what) {
                    keeper.handle(input, now);
                }
            }
        }
    }
}

fn of_acquire(command: acquire::Command) -> Command {
    match command {
        acquire::Command::Claim { limit, queue } => Command::Ask(What::Claim { queue }, limit),
        acquire::Command::Wait { limit } => Command::Ask(What::Wait, limit),
        acquire::Command::Confirm { limit } => Command::Ask(What::Renew, limit),
        acquire::Command::Release { limit } => Command::Ask(What::Release, limit),
        acquire::Command::Abandon { limit } => Command::Ask(What::Abandon, limit),
        acquire::Command::Watch => Command::Watch,
        acquire::Command::Answer(answer) => Command::Answer(answer),
        acquire::Command::Finish => Command::Finish,
    }
}

fn of_keeper(command: keeper::Command) -> Command {
    match command {
        keeper::Command::Renew { limit } => Command::Ask(What::Renew, limit),
        keeper::Command::Look { limit } => Command::Ask(What::Look, limit),
        keeper::Command::Release { limit } => Command::Ask(What::Release, limit),
        keeper::Command::Lost(_) => Command::Lost,
        keeper::Command::HandOff => Command::HandOff,
        keeper::Command::Done(_) => Command::Finish,
    }
}

fn to_acquire(outcome: Outcome) -> Option<acquire::Input> {
    use acquire::{Failure, Input};
    Some(match outcome {
        Outcome::Granted(counts) => Input::Granted(counts),
        Outcome::Queued => Input::Queued,
        Outcome::Busy => Input::Busy { retry_after: None },
        Outcome::Still => Input::Still,
        Outcome::Gone => Input::Gone,
        Outcome::Renewed { .. } => Input::Confirmed,
        Outcome::Refused => Input::Refused,
        Outcome::GivenBack => Input::GivenBack,
        Outcome::Failed(failure) => Input::Failed(failure),
        Outcome::Broken => Input::Failed(Failure::Unknown),
        Outcome::Looked => return None,
    })
}

fn to_keeper(outcome: Outcome, what: Option<What>) -> Option<keeper::Input> {
    use keeper::Input;
    Some(match outcome {
        Outcome::Renewed { waiter } if what == Some(What::Look) => Input::Looked { waiter },
        Outcome::Renewed { waiter } => Input::Renewed { waiter },
        Outcome::Looked => Input::Looked { waiter: false },
        Outcome::Refused => Input::Refused,
        Outcome::GivenBack => Input::Released,
        Outcome::Failed(_) | Outcome::Broken => match what? {
            What::Renew => Input::RenewFailed,
            What::Look => Input::LookFailed,
            _ => Input::ReleaseFailed,
        },
        _ => return None,
    })
}
