//! The referee: judges a run from outside the code, by the real time of the simulation and by what users were told.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Weak};

use tenure::election::Leadership;
use tenure::{FencingToken, Guard};
use tenure_core::Time;
use tenure_core::table::{KeySpace, Mode};

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
    /// A loss that neither a fault, nor an operator, nor the request explains.
    UnexpectedLoss,
    /// The server refused to start, exited without a reason, or panicked.
    ServerFailed,
    /// A task of the library panicked, or the simulation itself.
    Panicked,
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
            Self::UnexpectedLoss => "a loss that no fault explains",
            Self::ServerFailed => "the server failed",
            Self::Panicked => "a panic",
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
    pub(super) fn space(self) -> KeySpace {
        match self {
            Self::Exclusive | Self::Shared => KeySpace::Lock,
            Self::Slot { .. } => KeySpace::Semaphore,
        }
    }

    fn conflicts(self, other: Self) -> bool {
        self == Self::Exclusive || other == Self::Exclusive
    }
}

impl From<Mode> for HoldMode {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Exclusive => Self::Exclusive,
            Mode::Shared => Self::Shared,
            Mode::Slot { limit } => Self::Slot { limit },
        }
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
    /// Tokens that operators broke, or may have broken: number of attempts.
    broken: BTreeMap<FencingToken, u32>,
    /// Largest token of each key: of exclusive holds, and of all holds.
    tokens: BTreeMap<String, (FencingToken, FencingToken)>,
    /// Tokens that were seen, to find repetitions.
    seen: BTreeSet<(String, FencingToken)>,
    /// Slots that were run without retries.
    runs: BTreeSet<String>,
    pub(super) breach: Option<(ProductBreach, String)>,
    pub(super) holds: u64,
    pub(super) losses: u64,
}

/// Things that the referee sees at a real time.
pub(super) struct Eyes<'a> {
    pub(super) now: u64,
    /// Converts the real time to the time of a client's process, or of its host if the number of the process is
    /// `u32::MAX`. `None` if the process has ended.
    pub(super) local: &'a dyn Fn(usize, u32) -> Option<Time>,
    /// True if a proxy has closed the connection of the hold with this token at the server only, and its client does
    /// not know it yet. The server takes this for a close by the holder: a documented case of two holders.
    pub(super) half_closed: &'a dyn Fn(FencingToken) -> bool,
}

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
        });
        self.beliefs.len() - 1
    }

    /// True if a second holder is documented for the hold.
    fn is_excused(&self, belief: &Belief, eyes: &Eyes<'_>) -> bool {
        let detached = matches!(belief.source, Source::Detached);
        self.broken.contains_key(&belief.token) || !detached && (eyes.half_closed)(belief.token)
    }

    /// True if an operator tried to break the hold.
    pub(super) fn was_broken(&self, belief: usize) -> bool {
        self.broken.contains_key(&self.beliefs[belief].token)
    }

    /// True if an operator tried to break any hold.
    pub(super) fn has_broken(&self) -> bool {
        !self.broken.is_empty()
    }

    /// True if the user may rely on the hold at this time of its process.
    pub(super) fn relies_on(&self, belief: usize, Teller { real, local, .. }: Teller) -> bool {
        let belief = &self.beliefs[belief];
        local < belief.deadline && belief.ended.is_none_or(|ended| real < ended)
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

    /// Checks a hold that begins now, or is renewed now.
    pub(super) fn check(&mut self, index: usize, eyes: &Eyes<'_>) {
        let new = &self.beliefs[index];
        if !new.is_valid(eyes) || self.is_excused(new, eyes) {
            return;
        }
        let mut rivals = self.beliefs.iter().enumerate().filter(|(other, belief)| {
            let same = *other != index && belief.key == new.key && belief.is_valid(eyes);
            same && !self.is_excused(belief, eyes)
        });
        let breach = match new.mode {
            HoldMode::Slot { limit } => {
                let others = rivals.count();
                (others >= limit as usize)
                    .then(|| format!("{new}, beside {others} other holds of {limit}"))
            }
            mode => rivals
                .find(|(_, belief)| mode.conflicts(belief.mode))
                .map(|(_, belief)| format!("{new}, while {belief}")),
        };
        if let Some(what) = breach {
            self.breach(ProductBreach::Overlap, what);
        }
    }

    /// Describes the hold with this number if the server has let it expire although its user may still rely on it.
    pub(super) fn ended_early(&self, number: u64, eyes: &Eyes<'_>) -> Option<String> {
        let early = |belief: &&Belief| {
            let valid = belief.token.number() == number && belief.is_valid(eyes);
            valid && !self.is_excused(belief, eyes)
        };
        self.beliefs
            .iter()
            .find(early)
            .map(|belief| format!("{belief} until {:?}", belief.deadline))
    }

    /// Checks the token of a hold that begins.
    pub(super) fn check_token(&mut self, index: usize, eyes: &Eyes<'_>) {
        let belief = &self.beliefs[index];
        // A hold that was lost before its user could look at it protects nothing.
        let lost = match &belief.source {
            Source::Guard(guard) => guard.upgrade().is_none_or(|guard| !guard.is_held()),
            Source::Leadership(leadership) => !leadership.is_held(),
            Source::Detaching | Source::Detached => false,
        };
        let excused = lost || self.is_excused(belief, eyes);
        let (key, mode, token) = (belief.key.clone(), belief.mode, belief.token);
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
        *self.broken.entry(token).or_default() += 1;
    }

    /// The operator was told that the hold with this token was not broken.
    pub(super) fn not_broken(&mut self, token: FencingToken) {
        if let Some(attempts) = self.broken.get_mut(&token) {
            *attempts -= 1;
        }
        self.broken.retain(|_, attempts| *attempts > 0);
    }

    /// A slot was run by a process. Without retries, each slot is run once.
    pub(super) fn ran(&mut self, slot: String) {
        if !self.runs.insert(slot.clone()) {
            self.breach(ProductBreach::RunTwice, slot);
        }
    }

    /// Holds of which users know now.
    pub(super) fn valid(&self, eyes: &Eyes<'_>) -> Vec<String> {
        self.beliefs.iter().filter(|b| b.is_valid(eyes)).map(ToString::to_string).collect()
    }
}

impl Belief {
    fn is_valid(&self, Eyes { now, local, .. }: &Eyes<'_>) -> bool {
        let life = if matches!(self.source, Source::Detached) { u32::MAX } else { self.life };
        self.begun <= *now
            && self.ended.is_none_or(|ended| *now < ended)
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
