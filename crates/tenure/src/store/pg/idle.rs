//! Connections that are kept for a while after their last use.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tenure_core::Time;
use tokio::runtime::Handle;

use crate::Clock;

/// A few things that were used and may be again soon. What nobody takes is let go after a while.
#[derive(Debug)]
pub(crate) struct IdlePool<T> {
    state: Arc<Mutex<IdleState<T>>>,
    clock: Clock,
    max_idle: usize,
    idle_timeout: Duration,
}

#[derive(Debug)]
struct IdleState<T> {
    entries: Vec<(T, Time)>,
    /// A task is there to let go of what stays too long.
    sweeping: bool,
    closed: bool,
}

impl<T: Send + 'static> IdlePool<T> {
    pub(crate) fn new(clock: Clock, max_idle: usize, idle_timeout: Duration) -> Self {
        let state = IdleState { entries: Vec::new(), sweeping: false, closed: false };
        Self { state: Arc::new(Mutex::new(state)), clock, max_idle, idle_timeout }
    }

    /// The one used last.
    pub(crate) fn take(&self) -> Option<T> {
        lock(&self.state).entries.pop().map(|(kept, _)| kept)
    }

    pub(crate) fn put(&self, used: T) {
        let Ok(runtime) = Handle::try_current() else { return };
        let mut state = lock(&self.state);
        if state.closed || state.entries.len() >= self.max_idle {
            return;
        }
        state.entries.push((used, self.clock.now()));
        if !std::mem::replace(&mut state.sweeping, true) {
            runtime.spawn(sweep(Arc::clone(&self.state), self.clock.clone(), self.idle_timeout));
        }
    }

    /// Closes the connections that are kept now.
    pub(crate) fn clear(&self) {
        lock(&self.state).entries.clear();
    }

    /// Lets go of everything, and keeps nothing from now on.
    pub(crate) fn close(&self) {
        let mut state = lock(&self.state);
        state.closed = true;
        state.entries.clear();
    }

    pub(crate) fn is_closed(&self) -> bool {
        lock(&self.state).closed
    }
}

impl<T> Drop for IdlePool<T> {
    fn drop(&mut self) {
        let mut state = lock(&self.state);
        state.closed = true;
        state.entries.clear();
    }
}

async fn sweep<T: Send>(state: Arc<Mutex<IdleState<T>>>, clock: Clock, idle_timeout: Duration) {
    loop {
        clock.sleep_until(clock.now() + idle_timeout).await;
        let now = clock.now();
        let mut state = lock(&state);
        state.entries.retain(|(_, since)| now.since(*since) < idle_timeout);
        if state.entries.is_empty() {
            state.sweeping = false;
            return;
        }
    }
}

fn lock<T>(state: &Mutex<IdleState<T>>) -> MutexGuard<'_, IdleState<T>> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}
