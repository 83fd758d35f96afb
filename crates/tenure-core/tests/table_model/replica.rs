//! A table that is built from nothing but the events of another.

use std::collections::BTreeMap;

use tenure_core::Time;
use tenure_core::table::{HoldSnapshot, KeySpace, Mode, Owner, PlaceId, TableEvent};

type Name = (KeySpace, Vec<u8>);

/// Holders and waiters of every key.
#[derive(Default)]
pub struct Replica {
    /// By fencing number.
    holds: BTreeMap<u64, ReplicaHold>,
    queues: BTreeMap<Name, Vec<(PlaceId, Owner)>>,
}

/// A hold, with its secret and everything else that a restart needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaHold {
    pub name: Name,
    pub mode: Mode,
    pub token: tenure_core::LockToken,
    pub ends: Time,
    pub owner: Option<Owner>,
}

impl From<HoldSnapshot<'_>> for ReplicaHold {
    fn from(hold: HoldSnapshot<'_>) -> Self {
        let HoldSnapshot { key, mode, token, ends, owner } = hold;
        Self { name: (mode.space(), key.to_vec()), mode, token, ends, owner }
    }
}

impl Replica {
    /// Applies the next event.
    pub fn apply(&mut self, event: &TableEvent) {
        match event {
            TableEvent::Granted { place, owner, space, key, mode, grant } => {
                let name = (*space, key.to_vec());
                if let Some(place) = place {
                    self.leave(&name, *place);
                }
                let (token, ends, owner) = (grant.token, grant.ends, Some(*owner));
                self.restore(ReplicaHold { name, mode: *mode, token, ends, owner });
            }
            TableEvent::Renewed { token, ends, .. } => {
                self.holds.get_mut(&token.number()).expect("a renewed hold").ends = *ends;
            }
            TableEvent::Detached { token, .. } => {
                self.holds.get_mut(&token.number()).expect("a detached hold").owner = None;
            }
            TableEvent::Ended { owner, space, key, token, .. } => {
                let hold = self.holds.remove(&token.number()).expect("an ended hold");
                assert_eq!((hold.owner, hold.token), (*owner, *token), "the hold that ended");
                assert_eq!(hold.name, (*space, key.to_vec()), "the key of an ended hold");
            }
            TableEvent::Queued { place, owner, space, key, .. } => {
                self.queues.entry((*space, key.to_vec())).or_default().push((*place, *owner));
            }
            TableEvent::Left { place, space, key, .. } => {
                self.leave(&(*space, key.to_vec()), *place);
            }
            TableEvent::HandoffRequested { token, .. } => {
                assert!(self.holds.contains_key(&token.number()), "a hold that is asked for");
            }
        }
    }

    /// Adds a hold: a new one, or one of an earlier table.
    pub fn restore(&mut self, hold: ReplicaHold) {
        let number = hold.token.number();
        assert!(self.holds.insert(number, hold).is_none(), "two grants with one number");
    }

    /// All holds, in the order of their grants.
    pub fn holds(&self) -> Vec<ReplicaHold> {
        self.holds.values().cloned().collect()
    }

    /// Each waiting place with the number of places before it.
    pub fn waiters(&self) -> impl Iterator<Item = (PlaceId, usize)> {
        let queues = self.queues.values();
        queues.flat_map(|queue| queue.iter().enumerate().map(|(ahead, (place, _))| (*place, ahead)))
    }

    fn leave(&mut self, name: &Name, place: PlaceId) {
        let queue = self.queues.get_mut(name).expect("a queue");
        let at = queue.iter().position(|(waiting, _)| *waiting == place).expect("a waiting place");
        queue.remove(at);
    }
}
