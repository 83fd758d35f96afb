//! A mutex without poisoning.

use std::sync::{self, MutexGuard, PoisonError};

/// Mutex that can still be locked after a panic under its lock.
///
/// With a mutex of the standard library, such a panic makes each later user of the state panic as well. Use this one for
/// state that is valid after every statement of its critical sections.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
