//! Settings of a queue before it connects.

use std::time::Duration;

use super::{Options, Queue};
use crate::outage::OutageCallbacks;
use crate::{Result, StoreOutage};

/// Settings of a queue. Made by [`Queue::builder`].
///
/// ```no_run
/// use std::time::Duration;
/// use tenure::jobs::Queue;
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
/// let queue = Queue::builder()
///     .wait_for_store(Duration::MAX) // a server that is not up yet is waited for
///     .on_outage(|outage| eprintln!("{outage}"))
///     .connect("postgres://app@db.example/app", "sync_jobs")
///     .await?;
/// # drop(queue);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, Default)]
#[must_use = "a builder does nothing until it connects"]
pub struct QueueBuilder {
    options: Options,
    /// Time to wait for the server; `None` to fail at once.
    patience: Option<Duration>,
    on_outage: OutageCallbacks,
}

impl QueueBuilder {
    /// Sets the options of the queue; [`Options::default`] otherwise.
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }

    /// Waits up to `limit` for a server that is away; [`Duration::MAX`] waits for ever. Without this setting,
    /// connecting fails at once.
    pub fn wait_for_store(mut self, limit: Duration) -> Self {
        self.patience = Some(limit);
        self
    }

    /// Calls `f` within two seconds of an outage, every 30 s after that, and when the server is back. It is called
    /// while the queue connects, while a [`Worker`](super::Worker) runs, and for renewals of claimed jobs. `f` must
    /// return soon.
    pub fn on_outage(mut self, f: impl Fn(&StoreOutage) + Send + Sync + 'static) -> Self {
        self.on_outage.push(f);
        self
    }

    /// Connects to the queue in this table, as [`Queue::connect`] does.
    ///
    /// # Errors
    ///
    /// As for [`Queue::connect`]; also `Invalid` if the options contradict each other. An error that waiting cannot
    /// cure (wrong credentials, a missing database or table) is returned at once; `Unavailable` if the server was away
    /// for the whole time.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing behind.
    pub async fn connect(self, url: &str, table: &str) -> Result<Queue> {
        let Self { options, patience, on_outage } = self;
        Queue::open(url, table, options, patience, on_outage).await
    }
}

impl Queue {
    /// Starts the settings of a queue: its options, the time to wait for a server that is away, and callbacks.
    pub fn builder() -> QueueBuilder {
        QueueBuilder::default()
    }
}
