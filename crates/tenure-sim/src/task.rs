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
                    keeper.handle(keeper::KeeperInput::Broken(keeper::Loss::Disconnected), now);
                }
                if let Some(input) = to_keeper(outcome, what) {
                    keeper.handle(input, now);
                }
            }
        }
    }
}

fn of_acquire(command: acquire::AcquireCommand) -> Command {
    match command {
        acquire::AcquireCommand::Claim { limit, queue } => {
            Command::Ask(What::Claim { queue }, limit)
        }
        acquire::AcquireCommand::Wait { limit } => Command::Ask(What::Wait, limit),
        acquire::AcquireCommand::Confirm { limit } => Command::Ask(What::Renew, limit),
        acquire::AcquireCommand::Release { limit } => Command::Ask(What::Release, limit),
        acquire::AcquireCommand::Abandon { limit } => Command::Ask(What::Abandon, limit),
        acquire::AcquireCommand::Watch => Command::Watch,
        acquire::AcquireCommand::Answer(answer) => Command::Answer(answer),
        acquire::AcquireCommand::Finish => Command::Finish,
    }
}

fn of_keeper(command: keeper::KeeperCommand) -> Command {
    match command {
        keeper::KeeperCommand::Renew { limit } => Command::Ask(What::Renew, limit),
        keeper::KeeperCommand::CheckHandoff { limit } => Command::Ask(What::Look, limit),
        keeper::KeeperCommand::Release { limit } => Command::Ask(What::Release, limit),
        keeper::KeeperCommand::Lost(_) => Command::Lost,
        keeper::KeeperCommand::HandoffRequested => Command::HandOff,
        keeper::KeeperCommand::Done(_) => Command::Finish,
    }
}

fn to_acquire(outcome: Outcome) -> Option<acquire::AcquireInput> {
    use acquire::{AcquireInput, RequestFailure};
    Some(match outcome {
        Outcome::Granted(counts) => AcquireInput::Granted(counts),
        Outcome::Queued => AcquireInput::Queued,
        Outcome::Busy => AcquireInput::Contended { retry_after: None },
        Outcome::Still => AcquireInput::StillQueued,
        Outcome::Gone => AcquireInput::PlaceLost,
        Outcome::Renewed { .. } => AcquireInput::Confirmed,
        Outcome::Refused => AcquireInput::Refused,
        Outcome::GivenBack => AcquireInput::Released,
        Outcome::Failed(failure) => AcquireInput::Failed(failure),
        Outcome::Broken => AcquireInput::Failed(RequestFailure::Unknown),
        Outcome::Looked => return None,
    })
}

fn to_keeper(outcome: Outcome, what: Option<What>) -> Option<keeper::KeeperInput> {
    use keeper::KeeperInput;
    Some(match outcome {
        Outcome::Renewed { waiter } if what == Some(What::Look) => {
            KeeperInput::HandoffChecked { handoff_requested: waiter }
        }
        Outcome::Renewed { waiter } => KeeperInput::Renewed { handoff_requested: waiter },
        Outcome::Looked => KeeperInput::HandoffChecked { handoff_requested: false },
        Outcome::Refused => KeeperInput::Refused,
        Outcome::GivenBack => KeeperInput::Released,
        Outcome::Failed(_) | Outcome::Broken => match what? {
            What::Renew => KeeperInput::RenewFailed,
            What::Look => KeeperInput::HandoffCheckFailed,
            _ => KeeperInput::ReleaseFailed,
        },
        _ => return None,
    })
}
