//! The client: the entry point of the library.

use std::sync::Arc;
use std::time::Duration;

use tenure_core::lease::Lease;
use tokio::sync::watch;

use crate::election::{ElectionRequest, Leader};
use crate::request::{LockRequest, RequestKind};
use crate::store::examine::examine;
use crate::store::{Finding, Handle, Store};
use crate::url::{self, Schemes};
use crate::{Clock, Error, ErrorKind, Key, Result};

/// Client of one store: makes locks, semaphores, elections and observers of elections. Cloning is cheap.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
/// let client = tenure::Client::connect("memory:").await?;
/// let guard = client.lock("deploy").try_acquire().await?;
/// assert!(guard.is_held());
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Client {
    store: Arc<dyn Store>,
    clock: Clock,
    /// Each task that acquires or keeps a lock for this client has a receiver. When all receivers are dropped, the
    /// client is idle.
    work: Arc<watch::Sender<()>>,
}

/// Limit for one attempt to release a hold by its handle.
const RELEASE_LIMIT: Duration = Duration::from_secs(5);

impl Client {
    /// Connects to the store at `url`.
    ///
    /// | URL | store | cargo feature |
    /// |---|---|---|
    /// | `memory:`, `memory:NAME` | locks within this process | |
    /// | `file:`, `file:PATH` | locks between the processes of this host | `file` (default) |
    /// | `tenure://HOST:PORT` | lock server | `server` |
    /// | `tenures://HOST:PORT` | lock server, over TLS | `tls` |
    /// | `postgres://…` | lease rows in PostgreSQL | `postgres` |
    /// | `postgres+advisory://…` | advisory locks of PostgreSQL | `postgres` |
    /// | `nats://HOST/BUCKET` | NATS JetStream | `nats` |
    /// | `gs://BUCKET/PREFIX`, `s3://…`, `az://…` | object store | `object` |
    ///
    /// # Errors
    ///
    /// `Invalid` if this build does not support the URL's scheme: the message names the missing cargo feature.
    /// Otherwise the error of the store.
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time.
    pub async fn connect(url: &str) -> Result<Self> {
        Ok(Self::with_store(url::open(url, &Schemes::default()).await?))
    }

    /// Creates a client of a store that the caller has opened.
    pub fn with_store(store: Arc<dyn Store>) -> Self {
        Self { store, clock: Clock::system(), work: Arc::new(watch::Sender::new(())) }
    }

    /// Replaces the clock, for tests that control time.
    #[must_use]
    pub fn with_clock(self, clock: Clock) -> Self {
        Self { clock, ..self }
    }

    /// Store of this client.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    pub(crate) fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Starts a request for a lock: one holder at a time, unless the request is [shared](LockRequest::shared).
    pub fn lock(&self, key: impl AsRef<str>) -> LockRequest {
        self.request(key.as_ref(), RequestKind::Lock { shared: false })
    }

    /// Starts a request for a slot of a semaphore: at most `slots` holders at a time.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
    /// # let client = tenure::Client::connect("memory:").await?;
    /// let one = client.semaphore("downloads", 2).acquire().await?;
    /// let two = client.semaphore("downloads", 2).acquire().await?;
    /// assert!(client.semaphore("downloads", 2).try_acquire().await.is_err());
    /// drop((one, two));
    /// # Ok(()) }
    /// ```
    pub fn semaphore(&self, key: impl AsRef<str>, slots: u32) -> LockRequest {
        self.request(key.as_ref(), RequestKind::Semaphore { slots, shared: false })
    }

    /// Starts a request to take part in an election: one participant leads at a time.
    pub fn election(&self, key: impl AsRef<str>) -> ElectionRequest {
        let (store, clock, work) =
            (Arc::clone(&self.store), self.clock.clone(), self.work.subscribe());
        ElectionRequest::new(store, clock, work, Key::new(key.as_ref()))
    }

    /// Creates an observer of an election: it follows the leader without taking part.
    ///
    /// # Errors
    ///
    /// `Invalid` if the key is invalid.
    pub fn leader(&self, key: impl AsRef<str>) -> Result<Leader> {
        Leader::new(Arc::clone(&self.store), self.clock.clone(), Key::new(key.as_ref()))
    }

    /// Diagnoses the store: tests if it can be reached, describes its guarantees, and suggests improvements. Takes at
    /// most about `limit`, and removes what it writes.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tenure::store::FindingLevel;
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
    /// let client = tenure::Client::connect("memory:").await?;
    /// for finding in client.examine(Duration::from_secs(5)).await {
    ///     assert_eq!(finding.level, FindingLevel::Ok, "{}: {}", finding.what, finding.detail);
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time: what is left expires on its own.
    pub async fn examine(&self, limit: Duration) -> Vec<Finding> {
        examine(&*self.store, limit).await
    }

    /// Renews a hold that another process detached, by its handle. The hold then lasts for `ttl` from now.
    ///
    /// # Errors
    ///
    /// `NotHeld` if the hold of this handle has ended. `Invalid` for a ttl below the store's minimum or above 366 days.
    /// `Unsupported` if holds cannot outlive their process on this store.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the renewal may or may not take effect. It never ends the hold.
    pub async fn renew(&self, key: impl AsRef<str>, handle: &Handle, ttl: Duration) -> Result<()> {
        let key = Key::new(key.as_ref())?;
        Lease::check_ttl(ttl, self.store.capabilities().min_ttl).map_err(|error| {
            Error::new(ErrorKind::Invalid, error.to_string()).on(&key).at(&self.store)
        })?;
        let mut hold = self.store.resume(&key, handle).await?;
        let limit = Lease::request_limit_of(ttl);
        let renewed = hold.renew(ttl, limit).await;
        // Detached also after a failed renewal: otherwise dropping the hold could end it.
        let detached = hold.detach(limit).await;
        renewed?;
        detached
    }

    /// Releases a hold that another process detached, by its handle.
    ///
    /// # Errors
    ///
    /// `NotHeld` if the hold of this handle has ended. `Unsupported` if holds cannot outlive their process on this
    /// store.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the release may or may not take effect.
    pub async fn release(&self, key: impl AsRef<str>, handle: &Handle) -> Result<()> {
        let mut hold = self.store.resume(&Key::new(key.as_ref())?, handle).await?;
        hold.release(RELEASE_LIMIT).await
    }

    /// Resolves when this client and its clones have no task left: no lock is held or waited for, no election runs, and
    /// every dropped guard has been released.
    ///
    /// Before a program exits, it should wait for this, with a timeout: otherwise a lock that was dropped just before
    /// may stay held until its lease ends.
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time.
    pub async fn idle(&self) {
        self.work.closed().await;
    }

    fn request(&self, key: &str, kind: RequestKind) -> LockRequest {
        let store = Arc::clone(&self.store);
        LockRequest::new(store, self.clock.clone(), Key::new(key), kind)
            .tracked_by(self.work.subscribe())
    }
}
