//! Contract checker: knows the belief of every client at one real time, and checks the contract.

use std::collections::BTreeSet;
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
    pub(crate) token: u64,
    pub(crate) deadline: Time,
}

/// State of a client that the checker needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Condition {
    pub(crate) now: Time,
    /// True if the client is not paused, suspended or dead: messages reach it.
    pub(crate) awake: bool,
}

/// Checker of the contract.
#[derive(Debug, Default)]
pub(crate) struct ContractChecker {
    validity_is_a_deadline: bool,
    guards: Vec<Guard>,
    last_tokens: Vec<u64>,
    refused: BTreeSet<u64>,
    excused: BTreeSet<u64>,
}

impl ContractChecker {
    pub(crate) fn new(keys: usize, validity_is_a_deadline: bool) -> Self {
        Self { validity_is_a_deadline, last_tokens: vec![0; keys], ..Self::default() }
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
        if self.others(guard).any(|other| condition(other.client).awake) {
            return Err(Breach::LateLost);
        }
        if guard.token <= self.last_tokens[guard.key] {
            return Err(Breach::TokenFell);
        }
        self.last_tokens[guard.key] = guard.token;
        self.guards.push(guard);
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

    /// True if a hold of this claim would be a breach.
    pub(crate) fn must_not_hold(&self, claim: u64) -> bool {
        self.refused.contains(&claim) && !self.excused.contains(&claim)
    }

    fn others(&self, guard: Guard) -> impl Iterator<Item = &Guard> {
        self.guards.iter().filter(move |g| g.key == guard.key && g.task != guard.task)
    }

    fn check_exclusive(
        &self,
        guard: Guard,
        condition: &impl Fn(usize) -> Condition,
    ) -> Result<(), Breach> {
        let valid = |guard: &Guard| {
            !self.validity_is_a_deadline || condition(guard.client).now < guard.deadline
        };
        if valid(&guard) && self.others(guard).any(valid) {
            return Err(Breach::TwoHolders);
        }
        Ok(())
    }
}
