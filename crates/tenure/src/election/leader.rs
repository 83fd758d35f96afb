//! Observation of an election's leader without taking part.

use std::sync::Arc;
use std::time::Duration;

use tenure_core::{FencingToken, Key, KeyError};

use crate::store::{HolderState, KeySpace, Store, Version};
use crate::{Clock, Error, Result};

/// An observer of an election's leader that does not take part. Made by [`Client::leader`](crate::Client::leader).
///
/// The leader that it reports was current when the store answered and may have changed since. Use it for dashboards and
/// for routing, not to decide which process may write.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
/// # let client = tenure::Client::connect("memory:leader-doc").await?;
/// let election = client.election("scheduler").id("web-1").start().await?;
/// let mut leader = client.leader("scheduler")?;
/// let led = loop {
///     // Returns at once the first time, then with every change.
///     if let Some(led) = leader.changed().await? {
///         break led;
///     }
/// };
/// assert_eq!(led.by.map(|by| by.id).as_deref(), Some("web-1"));
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Leader {
    store: Arc<dyn Store>,
    clock: Clock,
    key: Key,
    poll_every: Duration,
    /// True once a result was returned.
    reported: bool,
    /// Token of the leader that was returned last; `None` if there was no leader.
    last_token: Option<FencingToken>,
    /// Version of the key that the store returned last; `None` if the store must be queried now.
    version: Option<Version>,
    /// The last query failed: the next one comes after a pause.
    failed: bool,
}

/// Poll interval on a store that does not push.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Poll interval on a store that pushes, in case a notification was lost.
const BACKSTOP_INTERVAL: Duration = Duration::from_secs(5);

impl Leader {
    pub(crate) fn new(
        store: Arc<dyn Store>,
        clock: Clock,
        key: Result<Key, KeyError>,
    ) -> Result<Self> {
        let key = key.map_err(|error| Error::from(error).at(&store))?;
        let poll_every = if store.capabilities().push { BACKSTOP_INTERVAL } else { POLL_INTERVAL };
        Ok(Self {
            store,
            clock,
            key,
            poll_every,
            reported: false,
            last_token: None,
            version: None,
            failed: false,
        })
    }

    /// Longest interval between two queries; by default 1 s on a store that does not push changes, 5 s on one that
    /// does.
    #[must_use]
    pub fn poll_every(mut self, time: Duration) -> Self {
        self.poll_every = time.max(Duration::from_millis(1));
        self
    }

    /// The current leader, with its token and lease; `None` if there is no leader.
    ///
    /// # Errors
    ///
    /// Errors of the store.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future has no effect.
    pub async fn current(&self) -> Result<Option<HolderState>> {
        Ok(self.inspect().await?.0)
    }

    /// Waits until the leader differs from the one returned last, then returns it; `None` if there is no leader.
    /// Returns at once the first time. A participant that leads again counts as another leader: its token differs.
    ///
    /// # Errors
    ///
    /// Errors of the store. The next call queries the store again, after a pause.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses no change; the next call returns the leader if it has changed since.
    pub async fn changed(&mut self) -> Result<Option<HolderState>> {
        loop {
            if let Some(seen) = self.version {
                self.wait(seen).await;
            } else if self.failed {
                self.pause().await;
            }
            // If this future is dropped during the query, the next call must query at once: the change that ended the
            // wait was not reported yet.
            self.version = None;
            self.failed = false;
            match self.inspect().await {
                Err(error) => {
                    self.failed = true;
                    return Err(error);
                }
                Ok((leader, seen)) => {
                    self.version = Some(seen);
                    let token = leader.as_ref().map(|leader| leader.token);
                    if !self.reported || self.last_token != token {
                        (self.reported, self.last_token) = (true, token);
                        return Ok(leader);
                    }
                }
            }
        }
    }

    async fn inspect(&self) -> Result<(Option<HolderState>, Version)> {
        let state = self.store.inspect(&self.key, KeySpace::Lock).await;
        let state = state.map_err(|error| error.on(&self.key).at(&self.store))?;
        Ok((state.holders.into_iter().next(), state.version))
    }

    /// Waits until the store reports a change, or until the next poll is due.
    async fn wait(&self, seen: Version) {
        tokio::select! {
            // Either may come first. A fixed order keeps simulated runs repeatable.
            biased;
            () = self.pause() => {}
            () = async {
                if let Err(error) = self.store.changed(&self.key, KeySpace::Lock, seen).await {
                    tracing::debug!(name: "tenure.watch_failed", key = %self.key, %error);
                    std::future::pending::<()>().await;
                }
            } => {}
        }
    }

    async fn pause(&self) {
        self.clock.sleep_until(self.clock.now() + self.poll_every).await;
    }
}
