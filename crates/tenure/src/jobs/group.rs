//! Requests of many callers in one statement.
//!
//! While a statement is under way, whoever comes waits for the next one, which serves all of them: a caller alone waits for
//! nobody, and many cost little more than one.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// How many statements of a kind may be under way at once: the server works on one while we read the answer of another.
const FLIGHTS: usize = 2;

/// Callers that wait, and how many statements are under way.
#[derive(Debug)]
pub(super) struct Group<T>(Mutex<State<T>>);

#[derive(Debug)]
struct State<T> {
    waiting: Vec<T>,
    flights: usize,
}

impl<T> Default for Group<T> {
    fn default() -> Self {
        Self(Mutex::new(State { waiting: Vec::new(), flights: 0 }))
    }
}

impl<T> Group<T> {
    /// Joins those that wait. Whether a task has to be spawned that asks for the [`next`](Self::next) until there is none:
    /// whoever joins before it runs goes along.
    pub(super) fn join(&self, caller: T) -> bool {
        let mut state = self.lock();
        state.waiting.push(caller);
        let spawn = state.flights < FLIGHTS;
        state.flights += usize::from(spawn);
        spawn
    }

    /// Those that wait now; `None` where nobody does.
    pub(super) fn next(&self) -> Option<Vec<T>> {
        let mut state = self.lock();
        if state.waiting.is_empty() {
            state.flights -= 1;
            return None;
        }
        Some(std::mem::take(&mut state.waiting))
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_comes_while_statements_are_under_way_goes_with_the_next() {
        let group = Group::default();
        assert!(group.join(1) && group.join(2));
        assert_eq!(group.next(), Some(vec![1, 2]));
        assert!(!group.join(3) && !group.join(4));
        assert_eq!(group.next(), Some(vec![3, 4]));
        assert_eq!((group.next(), group.next()), (None, None));
        assert!(group.join(5), "nobody is under way any more");
    }
}
