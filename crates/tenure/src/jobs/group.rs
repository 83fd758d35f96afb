//! Requests of many callers in one statement.
//!
//! While a statement is under way, whoever comes waits for the next one, which serves all of them: a caller alone waits for
//! nobody, and many cost little more than one.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// How many statements of a kind may be under way at once: fewer leave the server idle while we read an answer, more find
/// nobody to go along.
const FLIGHTS: usize = 4;

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
        let first: Vec<usize> = (0..FLIGHTS).collect();
        assert!(first.iter().all(|nth| group.join(*nth)));
        assert_eq!(group.next(), Some(first), "all who came before the first was sent");
        assert!(!group.join(10) && !group.join(11), "enough are under way");
        assert_eq!(group.next(), Some(vec![10, 11]));
        assert!((0..FLIGHTS).all(|_| group.next().is_none()));
        assert!(group.join(12), "nobody is under way any more");
    }
}
