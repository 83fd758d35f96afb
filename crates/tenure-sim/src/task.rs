//! A state machine of a client, with its operation in flight.

use tenure_core::acquire::{self, Acquire};
use tenure_core::keeper::{self, Keeper};
use tenure_core::{Machine as _, Time};

use crate::in_flight::{ClaimState, InFlight, Operation, Outcome};

#[derive(Debug)]
pub(crate) struct Task {
    /// Id of the task and of its claim: each acquire makes one claim.
    pub(crate) id: u64,
    pub(crate) key: usize,
    pub(crate) machine: TaskMachine,
    pub(crate) claim_state: ClaimState,
    pub(crate) in_flight: Option<InFlight>,
    /// Connection of the task.
    pub(crate) connection: usize,
    pub(crate) messages: u32,
    /// Time at which its user cancels or releases.
    pub(crate) end_use_at: Time,
    pub(crate) answered: bool,
    pub(crate) done: bool,
    /// True while the task waits for a change of a key in a stream.
    pub(crate) watching: bool,
}

#[derive(Debug)]
pub(crate) enum TaskMachine {
    Acquire(Acquire),
    Keeper(Keeper),
}

/// Command of either state machine.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Command {
    Send(Operation, std::time::Duration),
    /// No request; a wait in flight ends.
    Watch,
    Answer(acquire::AcquireAnswer),
    Lost,
    HandoffRequested,
    Finish,
}

impl Task {
    pub(crate) fn poll_timeout(&self) -> Time {
        let machine = match &self.machine {
            TaskMachine::Acquire(acquire) => acquire.poll_timeout(),
            TaskMachine::Keeper(keeper) => keeper.poll_timeout(),
        };
        let limit = self
            .in_flight
            .map_or(Time::MAX, |in_flight| in_flight.limit_at.min(in_flight.next_read_at));
        machine.unwrap_or(Time::MAX).min(limit).min(self.end_use_at)
    }

    pub(crate) fn handle_timeout(&mut self, now: Time) {
        match &mut self.machine {
            TaskMachine::Acquire(acquire) => acquire.handle_timeout(now),
            TaskMachine::Keeper(keeper) => keeper.handle_timeout(now),
        }
    }

    pub(crate) fn poll_command(&mut self) -> Option<Command> {
        match &mut self.machine {
            TaskMachine::Acquire(acquire) => acquire.poll_command().map(of_acquire),
            TaskMachine::Keeper(keeper) => keeper.poll_command().map(of_keeper),
        }
    }

    /// Ends the operation in flight and reports its outcome to the state machine.
    pub(crate) fn complete(&mut self, outcome: Outcome, now: Time) {
        let operation = self.in_flight.take().map(|in_flight| in_flight.operation);
        match &mut self.machine {
            TaskMachine::Acquire(acquire) => acquire.handle(to_acquire(outcome), now),
            TaskMachine::Keeper(keeper) => {
                if let Outcome::Broken = outcome {
                    keeper.handle(keeper::KeeperInput::HoldEnded(keeper::Loss::Disconnected), now);
                }
                if let Some(input) = to_keeper(outcome, operation) {
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

fn to_acquire(outcome: Outcome) -> acquire::AcquireInput {
    use acquire::{AcquireInput, RequestFailure};
    match outcome {
        Outcome::Granted(lease_start) => AcquireInput::Granted(lease_start),
        Outcome::Queued => AcquireInput::Queued,
        Outcome::Contended => AcquireInput::Contended { retry_after: None },
        Outcome::StillQueued => AcquireInput::StillQueued,
        Outcome::PlaceLost => AcquireInput::PlaceLost,
        Outcome::Renewed { .. } => AcquireInput::Confirmed,
        Outcome::Refused => AcquireInput::Refused,
        Outcome::Released => AcquireInput::Released,
        Outcome::Failed(failure) => AcquireInput::Failed(failure),
        Outcome::Broken => AcquireInput::Failed(RequestFailure::Unknown),
    }
}

fn to_keeper(outcome: Outcome, operation: Option<Operation>) -> Option<keeper::KeeperInput> {
    use keeper::KeeperInput;
    Some(match outcome {
        Outcome::Renewed { handoff_requested } if operation == Some(Operation::CheckHandoff) => {
            KeeperInput::HandoffChecked { handoff_requested }
        }
        Outcome::Renewed { handoff_requested } => KeeperInput::Renewed { handoff_requested },
        Outcome::Refused => KeeperInput::Refused,
        Outcome::Released => KeeperInput::Released,
        Outcome::Failed(_) | Outcome::Broken => match operation? {
            Operation::Renew => KeeperInput::RenewFailed,
            Operation::CheckHandoff => KeeperInput::HandoffCheckFailed,
            _ => KeeperInput::ReleaseFailed,
        },
        _ => return None,
    })
}
