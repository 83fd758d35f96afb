//! Memory store: locks within one process, on the same lock table as the lock server.
//!
//! It is a store in its own right, for programs that need locks between their tasks and for tests of code that uses
//! locks. It is no substitute for tests against another store.
//!
//! The modules are layers, from the top: `join` makes claims, `place` is the wait of a claim, `hold` its hold, `claim` its
//! owner, and `state` the lock table with an entry per claim.

mod claim;
mod hold;
mod join;
mod place;
mod state;

use std::collections::HashMap;
use std::fmt;
use std::pin::pin;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::{FencingToken, Key, Time};

use self::claim::ClaimState;
use self::hold::{MemoryHold, parse_handle};
use self::state::MemoryShared;
use super::{
    Answer, Capabilities, Claim, Handle, Handoff, Hold, KeySpace, KeyState, Liveness, QueueKind,
    Store, Version,
};
use crate::mutex::Mutex;
use crate::{Clock, Error, ErrorKind, Result, identity};

/// Locks within this process. Clones are the same store.
///
/// Every method answers at once, so no `limit` is ever reached.
///
/// ```
/// use std::sync::Arc;
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
/// let store = tenure::MemoryStore::new();
/// let one = tenure::Client::with_store(Arc::new(store.clone()));
/// let other = tenure::Client::with_store(Arc::new(store));
/// let guard = one.lock("reports").try_acquire().await?;
/// assert!(other.lock("reports").try_acquire().await.is_err());
/// guard.release().await?;
/// # Ok(()) }
/// ```
///
/// `Client::connect("memory:NAME")` connects all clients of this process that use the same name to the same store.
#[derive(Clone)]
pub struct MemoryStore(Arc<MemoryShared>);

/// Maximum number of keys that one call lists.
const MAX_LISTED_KEYS: usize = 1_000;

impl MemoryStore {
    /// A separate store, which only its clones share.
    pub fn new() -> Self {
        Self::with_clock(Clock::system())
    }

    /// A separate store that counts its leases on `clock`, for tests that control the time.
    pub fn with_clock(clock: Clock) -> Self {
        Self::build(String::new(), clock)
    }

    /// The store of all clients of `memory:NAME` in this process. It lives as long as one of them uses it.
    pub(crate) fn named(name: &str) -> Result<Self> {
        static NAMED: OnceLock<Mutex<HashMap<String, Weak<MemoryShared>>>> = OnceLock::new();
        let name = identity::checked_text("name of a memory store", name)?;
        let named = NAMED.get_or_init(Mutex::default);
        let mut named = named.lock();
        if let Some(shared) = named.get(&name).and_then(Weak::upgrade) {
            return Ok(Self(shared));
        }
        named.retain(|_, shared| shared.strong_count() > 0);
        let store = Self::build(name.clone(), Clock::system());
        named.insert(name, Arc::downgrade(&store.0));
        Ok(store)
    }

    fn build(name: String, clock: Clock) -> Self {
        Self(Arc::new(MemoryShared::new(name, clock)))
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Display for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

#[async_trait]
impl Store for MemoryStore {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            queue: QueueKind::Fifo,
            liveness: Liveness::Both,
            push: true,
            handoff: Handoff::Pushed,
            shared: true,
            semaphore: true,
            detached: true,
            list: true,
            identities: true,
            evict: true,
            ordered_tokens: true,
            min_ttl: Duration::from_millis(1),
        }
    }

    async fn claim(&self, claim: &Claim, _limit: Duration) -> Result<Answer> {
        join::join(&self.0, claim).map_err(|error| error.on(&claim.key).at(self))
    }

    async fn resume(&self, key: &Key, handle: &Handle) -> Result<Box<dyn Hold>> {
        let (space, token) = parse_handle(handle).ok_or_else(|| {
            Error::new(ErrorKind::Invalid, "not a handle of a memory store").on(key).at(self)
        })?;
        let claim = self.0.read(|state, now| {
            // Without a limit: the hold of this handle may be the last of a large semaphore.
            let view = state.table.inspect(space, key.as_bytes(), usize::MAX, now)?;
            let holder = view.holders.iter().find(|holder| holder.number == token.number())?;
            let owner = holder.owner?;
            let entry = state.entries.get_mut(&owner)?;
            let ours = entry.grant.is_some_and(|grant| grant.token == token);
            ours.then(|| entry.own(owner))
        });
        match claim {
            Some(claim) => {
                let claim = ClaimState::new(&self.0, claim);
                Ok(Box::new(MemoryHold { claim, token }))
            }
            None => Err(Error::new(ErrorKind::NotHeld, "the hold has ended").on(key).at(self)),
        }
    }

    async fn changed(&self, key: &Key, space: KeySpace, since: Version) -> Result<()> {
        loop {
            let mut changed = pin!(self.0.changed.notified());
            changed.as_mut().enable();
            let (seen, due) = self.0.read(|state, now| {
                let seen = state.view(key, space, now).1;
                (seen, state.table.poll_timeout().unwrap_or(Time::MAX))
            });
            if seen != since {
                return Ok(());
            }
            tokio::select! {
                () = changed => {}
                () = self.0.clock.sleep_until(due) => {}
            }
        }
    }

    async fn inspect(&self, key: &Key, space: KeySpace) -> Result<KeyState> {
        Ok(self.0.read(|state, now| state.key_state(key.clone(), space, now)))
    }

    async fn list(
        &self,
        space: KeySpace,
        prefix: &str,
        after: Option<&str>,
    ) -> Result<Vec<KeyState>> {
        Ok(self.0.read(|state, now| {
            let mut after = after.map(|after| after.as_bytes().to_vec());
            loop {
                let found = state.table.list(
                    space,
                    prefix.as_bytes(),
                    after.as_deref(),
                    MAX_LISTED_KEYS,
                    now,
                );
                let used = found.iter().filter(|summary| summary.idle_since.is_none());
                let page: Vec<_> = used
                    .filter_map(|summary| std::str::from_utf8(summary.key.as_bytes()).ok())
                    .filter_map(|text| Key::new(text).ok())
                    .map(|key| state.key_state(key, space, now))
                    .collect();
                // An empty page means the end of the list. So a page that has only unused keys is skipped.
                if !page.is_empty() || found.len() < MAX_LISTED_KEYS {
                    return page;
                }
                after = found.last().map(|last| last.key.as_bytes().to_vec());
            }
        }))
    }

    async fn evict(&self, key: &Key, token: FencingToken, reason: &str) -> Result<()> {
        let evicted = token.epoch() == 0
            && self.0.with(|state, now| {
                let mut evict =
                    |space| state.table.evict(space, key.as_bytes(), token.number(), now).is_ok();
                evict(KeySpace::Lock) || evict(KeySpace::Semaphore)
            });
        if !evicted {
            let message = format!(
                "no hold has the token {token}: see `tenure status` for the present holder"
            );
            return Err(Error::new(ErrorKind::NotHeld, message).on(key).at(self));
        }
        tracing::info!(name: "tenure.evicted", %key, store = %self, %token, reason);
        Ok(())
    }

    async fn close(&self) {}
}

#[cfg(test)]
mod tests {
    use super::state::MAX_SHOWN_ENTRIES;
    use super::*;
    use crate::Client;
    use crate::store::{Grant, LeaseStart, Mode};

    const LIMIT: Duration = Duration::from_secs(1);

    fn claim(key: &str, mode: Mode, id: u128) -> Claim {
        let key = Key::new(key).expect("plain letters");
        let (ttl, by) = (Duration::from_secs(60), Arc::default());
        Claim {
            id,
            key,
            mode,
            ttl,
            by,
            queue: false,
            fail_if_contended: false,
            fair: false,
            detached: true,
        }
    }

    async fn take(store: &MemoryStore, claim: &Claim) -> Grant {
        match store.claim(claim, LIMIT).await.expect("an answer") {
            Answer::Granted(grant) => grant,
            other => panic!("not granted: {other:?}"),
        }
    }

    #[tokio::test]
    async fn a_page_of_idle_keys_is_not_the_end_of_the_list() {
        let store = MemoryStore::new();
        let client = Client::with_store(Arc::new(store.clone()));
        for n in 0..MAX_LISTED_KEYS {
            let guard = client.lock(format!("a{n:04}")).try_acquire().await.expect("free");
            guard.release().await.expect("released");
        }
        let guard = client.lock("z").try_acquire().await.expect("free");
        let listed = store.list(KeySpace::Lock, "", None).await.expect("a page");
        assert_eq!(listed.iter().map(|state| &state.key).collect::<Vec<_>>(), [guard.key()]);
        let rest = store.list(KeySpace::Lock, "", Some("z")).await.expect("a page");
        assert!(rest.is_empty(), "{rest:?}");
    }

    #[tokio::test]
    async fn the_last_hold_of_a_large_semaphore_is_resumed_too() {
        let store = MemoryStore::new();
        let mut grants = Vec::new();
        for id in 0..=MAX_SHOWN_ENTRIES as u128 {
            let mode = Mode::Slot { limit: 2_000 };
            grants.push(take(&store, &claim("s", mode, id)).await);
        }
        let handle = grants.last().and_then(|grant| grant.hold.handle()).expect("a handle");
        let mut hold = store.resume(&Key::new("s").expect("a key"), &handle).await.expect("held");
        hold.release(LIMIT).await.expect("released");
    }

    #[tokio::test]
    async fn a_repeated_claim_finds_a_hold_that_outlived_its_process() {
        let store = MemoryStore::new();
        let claim = claim("a", Mode::Exclusive, 1);
        let token = take(&store, &claim).await.token;
        assert_eq!(take(&store, &claim).await.token, token);
    }

    #[tokio::test]
    async fn a_repeated_claim_renews_its_hold() {
        let (clock, hand) = Clock::manual();
        let store = MemoryStore::with_clock(clock);
        let claim = claim("a", Mode::Exclusive, 1);
        take(&store, &claim).await;
        hand.advance(claim.ttl / 2);
        // The lease counts from this request, so it must begin with it.
        assert_eq!(take(&store, &claim).await.lease_start, LeaseStart::FromRequest);
        let state = store.inspect(&claim.key, KeySpace::Lock).await.expect("shown");
        assert_eq!(state.holders[0].lease_left, Some(claim.ttl));
    }

    #[tokio::test]
    async fn a_change_wakes_watchers_although_no_time_passes() {
        let (clock, _hand) = Clock::manual();
        let store = MemoryStore::with_clock(clock);
        let claim = claim("a", Mode::Exclusive, 1);
        let seen = store.inspect(&claim.key, KeySpace::Lock).await.expect("shown").version;
        let (watching, key) = (store.clone(), claim.key.clone());
        let changed =
            tokio::spawn(async move { watching.changed(&key, KeySpace::Lock, seen).await });
        tokio::task::yield_now().await;
        take(&store, &claim).await;
        let woken = tokio::time::timeout(Duration::from_secs(20), changed).await;
        woken.expect("woken").expect("no panic").expect("changed");
    }

    #[tokio::test]
    async fn a_hold_that_is_dropped_with_its_task_is_released() {
        let store = MemoryStore::new();
        let attached = |id| Claim { detached: false, ..claim("a", Mode::Exclusive, id) };
        drop(take(&store, &attached(1)).await);
        take(&store, &attached(2)).await;
    }
}
