//! The client and its locks, without async.

use std::sync::Arc;
use std::time::Duration;

use super::election::{ElectionRequest, Leader};
use super::runtime::{same_as, wait, within};
use crate::retry::Retry;
use crate::store::{Finding, Store};
use crate::{Error, ErrorKind, FencingToken, Handle, Key, Lost, Result, StoreOutage};

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

    /// Starts the settings of a client: the time to wait for a store that is away, callbacks, and URL schemes of other
    /// crates.
    pub fn builder() -> ClientBuilder {
        ClientBuilder(crate::Client::builder())
    }

    /// A client of a store that the caller has built.
    pub fn with_store(store: Arc<dyn Store>) -> Self {
        Self(crate::Client::with_store(store))
    }

    /// The store of this client.
    pub fn store(&self) -> &Arc<dyn Store> {
        self.0.store()
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

    /// Renews a hold that another process detached, by its handle; see [`crate::Client::renew`].
    ///
    /// # Errors
    ///
    /// As [`crate::Client::renew`].
    pub fn renew(&self, key: impl AsRef<str>, handle: &Handle, ttl: Duration) -> Result<()> {
        wait(self.0.renew(key, handle, ttl))?
    }

    /// Releases a hold that another process detached, by its handle.
    ///
    /// # Errors
    ///
    /// As [`crate::Client::release`].
    pub fn release(&self, key: impl AsRef<str>, handle: &Handle) -> Result<()> {
        wait(self.0.release(key, handle))?
    }

    /// Waits at most `timeout` until this client and its clones have no task left; true if they have none. See
    /// [`crate::Client::idle`].
    pub fn idle(&self, timeout: Duration) -> bool {
        within(timeout, self.0.idle()).is_some()
    }
}

/// Settings of a client before it connects; see [`crate::ClientBuilder`].
///
/// ```
/// use std::sync::Arc;
/// use tenure::blocking::Client;
/// use tenure::{MemoryStore, Store};
///
/// let client = Client::builder()
///     .scheme("scratch", async |_url: String| Ok(Arc::new(MemoryStore::new()) as Arc<dyn Store>))
///     .connect("scratch:")?;
/// client.lock("reports").try_acquire()?.release()?;
/// # Ok::<(), tenure::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
#[must_use = "a builder does nothing until it connects"]
pub struct ClientBuilder(crate::ClientBuilder);

impl ClientBuilder {
    same_as! { "ClientBuilder":
        wait_for_store(limit: Duration);
        on_outage(f: impl Fn(&StoreOutage) + Send + Sync + 'static);
    }

    /// See [`ClientBuilder::scheme`](crate::ClientBuilder::scheme). `open` may use the timers and the I/O of tokio, and
    /// must not block.
    pub fn scheme<F, Opening>(self, scheme: &str, open: F) -> Self
    where
        F: Fn(String) -> Opening + Send + Sync + 'static,
        Opening: Future<Output = Result<Arc<dyn Store>>> + Send + 'static,
    {
        Self(self.0.scheme(scheme, open))
    }

    /// Connects to the store that `url` names.
    ///
    /// # Errors
    ///
    /// As [`crate::ClientBuilder::connect`].
    pub fn connect(self, url: &str) -> Result<Client> {
        wait(self.0.connect(url))?.map(Client)
    }
}

/// Settings of an acquire; see [`crate::LockRequest`].
#[derive(Debug)]
#[must_use = "a request does nothing until it is acquired"]
pub struct LockRequest(pub(super) crate::LockRequest);

impl LockRequest {
    same_as! { "LockRequest":
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
        class(class: impl Into<String>);
        fair();
        fail_if_contended();
        fail_fast();
        detached();
        on_handoff_requested(f: impl Fn() + Send + Sync + 'static);
        on_renewal_error(f: impl Fn(&Error) + Send + Sync + 'static);
        on_outage(f: impl Fn(&StoreOutage) + Send + Sync + 'static);
    }

    /// Key of the lock; `None` if the key is invalid, which fails when the request is sent.
    pub fn key(&self) -> Option<&Key> {
        self.0.key()
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

    /// Runs `work` under the lock if the lock is free. Returns the output of `work`, or `None` if another holder has the
    /// lock and `work` was not run.
    ///
    /// Unlike [`crate::LockRequest::try_run`], this cannot interrupt `work` when the hold is lost: `work` checks
    /// [`Guard::is_held`] or waits for [`Guard::ending`].
    ///
    /// # Errors
    ///
    /// `Lost` if the hold ended before `work` returned; otherwise as [`acquire`](Self::acquire). A release without a
    /// clear answer is not an error: `work` completed under the lock.
    pub fn try_run<T>(self, work: impl FnOnce(&Guard) -> T) -> Result<Option<T>> {
        let guard = match self.try_acquire() {
            Ok(guard) => guard,
            Err(error) if error.kind().is_held_by_another() => return Ok(None),
            Err(error) => return Err(error),
        };
        let output = work(&guard);
        match guard.release() {
            Err(error) if error.kind() == ErrorKind::Lost => Err(error),
            _ => Ok(Some(output)),
        }
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

    /// A descriptor that keeps the hold; see [`crate::Guard::keep_open`].
    ///
    /// # Errors
    ///
    /// As [`crate::Guard::keep_open`].
    #[cfg(unix)]
    pub fn keep_open(&self) -> Result<Option<std::os::fd::OwnedFd>> {
        self.0.keep_open()
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
