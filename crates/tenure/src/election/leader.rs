//! Who leads, for those who do not take part.

use std::sync::Arc;
use std::time::Duration;

use tenure_core::{FencingToken, Key, KeyError};

use crate::store::{HolderState, KeySpace, Store, Version};
use crate::{Clock, Error, Result};

/// An observer of an election: sees who leads without taking part. Made by [`Client::leader`](crate::Client::leader).
///
/// What it shows was so when the store was asked and may be over by now: it is for dashboards and for routing, not for
/// deciding who may write.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
/// # let client = tenure::Client::connect("memory:leader-doc").await?;
/// let election = client.election("scheduler").id("web-1").start().await?;
/// let mut leader = client.leader("scheduler")?;
/// let led = loop {
///     // At once the first time, then with every change.
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
    /// Whether anything was told yet.
    reported: bool,
    /// The token of the leader that was told last; `None` where nobody led.
    last_token: Option<FencingToken>,
    /// What the store showed last; `None` where it is time to ask.
    version: Option<Version>,
    /// The last question failed: the next one waits.
    failed: bool,
}

/// How often to ask a store that does not push.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// How often to ask a store that does, in case news got lost.
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

    /// How often the store is asked at least: every second where it does not push changes, and every 5 s where it does.
    #[must_use]
    pub fn poll_every(mut self, time: Duration) -> Self {
        self.poll_every = time.max(Duration::from_millis(1));
        self
    }

    /// Who leads now, with the token and for how long; `None` where nobody does.
    ///
    /// # Errors
    ///
    /// What the store says.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing.
    pub async fn current(&self) -> Result<Option<HolderState>> {
        Ok(self.inspect().await?.0)
    }

    /// Who leads, as soon as that is another than was told last, or nobody; at once the first time. The same participant
    /// leading again is another leader: its token differs.
    ///
    /// # Errors
    ///
    /// What the store says. Calling it again asks again, after a pause.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses nothing; the next call tells what has changed since.
    pub async fn changed(&mut self) -> Result<Option<HolderState>> {
        loop {
            if let Some(seen) = self.version {
                self.wait(seen).await;
            } else if self.failed {
                self.pause().await;
            }
            // Whoever drops this future from here on asks again at once.
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

    /// Waits until the store shows something else, or for the poll.
    async fn wait(&self, seen: Version) {
        tokio::select! {
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
