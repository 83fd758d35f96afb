//! The client: where a program begins.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use crate::election::{ElectionRequest, Leader};
use crate::request::{LockRequest, RequestKind};
use crate::store::{Finding, Handle, KeySpace, KeyState, Store};
use crate::{Clock, Key, Result, url};

/// Locks, semaphores, elections and their observers on one store. Cloning is cheap.
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
    /// Every task that acquires or keeps for this client has a receiver: when all are gone, nothing is at work.
    work: Arc<watch::Sender<()>>,
}

/// How long one attempt to release a hold by its handle may take.
const RELEASE_LIMIT: Duration = Duration::from_secs(5);

impl Client {
    /// A client of the store that `url` names: `memory:` or `memory:NAME` for locks within this process, `file:` or
    /// `file:PATH` for locks between the processes of this host, `tenure://HOST:PORT` for a lock server (feature `server`),
    /// `postgres://…` for lease rows of PostgreSQL, `postgres+advisory://…` for its advisory locks (feature `postgres`),
    /// `nats://HOST/BUCKET` for NATS JetStream (feature `nats`), `gs://`, `s3://` or `az://BUCKET/PREFIX` for an object
    /// store (feature `object`).
    ///
    /// # Errors
    ///
    /// `Invalid` where the URL names no store that this build knows; otherwise what the store says.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing.
    pub async fn connect(url: &str) -> Result<Self> {
        Ok(Self::with_store(url::open(url).await?))
    }

    /// A client of a store that was made by hand.
    pub fn with_store(store: Arc<dyn Store>) -> Self {
        Self { store, clock: Clock::system(), work: Arc::new(watch::Sender::new(())) }
    }

    /// The same client, counting on another clock: for tests that move time by hand.
    #[must_use]
    pub fn with_clock(self, clock: Clock) -> Self {
        Self { clock, ..self }
    }

    /// The store.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// A lock that one holds at a time.
    pub fn lock(&self, key: impl AsRef<str>) -> LockRequest {
        self.request(key.as_ref(), RequestKind::Lock { shared: false })
    }

    /// A semaphore with this many slots.
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
        self.request(key.as_ref(), RequestKind::Semaphore { slots })
    }

    /// An election: one of all who take part leads at a time.
    pub fn election(&self, key: impl AsRef<str>) -> ElectionRequest {
        let (store, clock, work) =
            (Arc::clone(&self.store), self.clock.clone(), self.work.subscribe());
        ElectionRequest::new(store, clock, work, Key::new(key.as_ref()))
    }

    /// An observer of an election: who leads, without taking part.
    ///
    /// # Errors
    ///
    /// `Invalid` for a bad key.
    pub fn leader(&self, key: impl AsRef<str>) -> Result<Leader> {
        Leader::new(Arc::clone(&self.store), self.clock.clone(), Key::new(key.as_ref()))
    }

    /// Who holds a lock, and who waits for it.
    ///
    /// # Errors
    ///
    /// `Invalid` for a bad key; otherwise what the store says.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing.
    pub async fn inspect(&self, key: impl AsRef<str>) -> Result<KeyState> {
        self.store.inspect(&Key::new(key.as_ref())?, KeySpace::Lock).await
    }

    /// What the store finds out about itself: whether it can be reached, what it promises, what could be better. It takes
    /// about as long as `limit` at most, and leaves nothing behind.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tenure::store::Verdict;
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
    /// let client = tenure::Client::connect("memory:").await?;
    /// for finding in client.examine(Duration::from_secs(5)).await {
    ///     assert_eq!(finding.verdict, Verdict::Ok, "{}: {}", finding.what, finding.detail);
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing that does not end by itself.
    pub async fn examine(&self, limit: Duration) -> Vec<Finding> {
        self.store.examine(limit).await
    }

    /// Renews a hold that another process was granted and left, by its handle: it lasts for `ttl` from now.
    ///
    /// # Errors
    ///
    /// `NotHeld` where it is no longer held by that handle; `Unsupported` where a hold cannot outlive its process.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future may cut the renewal off before or after it landed. It never ends the hold.
    pub async fn renew(&self, key: impl AsRef<str>, handle: &Handle, ttl: Duration) -> Result<()> {
        let mut hold = self.store.resume(&Key::new(key.as_ref())?, handle).await?;
        let renewed = hold.renew(ttl, ttl / 4).await;
        hold.detach();
        renewed.map(|_| ())
    }

    /// Releases a hold that another process was granted and left, by its handle.
    ///
    /// # Errors
    ///
    /// `NotHeld` where it is no longer held by that handle; `Unsupported` where a hold cannot outlive its process.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future may cut the release off before or after it landed.
    pub async fn release(&self, key: impl AsRef<str>, handle: &Handle) -> Result<()> {
        let mut hold = self.store.resume(&Key::new(key.as_ref())?, handle).await?;
        hold.release(RELEASE_LIMIT).await
    }

    /// Resolves when nothing is at work for this client and its clones: no lock is waited for or held, no election
    /// goes on, and whatever was dropped has been given back. A program that ends waits for this, with a bound, to leave nothing behind.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future changes nothing.
    pub async fn idle(&self) {
        self.work.closed().await;
    }

    fn request(&self, key: &str, kind: RequestKind) -> LockRequest {
        let store = Arc::clone(&self.store);
        LockRequest::new(store, self.clock.clone(), Key::new(key), kind)
            .counted(self.work.subscribe())
    }
}
