//! Observation of an election's leader without taking part.

use std::sync::Arc;
use std::time::Duration;

use tenure_core::{FencingToken, Key, KeyError};

use crate::store::{HolderState, KeySpace, Store};
use crate::watch::KeyWatch;
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
    watch: KeyWatch,
    /// True once a result was returned.
    reported: bool,
    /// Token of the leader that was returned last; `None` if there was no leader.
    last_token: Option<FencingToken>,
}

impl Leader {
    pub(crate) fn new(
        store: Arc<dyn Store>,
        clock: Clock,
        key: Result<Key, KeyError>,
    ) -> Result<Self> {
        let key = key.map_err(|error| Error::from(error).at(&store))?;
        let watch = KeyWatch::new(store, clock, key, KeySpace::Lock);
        Ok(Self { watch, reported: false, last_token: None })
    }

    /// Longest interval between two queries; by default 1 s on a store that does not push changes, 5 s on one that
    /// does.
    #[must_use]
    pub fn poll_every(mut self, time: Duration) -> Self {
        self.watch = self.watch.poll_every(time);
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
        Ok(self.watch.current().await?.holders.into_iter().next())
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
            let leader = self.watch.next().await?.holders.into_iter().next();
            let token = leader.as_ref().map(|leader| leader.token);
            if !self.reported || self.last_token != token {
                (self.reported, self.last_token) = (true, token);
                return Ok(leader);
            }
        }
    }
}
