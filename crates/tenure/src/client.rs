//! The client: where a program begins.

use std::sync::Arc;

use crate::request::{Kind, LockRequest};
use crate::store::{KeyState, Space, Store};
use crate::{Clock, Key, Result, url};

/// Locks, semaphores and their observers on one store. Cloning is cheap.
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
}

impl Client {
    /// A client of the store that `url` names: `memory:` or `memory:NAME` for locks within this process, `file:` or
    /// `file:PATH` for locks between the processes of this host.
    ///
    /// # Errors
    ///
    /// `Invalid` where the URL names no store that this build knows; otherwise what the store says.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing.
    #[expect(clippy::unused_async, reason = "stores behind a network connect here")]
    pub async fn connect(url: &str) -> Result<Self> {
        Ok(Self::with_store(url::open(url)?))
    }

    /// A client of a store that was made by hand.
    pub fn with_store(store: Arc<dyn Store>) -> Self {
        Self { store, clock: Clock::system() }
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
        self.request(key.as_ref(), Kind::Lock { shared: false })
    }

    /// A semaphore with this many slots.
    pub fn semaphore(&self, key: impl AsRef<str>, slots: u32) -> LockRequest {
        self.request(key.as_ref(), Kind::Semaphore { slots })
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
        self.store.inspect(&Key::new(key.as_ref())?, Space::Lock).await
    }

    fn request(&self, key: &str, kind: Kind) -> LockRequest {
        LockRequest::new(Arc::clone(&self.store), self.clock.clone(), Key::new(key), kind)
    }
}
