//! The commands that run, to be told something all at once.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::sys::signal::Signal;
use tokio::sync::{Notify, mpsc};

use crate::exit::Exit;
use crate::signals::Signals;

/// Whoever looks after a command.
#[derive(Default)]
pub(super) struct RunningJobs {
    state: Mutex<RunningJobsState>,
    gave_up: Notify,
}

#[derive(Default)]
struct RunningJobsState {
    next: u64,
    jobs: HashMap<u64, mpsc::UnboundedSender<Signal>>,
    /// We stop the commands: what becomes of them is not their fault.
    stopping: bool,
    /// Why no command can be run.
    exit: Option<Exit>,
}

/// One of them, until this is dropped.
pub(super) struct RunningJob<'a> {
    registry: &'a RunningJobs,
    number: u64,
    pub(super) signals: Signals,
}

impl RunningJobs {
    pub(super) fn register(&self) -> RunningJob<'_> {
        let (tell, told) = mpsc::unbounded_channel();
        let mut state = self.lock();
        state.next += 1;
        let number = state.next;
        if state.stopping {
            // Too late to begin.
            let _ = tell.send(Signal::SIGTERM);
        }
        state.jobs.insert(number, tell);
        RunningJob { registry: self, number, signals: Signals::Relayed(told) }
    }

    /// Passes a signal on to all commands.
    pub(super) fn forward(&self, signal: Signal) {
        for member in self.lock().jobs.values() {
            // One that is just leaving needs none.
            let _ = member.send(signal);
        }
    }

    /// Stops all commands by this signal.
    pub(super) fn stop(&self, signal: Signal) {
        self.lock().stopping = true;
        self.forward(signal);
        if signal == Signal::SIGTERM {
            // One that is stopped could not see it.
            self.forward(Signal::SIGCONT);
        }
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.lock().stopping
    }

    /// No command can be run: ends the work.
    pub(super) fn give_up(&self, exit: Exit) {
        self.lock().exit.get_or_insert(exit);
        self.gave_up.notify_one();
    }

    pub(super) async fn gave_up(&self) {
        self.gave_up.notified().await;
    }

    pub(super) fn exit(&self) -> Option<Exit> {
        self.lock().exit
    }

    fn lock(&self) -> MutexGuard<'_, RunningJobsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for RunningJob<'_> {
    fn drop(&mut self) {
        self.registry.lock().jobs.remove(&self.number);
    }
}
