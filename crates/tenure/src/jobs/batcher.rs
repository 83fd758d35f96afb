//! Requests of many callers in one statement.
//!
//! While a statement is under way, whoever comes waits for the next one, which serves all of them: a caller alone waits for
//! nobody, and many cost little more than one.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// How many statements of a kind may be under way at once: fewer leave the server idle while we read an answer, more find
/// nobody to go along.
const MAX_IN_FLIGHT: usize = 4;

/// Callers that wait, and how many statements are under way.
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
    /// Joins those that wait. Whether a task has to be spawned that asks for the [`next`](Self::next) until there is none:
    /// whoever joins before it runs goes along.
    pub(super) fn join(&self, caller: T) -> bool {
        let mut state = self.lock();
        state.waiting.push(caller);
        let spawn = state.in_flight < MAX_IN_FLIGHT;
        state.in_flight += usize::from(spawn);
        spawn
    }

    /// Those that wait now; `None` where nobody does.
    pub(super) fn next_batch(&self) -> Option<Vec<T>> {
        let mut state = self.lock();
        if state.waiting.is_empty() {
            state.in_flight -= 1;
            return None;
        }
        Some(std::mem::take(&mut state.waiting))
    }

    fn lock(&self) -> MutexGuard<'_, BatcherState<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callers_during_a_statement_join_the_next_batch() {
        let group = Batcher::default();
        let first: Vec<usize> = (0..MAX_IN_FLIGHT).collect();
        assert!(first.iter().all(|nth| group.join(*nth)));
        assert_eq!(group.next_batch(), Some(first), "all who came before the first was sent");
        assert!(!group.join(10) && !group.join(11), "enough are under way");
        assert_eq!(group.next_batch(), Some(vec![10, 11]));
        assert!((0..MAX_IN_FLIGHT).all(|_| group.next_batch().is_none()));
        assert!(group.join(12), "nobody is under way any more");
    }
}
