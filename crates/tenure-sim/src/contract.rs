//! Contract checker: knows the belief of every client at one real time, and checks the contract.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use tenure_core::Time;

/// Kinds of breaches of the contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Breach {
    /// Two guards of one key were valid at the same time.
    TwoHolders,
    /// A guard's fencing token was not larger than that of the guard before.
    TokenFell,
    /// A guard was handed out before the loss of the previous guard was reported, although its client was awake.
    LateLost,
    /// A guard was handed out after its deadline.
    StaleGuard,
    /// A guard became valid again after its deadline: in between, its user had seen it as lost.
    Revived,
    /// An acquire was answered twice, or after it was cancelled.
    AnsweredTwice,
    /// An acquire was answered with "not held", but the store held or later granted the key for it.
    HeldAfterNo,
    /// A state machine sent a second request while one was in flight.
    TwoRequests,
    /// A state machine did not finish although the faults had ended.
    NoEnd,
    /// A key did not become free although all clients had left.
    NotFreed,
}

impl fmt::Display for Breach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TwoHolders => "two guards of one key were valid at once",
            Self::TokenFell => "a fencing token did not grow",
            Self::LateLost => "a hold was granted again before its loss was reported to its holder",
            Self::StaleGuard => "a guard was handed out past its deadline",
            Self::Revived => "a guard past its deadline became valid again",
            Self::AnsweredTwice => "an acquire was answered twice",
            Self::HeldAfterNo => "the store holds a key for a refused acquire",
            Self::TwoRequests => "a second request was sent while one was in flight",
            Self::NoEnd => "a state machine did not finish",
            Self::NotFreed => "a key was not freed",
        })
    }
}

/// A guard that a user has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Guard {
    pub(crate) task: u64,
    pub(crate) client: usize,
    pub(crate) key: usize,
    pub(crate) token: u128,
    pub(crate) deadline: Time,
    /// Process that has the guard, if its store promises that its tokens grow whatever the store loses.
    pub(crate) process: Option<u64>,
}

/// State of a client that the checker needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Condition {
    pub(crate) now: Time,
    /// True if the client is not paused, suspended or dead: messages reach it.
    pub(crate) awake: bool,
}

/// Record that the store has lost.
#[derive(Clone, Copy, Debug)]
struct LostRecord {
    /// First request that the store received from the claim since.
    first_request: Option<u32>,
    /// True if the number of the grant may be given again.
    token_repeats: bool,
}

/// Checker of the contract.
#[derive(Debug, Default)]
pub(crate) struct ContractChecker {
    validity_is_a_deadline: bool,
    guards: Vec<Guard>,
    /// Tokens of each key that were handed out and not lost.
    tokens: Vec<Vec<u128>>,
    /// Largest token of each process and key.
    process_tokens: BTreeMap<(u64, usize), u128>,
    refused: BTreeSet<u64>,
    excused: BTreeSet<u64>,
    /// Claims whose record the store has lost.
    lost: BTreeMap<u64, LostRecord>,
    /// Number of overlaps that were excused by a lost record.
    pub(crate) excused_overlaps: u64,
}

impl ContractChecker {
    pub(crate) fn new(keys: usize, validity_is_a_deadline: bool) -> Self {
        Self { validity_is_a_deadline, tokens: vec![Vec::new(); keys], ..Self::default() }
    }

    /// Checks a guard that is handed to its user.
    pub(crate) fn hand_out(
        &mut self,
        guard: Guard,
        condition: impl Fn(usize) -> Condition,
    ) -> Result<(), Breach> {
        if condition(guard.client).now >= guard.deadline {
            return Err(Breach::StaleGuard);
        }
        self.check_exclusive(guard, &condition)?;
        let unexcused = |other: &&Guard| !self.is_lost(guard.task) && !self.is_lost(other.task);
        if self.others(guard).filter(unexcused).any(|other| condition(other.client).awake) {
            return Err(Breach::LateLost);
        }
        self.guards.push(guard);
        if let Some(lost) = self.lost.get(&guard.task) {
            // The grant was lost before its guard was handed out. Guards of later grants may have been handed out first.
            if !lost.token_repeats {
                self.tokens[guard.key].push(guard.token);
            }
            return Ok(());
        }
        let fell = self.tokens[guard.key].iter().any(|token| guard.token <= *token);
        self.tokens[guard.key].push(guard.token);
        let before = guard
            .process
            .and_then(|process| self.process_tokens.insert((process, guard.key), guard.token));
        if fell || before.is_some_and(|before| guard.token <= before) {
            return Err(Breach::TokenFell);
        }
        Ok(())
    }

    /// Checks a guard whose deadline may have moved.
    pub(crate) fn deadline_moved(
        &mut self,
        task: u64,
        deadline: Time,
        condition: impl Fn(usize) -> Condition,
    ) -> Result<(), Breach> {
        let Some(guard) = self.guards.iter_mut().find(|guard| guard.task == task) else {
            return Ok(());
        };
        let before = std::mem::replace(&mut guard.deadline, deadline);
        let guard = *guard;
        if deadline <= before {
            return Ok(());
        }
        self.check_exclusive(guard, &condition)?;
        if condition(guard.client).now >= before { Err(Breach::Revived) } else { Ok(()) }
    }

    /// Removes a guard that was reported lost or released, or whose process died.
    pub(crate) fn guard_ended(&mut self, task: u64) {
        self.guards.retain(|guard| guard.task != task);
    }

    pub(crate) fn note_refusal(&mut self, claim: u64) {
        self.refused.insert(claim);
    }

    /// Excuses a claim: a hold that it gets from now on is not a breach.
    pub(crate) fn excuse(&mut self, claim: u64) {
        self.excused.insert(claim);
    }

    /// Notes that the store has lost an acknowledged write for this claim. Until its next renewal is answered, its hold
    /// may overlap with another.
    pub(crate) fn record_lost(&mut self, claim: u64, token_repeats: bool) {
        self.lost.insert(claim, LostRecord { first_request: None, token_repeats });
    }

    /// Notes that the store has lost the grants of a key with tokens above `kept`: they may be given again.
    pub(crate) fn tokens_lost(&mut self, key: usize, kept: u128) {
        self.tokens[key].retain(|token| *token <= kept);
    }

    /// Notes that the store received a request of a claim.
    pub(crate) fn note_request(&mut self, claim: u64, number: u32) {
        if let Some(lost) = self.lost.get_mut(&claim) {
            lost.first_request.get_or_insert(number);
        }
    }

    /// Notes that a renewal was granted by the reply to this request. If the store received the request after its loss,
    /// it could have refused: the excuse ends.
    pub(crate) fn renewed(&mut self, claim: u64, number: u32) {
        let first = self.lost.get(&claim).and_then(|lost| lost.first_request);
        if first.is_some_and(|first| first <= number) {
            self.lost.remove(&claim);
        }
    }

    fn is_lost(&self, claim: u64) -> bool {
        self.lost.contains_key(&claim)
    }

    /// True if a hold of this claim would be a breach.
    pub(crate) fn must_not_hold(&self, claim: u64) -> bool {
        self.refused.contains(&claim) && !self.excused.contains(&claim)
    }

    fn others(&self, guard: Guard) -> impl Iterator<Item = &Guard> {
        self.guards.iter().filter(move |g| g.key == guard.key && g.task != guard.task)
    }

    fn check_exclusive(
        &mut self,
        guard: Guard,
        condition: &impl Fn(usize) -> Condition,
    ) -> Result<(), Breach> {
        let valid = |guard: &Guard| {
            !self.validity_is_a_deadline || condition(guard.client).now < guard.deadline
        };
        if !valid(&guard) {
            return Ok(());
        }
        let mut excused = 0;
        for other in self.others(guard).filter(|other| valid(other)) {
            if !self.is_lost(guard.task) && !self.is_lost(other.task) {
                return Err(Breach::TwoHolders);
            }
            excused += 1;
        }
        self.excused_overlaps += excused;
        Ok(())
    }
}
