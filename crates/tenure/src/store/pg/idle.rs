//! Idle connections, kept for a short time after their last use.

use std::sync::Arc;
use std::time::Duration;

use tenure_core::Time;
use tokio::runtime::Handle;

use crate::Clock;
use crate::mutex::Mutex;

/// A small pool of idle entries. An entry that is not taken within the idle timeout is dropped.
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
    /// True while a task runs that drops expired entries.
    sweeping: bool,
    closed: bool,
}

impl<T: Send + 'static> IdlePool<T> {
    pub(crate) fn new(clock: Clock, max_idle: usize, idle_timeout: Duration) -> Self {
        let state = IdleState { entries: Vec::new(), sweeping: false, closed: false };
        Self { state: Arc::new(Mutex::new(state)), clock, max_idle, idle_timeout }
    }

    /// Takes the entry that was used last.
    pub(crate) fn take(&self) -> Option<T> {
        self.state.lock().entries.pop().map(|(kept, _)| kept)
    }

    /// Keeps an entry. It is dropped instead if the pool is full or closed, or if no runtime is there to expire it.
    pub(crate) fn put(&self, used: T) {
        let Ok(runtime) = Handle::try_current() else { return };
        let mut state = self.state.lock();
        if state.closed || state.entries.len() >= self.max_idle {
            return;
        }
        state.entries.push((used, self.clock.now()));
        if !std::mem::replace(&mut state.sweeping, true) {
            runtime.spawn(sweep(Arc::clone(&self.state), self.clock.clone(), self.idle_timeout));
        }
    }

    /// Drops all idle entries; later ones are kept again.
    pub(crate) fn clear(&self) {
        self.state.lock().entries.clear();
    }

    /// Drops all idle entries, and keeps none from now on.
    pub(crate) fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        state.entries.clear();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.state.lock().closed
    }
}

impl<T> Drop for IdlePool<T> {
    fn drop(&mut self) {
        let mut state = self.state.lock();
        state.closed = true;
        state.entries.clear();
    }
}

async fn sweep<T: Send>(state: Arc<Mutex<IdleState<T>>>, clock: Clock, idle_timeout: Duration) {
    loop {
        clock.sleep_until(clock.now() + idle_timeout).await;
        let now = clock.now();
        let mut state = state.lock();
        state.entries.retain(|(_, since)| now.since(*since) < idle_timeout);
        if state.entries.is_empty() {
            state.sweeping = false;
            return;
        }
    }
}
