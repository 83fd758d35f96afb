//! Batching: the requests of many callers in one statement.
//!
//! While enough statements are in flight, new requests wait for the next one, which serves all of them. A single caller
//! does not wait, and many callers cost little more than one.

use std::sync::{Arc, MutexGuard};

use crate::Error;
use crate::mutex::Mutex;

/// Maximum number of statements of a kind in flight. With fewer, the server idles while we read an answer; with more,
/// batches are too small.
const MAX_IN_FLIGHT: usize = 4;

/// Waiting requests, and the number of statements in flight.
#[derive(Debug)]
pub(super) struct Batcher<T>(Mutex<BatcherState<T>>);

#[derive(Debug)]
struct BatcherState<T> {
    waiting: Vec<T>,
    in_flight: usize,
}

impl<T> Default for Batcher<T> {
    fn default() -> Self {
        Self(Mutex::new(BatcherState { waiting: Vec::new(), in_flight: 0 }))
    }
}

impl<T> Batcher<T> {
    /// Adds a request to the next batch. If this returns true, the caller must spawn a task that calls
    /// [`next_batch`](Self::next_batch) until it returns `None`; requests that join before the task runs are in its
    /// batch.
    pub(super) fn join(&self, request: T) -> bool {
        let mut state = self.lock();
        state.waiting.push(request);
        let spawn = state.in_flight < MAX_IN_FLIGHT;
        state.in_flight += usize::from(spawn);
        spawn
    }

    /// Takes all waiting requests; `None` if none waits, and the task must end.
    ///
    /// The check and the decrement are one critical section: a request that joins right after it sees the task as gone,
    /// and its caller spawns another.
    pub(super) fn next_batch(&self) -> Option<Vec<T>> {
        let mut state = self.lock();
        if state.waiting.is_empty() {
            state.in_flight -= 1;
            return None;
        }
        Some(std::mem::take(&mut state.waiting))
    }

    fn lock(&self) -> MutexGuard<'_, BatcherState<T>> {
        self.0.lock()
    }
}

/// Copies an error for each of `count` callers.
pub(super) fn repeat_error(error: Error, count: usize) -> impl Iterator<Item = Error> {
    let cause = Arc::new(error);
    (0..count).map(move |_| Error::copy_of(&cause, "the batched request failed"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callers_during_a_statement_join_the_next_batch() {
        let batcher = Batcher::default();
        let first: Vec<usize> = (0..MAX_IN_FLIGHT).collect();
        assert!(first.iter().all(|nth| batcher.join(*nth)));
        assert_eq!(
            batcher.next_batch(),
            Some(first),
            "all requests that joined before the first statement"
        );
        assert!(!batcher.join(10) && !batcher.join(11), "enough are in flight");
        assert_eq!(batcher.next_batch(), Some(vec![10, 11]));
        assert!((0..MAX_IN_FLIGHT).all(|_| batcher.next_batch().is_none()));
        assert!(batcher.join(12), "none is in flight");
    }
}
