//! The memory store: locks within one process, over the same table as the lock server.
//!
//! It is a store of its own, for programs that need locks between their tasks and for tests of code that uses locks. It
//! is no stand-in for the tests of another store.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher, RandomState};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::table::{
    Asked, Config, Ending, Event, Grant as TableGrant, Leave, LockTable, Mint, Owner, PlaceId,
    Refusal, View, Want,
};
use tenure_core::{FencingToken, Key, LockToken, Time};
use tokio::sync::Notify;

use super::{
    Answer, Busy, Capabilities, Claim, Counts, Ends, Grant, Handle, Handoff, Hold, HoldEvent,
    HolderState, Identity, KeyState, Loss, Place, Queue, Renewed, Seen, Space, Store, Waited,
    WaiterState,
};
use crate::{Clock, Error, ErrorKind, Result, identity};

/// Locks within this process. A clone is the same store.
///
/// Every method answers at once, so that no `limit` is ever reached.
#[derive(Clone)]
pub struct Memory(Arc<Shared>);

/// The most holders and waiters of one key that are shown.
const SHOWN: usize = 1_000;
/// The most keys that one call lists.
const LISTED: usize = 1_000;

impl Memory {
    /// A store of its own, which nobody else can reach.
    pub fn new() -> Self {
        Self::with_clock(Clock::system())
    }

    /// The same, counting its leases on another clock: for tests that move time by hand.
    pub fn with_clock(clock: Clock) -> Self {
        Self::build(String::new(), clock)
    }

    /// The store that every `memory:NAME` of this process names, as long as somebody uses it.
    pub(crate) fn named(name: &str) -> Result<Self> {
        static NAMED: OnceLock<Mutex<HashMap<String, Weak<Shared>>>> = OnceLock::new();
        let name = identity::checked("name of a memory store", name)?;
        let named = NAMED.get_or_init(Mutex::default);
        let mut named = named.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(shared) = named.get(&name).and_then(Weak::upgrade) {
            return Ok(Self(shared));
        }
        named.retain(|_, shared| shared.strong_count() > 0);
        let store = Self::build(name.clone(), Clock::system());
        named.insert(name, Arc::downgrade(&store.0));
        Ok(store)
    }

    fn build(name: String, clock: Clock) -> Self {
        let config = Config { tell_holders: true, ..Config::default() };
        let table = LockTable::new(config, RandomState::new(), Tokens(RandomState::new()));
        let state = State { table, seats: HashMap::new(), claims: HashMap::new() };
        Self(Arc::new(Shared { name, clock, state: Mutex::new(state), changed: Notify::new() }))
    }
}

impl Default for Memory {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

#[async_trait]
impl Store for Memory {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            queue: Queue::Fifo,
            ends: Ends::Both,
            push: true,
            handoff: Handoff::Pushed,
            shared: true,
            semaphore: true,
            detached: true,
            list: true,
            names: true,
            evict: true,
            min_ttl: Duration::from_millis(1),
        }
    }

    async fn claim(&self, claim: &Claim, _limit: Duration) -> Result<Answer> {
        self.0.with(|state, now| match state.again(&self.0, claim, now) {
            Some(answer) => Ok(answer),
            None => state.claim(&self.0, claim, now).map_err(|error| error.on(&claim.key).at(self)),
        })
    }

    async fn resume(&self, key: &Key, handle: &Handle) -> Result<Box<dyn Hold>> {
        let (space, token) = parse_handle(handle).ok_or_else(|| {
            Error::new(ErrorKind::Invalid, "this is no handle of a memory store").on(key).at(self)
        })?;
        let seat = self.0.look(|state, now| {
            // All of them: the hold that is asked for may be the last of a large semaphore.
            let view = state.table.inspect(space, key.as_bytes(), usize::MAX, now)?;
            let holder = view.holders.iter().find(|holder| holder.number == token.number())?;
            let owner = holder.owner?;
            let seat = state.seats.get_mut(&owner)?;
            let ours = seat.grant.is_some_and(|grant| grant.token == token);
            ours.then(|| seat.sit(&self.0, owner))
        });
        match seat {
            Some(seat) => Ok(Box::new(MemoryHold { seat, token })),
            None => Err(Error::new(ErrorKind::NotHeld, "the hold has ended").on(key).at(self)),
        }
    }

    async fn changed(&self, key: &Key, space: Space, since: Seen) -> Result<()> {
        loop {
            let mut changed = pin!(self.0.changed.notified());
            changed.as_mut().enable();
            let (seen, due) = self.0.look(|state, now| {
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

    async fn inspect(&self, key: &Key, space: Space) -> Result<KeyState> {
        Ok(self.0.look(|state, now| state.show(key.clone(), space, now)))
    }

    async fn list(&self, space: Space, prefix: &str, after: Option<&str>) -> Result<Vec<KeyState>> {
        Ok(self.0.look(|state, now| {
            let mut after = after.map(|after| after.as_bytes().to_vec());
            loop {
                let found =
                    state.table.list(space, prefix.as_bytes(), after.as_deref(), LISTED, now);
                let used = found.iter().filter(|summary| summary.idle_since.is_none());
                let page: Vec<_> = used
                    .filter_map(|summary| std::str::from_utf8(summary.key.as_bytes()).ok())
                    .filter_map(|text| Key::new(text).ok())
                    .map(|key| state.show(key, space, now))
                    .collect();
                // An empty page says that nothing follows: not while there are only keys that nobody uses.
                if !page.is_empty() || found.len() < LISTED {
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
                evict(Space::Lock) || evict(Space::Semaphore)
            });
        if !evicted {
            let message = format!("no hold has the token {token}: look at who holds it now");
            return Err(Error::new(ErrorKind::NotHeld, message).on(key).at(self));
        }
        tracing::info!(name: "tenure.evicted", %key, store = %self, %token, reason);
        Ok(())
    }

    async fn close(&self) {}
}

struct Shared {
    name: String,
    clock: Clock,
    state: Mutex<State>,
    changed: Notify,
}

impl Shared {
    /// Does something to the table, passes on what happened in it, and wakes whoever watches.
    fn with<T>(&self, act: impl FnOnce(&mut State, Time) -> T) -> T {
        let now = self.clock.now();
        let result = {
            let mut state = self.lock();
            let result = act(&mut state, now);
            state.pass_on(now);
            result
        };
        self.changed.notify_waiters();
        result
    }

    /// Looks at the table. Watchers are woken only by what the time brought about, or they would wake each other.
    fn look<T>(&self, look: impl FnOnce(&mut State, Time) -> T) -> T {
        let now = self.clock.now();
        let (result, changed) = {
            let mut state = self.lock();
            let result = look(&mut state, now);
            (result, state.pass_on(now))
        };
        if changed {
            self.changed.notify_waiters();
        }
        result
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Display for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "memory:{}", self.name)
    }
}

struct State {
    table: LockTable<RandomState, Tokens>,
    seats: HashMap<Owner, SeatState>,
    claims: HashMap<u128, Owner>,
}

/// What the store knows of one claim that waits or holds.
struct SeatState {
    claim: u128,
    by: Arc<Identity>,
    key: Key,
    space: Space,
    place: Option<PlaceId>,
    grant: Option<TableGrant>,
    lost: Option<Loss>,
    wanted: bool,
    /// The hold outlives its seat.
    left: bool,
    seat: Weak<Seat>,
    wake: Arc<Notify>,
}

impl SeatState {
    fn sit(&mut self, shared: &Arc<Shared>, owner: Owner) -> Arc<Seat> {
        if let Some(seat) = self.seat.upgrade() {
            return seat;
        }
        let (shared, wake) = (Arc::clone(shared), Arc::clone(&self.wake));
        let seat = Arc::new(Seat { shared, owner, key: self.key.clone(), space: self.space, wake });
        self.seat = Arc::downgrade(&seat);
        seat
    }
}

impl State {
    fn claim(&mut self, shared: &Arc<Shared>, claim: &Claim, now: Time) -> Result<Answer> {
        let owner = self.table.connect();
        let space = claim.mode.space();
        let want = Want { owner, mode: claim.mode, lease: claim.ttl, queue: claim.queue };
        let (place, grant) = match self.table.ask(claim.key.as_bytes(), want, now) {
            Asked::Granted(grant) => (None, Some(grant)),
            Asked::Queued(place) => (Some(place), None),
            Asked::Busy => {
                self.table.disconnect(owner, Leave::Release, now);
                return Ok(Answer::Busy(self.busy(&claim.key, space, now)));
            }
            Asked::Refused(refusal) => {
                self.table.disconnect(owner, Leave::Release, now);
                return Err(refused(refusal));
            }
        };
        let mut known = SeatState {
            claim: claim.id,
            by: Arc::clone(&claim.by),
            key: claim.key.clone(),
            space,
            place,
            grant,
            lost: None,
            wanted: false,
            left: claim.detached,
            seat: Weak::new(),
            wake: Arc::new(Notify::new()),
        };
        let seat = known.sit(shared, owner);
        self.seats.insert(owner, known);
        self.claims.insert(claim.id, owner);
        Ok(answer(seat, grant))
    }

    /// The answer to a claim that was sent before: what it has, if it still has it.
    fn again(&mut self, shared: &Arc<Shared>, claim: &Claim, now: Time) -> Option<Answer> {
        let owner = *self.claims.get(&claim.id)?;
        let seat = self.seats.get_mut(&owner)?;
        if let Some(grant) = seat.grant {
            self.table.renew(seat.space, seat.key.as_bytes(), grant.token, claim.ttl, now).ok()?;
        } else {
            seat.place?;
        }
        // Last of all: the seat must not be dropped in here, it would take the lock again. Of a hold that outlives its
        // seat there may be none left.
        let sitting = seat.sit(shared, owner);
        Some(answer(sitting, seat.grant))
    }

    /// Tells everybody of what happened in the table; whether anything did.
    fn pass_on(&mut self, now: Time) -> bool {
        let mut changed = false;
        while let Some(event) = self.table.poll_event() {
            changed = true;
            let (Event::Granted { owner, .. }
            | Event::Wanted { owner, .. }
            | Event::Ended { owner: Some(owner), .. }) = event
            else {
                continue;
            };
            let Some(seat) = self.seats.get_mut(&owner) else { continue };
            match event {
                Event::Granted { grant, .. } => (seat.place, seat.grant) = (None, Some(grant)),
                Event::Wanted { .. } => seat.wanted = true,
                Event::Ended { how, .. } => {
                    seat.grant = None;
                    seat.lost = Some(match how {
                        Ending::Expired => Loss::Expired,
                        Ending::Evicted => Loss::Evicted,
                        Ending::Disconnected | Ending::Abandoned => Loss::Taken,
                    });
                }
            }
            seat.wake.notify_one();
            self.tidy(owner, now);
        }
        changed
    }

    /// Forgets an owner that nobody sits for and that has nothing that outlives it.
    fn tidy(&mut self, owner: Owner, now: Time) {
        let Some(seat) = self.seats.get(&owner) else { return };
        let keeps = seat.left && seat.grant.is_some();
        if seat.seat.strong_count() == 0 && !keeps {
            // The number of a claim that came again belongs to its later seat.
            if self.claims.get(&seat.claim) == Some(&owner) {
                self.claims.remove(&seat.claim);
            }
            self.seats.remove(&owner);
            self.table.disconnect(owner, Leave::Release, now);
        }
    }

    fn view(&mut self, key: &Key, space: Space, now: Time) -> (Option<View>, Seen) {
        let view = self.table.inspect(space, key.as_bytes(), SHOWN, now);
        let (holders, waiters) = match &view {
            Some(view) => (&view.holders[..], &view.waiters[..]),
            None => (&[][..], &[][..]),
        };
        let holders: Vec<_> = holders.iter().map(|holder| holder.number).collect();
        let waiters: Vec<_> = waiters.iter().map(|waiter| waiter.place).collect();
        // What is seen is compared within this process only: any hasher without a seed will do.
        let seen = BuildHasherDefault::<DefaultHasher>::default().hash_one((holders, waiters));
        (view, Seen(seen.into()))
    }

    fn show(&mut self, key: Key, space: Space, now: Time) -> KeyState {
        let (view, seen) = self.view(&key, space, now);
        let by = |owner: Owner| self.seats.get(&owner).map(|seat| (*seat.by).clone());
        let (holders, waiters) =
            view.map_or_else(Default::default, |view| (view.holders, view.waiters));
        let holders = holders.iter().map(|holder| HolderState {
            by: holder.owner.and_then(by),
            token: FencingToken::new(0, holder.number),
            held_for: Some(now.since(holder.granted)),
            lease_left: Some(holder.ends.since(now)),
        });
        let waiters = waiters.iter().map(|waiter| WaiterState {
            by: by(waiter.owner),
            waited_for: Some(now.since(waiter.since)),
        });
        KeyState { space, holders: holders.collect(), waiters: waiters.collect(), seen, key }
    }

    fn busy(&mut self, key: &Key, space: Space, now: Time) -> Busy {
        let shown = self.show(key.clone(), space, now);
        let holder = shown.holders.into_iter().find_map(|holder| holder.by);
        Busy { holder, seen: shown.seen, retry_after: None }
    }
}

/// One claim's stay in the store: when the last who sits here goes, so does what it had, as if a process had died.
struct Seat {
    shared: Arc<Shared>,
    owner: Owner,
    key: Key,
    space: Space,
    wake: Arc<Notify>,
}

impl Seat {
    fn not_held(&self) -> Error {
        Error::new(ErrorKind::NotHeld, "the hold has ended").on(&self.key).at(&self.shared)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.shared.with(|state, now| state.tidy(self.owner, now));
    }
}

impl fmt::Debug for Seat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {}", self.key, self.shared)
    }
}

#[derive(Debug)]
struct MemoryPlace {
    seat: Arc<Seat>,
}

#[async_trait]
impl Place for MemoryPlace {
    async fn wait(&mut self, limit: Duration) -> Result<Waited> {
        let Seat { shared, owner, wake, .. } = &*self.seat;
        let end = shared.clock.now() + limit;
        loop {
            // Whoever waits sees to it that leases end in time: the store has no timer of its own.
            shared.look(|state, now| state.table.handle_timeout(now));
            let due = {
                let state = shared.lock();
                let Some(seat) = state.seats.get(owner) else { return Ok(Waited::Gone) };
                match (seat.grant, seat.place) {
                    (Some(grant), _) => {
                        let seat = Arc::clone(&self.seat);
                        return Ok(Waited::Granted(granted(seat, grant, Counts::FromConfirm)));
                    }
                    (None, None) => return Ok(Waited::Gone),
                    (None, Some(place)) if shared.clock.now() >= end => {
                        return Ok(Waited::Still { ahead: state.table.ahead(place) });
                    }
                    (None, Some(_)) => state.table.poll_timeout().unwrap_or(Time::MAX).min(end),
                }
            };
            tokio::select! {
                () = wake.notified() => {}
                () = shared.clock.sleep_until(due) => {}
            }
        }
    }

    async fn abandon(&mut self, _limit: Duration) -> Result<()> {
        let Seat { shared, owner, key, space, .. } = &*self.seat;
        shared.with(|state, now| {
            let Some(seat) = state.seats.get_mut(owner) else { return };
            if let Some(place) = seat.place.take() {
                state.table.abandon(place, now);
            }
            if let Some(grant) = seat.grant.take() {
                // A grant that is over already is as good as given back.
                let _ = state.table.release(*space, key.as_bytes(), grant.token, now);
            }
        });
        Ok(())
    }
}

#[derive(Debug)]
struct MemoryHold {
    seat: Arc<Seat>,
    token: LockToken,
}

#[async_trait]
impl Hold for MemoryHold {
    async fn renew(&mut self, ttl: Duration, _limit: Duration) -> Result<Renewed> {
        let Seat { shared, key, space, .. } = &*self.seat;
        shared
            .with(|state, now| state.table.renew(*space, key.as_bytes(), self.token, ttl, now))
            .map(|renewed| Renewed { waiter: renewed.waiters > 0 })
            .map_err(|_| self.seat.not_held())
    }

    async fn look(&mut self, _limit: Duration) -> Result<bool> {
        let Seat { shared, key, space, .. } = &*self.seat;
        let view = shared.look(|state, now| state.table.inspect(*space, key.as_bytes(), 0, now));
        Ok(view.is_some_and(|view| view.summary.waiters > 0))
    }

    async fn event(&mut self) -> HoldEvent {
        let Seat { shared, owner, wake, .. } = &*self.seat;
        loop {
            if let Some(seat) = shared.lock().seats.get_mut(owner) {
                if let Some(loss) = seat.lost {
                    return HoldEvent::Lost(loss);
                }
                if std::mem::take(&mut seat.wanted) {
                    return HoldEvent::Wanted;
                }
            }
            wake.notified().await;
        }
    }

    async fn release(&mut self, _limit: Duration) -> Result<()> {
        let Seat { shared, key, space, owner, .. } = &*self.seat;
        shared.with(|state, now| {
            if let Some(seat) = state.seats.get_mut(owner) {
                seat.grant = None;
            }
            let released = state.table.release(*space, key.as_bytes(), self.token, now);
            released.map_err(|_| self.seat.not_held())
        })
    }

    fn handle(&self) -> Option<Handle> {
        let space = match self.seat.space {
            Space::Lock => 'l',
            Space::Semaphore => 's',
        };
        Some(Handle::new(format!("{space}{}", self.token)))
    }

    fn leave(self: Box<Self>) {
        if let Some(seat) = self.seat.shared.lock().seats.get_mut(&self.seat.owner) {
            seat.left = true;
        }
    }

    #[cfg(unix)]
    fn keep_open(&self) -> Option<Weak<dyn super::KeepOpen>> {
        None
    }
}

fn parse_handle(handle: &Handle) -> Option<(Space, LockToken)> {
    let (space, token) = handle.expose().split_at_checked(1)?;
    let space = match space {
        "l" => Space::Lock,
        "s" => Space::Semaphore,
        _ => return None,
    };
    Some((space, token.parse().ok()?))
}

fn answer(seat: Arc<Seat>, grant: Option<TableGrant>) -> Answer {
    match grant {
        Some(grant) => Answer::Granted(granted(seat, grant, Counts::FromRequest)),
        None => Answer::Queued(Box::new(MemoryPlace { seat })),
    }
}

fn granted(seat: Arc<Seat>, grant: TableGrant, counts: Counts) -> Grant {
    let TableGrant { token, waiters, .. } = grant;
    let hold = Box::new(MemoryHold { seat, token });
    Grant { token: token.fencing(), counts, waiter: waiters > 0, hold }
}

fn refused(refusal: Refusal) -> Error {
    let kind = match refusal {
        Refusal::LimitMismatch => ErrorKind::Invalid,
        _ => ErrorKind::Unavailable,
    };
    Error::new(kind, refusal.to_string())
}

/// Tokens whose numbers grow over all memory stores of this process, so that a store that was dropped and made anew under
/// the same name does not repeat them; the secret half is a keyed hash.
struct Tokens(RandomState);

impl Mint for Tokens {
    fn mint(&mut self) -> LockToken {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let number = LAST.fetch_add(1, Ordering::Relaxed) + 1;
        LockToken::new(number, self.0.hash_one(number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Client;
    use crate::store::Mode;

    const LIMIT: Duration = Duration::from_secs(1);

    fn claim(key: &str, mode: Mode, id: u128) -> Claim {
        let key = Key::new(key).expect("plain letters");
        let (ttl, by) = (Duration::from_secs(60), Arc::default());
        Claim { id, key, mode, ttl, by, queue: false, fair: false, detached: true }
    }

    async fn take(store: &Memory, claim: &Claim) -> Grant {
        match store.claim(claim, LIMIT).await.expect("an answer") {
            Answer::Granted(grant) => grant,
            other => panic!("not granted: {other:?}"),
        }
    }

    #[tokio::test]
    async fn a_page_of_idle_keys_is_not_the_end_of_the_list() {
        let store = Memory::new();
        let client = Client::with_store(Arc::new(store.clone()));
        for n in 0..LISTED {
            let guard = client.lock(format!("a{n:04}")).try_acquire().await.expect("free");
            guard.release().await.expect("released");
        }
        let guard = client.lock("z").try_acquire().await.expect("free");
        let listed = store.list(Space::Lock, "", None).await.expect("a page");
        assert_eq!(listed.iter().map(|state| &state.key).collect::<Vec<_>>(), [guard.key()]);
        let rest = store.list(Space::Lock, "", Some("z")).await.expect("a page");
        assert!(rest.is_empty(), "{rest:?}");
    }

    #[tokio::test]
    async fn the_last_hold_of_a_large_semaphore_is_resumed_too() {
        let store = Memory::new();
        let mut grants = Vec::new();
        for id in 0..=SHOWN as u128 {
            let mode = Mode::Slot { limit: 2_000 };
            grants.push(take(&store, &claim("s", mode, id)).await);
        }
        let handle = grants.last().and_then(|grant| grant.hold.handle()).expect("a handle");
        let mut hold = store.resume(&Key::new("s").expect("a key"), &handle).await.expect("held");
        hold.release(LIMIT).await.expect("released");
    }

    #[tokio::test]
    async fn a_repeated_claim_finds_a_hold_that_outlived_its_process() {
        let store = Memory::new();
        let claim = claim("a", Mode::Exclusive, 1);
        let token = take(&store, &claim).await.token;
        assert_eq!(take(&store, &claim).await.token, token);
    }
}
