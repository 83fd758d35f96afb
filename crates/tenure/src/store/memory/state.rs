//! Contents of the memory store: the lock table, and an entry per claim.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard};

use tenure_core::table::{
    ClaimAnswer, Ending, Grant as TableGrant, LockTable, Mint, OnDisconnect, Owner, PlaceId,
    Refusal, TableClaim, TableConfig, TableEvent, View,
};
use tenure_core::{FencingToken, Key, LockToken, Time};
use tokio::sync::Notify;

use crate::mutex::Mutex;
use crate::store::{
    Claim, Contended, HolderState, Identity, KeySpace, KeyState, Loss, Version, WaiterState,
};
use crate::{Clock, Error, ErrorKind, Result};

/// Maximum number of holders, and of waiters, of one key that are shown.
pub(super) const MAX_SHOWN_ENTRIES: usize = 1_000;

/// State that the clones of a store share.
pub(super) struct MemoryShared {
    name: String,
    pub(super) clock: Clock,
    state: Mutex<MemoryState>,
    pub(super) changed: Notify,
}

impl MemoryShared {
    pub(super) fn new(name: String, clock: Clock) -> Self {
        let config = TableConfig { notify_holders: true, ..TableConfig::default() };
        let table = LockTable::new(config, RandomState::new(), Tokens(RandomState::new()));
        let state = MemoryState { table, entries: HashMap::new(), claims: HashMap::new() };
        Self { name, clock, state: Mutex::new(state), changed: Notify::new() }
    }

    /// Changes the table, dispatches the events of the change, and wakes all watchers.
    pub(super) fn with<T>(&self, act: impl FnOnce(&mut MemoryState, Time) -> T) -> T {
        let now = self.clock.now();
        let result = {
            let mut state = self.lock();
            let result = act(&mut state, now);
            state.dispatch_events(now);
            result
        };
        self.changed.notify_waiters();
        result
    }

    /// Reads the table. Wakes watchers only if an expired lease changed the table: otherwise every read would wake all
    /// watchers, which read the table in turn.
    pub(super) fn read<T>(&self, read: impl FnOnce(&mut MemoryState, Time) -> T) -> T {
        let now = self.clock.now();
        let (result, changed) = {
            let mut state = self.lock();
            let result = read(&mut state, now);
            (result, state.dispatch_events(now))
        };
        if changed {
            self.changed.notify_waiters();
        }
        result
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, MemoryState> {
        self.state.lock()
    }
}

impl fmt::Display for MemoryShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "memory:{}", self.name)
    }
}

pub(super) struct MemoryState {
    pub(super) table: LockTable<RandomState, Tokens>,
    pub(super) entries: HashMap<Owner, ClaimEntry>,
    claims: HashMap<u128, Owner>,
}

/// Entry of a claim that waits or holds.
pub(super) struct ClaimEntry {
    claim_id: u128,
    by: Arc<Identity>,
    key: Key,
    space: KeySpace,
    pub(super) place: Option<PlaceId>,
    pub(super) grant: Option<TableGrant>,
    pub(super) lost: Option<Loss>,
    pub(super) handoff_requested: bool,
    /// The hold outlives its owners.
    pub(super) detached: bool,
    /// Number of owners: places and holds of this process, and futures that are about to return one.
    owners: usize,
    wake: Arc<Notify>,
}

/// A claim that the caller owns, until it calls [`MemoryState::disown`].
pub(super) struct OwnedClaim {
    pub(super) owner: Owner,
    pub(super) key: Key,
    pub(super) space: KeySpace,
    pub(super) grant: Option<TableGrant>,
    pub(super) wake: Arc<Notify>,
}

impl ClaimEntry {
    /// Adds an owner. A detached hold may have none before.
    pub(super) fn own(&mut self, owner: Owner) -> OwnedClaim {
        self.owners += 1;
        let (key, space, grant) = (self.key.clone(), self.space, self.grant);
        OwnedClaim { owner, key, space, grant, wake: Arc::clone(&self.wake) }
    }
}

/// Answer of the table to a claim.
pub(super) enum MemoryAnswer {
    /// The claim is held, or waits.
    Entered(OwnedClaim),
    Contended(Contended),
}

/// Effect of a table event on a claim.
enum Effect {
    Granted(TableGrant),
    HandoffRequested,
    Lost(Loss),
}

impl MemoryState {
    pub(super) fn claim(&mut self, claim: &Claim, now: Time) -> Result<MemoryAnswer> {
        let owner = self.table.connect();
        let space = claim.mode.space();
        let want = TableClaim { owner, mode: claim.mode, lease: claim.ttl, queue: claim.queue };
        let (place, grant) = match self.table.claim(claim.key.as_bytes(), want, now) {
            ClaimAnswer::Granted(grant) => (None, Some(grant)),
            ClaimAnswer::Queued(place) => (Some(place), None),
            ClaimAnswer::Contended => {
                self.table.disconnect(owner, OnDisconnect::Release, now);
                let contended = self.contended(&claim.key, space, now);
                return Ok(MemoryAnswer::Contended(contended));
            }
            ClaimAnswer::Refused(refusal) => {
                self.table.disconnect(owner, OnDisconnect::Release, now);
                return Err(refused(refusal));
            }
        };
        let mut entry = ClaimEntry {
            claim_id: claim.id,
            by: Arc::clone(&claim.by),
            key: claim.key.clone(),
            space,
            place,
            grant,
            lost: None,
            handoff_requested: false,
            detached: claim.detached,
            owners: 0,
            wake: Arc::new(Notify::new()),
        };
        let entered = entry.own(owner);
        self.entries.insert(owner, entry);
        self.claims.insert(claim.id, owner);
        Ok(MemoryAnswer::Entered(entered))
    }

    /// Answer to a repeated claim: its place or its hold, if it still has one.
    pub(super) fn repeat_claim(&mut self, claim: &Claim, now: Time) -> Option<OwnedClaim> {
        let owner = *self.claims.get(&claim.id)?;
        let entry = self.entries.get_mut(&owner)?;
        if let Some(grant) = entry.grant {
            self.table
                .renew(entry.space, entry.key.as_bytes(), grant.token, claim.ttl, now)
                .ok()?;
        } else {
            entry.place?;
        }
        Some(entry.own(owner))
    }

    /// Removes an owner of a claim. Without owners the claim loses its place or its hold.
    pub(super) fn disown(&mut self, owner: Owner, now: Time) {
        if let Some(entry) = self.entries.get_mut(&owner) {
            entry.owners -= 1;
        }
        self.remove_if_unused(owner, now);
    }

    /// Applies the events of the table to the entries and wakes their owners; true if there was an event.
    fn dispatch_events(&mut self, now: Time) -> bool {
        let mut changed = false;
        while let Some(event) = self.table.poll_event() {
            changed = true;
            let (owner, effect) = match event {
                TableEvent::Granted { place: Some(_), owner, grant, .. } => {
                    (owner, Effect::Granted(grant))
                }
                TableEvent::HandoffRequested { owner, .. } => (owner, Effect::HandoffRequested),
                TableEvent::Ended { how, owner: Some(owner), .. } => match how {
                    Ending::Released => continue,
                    Ending::Expired => (owner, Effect::Lost(Loss::Expired)),
                    Ending::Evicted => (owner, Effect::Lost(Loss::Evicted)),
                    Ending::Disconnected | Ending::Abandoned => (owner, Effect::Lost(Loss::Taken)),
                },
                // The caller of the operation has the answer, or the hold has no owner.
                TableEvent::Granted { place: None, .. }
                | TableEvent::Renewed { .. }
                | TableEvent::Detached { .. }
                | TableEvent::Queued { .. }
                | TableEvent::Left { .. }
                | TableEvent::Ended { owner: None, .. } => continue,
            };
            let Some(entry) = self.entries.get_mut(&owner) else { continue };
            match effect {
                Effect::Granted(grant) => (entry.place, entry.grant) = (None, Some(grant)),
                Effect::HandoffRequested => entry.handoff_requested = true,
                Effect::Lost(loss) => (entry.grant, entry.lost) = (None, Some(loss)),
            }
            entry.wake.notify_one();
            self.remove_if_unused(owner, now);
        }
        changed
    }

    /// Removes a claim without owners, unless it has a detached hold.
    fn remove_if_unused(&mut self, owner: Owner, now: Time) {
        let Some(entry) = self.entries.get(&owner) else { return };
        let keeps = entry.detached && entry.grant.is_some();
        if entry.owners == 0 && !keeps {
            // If the claim was sent again after its end, its id belongs to the later entry.
            if self.claims.get(&entry.claim_id) == Some(&owner) {
                self.claims.remove(&entry.claim_id);
            }
            self.entries.remove(&owner);
            self.table.disconnect(owner, OnDisconnect::Release, now);
        }
    }

    pub(super) fn view(
        &mut self,
        key: &Key,
        space: KeySpace,
        now: Time,
    ) -> (Option<View>, Version) {
        let view = self.table.inspect(space, key.as_bytes(), MAX_SHOWN_ENTRIES, now);
        let (holders, waiters) = match &view {
            Some(view) => (&view.holders[..], &view.waiters[..]),
            None => (&[][..], &[][..]),
        };
        let holders: Vec<_> = holders.iter().map(|holder| holder.number).collect();
        let waiters: Vec<_> = waiters.iter().map(|waiter| waiter.place).collect();
        // Versions are compared within this process only: any hasher with a fixed seed will do.
        let seen = BuildHasherDefault::<DefaultHasher>::default().hash_one((holders, waiters));
        (view, Version(seen.into()))
    }

    pub(super) fn key_state(&mut self, key: Key, space: KeySpace, now: Time) -> KeyState {
        let (view, seen) = self.view(&key, space, now);
        let by = |owner: Owner| self.entries.get(&owner).map(|entry| (*entry.by).clone());
        let (holders, waiters) =
            view.map_or_else(Default::default, |view| (view.holders, view.waiters));
        let holders = holders.iter().map(|holder| HolderState {
            by: holder.owner.and_then(by),
            token: FencingToken::new(0, holder.number),
            held_for: Some(now.since(holder.granted)),
            lease_left: Some(holder.ends.since(now)),
            revision: None,
        });
        let waiters = waiters.iter().map(|waiter| WaiterState {
            by: by(waiter.owner),
            waited_for: Some(now.since(waiter.since)),
        });
        KeyState {
            space,
            holders: holders.collect(),
            waiters: waiters.collect(),
            version: seen,
            key,
        }
    }

    fn contended(&mut self, key: &Key, space: KeySpace, now: Time) -> Contended {
        let shown = self.key_state(key.clone(), space, now);
        let holder = shown.holders.into_iter().find_map(|holder| holder.by);
        Contended { holder, version: shown.version, retry_after: None, note: None }
    }
}

fn refused(refusal: Refusal) -> Error {
    let kind = match refusal {
        Refusal::LimitMismatch => ErrorKind::Invalid,
        _ => ErrorKind::Unavailable,
    };
    Error::new(kind, refusal.to_string())
}

/// Tokens whose numbers grow across all memory stores of this process, so that a store that was dropped and created
/// again with the same name does not repeat them. The secret half is a keyed hash.
pub(super) struct Tokens(RandomState);

impl Mint for Tokens {
    fn mint(&mut self) -> LockToken {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let number = LAST.fetch_add(1, Ordering::Relaxed) + 1;
        LockToken::new(number, self.0.hash_one(number))
    }
}
