//! Callbacks that are added to an election after it was built.

use std::sync::Arc;

use super::callbacks::CallbackOutput;
use super::{AcquireFailed, Election, Leadership, StateChange, StopReason};
use crate::Error;
use crate::guard::Lost;

/// Callbacks of a running election. Each is called for the events from now on, after those that were registered before,
/// and as described at [`ElectionRequest`](super::ElectionRequest#callbacks).
impl Election {
    /// Calls `f` when this participant becomes the leader. If it leads already, `f` is called for its next term: check
    /// [`leadership`](Self::leadership) after this call.
    pub fn on_acquired<R: CallbackOutput<How>, How>(
        &self,
        f: impl Fn(Leadership) -> R + Send + Sync + 'static,
    ) {
        self.callbacks().acquired.add(f);
    }

    /// Calls `f` when this participant has given up its leadership.
    pub fn on_released<R: CallbackOutput<How>, How>(
        &self,
        f: impl Fn() -> R + Send + Sync + 'static,
    ) {
        self.callbacks().released.add(move |()| f());
    }

    /// Calls `f` when this participant has lost its leadership.
    pub fn on_lost<R: CallbackOutput<How>, How>(
        &self,
        f: impl Fn(Lost) -> R + Send + Sync + 'static,
    ) {
        self.callbacks().lost.add(f);
    }

    /// Calls `f` when a claim failed though the store answered.
    pub fn on_acquire_failed<R: CallbackOutput<How>, How>(
        &self,
        f: impl Fn(AcquireFailed) -> R + Send + Sync + 'static,
    ) {
        self.callbacks().acquire_failed.add(f);
    }

    /// Calls `f` when the state has changed.
    pub fn on_state_change<R: CallbackOutput<How>, How>(
        &self,
        f: impl Fn(StateChange) -> R + Send + Sync + 'static,
    ) {
        self.callbacks().state_change.add(f);
    }

    /// Calls `f` when a request to the store, a renewal or a callback failed.
    pub fn on_error<R: CallbackOutput<How>, How>(
        &self,
        f: impl Fn(Arc<Error>) -> R + Send + Sync + 'static,
    ) {
        self.callbacks().error.add(f);
    }

    /// Calls `f` when the run has ended, as the last callback of the run.
    pub fn on_stopped<R: CallbackOutput<How>, How>(
        &self,
        f: impl Fn(StopReason) -> R + Send + Sync + 'static,
    ) {
        self.callbacks().stopped.add(f);
    }
}
