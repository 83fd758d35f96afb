//! Holders that the tap knows of, each with the latest time at which the server may end its hold.

use std::collections::BTreeMap;
use std::time::Duration;

use tenure_core::Time;

use super::claim::{SpaceKey, TappedClaim};
use crate::product::referee::HoldMode;

/// Holders of all keys, by fencing number. A hold that may exist counts as long as its lease can last.
#[derive(Debug, Default)]
pub(super) struct TappedHolders {
    holders: BTreeMap<u64, TappedHolder>,
    /// Fencing numbers of granted claims, by their ids.
    numbers: BTreeMap<String, u64>,
    /// Leases that began in this turn: of holders, and of claims that may have been granted without a word on the wire.
    begun: Vec<(u64, Duration)>,
    begun_unseen: Vec<(SpaceKey, Duration)>,
    /// Times until which such a claim may be held.
    unseen: BTreeMap<SpaceKey, Time>,
    embargo: Time,
    /// Clock of the server at the start of the turn. Leases that had ended by then were ended in the turn.
    turn_began: Time,
}

#[derive(Debug)]
struct TappedHolder {
    key: SpaceKey,
    mode: HoldMode,
    until: Time,
}

impl TappedHolders {
    pub(super) fn restored(
        holds: impl IntoIterator<Item = (SpaceKey, HoldMode, u64, Time)>,
        embargo: Option<Time>,
        now: Time,
    ) -> Self {
        let holder = |(key, mode, number, until)| (number, TappedHolder { key, mode, until });
        Self {
            holders: holds.into_iter().map(holder).collect(),
            embargo: embargo.unwrap_or(Time::ZERO),
            turn_began: now,
            ..Self::default()
        }
    }

    /// Returns the fencing number of the grant.
    pub(super) fn granted(
        &mut self,
        claim: &TappedClaim,
        handle: &str,
        lease: &str,
    ) -> Option<u64> {
        let number = number_of(handle)?;
        let TappedClaim { id, key, mode, .. } = claim;
        self.numbers.insert(id.clone(), number);
        let holder = TappedHolder { key: key.clone(), mode: *mode, until: Time::MAX };
        self.holders.insert(number, holder);
        self.begun.push((number, Duration::from_millis(lease.parse().unwrap_or(u64::MAX))));
        Some(number)
    }

    /// The server has read a renewal. It counts as granted: the bound is then too late at worst.
    pub(super) fn renewed(&mut self, key: &SpaceKey, argument: &str) {
        let mut fields = argument.split(' ');
        let number = fields.next().and_then(number_of);
        let lease = fields.next().and_then(|lease| lease.parse().ok()).map(Duration::from_millis);
        let (Some(number), Some(lease)) = (number, lease) else { return };
        if let Some(holder) = self.holders.get_mut(&number) {
            holder.until = Time::MAX;
            self.begun.push((number, lease));
        } else {
            self.begun_unseen.push((key.clone(), lease));
        }
    }

    pub(super) fn ended(&mut self, number: u64) {
        self.holders.remove(&number);
    }

    pub(super) fn abandoned(&mut self, id: &str) {
        if let Some(number) = self.numbers.remove(id) {
            self.ended(number);
        }
    }

    /// These claims may have been granted in this turn without a word on the wire.
    pub(super) fn unclear(&mut self, claims: &[TappedClaim]) {
        self.begun_unseen.extend(claims.iter().map(|claim| (claim.key.clone(), claim.lease)));
    }

    /// Sets the bounds of the leases that began in this turn: none began later than now.
    pub(super) fn end_turn(&mut self, now: Time) {
        for (number, lease) in self.begun.drain(..) {
            if let Some(holder) = self.holders.get_mut(&number) {
                let until = now + lease;
                holder.until =
                    if holder.until == Time::MAX { until } else { holder.until.max(until) };
            }
        }
        for (key, lease) in self.begun_unseen.drain(..) {
            let until = self.unseen.entry(key).or_insert(Time::ZERO);
            *until = (*until).max(now + lease);
        }
        // Called at the end of one turn and the start of the next.
        let turn_began = std::mem::replace(&mut self.turn_began, now);
        self.holders.retain(|_, holder| holder.until > turn_began);
        self.unseen.retain(|_, until| *until > turn_began);
        if self.embargo <= turn_began {
            self.embargo = Time::ZERO;
        }
    }

    /// True if there is surely room for the first waiter of a key: for this claim, or, unless it waits `alone`, for
    /// another one that may be before it.
    pub(super) fn has_room(&self, claim: &TappedClaim, alone: bool) -> bool {
        let mut holders = self.holders.values().filter(|holder| holder.key == claim.key);
        let room = match claim.mode {
            HoldMode::Shared if alone => holders.all(|holder| holder.mode == HoldMode::Shared),
            HoldMode::Exclusive | HoldMode::Shared => holders.next().is_none(),
            HoldMode::Slot { limit } => holders.count() < limit as usize,
        };
        room && self.embargo == Time::ZERO && !self.unseen.contains_key(&claim.key)
    }
}

/// Fencing number in a handle: its first half.
pub(super) fn number_of(handle: &str) -> Option<u64> {
    u64::from_str_radix(handle.get(..16)?, 16).ok()
}
