//! Follows the holders and waiters of a key.

use std::sync::Arc;
use std::time::Duration;

use tenure_core::{Key, Time};

use crate::race::race;
use crate::store::{KeySpace, KeyState, Store, Version};
use crate::{Clock, Result};

/// Poll interval on a store that does not push.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Poll interval on a store that pushes, in case a notification was lost.
const BACKSTOP_INTERVAL: Duration = Duration::from_secs(5);

/// Follows the holders and waiters of a key. Made by [`Client::watch`](crate::Client::watch).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
/// # let client = tenure::Client::connect("memory:").await?;
/// let mut watch = client.watch("deploy")?;
/// assert!(watch.next().await?.holders.is_empty());
///
/// let guard = client.lock("deploy").acquire().await?;
/// assert_eq!(watch.next().await?.holders[0].token, guard.fencing_token());
/// # Ok(()) }
/// ```
#[derive(Debug)]
#[must_use = "a watch does nothing until it is polled"]
pub struct KeyWatch {
    store: Arc<dyn Store>,
    clock: Clock,
    key: Key,
    space: KeySpace,
    poll_every: Duration,
    /// Version of the state that was returned last.
    returned: Option<Version>,
    /// Version that the store showed last; `None` if the store must be queried now.
    seen: Option<Version>,
    /// Instant of the next query, also if no change is reported. It stays when a call is dropped.
    next_poll: Time,
}

impl KeyWatch {
    pub(crate) fn new(store: Arc<dyn Store>, clock: Clock, key: Key, space: KeySpace) -> Self {
        let poll_every = if store.capabilities().push { BACKSTOP_INTERVAL } else { POLL_INTERVAL };
        let (returned, seen, next_poll) = (None, None, Time::ZERO);
        Self { store, clock, key, space, poll_every, returned, seen, next_poll }
    }

    /// Sets the longest interval between two queries; by default 1 s on a store that does not push changes, 5 s on one
    /// that does.
    pub fn poll_every(mut self, time: Duration) -> Self {
        self.poll_every = time.max(Duration::from_millis(1));
        self
    }

    /// Waits until the state of the key differs from the one returned last, then returns it. Returns at once the first
    /// time. A change that is undone between two queries may go unnoticed.
    ///
    /// # Errors
    ///
    /// Errors of the store. The next call queries the store again, after a pause.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses no change; the next call returns the state if it has changed since.
    pub async fn next(&mut self) -> Result<KeyState> {
        loop {
            match self.seen {
                Some(seen) => self.wait(seen).await,
                None => self.clock.sleep_until(self.next_poll).await,
            }
            // If this future is dropped during the query, the next call must query at once: the change that ended the
            // wait was not reported yet.
            self.seen = None;
            self.next_poll = Time::ZERO;
            let state = self.current().await;
            self.next_poll = self.clock.now() + self.poll_every;
            let state = state?;
            self.seen = Some(state.version);
            if self.returned != self.seen {
                self.returned = self.seen;
                return Ok(state);
            }
        }
    }

    /// Queries the store once.
    pub(crate) async fn current(&self) -> Result<KeyState> {
        let state = self.store.inspect(&self.key, self.space).await;
        state.map_err(|error| error.on(&self.key).at(&self.store))
    }

    /// Waits until the store reports a change, or until the next poll is due.
    async fn wait(&self, seen: Version) {
        let changed = async {
            if let Err(error) = self.store.changed(&self.key, self.space, seen).await {
                tracing::debug!(name: "tenure.watch_failed", key = %self.key, %error);
                std::future::pending::<()>().await;
            }
        };
        race(self.clock.sleep_until(self.next_poll), changed).await;
    }
}
