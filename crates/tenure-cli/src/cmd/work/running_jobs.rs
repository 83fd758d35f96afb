//! Registry of the running commands, to signal all of them at once.

use std::collections::HashMap;
use std::sync::MutexGuard;

use nix::sys::signal::Signal;
use tokio::sync::{Notify, mpsc};

use crate::exit::Exit;
use crate::mutex::Mutex;
use crate::signals::Signals;

/// The running commands, each with the channel to its supervisor.
#[derive(Default)]
pub(super) struct RunningJobs {
    state: Mutex<RunningJobsState>,
    gave_up: Notify,
}

#[derive(Default)]
struct RunningJobsState {
    next: u64,
    jobs: HashMap<u64, mpsc::UnboundedSender<Signal>>,
    /// The commands are being stopped: a command that ends now has not failed, and its job is released.
    stopping: bool,
    /// Exit code of the worker, set once the command cannot be started.
    exit: Option<Exit>,
}

/// Entry of a running command; removed on drop.
pub(super) struct RunningJob<'a> {
    registry: &'a RunningJobs,
    number: u64,
    pub(super) signals: Signals,
}

impl RunningJobs {
    pub(super) fn register(&self) -> RunningJob<'_> {
        let (sender, signals) = mpsc::unbounded_channel();
        let mut state = self.lock();
        state.next += 1;
        let number = state.next;
        if state.stopping {
            // This command started while the others were being stopped, and has missed their signal.
            let _ = sender.send(Signal::SIGTERM);
        }
        state.jobs.insert(number, sender);
        RunningJob { registry: self, number, signals: Signals::Relayed(signals) }
    }

    /// Forwards a signal to all commands.
    pub(super) fn forward(&self, signal: Signal) {
        for job in self.lock().jobs.values() {
            // A command that has just ended needs no signal.
            let _ = job.send(signal);
        }
    }

    /// Stops all commands with this signal.
    pub(super) fn stop(&self, signal: Signal) {
        self.lock().stopping = true;
        self.forward(signal);
        if signal == Signal::SIGTERM {
            // A suspended process receives TERM only after it is continued.
            self.forward(Signal::SIGCONT);
        }
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.lock().stopping
    }

    /// Ends the worker with `exit`: the command cannot be started.
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
        self.state.lock()
    }
}

impl Drop for RunningJob<'_> {
    fn drop(&mut self) {
        self.registry.lock().jobs.remove(&self.number);
    }
}
