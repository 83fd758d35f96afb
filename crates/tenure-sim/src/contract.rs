//! The referee: sees what every client believes at one real instant, and checks the contract.

use std::collections::BTreeSet;
use std::fmt;

use tenure_core::Time;

/// Which promise was broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Breach {
    /// Two guards of one key were valid at one instant.
    TwoHolders,
    /// A guard had a fencing token that was not above the one before it.
    TokenFell,
    /// A guard was handed out while the one before it had heard nothing of its end, though its client was awake.
    LateLost,
    /// A guard was handed out that was not valid any more.
    StaleGuard,
    /// A guard that was not valid any more became valid again: whoever looked in between had been told otherwise.
    Revived,
    /// An acquire was answered twice, or after it was cancelled.
    AnsweredTwice,
    /// A caller was told that nothing is held, and the store held for it or came to.
    HeldAfterNo,
    /// A machine asked for a second request while one was under way.
    TwoRequests,
    /// A machine did not come to an end although the world had healed.
    NoEnd,
    /// A key did not become free although everybody had gone.
    NotFreed,
}

impl fmt::Display for Breach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TwoHolders => "two guards of one key were valid at once",
            Self::TokenFell => "a fencing token did not grow",
            Self::LateLost => "a hold passed on before its holder was told that it was lost",
            Self::StaleGuard => "a guard was handed out past its deadline",
            Self::Revived => "a guard past its deadline became valid again",
            Self::AnsweredTwice => "an acquire was answered twice",
            Self::HeldAfterNo => "the store holds for a caller who was told that nothing is held",
            Self::TwoRequests => "a second request while one was under way",
            Self::NoEnd => "a machine did not end",
            Self::NotFreed => "a key was not freed",
        })
    }
}

/// A guard that somebody has, as the referee sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Guard {
    pub(crate) task: u64,
    pub(crate) client: usize,
    pub(crate) key: usize,
    pub(crate) token: u64,
    pub(crate) deadline: Time,
}

/// What the referee has to know of a client to judge its guards.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Condition {
    pub(crate) now: Time,
    /// It is not paused, asleep or dead: news reach it.
    pub(crate) awake: bool,
}

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

    /// A guard reaches its user.
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

    /// A guard's deadline may have moved.
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

    /// The user of a guard was told of its loss, or let go of it, or is no more.
    pub(crate) fn guard_ended(&mut self, task: u64) {
        self.guards.retain(|guard| guard.task != task);
    }

    pub(crate) fn note_refusal(&mut self, claim: u64) {
        self.refused.insert(claim);
    }

    /// What a claim comes to hold from now on is nobody's fault.
    pub(crate) fn excuse(&mut self, claim: u64) {
        self.excused.insert(claim);
    }

    /// Whether it would break a promise if this claim were found to hold.
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
