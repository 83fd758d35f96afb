//! The referee: judges a run from outside the code, by the real time of the simulation and by what users were told.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Weak};

use tenure::election::Leadership;
use tenure::{FencingToken, Guard};
use tenure_core::Time;

/// Kind of a breach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProductBreach {
    /// Two users believe, each by its own clock, that they hold a key that only one may hold.
    Overlap,
    /// The server has ended a hold that its user may still rely on: the next holder overlaps it.
    EndedEarly,
    /// A fencing token is not larger than that of an earlier holder.
    TokenOrder,
    /// A waiter was overtaken.
    Overtaken,
    /// A waiter was not served although all faults had ended.
    NotServed,
    /// A waiter was not woken when the key became free.
    NotWoken,
    /// A slot was run twice.
    RunTwice,
    /// An error that no fault explains.
    UnexpectedError,
    /// The server refused to start, or panicked.
    ServerFailed,
}

impl fmt::Display for ProductBreach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Overlap => "two holders at once",
            Self::EndedEarly => "a hold ended at the server before its holder's deadline",
            Self::TokenOrder => "a fencing token did not grow",
            Self::Overtaken => "a waiter was overtaken",
            Self::NotServed => "a waiter was not served after the faults had ended",
            Self::NotWoken => "a waiter was not woken",
            Self::RunTwice => "a slot was run twice",
            Self::UnexpectedError => "an error that no fault explains",
            Self::ServerFailed => "the server failed",
        })
    }
}

/// Mode of a hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HoldMode {
    Exclusive,
    Shared,
    Slot { limit: u32 },
}

impl HoldMode {
    fn conflicts(self, other: Self) -> bool {
        self == Self::Exclusive || other == Self::Exclusive
    }
}

/// A hold that a user was told of.
#[derive(Debug)]
pub(super) struct Belief {
    pub(super) client: usize,
    pub(super) life: u32,
    pub(super) key: String,
    pub(super) mode: HoldMode,
    pub(super) token: FencingToken,
    source: Source,
    /// Real time at which the user was told.
    begun: u64,
    /// Instant, on the clock of its process, until which the user may rely on the hold.
    deadline: Time,
    /// Real time of its end, if it has ended before the deadline.
    ended: Option<u64>,
    /// A second holder is documented for this hold: it was broken, or a proxy closed its connection at the server only.
    excused: bool,
}

/// Source of a belief.
enum Source {
    Guard(Weak<Guard>),
    Leadership(Leadership),
    /// A hold that its process is detaching lasts until its deadline, or until the process ends.
    Detaching,
    /// A detached hold lasts until its deadline.
    Detached,
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Guard(_) => "guard",
            Self::Leadership(_) => "leadership",
            Self::Detaching => "detaching",
            Self::Detached => "detached",
        })
    }
}

/// A process at the time at which it tells something: its client, its number, and its clocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Teller {
    pub(super) client: usize,
    pub(super) life: u32,
    pub(super) real: u64,
    pub(super) local: Time,
}

/// State of the referee.
#[derive(Debug, Default)]
pub(super) struct Referee {
    beliefs: Vec<Belief>,
    /// Tokens that an operator broke.
    broken: BTreeSet<FencingToken>,
    /// Largest token of each key: of exclusive holds, and of all holds.
    tokens: BTreeMap<String, (FencingToken, FencingToken)>,
    /// Tokens that were seen, to find repetitions.
    seen: BTreeSet<(String, FencingToken)>,
    /// Clients with a connection that was closed at the server only, and the real time at which every hold of that
    /// connection has ended.
    half_closed: BTreeMap<usize, u64>,
    /// Slots that were run without retries.
    runs: BTreeSet<String>,
    pub(super) breach: Option<(ProductBreach, String)>,
    pub(super) holds: u64,
    pub(super) losses: u64,
}

/// Conversion of real time to the time of a client: `None` if the client's process has ended.
pub(super) type LocalTime<'a> = dyn Fn(usize, u32) -> Option<Time> + 'a;

impl Referee {
    pub(super) fn breach(&mut self, breach: ProductBreach, what: String) {
        self.breach.get_or_insert((breach, what));
    }

    pub(super) fn guard(&mut self, teller: Teller, mode: HoldMode, guard: &Arc<Guard>) -> usize {
        let (key, token) = (guard.key().to_string(), guard.fencing_token());
        let key =
            if matches!(mode, HoldMode::Slot { .. }) { format!("slots of {key}") } else { key };
        self.add(teller, key, mode, token, Source::Guard(Arc::downgrade(guard)))
    }

    pub(super) fn leadership(&mut self, teller: Teller, leadership: &Leadership) -> usize {
        let (key, token) = (leadership.key().to_string(), leadership.fencing_token());
        let source = Source::Leadership(leadership.clone());
        self.add(teller, key, HoldMode::Exclusive, token, source)
    }

    fn add(
        &mut self,
        Teller { client, life, real, local }: Teller,
        key: String,
        mode: HoldMode,
        token: FencingToken,
        source: Source,
    ) -> usize {
        self.holds += 1;
        let excused = self.broken.contains(&token)
            || self.half_closed.get(&client).is_some_and(|until| real < *until);
        self.beliefs.push(Belief {
            client,
            life,
            key,
            mode,
            token,
            source,
            begun: real,
            deadline: local,
            ended: None,
            excused,
        });
        self.beliefs.len() - 1
    }

    /// The user detaches the hold: it is not renewed any longer.
    pub(super) fn detaching(&mut self, belief: usize) {
        self.beliefs[belief].source = Source::Detaching;
    }

    /// The user has detached the hold. It lasts until its deadline.
    pub(super) fn detached(&mut self, belief: usize) {
        self.beliefs[belief].source = Source::Detached;
    }

    /// The user has renewed a detached hold by its handle.
    pub(super) fn renewed(&mut self, belief: usize, deadline: Time) {
        self.beliefs[belief].deadline = deadline;
    }

    /// The user has ended the hold, or was told that it is lost.
    pub(super) fn ended(&mut self, belief: usize, at: u64) {
        let belief = &mut self.beliefs[belief];
        belief.ended = Some(belief.ended.map_or(at, |ended| ended.min(at)));
    }

    /// Reads the state of all holds of a process, at its real time `at` and its local time `local`. Returns the holds
    /// that came back after their end.
    pub(super) fn refresh(&mut self, client: usize, life: u32, at: u64, local: Time) -> Vec<usize> {
        let mut back = Vec::new();
        for (index, belief) in self.beliefs.iter_mut().enumerate() {
            if (belief.client, belief.life) != (client, life) || belief.ended.is_some() {
                continue;
            }
            let left = match &belief.source {
                Source::Guard(guard) => guard.upgrade().map(|guard| guard.remaining()),
                Source::Leadership(leadership) => Some(leadership.remaining()),
                Source::Detaching | Source::Detached => continue,
            };
            match left {
                Some(left) if !left.is_zero() => {
                    if belief.deadline <= local {
                        back.push(index);
                    }
                    belief.deadline = local + left;
                }
                // Past its deadline, or told to be lost.
                Some(_) | None => {
                    if local < belief.deadline {
                        belief.ended = Some(at);
                    }
                }
            }
        }
        back
    }

    /// All holds of a process that has ended are over.
    pub(super) fn process_ended(&mut self, client: usize, life: u32, at: u64) {
        for belief in &mut self.beliefs {
            let detached = matches!(belief.source, Source::Detached);
            if (belief.client, belief.life) == (client, life) && !detached {
                belief.ended.get_or_insert(at);
            }
        }
    }

    /// Checks a hold that begins at the real time `now`.
    pub(super) fn check(&mut self, index: usize, now: u64, local: &LocalTime<'_>) {
        let new = &self.beliefs[index];
        if !new.is_valid(now, local) {
            return;
        }
        let rivals = self.beliefs.iter().enumerate().filter(|(other, belief)| {
            *other != index && belief.key == new.key && belief.is_valid(now, local)
        });
        let breach = match new.mode {
            HoldMode::Slot { limit } => {
                let others: Vec<_> = rivals.filter(|(_, belief)| !belief.excused).collect();
                (!new.excused && others.len() >= limit as usize)
                    .then(|| format!("{new}, beside {} other holds of {limit}", others.len()))
            }
            mode => rivals
                .filter(|(_, belief)| mode.conflicts(belief.mode))
                .find(|(_, belief)| !belief.excused && !new.excused)
                .map(|(_, belief)| format!("{new}, while {belief}")),
        };
        if let Some(what) = breach {
            self.breach(ProductBreach::Overlap, what);
        }
    }

    /// Describes the hold with this number if the server has let it expire although its user may still rely on it.
    pub(super) fn ended_early(
        &self,
        number: u64,
        now: u64,
        local: &LocalTime<'_>,
    ) -> Option<String> {
        let early = |belief: &&Belief| {
            belief.token.number() == number && !belief.excused && belief.is_valid(now, local)
        };
        self.beliefs
            .iter()
            .find(early)
            .map(|belief| format!("{belief} until {:?}", belief.deadline))
    }

    /// Checks the token of a hold that begins.
    pub(super) fn check_token(&mut self, index: usize) {
        let Belief { key, mode, token, excused, .. } = &self.beliefs[index];
        let (key, mode, token, excused) = (key.clone(), *mode, *token, *excused);
        if !self.seen.insert((key.clone(), token)) {
            return self.breach(
                ProductBreach::TokenOrder,
                format!("{key}: {token} was given to two holds"),
            );
        }
        let (exclusive, any) = self.tokens.entry(key.clone()).or_default();
        let (floor, slot) = match mode {
            HoldMode::Exclusive => (*any, false),
            HoldMode::Shared => (*exclusive, false),
            HoldMode::Slot { .. } => (FencingToken::NONE, true),
        };
        let grows = slot || token > floor;
        if mode == HoldMode::Exclusive {
            *exclusive = (*exclusive).max(token);
        }
        *any = (*any).max(token);
        if !grows && !excused {
            let what = format!("{key}: {token} after {floor}");
            self.breach(ProductBreach::TokenOrder, what);
        }
    }

    /// An operator breaks the hold with this token.
    pub(super) fn broken(&mut self, token: FencingToken) {
        self.broken.insert(token);
        for belief in self.beliefs.iter_mut().filter(|belief| belief.token == token) {
            belief.excused = true;
        }
    }

    /// A proxy has closed a connection of this client at the server only.
    pub(super) fn half_closed(&mut self, client: usize, until: u64) {
        self.half_closed.insert(client, until);
        for belief in self.beliefs.iter_mut().filter(|belief| belief.client == client) {
            belief.excused = true;
        }
    }

    /// A slot was run by a process. Without retries, each slot is run once.
    pub(super) fn ran(&mut self, slot: String) {
        if !self.runs.insert(slot.clone()) {
            self.breach(ProductBreach::RunTwice, slot);
        }
    }

    /// Holds of which users know at the real time `now`.
    pub(super) fn valid(&self, now: u64, local: &LocalTime<'_>) -> Vec<String> {
        self.beliefs.iter().filter(|b| b.is_valid(now, local)).map(ToString::to_string).collect()
    }
}

impl Belief {
    fn is_valid(&self, now: u64, local: &LocalTime<'_>) -> bool {
        let life = if matches!(self.source, Source::Detached) { u32::MAX } else { self.life };
        self.begun <= now
            && self.ended.is_none_or(|ended| now < ended)
            && local(self.client, life).is_some_and(|local| local < self.deadline)
    }
}

impl fmt::Display for Belief {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { client, key, mode, token, source, .. } = self;
        write!(f, "client {client} holds {key} ({mode:?}, token {token}, {source:?})")
    }
}

/// Real time in seconds, for people.
pub(super) fn seconds(nanos: u64) -> String {
    format!("{}.{:06}s", nanos / 1_000_000_000, nanos % 1_000_000_000 / 1_000)
}
