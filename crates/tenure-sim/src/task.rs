//! One machine of a client, with the request that it has under way.

use tenure_core::Time;
use tenure_core::acquire::{self, Acquire};
use tenure_core::keeper::{self, Keeper};

use crate::in_flight::{ClaimState, InFlight, Operation, Outcome};

#[derive(Debug)]
pub(crate) struct Task {
    /// Also the id of its claim: one acquire, one claim.
    pub(crate) id: u64,
    pub(crate) key: usize,
    pub(crate) machine: Machine,
    pub(crate) claim_state: ClaimState,
    pub(crate) in_flight: Option<InFlight>,
    /// The connection it speaks over.
    pub(crate) connection: usize,
    pub(crate) messages: u32,
    /// When its user goes away or lets go.
    pub(crate) end_use_at: Time,
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
    Send(Operation, std::time::Duration),
    /// Nothing to ask; a wait under way ends.
    Watch,
    Answer(acquire::Answer),
    Lost,
    HandoffRequested,
    Finish,
}

impl Task {
    pub(crate) fn poll_timeout(&self) -> Time {
        let machine = match &self.machine {
            Machine::Acquire(acquire) => acquire.poll_timeout(),
            Machine::Keeper(keeper) => keeper.poll_timeout(),
        };
        let limit =
            self.in_flight.map_or(Time::MAX, |errand| errand.limit_at.min(errand.next_read_at));
        machine.unwrap_or(Time::MAX).min(limit).min(self.end_use_at)
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
    pub(crate) fn complete(&mut self, outcome: Outcome, now: Time) {
        let what = self.in_flight.take().map(|errand| errand.operation);
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
            Command::Send(Operation::Claim { queue }, limit)
        }
        acquire::AcquireCommand::Wait { limit } => Command::Send(Operation::Wait, limit),
        acquire::AcquireCommand::Confirm { limit } => Command::Send(Operation::Renew, limit),
        acquire::AcquireCommand::Release { limit } => Command::Send(Operation::Release, limit),
        acquire::AcquireCommand::Abandon { limit } => Command::Send(Operation::Abandon, limit),
        acquire::AcquireCommand::Watch => Command::Watch,
        acquire::AcquireCommand::Answer(answer) => Command::Answer(answer),
        acquire::AcquireCommand::Finish => Command::Finish,
    }
}

fn of_keeper(command: keeper::KeeperCommand) -> Command {
    match command {
        keeper::KeeperCommand::Renew { limit } => Command::Send(Operation::Renew, limit),
        keeper::KeeperCommand::CheckHandoff { limit } => {
            Command::Send(Operation::CheckHandoff, limit)
        }
        keeper::KeeperCommand::Release { limit } => Command::Send(Operation::Release, limit),
        keeper::KeeperCommand::Lost(_) => Command::Lost,
        keeper::KeeperCommand::HandoffRequested => Command::HandoffRequested,
        keeper::KeeperCommand::Done(_) => Command::Finish,
    }
}

fn to_acquire(outcome: Outcome) -> Option<acquire::AcquireInput> {
    use acquire::{AcquireInput, RequestFailure};
    Some(match outcome {
        Outcome::Granted(counts) => AcquireInput::Granted(counts),
        Outcome::Queued => AcquireInput::Queued,
        Outcome::Contended => AcquireInput::Contended { retry_after: None },
        Outcome::StillQueued => AcquireInput::StillQueued,
        Outcome::PlaceLost => AcquireInput::PlaceLost,
        Outcome::Renewed { .. } => AcquireInput::Confirmed,
        Outcome::Refused => AcquireInput::Refused,
        Outcome::Released => AcquireInput::Released,
        Outcome::Failed(failure) => AcquireInput::Failed(failure),
        Outcome::Broken => AcquireInput::Failed(RequestFailure::Unknown),
        Outcome::HandoffChecked => return None,
    })
}

fn to_keeper(outcome: Outcome, what: Option<Operation>) -> Option<keeper::KeeperInput> {
    use keeper::KeeperInput;
    Some(match outcome {
        Outcome::Renewed { handoff_requested: waiter } if what == Some(Operation::CheckHandoff) => {
            KeeperInput::HandoffChecked { handoff_requested: waiter }
        }
        Outcome::Renewed { handoff_requested: waiter } => {
            KeeperInput::Renewed { handoff_requested: waiter }
        }
        Outcome::HandoffChecked => KeeperInput::HandoffChecked { handoff_requested: false },
        Outcome::Refused => KeeperInput::Refused,
        Outcome::Released => KeeperInput::Released,
        Outcome::Failed(_) | Outcome::Broken => match what? {
            Operation::Renew => KeeperInput::RenewFailed,
            Operation::CheckHandoff => KeeperInput::HandoffCheckFailed,
            _ => KeeperInput::ReleaseFailed,
        },
        _ => return None,
    })
}
