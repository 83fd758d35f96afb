//! The lock table against a plain model of it: the same random operations must give the same answers, events and views.
#![expect(clippy::disallowed_types, reason = "any hasher with a fixed seed will do for a test")]
#![allow(clippy::unwrap_used, missing_docs, unreachable_pub)]

mod model;
mod replica;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::hash::{BuildHasher, DefaultHasher, Hasher};
use std::rc::Rc;
use std::time::Duration;

use model::{Answer, Model, Name, Told, Wish};
use replica::{Replica, ReplicaHold};
use tenure_core::table::{
    ClaimAnswer, Enqueued, KeySpace, LockTable, Mode, OnDisconnect, Owner, PlaceId, Redeemed,
    TableClaim, TableConfig, TableEvent, UpcomingOp,
};
use tenure_core::{LockToken, Random, Time};

const SEEDS: u64 = 1_000;
const STEPS: usize = 400;

#[test]
fn the_table_agrees_with_the_model() {
    let mut met = BTreeMap::new();
    for seed in 0..SEEDS {
        let mut pair = Pair::new(seed);
        pair.run();
        for (what, times) in pair.met {
            *met.entry(what).or_insert(0) += times;
        }
    }
    for (what, at_least) in OFTEN_ENOUGH {
        let times = met.get(what).copied().unwrap_or(0);
        assert!(times >= at_least, "{what} came up {times} times only, of {met:#?}");
    }
}

/// A model that never meets a case proves nothing of it.
const OFTEN_ENOUGH: [(&str, usize); 23] = [
    ("ask Granted", 1000),
    ("ask Queued", 1000),
    ("ask Busy", 1000),
    ("ask Refused(MaxKeys)", 500),
    ("ask Refused(MaxWaiters)", 500),
    ("ask Refused(LimitMismatch)", 500),
    ("ask Refused(UnknownOwner)", 500),
    ("enqueue Granted", 1000),
    ("enqueue Queued", 1000),
    ("enqueue AlreadyEnqueued", 1000),
    ("redeem Granted", 500),
    ("redeem Queued", 500),
    ("redeem LeaseExpired", 500),
    ("abandon Waiting", 500),
    ("abandon Granted", 100),
    ("abandon Lapsed", 50),
    ("told Granted", 1000),
    ("told Ended", 1000),
    ("told Wanted", 500),
    ("told Queued", 1000),
    ("told Left", 500),
    ("told Renewed", 1000),
    ("told Detached", 50),
];

/// Long and short ones, and each in both spaces.
const KEYS: [&[u8]; 4] = [b"a", b"b", b"a key of more bytes than are kept inline", b"a/\xff\0"];

type Table = LockTable<Masked, Box<dyn FnMut() -> LockToken>>;

/// Keeps only some bits of each hash, so that different things have the same.
#[derive(Clone)]
struct Masked {
    hasher: DefaultHasher,
    mask: u64,
}

impl BuildHasher for Masked {
    type Hasher = Self;

    fn build_hasher(&self) -> Self {
        self.clone()
    }
}

impl Hasher for Masked {
    fn finish(&self) -> u64 {
        self.hasher.finish() & self.mask
    }

    fn write(&mut self, bytes: &[u8]) {
        self.hasher.write(bytes);
    }
}

pub fn token(number: u64) -> LockToken {
    LockToken::new(number, number.wrapping_mul(0x9e37))
}

/// The table and its model, side by side.
struct Pair {
    seed: u64,
    /// The last fencing number of the table.
    numbers: Rc<Cell<u64>>,
    step: usize,
    random: Dice,
    now: Time,
    table: Table,
    model: Model,
    /// Built from the events of the table.
    replica: Replica,
    /// Events that the replica has applied since the last comparison.
    replayed: Vec<Told>,
    /// The table's names of what the model numbers.
    owners: Vec<Owner>,
    places: Vec<PlaceId>,
    /// Every grant there ever was.
    tokens: Vec<(Name, LockToken)>,
    /// How often which case came up.
    met: BTreeMap<String, usize>,
}

impl Pair {
    fn new(seed: u64) -> Self {
        let mut random = Dice(Random::new(seed));
        let config = TableConfig {
            max_keys: 2 + random.below(5),
            max_waiters_per_key: 1 + random.below(6),
            max_idle: Duration::from_nanos(random.0.below(20)),
            max_idle_keys: random.below(4),
            notify_holders: random.below(2) == 0,
        };
        let mask = [u64::MAX, 3, 0][random.below(3)];
        let hasher = Masked { hasher: DefaultHasher::new(), mask };
        let numbers = Rc::new(Cell::new(0));
        let last = Rc::clone(&numbers);
        let mint: Box<dyn FnMut() -> LockToken> = Box::new(move || {
            last.set(last.get() + 1);
            token(last.get())
        });
        Self {
            seed,
            numbers,
            step: 0,
            random,
            now: Time::ZERO,
            table: LockTable::new(config, hasher, mint),
            model: Model::new(config),
            replica: Replica::default(),
            replayed: Vec::new(),
            owners: Vec::new(),
            places: Vec::new(),
            tokens: Vec::new(),
            met: BTreeMap::new(),
        }
    }

    fn run(&mut self) {
        self.connect();
        for _ in 0..STEPS {
            self.step += 1;
            if self.random.below(4) == 0 {
                self.look_ahead();
            }
            self.step();
            self.compare();
        }
        self.wind_down();
    }

    fn step(&mut self) {
        match self.random.below(41) {
            40 => self.detach(),
            0..=8 => self.ask(),
            9..=14 => self.enqueue(),
            15..=18 => self.redeem(),
            19..=21 => self.abandon(),
            22..=24 => self.renew(),
            25..=29 => self.release(),
            30 => self.evict(),
            31 => self.restore(),
            32 | 37 => self.connect(),
            33 => self.disconnect(),
            34..=35 => self.timeout(),
            36 => self.view(),
            _ => self.now = self.now + Duration::from_nanos(self.random.0.below(6)),
        }
    }

    /// At a few keys, which come next or do not: the model knows nothing of it, and it must not matter.
    fn look_ahead(&mut self) {
        let names: Vec<_> = (0..=self.random.below(6)).map(|_| self.name()).collect();
        let renews = self.random.below(4) == 0;
        self.table.prefetch(names.into_iter().map(|(space, key)| UpcomingOp {
            space,
            key,
            is_renewal: renews,
        }));
    }

    fn connect(&mut self) {
        // Few are connected at once, so that they meet.
        if self.model.counts().owners < 5 {
            self.owners.push(self.table.connect());
            self.model.connected.push(true);
        }
    }

    fn disconnect(&mut self) {
        let owner = self.owner();
        let leave =
            if self.random.below(3) == 0 { OnDisconnect::KeepHolds } else { OnDisconnect::Release };
        self.table.disconnect(self.owners[owner], leave, self.now);
        self.model.disconnect(owner, leave, self.now);
    }

    fn ask(&mut self) {
        let (key, wish, want) = self.wish();
        let answer = self.table.claim(key, want, self.now);
        let expected = self.model.ask(key, wish, false, self.now);
        let answer = match answer {
            ClaimAnswer::Granted(grant) => Answer::Granted(grant),
            ClaimAnswer::Queued(place) => Answer::Queued(self.queued(place, expected)),
            ClaimAnswer::Contended => Answer::Busy,
            ClaimAnswer::Refused(refusal) => Answer::Refused(refusal),
        };
        self.meet("ask", &answer);
        self.same(&answer, &expected, &format!("ask {key:?} {wish:?}"));
        self.granted((wish.mode.space(), key), answer);
    }

    fn enqueue(&mut self) {
        let (key, wish, want) = self.wish();
        let answer = self.table.enqueue(key, want, self.now);
        let expected = self.model.ask(key, wish, true, self.now);
        let answer = match answer {
            Enqueued::Granted(grant) => Answer::Granted(grant),
            Enqueued::Queued(place) => Answer::Queued(self.queued(place, expected)),
            Enqueued::AlreadyEnqueued => Answer::AlreadyEnqueued,
            Enqueued::Refused(refusal) => Answer::Refused(refusal),
        };
        self.meet("enqueue", &answer);
        self.same(&answer, &expected, &format!("enqueue {key:?} {wish:?}"));
        self.granted((wish.mode.space(), key), answer);
    }

    fn redeem(&mut self) {
        let claims = self.model.claims.iter().filter(|claim| claim.two_phase);
        let claims: Vec<_> = claims.map(|claim| (claim.owner, claim.name)).collect();
        let (owner, (space, key)) = match claims.len() {
            len if len > 0 && self.random.below(8) > 0 => claims[self.random.below(len)],
            _ => (self.owner(), self.name()),
        };
        let answer = match self.table.redeem(self.owners[owner], space, key, self.now) {
            Redeemed::Granted(grant) => Answer::Granted(grant),
            Redeemed::Waiting(place) => Answer::Queued(self.place_no(place)),
            Redeemed::LeaseExpired => Answer::LeaseExpired,
            Redeemed::NotEnqueued => Answer::NotEnqueued,
        };
        let expected = self.model.redeem(owner, (space, key), self.now);
        self.meet("redeem", &answer);
        self.same(&answer, &expected, &format!("redeem {owner} {space:?} {key:?}"));
    }

    fn abandon(&mut self) {
        let Some(place) = self.random.recent(self.places.len()) else { return };
        let ahead = self.table.waiters_ahead(self.places[place]);
        self.same(&ahead, &self.model.ahead(place), &format!("ahead of {place}"));
        let claim = self.model.claims.iter().find(|claim| claim.place == Some(place));
        if let Some(stage) = claim.map(|claim| claim.stage) {
            self.meet("abandon", &stage);
        }
        let there = self.table.abandon(self.places[place], self.now);
        let expected = self.model.abandon(place, self.now);
        self.same(&there, &expected, &format!("abandon {place}"));
    }

    fn renew(&mut self) {
        let Some(((space, key), token)) = self.proof() else { return };
        let lease = self.lease();
        let renewed = self.table.renew(space, key, token, lease, self.now).ok();
        let expected = self.model.renew((space, key), token, lease, self.now);
        self.same(&renewed, &expected, &format!("renew {space:?} {key:?} {token:?} {lease:?}"));
    }

    fn detach(&mut self) {
        let Some(((space, key), token)) = self.proof() else { return };
        let detached = self.table.detach(space, key, token, self.now).is_ok();
        let expected = self.model.detach((space, key), token, self.now);
        self.same(&detached, &expected, &format!("detach {space:?} {key:?} {token:?}"));
    }

    fn release(&mut self) {
        let Some(((space, key), token)) = self.proof() else { return };
        let released = self.table.release(space, key, token, self.now).is_ok();
        let expected = self.model.release((space, key), token, self.now);
        self.same(&released, &expected, &format!("release {space:?} {key:?} {token:?}"));
    }

    fn evict(&mut self) {
        let Some(((space, key), token)) = self.proof() else { return };
        let evicted = self.table.evict(space, key, token.number(), self.now);
        let evicted = evicted.map(|owner| owner.map(|owner| self.owner_no(owner)));
        let expected = self.model.evict((space, key), token.number(), self.now);
        self.same(&evicted, &expected, &format!("evict {space:?} {key:?} {token:?}"));
    }

    fn restore(&mut self) {
        let (key, wish, _) = self.wish();
        // The next number, or now and then one that the key has already.
        let name = (wish.mode.space(), key);
        let known = self.model.keys.iter().find(|key| key.name == name);
        let token = match known.and_then(|key| key.holds.last()) {
            Some(hold) if self.random.below(4) == 0 => hold.token,
            _ => {
                self.model.number += 1;
                self.numbers.set(self.model.number);
                token(self.model.number)
            }
        };
        let ends = self.now + Duration::from_nanos(self.random.0.below(20));
        let restored = self.table.restore(key, wish.mode, token, ends, self.now).is_ok();
        let expected = self.model.restore(key, wish.mode, token, ends, self.now);
        self.same(&restored, &expected, &format!("restore {key:?} {:?} {token:?}", wish.mode));
        self.tokens.push((name, token));
        if restored {
            let mode = model::at_least_one(wish.mode);
            self.replay();
            let name = (name.0, key.to_vec());
            self.replica.restore(ReplicaHold { name, mode, token, ends, owner: None });
        }
    }

    fn timeout(&mut self) {
        self.table.handle_timeout(self.now);
        self.model.handle_timeout(self.now);
    }

    /// Every key, closely and in a list by pages.
    fn view(&mut self) {
        self.model.handle_timeout(self.now);
        for space in [KeySpace::Lock, KeySpace::Semaphore] {
            let mut names: Vec<_> = self.model.keys.iter().map(|key| key.name).collect();
            names.retain(|name| name.0 == space);
            names.sort_unstable();
            let mut listed: Vec<Vec<u8>> = Vec::new();
            loop {
                let after = listed.last().cloned();
                let keys = self.table.list(space, b"a", after.as_deref(), 2, self.now);
                listed.extend(keys.iter().map(|summary| summary.key.to_vec()));
                if keys.len() < 2 {
                    break;
                }
            }
            let expected: Vec<_> =
                names.iter().filter(|n| n.1[0] == b'a').map(|n| n.1.to_vec()).collect();
            self.same(&listed, &expected, "list");
            for key in KEYS {
                self.inspect((space, key));
            }
        }
    }

    fn inspect(&mut self, name: Name) {
        let seen = self.table.inspect(name.0, name.1, usize::MAX, self.now).map(|view| {
            let holders: Vec<_> = view
                .holders
                .iter()
                .map(|h| {
                    let owner = h.owner.map(|owner| self.owner_no(owner));
                    (h.number, h.mode, owner, h.granted, h.lease, h.ends)
                })
                .collect();
            let waiters: Vec<_> = view
                .waiters
                .iter()
                .map(|w| (self.place_no(w.place), self.owner_no(w.owner), w.mode, w.since))
                .collect();
            let summary = &view.summary;
            assert_eq!(summary.first, view.holders.first().copied());
            assert_eq!(summary.holders as usize, view.holders.len());
            assert_eq!(summary.waiters as usize, view.waiters.len());
            (summary.limit, summary.idle_since, holders, waiters)
        });
        let model = &self.model;
        let expected = model.keys.iter().find(|key| key.name == name).map(|key| {
            let holders: Vec<_> = key
                .holds
                .iter()
                .map(|h| (h.token.number(), h.mode, h.owner, h.granted, h.lease, h.ends))
                .collect();
            let waiters: Vec<_> =
                model.waiting(name).map(|c| (c.place.unwrap(), c.owner, c.mode, c.since)).collect();
            let idle = model.idle.iter().find(|idle| idle.0 == name).map(|idle| idle.1);
            ((name.0 == KeySpace::Semaphore).then_some(key.limit), idle, holders, waiters)
        });
        self.same(&seen, &expected, &format!("inspect {name:?}"));
    }

    /// Applies the events of the table to the replica.
    fn replay(&mut self) {
        while let Some(event) = self.table.poll_event() {
            self.replica.apply(&event);
            let told = self.told(event);
            self.replayed.push(told);
        }
    }

    /// The replica has the holds of the table, and its waiters in the same order.
    fn compare_replica(&self) {
        let mut holds: Vec<ReplicaHold> = self.table.holds().map(ReplicaHold::from).collect();
        holds.sort_by_key(|hold| hold.token.number());
        self.same(&holds, &self.replica.holds(), "holds of the replica");
        let mut waiters = 0;
        for (place, ahead) in self.replica.waiters() {
            self.same(&self.table.waiters_ahead(place), &Some(ahead), "place in the replica");
            waiters += 1;
        }
        self.same(&self.table.sizes().waiters, &waiters, "waiters of the replica");
    }

    /// After every step: the same events, the same counts, timers that are not late, and a sound inside.
    fn compare(&mut self) {
        self.table.check();
        self.replay();
        self.compare_replica();
        let told = std::mem::take(&mut self.replayed);
        let expected = std::mem::take(&mut self.model.told);
        self.same(&told, &expected, "events");
        for event in told {
            self.meet("told", &event);
            if let Told::Granted { place: Some(_), name, grant, .. } = event {
                self.tokens.push((name, grant.token));
            }
        }
        self.same(&self.table.sizes(), &self.model.counts(), "counts");
        if let Some(due) = self.model.next_timeout() {
            let offered = self.table.poll_timeout();
            assert!(
                offered.is_some_and(|at| at <= due),
                "seed {}: timer at {offered:?}, due at {due:?}",
                self.seed
            );
        }
    }

    /// When all have left and the timers have run, nothing is left.
    fn wind_down(&mut self) {
        for owner in 0..self.owners.len() {
            self.table.disconnect(self.owners[owner], OnDisconnect::Release, self.now);
            self.model.disconnect(owner, OnDisconnect::Release, self.now);
        }
        for ((space, key), token) in std::mem::take(&mut self.tokens) {
            let _ = self.table.evict(space, key, token.number(), self.now);
            let _ = self.model.evict((space, key), token.number(), self.now);
        }
        self.compare();
        let mut calls = 0;
        while let Some(at) = self.table.poll_timeout() {
            assert!(at > self.now || calls == 0, "seed {}: no progress at {at:?}", self.seed);
            self.now = self.now.max(at);
            self.timeout();
            self.compare();
            calls += 1;
        }
        self.same(&self.table.sizes(), &tenure_core::table::TableSizes::default(), "what is left");
    }

    fn wish(&mut self) -> (&'static [u8], Wish, TableClaim) {
        let (space, key) = self.name();
        let mode = match (space, self.random.below(2)) {
            (KeySpace::Lock, 0) => Mode::Exclusive,
            (KeySpace::Lock, _) => Mode::Shared,
            // Mostly the same limit, or little would be granted.
            (KeySpace::Semaphore, _) if self.random.below(8) > 0 => Mode::Slot { limit: 2 },
            (KeySpace::Semaphore, 0) => Mode::Slot { limit: 0 },
            (KeySpace::Semaphore, _) => Mode::Slot { limit: 1 },
        };
        let wish = Wish {
            owner: self.owner(),
            mode,
            lease: self.lease(),
            queue: self.random.below(4) > 0,
        };
        let Wish { owner, mode, lease, queue } = wish;
        (key, wish, TableClaim { owner: self.owners[owner], mode, lease, queue })
    }

    fn name(&mut self) -> Name {
        let space = if self.random.below(5) < 3 { KeySpace::Lock } else { KeySpace::Semaphore };
        // The first key is the busiest.
        let at = self.random.below(KEYS.len()).min(self.random.below(KEYS.len()));
        (space, KEYS[at])
    }

    fn lease(&mut self) -> Duration {
        match self.random.below(20) {
            0 => Duration::ZERO,
            1 => Duration::from_nanos(u64::MAX),
            _ => Duration::from_nanos(1 + self.random.0.below(30)),
        }
    }

    /// Mostly one that is connected; now and then one long gone.
    fn owner(&mut self) -> usize {
        let connected = (0..self.owners.len()).filter(|owner| self.model.connected[*owner]);
        let connected: Vec<usize> = connected.collect();
        match connected.len() {
            len if len > 0 && self.random.below(20) > 0 => connected[self.random.below(len)],
            _ => self.random.below(self.owners.len()),
        }
    }

    /// A key and a token that mostly belong together, and may be over.
    fn proof(&mut self) -> Option<(Name, LockToken)> {
        let at = self.random.recent(self.tokens.len())?;
        let (name, token) = self.tokens[at];
        Some(match self.random.below(12) {
            0 => (self.name(), token),
            1 => (name, LockToken::new(token.number(), 1)),
            _ => (name, token),
        })
    }

    fn granted(&mut self, name: Name, answer: Answer) {
        if let Answer::Granted(grant) = answer {
            self.tokens.push((name, grant.token));
        }
    }

    /// Takes down the table's name for a place that the model has numbered too.
    fn queued(&mut self, place: PlaceId, expected: Answer) -> usize {
        assert!(!self.places.contains(&place), "seed {}: {place:?} again", self.seed);
        self.same(&expected, &Answer::Queued(self.places.len()), "queued");
        self.places.push(place);
        self.places.len() - 1
    }

    fn place_no(&self, place: PlaceId) -> usize {
        self.places.iter().position(|other| *other == place).expect("a place that was given out")
    }

    fn owner_no(&self, owner: Owner) -> usize {
        self.owners.iter().position(|other| *other == owner).expect("an owner that connected")
    }

    fn told(&self, event: TableEvent) -> Told {
        let name = |space, key: &[u8]| {
            (space, KEYS.into_iter().find(|other| *other == key).expect("a key of ours"))
        };
        match event {
            TableEvent::Granted { place, owner, space, key, grant, .. } => Told::Granted {
                place: place.map(|place| self.place_no(place)),
                owner: self.owner_no(owner),
                name: name(space, &key),
                grant,
            },
            TableEvent::Renewed { space, key, token, lease, ends } => {
                Told::Renewed { name: name(space, &key), token, lease, ends }
            }
            TableEvent::Detached { space, key, token } => {
                Told::Detached { name: name(space, &key), token }
            }
            TableEvent::Queued { place, owner, space, key, mode } => Told::Queued {
                place: self.place_no(place),
                owner: self.owner_no(owner),
                name: name(space, &key),
                mode,
            },
            TableEvent::Left { place, owner, space, key } => Told::Left {
                place: self.place_no(place),
                owner: self.owner_no(owner),
                name: name(space, &key),
            },
            TableEvent::Ended { how, owner, space, key, token } => Told::Ended {
                how,
                owner: owner.map(|owner| self.owner_no(owner)),
                name: name(space, &key),
                token,
            },
            TableEvent::HandoffRequested { owner, space, key, token } => {
                Told::Wanted { owner: self.owner_no(owner), name: name(space, &key), token }
            }
        }
    }

    fn meet(&mut self, what: &str, outcome: &impl std::fmt::Debug) {
        let outcome = format!("{outcome:?}");
        let case = match outcome.strip_prefix("Refused") {
            Some(_) => &*outcome,
            None => outcome.split(['(', ' ']).next().unwrap_or_default(),
        };
        *self.met.entry(format!("{what} {case}")).or_insert(0) += 1;
    }

    fn same<T: PartialEq + std::fmt::Debug>(&self, table: &T, model: &T, what: &str) {
        let Self { seed, step, now, .. } = self;
        assert_eq!(table, model, "seed {seed}, step {step}, at {now:?}: {what}: table, model");
    }
}

/// The generator of the core, in the units of this test.
struct Dice(Random);

impl Dice {
    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.0.below(end as u64)).unwrap()
    }

    /// One of `len`, mostly of the last few; `None` of none.
    fn recent(&mut self, len: usize) -> Option<usize> {
        let among = if self.below(10) == 0 { len } else { len.min(6) };
        (len > 0).then(|| len - 1 - self.below(among))
    }
}
