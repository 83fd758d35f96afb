//! Settings of a client before it connects.

use std::sync::Arc;
use std::time::Duration;

use crate::client::Client;
use crate::outage::{OutageCallbacks, OutageMonitor, StoreOutage};
use crate::store::Store;
use crate::url::{self, Schemes};
use crate::{Clock, Result};

/// Settings of a client. Made by [`Client::builder`].
///
/// ```
/// use std::time::Duration;
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
/// let client = tenure::Client::builder()
///     .wait_for_store(Duration::from_secs(20)) // a store that is not up yet is waited for
///     .on_outage(|outage| eprintln!("{outage}"))
///     .connect("memory:")
///     .await?;
/// # drop(client);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, Default)]
#[must_use = "a builder does nothing until it connects"]
pub struct ClientBuilder {
    /// Time to wait for the store; `None` to fail at once.
    patience: Option<Duration>,
    on_outage: OutageCallbacks,
    schemes: Schemes,
}

impl ClientBuilder {
    /// Waits up to `limit` for a store that is away; [`Duration::MAX`] waits for ever. Without this setting, connecting
    /// fails at once.
    pub fn wait_for_store(mut self, limit: Duration) -> Self {
        self.patience = Some(limit);
        self
    }

    /// Calls `f` within two seconds of an outage, every 30 s after that, and when the store is back. It is called while
    /// the client waits for the store, so only with [`wait_for_store`](Self::wait_for_store); [`LockRequest::on_outage`](crate::LockRequest::on_outage) is for later.
    pub fn on_outage(mut self, f: impl Fn(&StoreOutage) + Send + Sync + 'static) -> Self {
        self.on_outage.push(f);
        self
    }

    /// Makes `open` the function that opens the store at a URL with this scheme. It gets the whole URL.
    ///
    /// For stores of other crates; `examples/custom_store.rs` is a complete one. [`connect`](Self::connect) fails with
    /// `Invalid` if the scheme is not the scheme of a URL, or belongs to a store of tenure, even if its feature is off.
    /// URLs must have the scheme as it is written here.
    ///
    /// `open` should make one request, so that a store that is away is noticed: [`wait_for_store`](Self::wait_for_store)
    /// retries `Unavailable`, other errors are returned at once. It may be called several times.
    ///
    /// For the command `tenure`, write a program that gives this builder to `tenure_cli::main_with` (crate `tenure-cli`):
    /// it is the whole command, with your scheme in `--store`.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use tenure::{Client, MemoryStore, Store};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
    /// let client = Client::builder()
    ///     .scheme("scratch", async |_url: String| Ok(Arc::new(MemoryStore::new()) as Arc<dyn Store>))
    ///     .connect("scratch:")
    ///     .await?;
    /// # drop(client);
    /// # Ok(()) }
    /// ```
    pub fn scheme<F, Opening>(mut self, scheme: &str, open: F) -> Self
    where
        F: Fn(String) -> Opening + Send + Sync + 'static,
        Opening: Future<Output = Result<Arc<dyn Store>>> + Send + 'static,
    {
        self.schemes.add(scheme, open);
        self
    }

    /// Connects to the store at `url`, as [`Client::connect`] does.
    ///
    /// # Errors
    ///
    /// As for [`Client::connect`]. An error that waiting cannot cure (a wrong URL, wrong credentials, a missing
    /// database) is returned at once; `Unavailable` if the store was away for the whole time.
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time.
    pub async fn connect(self, url: &str) -> Result<Client> {
        // On the heap: the future of a store that connects is large.
        let open = || Box::pin(url::open(url, &self.schemes));
        let Some(limit) = self.patience else { return Ok(Client::with_store(open().await?)) };
        // The rest of the URL may contain a password.
        let scheme = url.split(':').next().unwrap_or_default();
        let monitor = OutageMonitor::new(Clock::system(), "", scheme, self.on_outage);
        Ok(Client::with_store(monitor.connect(limit, open).await?))
    }
}

impl Client {
    /// Starts the settings of a client: the time to wait for a store that is away, and callbacks.
    pub fn builder() -> ClientBuilder {
        ClientBuilder::default()
    }
}
