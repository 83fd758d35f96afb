//! Several locks at once, and operations on the keys of a store, without async.

use std::time::Duration;

use super::lock::{Client, LockRequest};
use super::runtime::{same_as, wait, within};
use crate::race::before;
use crate::store::{HistoryEvent, KeyState};
use crate::{FencingToken, Key, Lost, Result};

impl Client {
    /// A request for several locks; see [`crate::Client::lock_all`].
    pub fn lock_all<K: AsRef<str>>(&self, keys: impl IntoIterator<Item = K>) -> LockAllRequest {
        LockAllRequest(self.0.lock_all(keys))
    }

    /// Keys in use that begin with `prefix`; see [`crate::Client::list`].
    ///
    /// # Errors
    ///
    /// As [`crate::Client::list`].
    pub fn list(&self, prefix: &str) -> Result<Vec<KeyState>> {
        wait(self.0.list(prefix))?
    }

    /// The first keys that [`list`](Self::list) would return, and true if there are more.
    ///
    /// # Errors
    ///
    /// As [`crate::Client::list_first`].
    pub fn list_first(&self, prefix: &str, limit: usize) -> Result<(Vec<KeyState>, bool)> {
        wait(self.0.list_first(prefix, limit))?
    }

    /// Holders of a lock, and its waiters.
    ///
    /// # Errors
    ///
    /// As [`crate::Client::inspect`].
    pub fn inspect(&self, key: impl AsRef<str>) -> Result<KeyState> {
        wait(self.0.inspect(key))?
    }

    /// Holders of a semaphore, and its waiters.
    ///
    /// # Errors
    ///
    /// As [`crate::Client::inspect_semaphore`].
    pub fn inspect_semaphore(&self, key: impl AsRef<str>) -> Result<KeyState> {
        wait(self.0.inspect_semaphore(key))?
    }

    /// Follows the holders of a lock and its waiters.
    ///
    /// # Errors
    ///
    /// As [`crate::Client::watch`].
    pub fn watch(&self, key: impl AsRef<str>) -> Result<KeyWatch> {
        self.0.watch(key).map(KeyWatch)
    }

    /// Follows the holders of a semaphore and its waiters.
    ///
    /// # Errors
    ///
    /// As [`crate::Client::watch_semaphore`].
    pub fn watch_semaphore(&self, key: impl AsRef<str>) -> Result<KeyWatch> {
        self.0.watch_semaphore(key).map(KeyWatch)
    }

    /// Recent events of a lock; see [`crate::Client::history`].
    ///
    /// # Errors
    ///
    /// As [`crate::Client::history`].
    pub fn history(&self, key: impl AsRef<str>) -> Result<Vec<HistoryEvent>> {
        wait(self.0.history(key))?
    }

    /// Recent events of a semaphore; see [`crate::Client::history_semaphore`].
    ///
    /// # Errors
    ///
    /// As [`crate::Client::history_semaphore`].
    pub fn history_semaphore(&self, key: impl AsRef<str>) -> Result<Vec<HistoryEvent>> {
        wait(self.0.history_semaphore(key))?
    }

    /// Ends the hold that has this token; see [`crate::Client::evict`].
    ///
    /// # Errors
    ///
    /// As [`crate::Client::evict`].
    pub fn evict(&self, key: impl AsRef<str>, token: FencingToken, reason: &str) -> Result<()> {
        wait(self.0.evict(key, token, reason))?
    }

    /// Removes what released locks left in the store; see [`crate::Client::gc`].
    ///
    /// # Errors
    ///
    /// As [`crate::Client::gc`].
    pub fn gc(&self, older_than: Duration) -> Result<u64> {
        wait(self.0.gc(older_than))?
    }
}

/// Request for several locks; see [`crate::LockAllRequest`].
#[derive(Debug)]
#[must_use = "a request does nothing until it is acquired"]
pub struct LockAllRequest(crate::LockAllRequest);

impl LockAllRequest {
    /// Applies settings to the request of every lock.
    pub fn each(self, settings: impl Fn(LockRequest) -> LockRequest + Send + 'static) -> Self {
        Self(self.0.each(move |request| settings(LockRequest(request)).0))
    }

    /// Sets the maximum time to wait for all locks together.
    pub fn timeout(self, timeout: Duration) -> Self {
        Self(self.0.timeout(timeout))
    }

    /// Acquires all locks, waiting for them until the timeout.
    ///
    /// # Errors
    ///
    /// As [`crate::LockAllRequest::acquire`].
    pub fn acquire(self) -> Result<LockGuards> {
        wait(self.0.acquire())?.map(LockGuards)
    }

    /// Acquires all locks if all are free.
    ///
    /// # Errors
    ///
    /// As [`crate::LockAllRequest::try_acquire`].
    pub fn try_acquire(self) -> Result<LockGuards> {
        wait(self.0.try_acquire())?.map(LockGuards)
    }
}

/// Several locks that are held together; see [`crate::LockGuards`].
#[derive(Debug)]
#[must_use = "dropping the guards releases the locks"]
pub struct LockGuards(crate::LockGuards);

impl LockGuards {
    /// True while every lock is held.
    pub fn is_held(&self) -> bool {
        self.0.is_held()
    }

    /// Fencing token of one of the locks; `None` if it is not among them.
    pub fn fencing_token(&self, key: impl AsRef<str>) -> Option<FencingToken> {
        self.0.get(key).map(crate::Guard::fencing_token)
    }

    /// Keys of the locks.
    pub fn keys(&self) -> impl Iterator<Item = &Key> {
        self.0.keys()
    }

    /// Time until the earliest local deadline of the holds.
    pub fn remaining(&self) -> Duration {
        self.0.remaining()
    }

    /// Waits at most `timeout` until the protected work must begin to stop; true if it must.
    pub fn ending(&self, timeout: Duration) -> bool {
        within(timeout, self.0.ending()).is_some()
    }

    /// Waits at most `timeout` until a waiter has asked for one of the locks; true if one has.
    pub fn handoff_requested(&self, timeout: Duration) -> bool {
        within(timeout, self.0.handoff_requested()).is_some()
    }

    /// Waits for the loss of one of the locks, for at most `timeout`; `None` if all are still held then.
    pub fn lost(&self, timeout: Duration) -> Option<Lost> {
        within(timeout, self.0.lost())
    }

    /// Releases all locks and reports the first error.
    ///
    /// # Errors
    ///
    /// As [`crate::LockGuards::release`].
    pub fn release(self) -> Result<()> {
        wait(self.0.release())?
    }
}

/// Follows the holders and waiters of a key; see [`crate::KeyWatch`].
#[derive(Debug)]
#[must_use = "a watch does nothing until it is polled"]
pub struct KeyWatch(crate::KeyWatch);

impl KeyWatch {
    same_as! { "KeyWatch":
        poll_every(time: Duration);
    }

    /// Waits until the state of the key differs from the one returned last, for at most `timeout`; `None` if it does not
    /// differ then. Returns at once the first time.
    ///
    /// # Errors
    ///
    /// As [`crate::KeyWatch::next`].
    pub fn next(&mut self, timeout: Duration) -> Result<Option<KeyState>> {
        let clock = crate::Clock::system();
        wait(before(&clock, clock.now() + timeout, self.0.next()))?.transpose()
    }
}
