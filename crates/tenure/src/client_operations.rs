//! Operations of a client on the keys of its store: for operators, dashboards and clean-up jobs.

use std::sync::Arc;
use std::time::Duration;

use tenure_core::{FencingToken, Key};

use crate::client::Client;
use crate::store::{HistoryEvent, KeySpace, KeyState};
use crate::watch::KeyWatch;
use crate::{Error, Result};

impl Client {
    /// Returns the keys in use that begin with `prefix`, locks and semaphores, in order of their names. The empty prefix
    /// lists all.
    ///
    /// The waiters of a listed key may be missing: [`inspect`](Self::inspect) returns them.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
    /// # let client = tenure::Client::connect("memory:").await?;
    /// let guard = client.lock("reports/nightly").acquire().await?;
    /// let keys = client.list("reports/").await?;
    /// assert_eq!(keys[0].key.as_str(), "reports/nightly");
    /// assert_eq!(keys[0].holders[0].token, guard.fencing_token());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// `Unsupported` if the store cannot list its keys; otherwise the error of the store.
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time.
    pub async fn list(&self, prefix: &str) -> Result<Vec<KeyState>> {
        Ok(self.list_first(prefix, usize::MAX).await?.0)
    }

    /// Returns the first `limit` keys that [`list`](Self::list) would return, and true if there are more.
    ///
    /// # Errors
    ///
    /// As [`list`](Self::list).
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time.
    pub async fn list_first(&self, prefix: &str, limit: usize) -> Result<(Vec<KeyState>, bool)> {
        let mut keys = Vec::new();
        for space in [KeySpace::Lock, KeySpace::Semaphore] {
            let (mut after, mut found): (Option<Key>, usize) = (None, 0);
            // One key above the limit is read, to know whether there are more.
            while found <= limit {
                let page =
                    self.store().list(space, prefix, after.as_ref().map(Key::as_str)).await?;
                let Some(last) = page.last() else { break };
                after = Some(last.key.clone());
                let before = keys.len();
                keys.extend(page.into_iter().filter(KeyState::is_in_use));
                found += keys.len() - before;
            }
        }
        keys.sort_by(|a, b| a.key.cmp(&b.key));
        let more = keys.len() > limit;
        keys.truncate(limit);
        Ok((keys, more))
    }

    /// Returns the holders of a lock and its waiters.
    ///
    /// # Errors
    ///
    /// `Invalid` if the key is invalid; otherwise the error of the store.
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time.
    pub async fn inspect(&self, key: impl AsRef<str>) -> Result<KeyState> {
        self.store().inspect(&self.key(key)?, KeySpace::Lock).await
    }

    /// Returns the holders of a semaphore and its waiters.
    ///
    /// # Errors
    ///
    /// As [`inspect`](Self::inspect).
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time.
    pub async fn inspect_semaphore(&self, key: impl AsRef<str>) -> Result<KeyState> {
        self.store().inspect(&self.key(key)?, KeySpace::Semaphore).await
    }

    /// Follows the holders of a lock and its waiters.
    ///
    /// # Errors
    ///
    /// `Invalid` if the key is invalid.
    pub fn watch(&self, key: impl AsRef<str>) -> Result<KeyWatch> {
        self.watch_in(key, KeySpace::Lock)
    }

    /// Follows the holders of a semaphore and its waiters.
    ///
    /// # Errors
    ///
    /// As [`watch`](Self::watch).
    pub fn watch_semaphore(&self, key: impl AsRef<str>) -> Result<KeyWatch> {
        self.watch_in(key, KeySpace::Semaphore)
    }

    /// Returns the recent events of a lock, oldest first, as far back as the store keeps them.
    ///
    /// # Errors
    ///
    /// `Unsupported` on most stores: only a lock server that was started with `--history` keeps events.
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time.
    pub async fn history(&self, key: impl AsRef<str>) -> Result<Vec<HistoryEvent>> {
        self.store().history(&self.key(key)?, KeySpace::Lock).await
    }

    /// Returns the recent events of a semaphore, oldest first, as far back as the store keeps them.
    ///
    /// # Errors
    ///
    /// As [`history`](Self::history).
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time.
    pub async fn history_semaphore(&self, key: impl AsRef<str>) -> Result<Vec<HistoryEvent>> {
        self.store().history(&self.key(key)?, KeySpace::Semaphore).await
    }

    /// Ends the hold that has this token on a lock or a semaphore. For operators: the holder learns of it by its next
    /// renewal at the latest, and may work until then. `reason` is for logs and the history.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
    /// # let client = tenure::Client::connect("memory:").await?;
    /// let guard = client.lock("deploy").acquire().await?;
    /// client.evict("deploy", guard.fencing_token(), "the machine is gone").await?;
    /// assert_eq!(guard.lost().await.reason, tenure::Loss::Evicted);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// `NotHeld` if no hold has this token: nothing was changed. `Unsupported` if the store cannot break a hold.
    /// `Unknown` if the outcome is unknown; otherwise the error of the store.
    ///
    /// # Cancel safety
    ///
    /// Not cancel safe: after a drop the hold may have been broken.
    pub async fn evict(
        &self,
        key: impl AsRef<str>,
        token: FencingToken,
        reason: &str,
    ) -> Result<()> {
        self.store().evict(&self.key(key)?, token, reason).await
    }

    /// Removes the data that the store still keeps for locks that were released at least `older_than` ago. Returns the
    /// number of removed objects: 0 on a store that keeps no such data.
    ///
    /// Never removes a lock that is held or has waiters, and fencing tokens never decrease because of it.
    ///
    /// # Errors
    ///
    /// The first error of the store ends the run. Objects that were removed before stay removed.
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time: each removal is complete by itself.
    pub async fn gc(&self, older_than: Duration) -> Result<u64> {
        self.store().clean(older_than).await
    }

    fn watch_in(&self, key: impl AsRef<str>, space: KeySpace) -> Result<KeyWatch> {
        let (store, clock) = (Arc::clone(self.store()), self.clock().clone());
        Ok(KeyWatch::new(store, clock, self.key(key)?, space))
    }

    fn key(&self, key: impl AsRef<str>) -> Result<Key> {
        Key::new(key.as_ref()).map_err(|error| Error::from(error).at(self.store()))
    }
}
