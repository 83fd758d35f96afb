//! The memory store with a flaw.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use tenure::store::{
    Answer, Capabilities, Claim, Grant, Handle, Hold, KeySpace, KeyState, Mode, Place, Renewed,
    Store, Version, Waited,
};
use tenure::{Error, ErrorKind, FencingToken, Key, MemoryStore, Result};

/// Way in which a store breaks the contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flaw {
    None,
    AbandonDoesNothing,
    AbandonKeepsTheGrant,
    WaitIgnoresItsLimit,
    ListIgnoresThePrefix,
    ListShowsEndedHolds,
    HoldersAreNameless,
    ResumesByHalfAHandle,
    ResumesByToken,
    EvictsLocksOnly,
    DeadReadersStay,
    DeadSlotHoldersStay,
    CleanEndsHolds,
    CleanResetsTokens,
    CountsOwnGrants,
    RenewalRevives,
    KeysAreCaseless,
}

/// State that all clients of a wrong store share.
#[derive(Default)]
pub(crate) struct Shared {
    inner: MemoryStore,
    grants: AtomicU64,
    cleaned: AtomicBool,
    /// Handles of all holds, and all keys ever held.
    handles: Mutex<Vec<Handle>>,
    held: Mutex<BTreeMap<String, KeyState>>,
    /// Places and grants that a flaw keeps from ending.
    places: Mutex<Vec<Box<dyn Place>>>,
    kept: Mutex<Vec<Grant>>,
}

#[derive(Clone)]
pub(crate) struct WrongStore {
    flaw: Flaw,
    shared: Arc<Shared>,
    own_grants: Arc<AtomicU64>,
}

impl WrongStore {
    pub(crate) fn new(flaw: Flaw, shared: Arc<Shared>) -> Self {
        Self { flaw, shared, own_grants: Arc::default() }
    }

    fn key(&self, key: &Key) -> Key {
        match self.flaw {
            Flaw::KeysAreCaseless => Key::new(&key.as_str().to_lowercase()).expect("as good"),
            _ => key.clone(),
        }
    }

    async fn granted(&self, key: &Key, grant: Grant) -> Grant {
        let Grant { token, lease_start, handoff_requested, hold, .. } = grant;
        self.shared.handles.lock().unwrap().extend(hold.handle());
        let state = self.shared.inner.inspect(key, KeySpace::Lock).await.expect("in memory");
        self.shared.held.lock().unwrap().insert(key.to_string(), state);
        let counter = match self.flaw {
            Flaw::CountsOwnGrants => &self.own_grants,
            _ => &self.shared.grants,
        };
        let high =
            self.flaw == Flaw::CleanResetsTokens && !self.shared.cleaned.load(Ordering::SeqCst);
        let token = FencingToken::new(u64::from(high), token.number());
        let (store, key) = (self.clone(), key.clone());
        let mut grant = Grant::new(token, Box::new(WrongHold { store, key, hold }));
        (grant.lease_start, grant.handoff_requested) = (lease_start, handoff_requested);
        grant.grants = Some(counter.fetch_add(1, Ordering::SeqCst) + 1);
        grant
    }

    /// The hold that a handle would name if a part of it were enough.
    fn guessed(&self, text: &str) -> Option<Handle> {
        let number = |handle: &Handle| u64::from_str_radix(&handle.expose()[1..17], 16).unwrap();
        let fits = |handle: &&Handle| match self.flaw {
            Flaw::ResumesByHalfAHandle => text.get(..17) == handle.expose().get(..17),
            Flaw::ResumesByToken => text == number(handle).to_string(),
            _ => false,
        };
        self.shared.handles.lock().unwrap().iter().find(fits).cloned()
    }
}

#[async_trait]
impl Store for WrongStore {
    fn capabilities(&self) -> Capabilities {
        self.shared.inner.capabilities()
    }

    async fn claim(&self, claim: &Claim, limit: Duration) -> Result<Answer> {
        let mut claim = claim.clone();
        claim.key = self.key(&claim.key);
        let stays = match claim.mode {
            Mode::Shared => self.flaw == Flaw::DeadReadersStay,
            Mode::Slot { .. } => self.flaw == Flaw::DeadSlotHoldersStay,
            Mode::Exclusive => false,
        };
        if stays {
            (claim.ttl, claim.detached) = (claim.ttl * 12, true);
        }
        Ok(match self.shared.inner.claim(&claim, limit).await? {
            Answer::Granted(grant) => Answer::Granted(self.granted(&claim.key, grant).await),
            Answer::Queued(place) => {
                let (store, key) = (self.clone(), claim.key);
                Answer::Queued(Box::new(WrongPlace { store, key, place: Some(place) }))
            }
            other => other,
        })
    }

    async fn resume(&self, key: &Key, handle: &Handle) -> Result<Box<dyn Hold>> {
        let guessed = self.guessed(handle.expose());
        self.shared.inner.resume(key, guessed.as_ref().unwrap_or(handle)).await
    }

    async fn changed(&self, key: &Key, space: KeySpace, since: Version) -> Result<()> {
        self.shared.inner.changed(&self.key(key), space, since).await
    }

    async fn inspect(&self, key: &Key, space: KeySpace) -> Result<KeyState> {
        let mut state = self.shared.inner.inspect(&self.key(key), space).await?;
        if self.flaw == Flaw::HoldersAreNameless {
            state.holders.iter_mut().for_each(|holder| holder.by = None);
        }
        Ok(state)
    }

    async fn list(
        &self,
        space: KeySpace,
        prefix: &str,
        after: Option<&str>,
    ) -> Result<Vec<KeyState>> {
        match self.flaw {
            Flaw::ListIgnoresThePrefix => self.shared.inner.list(space, "", after).await,
            Flaw::ListShowsEndedHolds => {
                let held = self.shared.held.lock().unwrap();
                let fits =
                    |key: &str| key.starts_with(prefix) && after.is_none_or(|after| key > after);
                Ok(held
                    .iter()
                    .filter(|(key, _)| fits(key))
                    .map(|(_, state)| state.clone())
                    .collect())
            }
            _ => self.shared.inner.list(space, prefix, after).await,
        }
    }

    async fn evict(&self, key: &Key, token: FencingToken, reason: &str) -> Result<()> {
        let locks = self.shared.inner.inspect(key, KeySpace::Lock).await?;
        let is_lock = locks.holders.iter().any(|holder| holder.token == token);
        if self.flaw == Flaw::EvictsLocksOnly && !is_lock {
            return Err(Error::new(ErrorKind::NotHeld, "no lock has this token"));
        }
        self.shared.inner.evict(key, token, reason).await
    }

    async fn clean(&self, _older_than: Duration) -> Result<u64> {
        self.shared.cleaned.store(true, Ordering::SeqCst);
        if self.flaw == Flaw::CleanEndsHolds {
            for state in self.shared.inner.list(KeySpace::Lock, "", None).await? {
                self.shared.inner.evict(&state.key, state.holders[0].token, "clean").await?;
            }
        }
        Ok(0)
    }
}

struct WrongPlace {
    store: WrongStore,
    key: Key,
    place: Option<Box<dyn Place>>,
}

#[async_trait]
impl Place for WrongPlace {
    async fn wait(&mut self, limit: Duration) -> Result<Waited> {
        let Some(place) = &mut self.place else { return Ok(Waited::Gone) };
        let ignored = self.store.flaw == Flaw::WaitIgnoresItsLimit;
        Ok(match place.wait(if ignored { Duration::from_secs(600) } else { limit }).await? {
            Waited::Granted(grant) => Waited::Granted(self.store.granted(&self.key, grant).await),
            other => other,
        })
    }

    async fn abandon(&mut self, limit: Duration) -> Result<()> {
        let (flaw, shared) = (self.store.flaw, &self.store.shared);
        if flaw == Flaw::AbandonDoesNothing {
            shared.places.lock().unwrap().extend(self.place.take());
            return Ok(());
        }
        let Some(place) = &mut self.place else { return Ok(()) };
        if flaw == Flaw::AbandonKeepsTheGrant
            && let Waited::Granted(grant) = place.wait(Duration::ZERO).await?
        {
            shared.kept.lock().unwrap().push(grant);
            return Ok(());
        }
        place.abandon(limit).await
    }
}

struct WrongHold {
    store: WrongStore,
    key: Key,
    hold: Box<dyn Hold>,
}

#[async_trait]
impl Hold for WrongHold {
    async fn renew(&mut self, ttl: Duration, limit: Duration) -> Result<Renewed> {
        let renewed = self.hold.renew(ttl, limit).await;
        let state = self.store.shared.inner.inspect(&self.key, KeySpace::Lock).await?;
        if self.store.flaw == Flaw::RenewalRevives && state.holders.is_empty() {
            return Ok(Renewed::default());
        }
        renewed
    }

    async fn event(&mut self) -> tenure::store::HoldEvent {
        self.hold.event().await
    }

    async fn release(&mut self, limit: Duration) -> Result<()> {
        self.hold.release(limit).await
    }

    fn handle(&self) -> Option<Handle> {
        self.hold.handle()
    }

    async fn detach(&mut self, limit: Duration) -> Result<()> {
        self.hold.detach(limit).await
    }
}

impl fmt::Display for WrongStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "wrong:{:?}", self.flaw)
    }
}

impl fmt::Debug for WrongStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Debug for WrongPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "place of {}", self.key)
    }
}

impl fmt::Debug for WrongHold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hold of {}", self.key)
    }
}
