//! Connections that are kept for a while after their last use.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tenure_core::Time;
use tokio::runtime::Handle;

use crate::Clock;

/// A few things that were used and may be again soon. What nobody takes is let go after a while.
#[derive(Debug)]
pub(crate) struct Idle<T> {
    state: Arc<Mutex<State<T>>>,
    clock: Clock,
    most: usize,
    linger: Duration,
}

#[derive(Debug)]
struct State<T> {
    kept: Vec<(T, Time)>,
    /// A task is there to let go of what stays too long.
    swept: bool,
    closed: bool,
}

impl<T: Send + 'static> Idle<T> {
    pub(crate) fn new(clock: Clock, most: usize, linger: Duration) -> Self {
        let state = State { kept: Vec::new(), swept: false, closed: false };
        Self { state: Arc::new(Mutex::new(state)), clock, most, linger }
    }

    /// The one used last.
    pub(crate) fn take(&self) -> Option<T> {
        lock(&self.state).kept.pop().map(|(kept, _)| kept)
    }

    pub(crate) fn put(&self, used: T) {
        let Ok(runtime) = Handle::try_current() else { return };
        let mut state = lock(&self.state);
        if state.closed || state.kept.len() >= self.most {
            return;
        }
        state.kept.push((used, self.clock.now()));
        if !std::mem::replace(&mut state.swept, true) {
            runtime.spawn(sweep(Arc::clone(&self.state), self.clock.clone(), self.linger));
        }
    }

    /// Closes the connections that are kept now.
    pub(crate) fn clear(&self) {
        lock(&self.state).kept.clear();
    }

    /// Lets go of everything, and keeps nothing from now on.
    pub(crate) fn close(&self) {
        let mut state = lock(&self.state);
        state.closed = true;
        state.kept.clear();
    }

    pub(crate) fn is_closed(&self) -> bool {
        lock(&self.state).closed
    }
}

impl<T> Drop for Idle<T> {
    fn drop(&mut self) {
        let mut state = lock(&self.state);
        state.closed = true;
        state.kept.clear();
    }
}

async fn sweep<T: Send>(state: Arc<Mutex<State<T>>>, clock: Clock, linger: Duration) {
    loop {
        clock.sleep_until(clock.now() + linger).await;
        let now = clock.now();
        let mut state = lock(&state);
        state.kept.retain(|(_, since)| now.since(*since) < linger);
        if state.kept.is_empty() {
            state.swept = false;
            return;
        }
    }
}

fn lock<T>(state: &Mutex<State<T>>) -> MutexGuard<'_, State<T>> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}
