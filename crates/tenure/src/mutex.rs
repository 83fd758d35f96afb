//! A mutex without poisoning.

use std::fmt;
#[cfg(any(test, all(unix, feature = "file")))]
use std::sync::TryLockError;
use std::sync::{self, MutexGuard, PoisonError};

/// Mutex that can still be locked after a panic under its lock.
///
/// With a mutex of the standard library, such a panic makes each later user of the state panic as well. Use this one for
/// state that is valid after every statement of its critical sections.
#[derive(Default)]
pub(crate) struct Mutex<T>(sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks without waiting; `None` if another thread has the lock.
    #[cfg(any(test, all(unix, feature = "file")))]
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(error)) => Some(error.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for Mutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_survives_a_panic_under_the_lock() {
        let mutex = Mutex::new(1);
        let panicked = std::thread::scope(|scope| {
            let holder = scope.spawn(|| {
                *mutex.lock() = 2;
                let _guard = mutex.lock();
                panic!("under the lock");
            });
            holder.join().is_err()
        });
        assert!(panicked);
        assert_eq!(*mutex.lock(), 2);
        let guard = mutex.try_lock();
        assert!(guard.is_some());
        assert!(mutex.try_lock().is_none());
    }
}
