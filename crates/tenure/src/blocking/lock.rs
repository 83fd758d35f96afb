//! The client and its locks, without async.

use std::sync::Arc;
use std::time::Duration;

use super::election::{ElectionRequest, Leader};
use super::runtime::{same_as, wait, within};
use crate::retry::Retry;
use crate::store::{Finding, Store};
use crate::{Error, FencingToken, Handle, Key, Lost, Result, StoreOutage};

/// Locks, semaphores and elections on one store; see [`crate::Client`]. Cloning is cheap.
///
/// ```
/// let client = tenure::blocking::Client::connect("memory:")?;
/// let guard = client.lock("reports").try_acquire()?;
/// assert!(client.lock("reports").try_acquire().is_err());
/// guard.release()?;
/// # Ok::<(), tenure::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Client(pub(super) crate::Client);

impl Client {
    /// Connects to the store that `url` names.
    ///
    /// # Errors
    ///
    /// As [`crate::Client::connect`].
    pub fn connect(url: &str) -> Result<Self> {
        wait(crate::Client::connect(url))?.map(Self)
    }

    /// A client of a store that the caller has built.
    pub fn with_store(store: Arc<dyn Store>) -> Self {
        Self(crate::Client::with_store(store))
    }

    /// A request for an exclusive lock.
    pub fn lock(&self, key: impl AsRef<str>) -> LockRequest {
        LockRequest(self.0.lock(key))
    }

    /// A request for one slot of a semaphore that has this many slots.
    pub fn semaphore(&self, key: impl AsRef<str>, slots: u32) -> LockRequest {
        LockRequest(self.0.semaphore(key, slots))
    }

    /// A request to take part in an election.
    pub fn election(&self, key: impl AsRef<str>) -> ElectionRequest {
        ElectionRequest(self.0.election(key))
    }

    /// Observer of an election's leader, without taking part.
    ///
    /// # Errors
    ///
    /// `Invalid` for a bad key.
    pub fn leader(&self, key: impl AsRef<str>) -> Result<Leader> {
        self.0.leader(key).map(Leader)
    }

    /// Checks of the store's own health and settings; see [`crate::Client::examine`].
    ///
    /// # Errors
    ///
    /// `Unavailable` if the background thread of the library cannot be started.
    pub fn examine(&self, limit: Duration) -> Result<Vec<Finding>> {
        wait(self.0.examine(limit))
    }
}

/// Settings of an acquire; see [`crate::LockRequest`].
#[derive(Debug)]
#[must_use = "a request does nothing until it is acquired"]
pub struct LockRequest(pub(super) crate::LockRequest);

impl LockRequest {
    same_as! { LockRequest:
        ttl(ttl: Duration);
        timeout(timeout: Duration);
        shared();
        keep_alive(on: bool);
        keep_alive_factor(factor: u32);
        max_hold(max: Duration);
        stop_grace(time: Duration);
        retry(retry: impl Retry + 'static);
        id(id: impl Into<String>);
        note(note: impl Into<String>);
        fair();
        fail_if_contended();
        detached();
        on_handoff_requested(f: impl Fn() + Send + Sync + 'static);
        on_renewal_error(f: impl Fn(&Error) + Send + Sync + 'static);
        on_outage(f: impl Fn(&StoreOutage) + Send + Sync + 'static);
    }

    /// Acquires the lock, waiting for it until the timeout.
    ///
    /// # Errors
    ///
    /// As [`crate::LockRequest::acquire`].
    pub fn acquire(self) -> Result<Guard> {
        wait(self.0.acquire())?.map(Guard)
    }

    /// Acquires the lock if it is free.
    ///
    /// # Errors
    ///
    /// As [`crate::LockRequest::try_acquire`].
    pub fn try_acquire(self) -> Result<Guard> {
        wait(self.0.try_acquire())?.map(Guard)
    }

    /// Joins the queue: the first of two phases.
    ///
    /// # Errors
    ///
    /// As [`crate::LockRequest::enqueue`].
    pub fn enqueue(self) -> Result<Pending> {
        wait(self.0.enqueue())?.map(Pending)
    }
}

/// A place in the queue; see [`crate::Pending`].
#[derive(Debug)]
#[must_use = "dropping a place leaves the queue"]
pub struct Pending(crate::Pending);

impl Pending {
    /// Waits for the lock: the second of two phases.
    ///
    /// # Errors
    ///
    /// As [`crate::Pending::wait`].
    pub fn wait(self) -> Result<Guard> {
        wait(self.0.wait())?.map(Guard)
    }
}

/// A held lock; see [`crate::Guard`]. Dropping it releases the lock in the background.
#[derive(Debug)]
#[must_use = "dropping a guard releases the lock"]
pub struct Guard(crate::Guard);

impl Guard {
    /// Key of the lock.
    pub fn key(&self) -> &Key {
        self.0.key()
    }

    /// Fencing token: grows with every grant of this key.
    pub fn fencing_token(&self) -> FencingToken {
        self.0.fencing_token()
    }

    /// Revision of the record in a NATS bucket, which renewals raise; `None` on other stores. See
    /// [`crate::Guard::revision`].
    pub fn revision(&self) -> Option<u64> {
        self.0.revision()
    }

    /// Secret with which another process can renew and release the hold.
    pub fn handle(&self) -> Option<&Handle> {
        self.0.handle()
    }

    /// True while the lock is held: a local clock check, no I/O.
    pub fn is_held(&self) -> bool {
        self.0.is_held()
    }

    /// Time until the local deadline of the hold.
    pub fn remaining(&self) -> Duration {
        self.0.remaining()
    }

    /// Waits for the loss of the hold, for at most `timeout`; `None` if it is still held then.
    pub fn lost(&self, timeout: Duration) -> Option<Lost> {
        within(timeout, self.0.lost())
    }

    /// Waits at most `timeout` until a waiter has asked for this lock; true if one has.
    pub fn handoff_requested(&self, timeout: Duration) -> bool {
        within(timeout, self.0.handoff_requested()).is_some()
    }

    /// Waits at most `timeout` until the protected work must begin to stop; true if it must.
    pub fn ending(&self, timeout: Duration) -> bool {
        within(timeout, self.0.ending()).is_some()
    }

    /// Releases the lock and reports the result.
    ///
    /// # Errors
    ///
    /// As [`crate::Guard::release`].
    pub fn release(self) -> Result<()> {
        wait(self.0.release())?
    }

    /// Stops renewing and leaves the hold to its ttl, or to another process that has the handle.
    ///
    /// # Errors
    ///
    /// As [`crate::Guard::detach`].
    pub fn detach(self) -> Result<Handle> {
        wait(self.0.detach())?
    }
}
