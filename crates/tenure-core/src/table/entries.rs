//! Records of the table: keys, holds, places and owners.

use super::bytes::KeyBytes;
use super::list::{Linked, Links, List};
use super::slab::Slab;
use super::types::{KeySpace, Mode};
use crate::{LockToken, Time};

/// State of a key, in two adjacent cache lines. A renewal needs only these and the index. An uncontended claim or
/// release also needs the hold's slot in its owner's list.
#[derive(Debug)]
#[repr(C, align(128))]
pub(super) struct Entry {
    pub(super) key: KeyBytes,
    /// Time of the slot's alarm: at or before the end of a sole hold. It stays set when the hold ends, so the next hold
    /// need not set one.
    pub(super) alarm: Time,
    /// Places in the order of the queue.
    pub(super) queue: List,
    /// Slots of a semaphore.
    pub(super) limit: u32,
    /// Two-phase claims whose grant expired and whose owner has not been informed.
    pub(super) lapsed: u32,
    /// Neighbours in the idle list.
    pub(super) links: Links,
    pub(super) space: KeySpace,
    // The second cache line begins here.
    pub(super) holders: Holders,
}

/// Holders of a key.
#[derive(Debug)]
pub(super) enum Holders {
    /// No holder. `idle_since` counts if the key is idle.
    Unheld { idle_since: Time },
    /// The common case, stored inline to save a cache miss.
    Sole(Hold),
    /// Shared holders or slots, in the order of their grants.
    Many(List),
}

#[derive(Debug)]
pub(super) struct Hold {
    pub(super) token: LockToken,
    pub(super) granted: Time,
    pub(super) ends: Time,
    /// In nanoseconds.
    pub(super) lease: u64,
    /// Slot of the owner, or `NONE`.
    pub(super) owner: u32,
    /// Index among the holds of the owner.
    pub(super) owner_index: u32,
    /// Two-phase claim that has not been redeemed, or `NONE`.
    pub(super) place: u32,
}

/// Hold of a key that can have several holders.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) hold: Hold,
    pub(super) key: u32,
    pub(super) links: Links,
}

/// Location of a hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HoldRef {
    /// In the entry of this key.
    Key(u32),
    /// In the slab of members.
    Member(u32),
}

/// Place in a queue, or a two-phase claim in any of its stages.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) serial: u64,
    pub(super) since: Time,
    pub(super) lease: u64,
    pub(super) owner: u32,
    /// Index among the places of the owner.
    pub(super) owner_index: u32,
    pub(super) key: u32,
    pub(super) links: Links,
    pub(super) mode: Mode,
    pub(super) stage: Stage,
    pub(super) two_phase: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Waiting,
    /// Granted and not redeemed: only a two-phase claim.
    Granted(HoldRef),
    /// The grant ended before it was redeemed: only a two-phase claim.
    Lapsed,
}

/// Owner with the holds and places that end when it disconnects.
#[derive(Debug)]
pub(super) struct OwnerState {
    pub(super) serial: u64,
    /// In slabs, so that a removal moves no other element.
    pub(super) holds: Slab<HoldRef>,
    pub(super) places: Slab<u32>,
}

/// Most shared holders of a lock; further claims wait.
const MAX_SHARED_HOLDERS: u32 = 1 << 20;

impl Entry {
    pub(super) fn new(key: &[u8], mode: Mode) -> Self {
        let mut entry = Self {
            key: key.into(),
            alarm: Time::MAX,
            holders: Holders::Unheld { idle_since: Time::ZERO },
            queue: List::EMPTY,
            limit: 0,
            lapsed: 0,
            links: Links::UNLINKED,
            space: mode.space(),
        };
        entry.set_limit(mode);
        entry
    }

    /// True if this is the entry of `key`.
    pub(super) fn matches(&self, space: KeySpace, key: &[u8]) -> bool {
        self.space == space && self.key.as_bytes() == key
    }

    /// Reads a value from each of the two cache lines.
    pub(super) fn touch(&self) -> u32 {
        self.limit ^ u32::from(self.is_held())
    }

    /// Sets the limit of a semaphore that is not in use.
    pub(super) fn set_limit(&mut self, mode: Mode) {
        if let Mode::Slot { limit } = mode {
            self.limit = limit.max(1);
        }
    }

    pub(super) fn is_held(&self) -> bool {
        !matches!(self.holders, Holders::Unheld { .. })
    }

    pub(super) fn is_idle(&self) -> bool {
        !self.is_held() && self.queue.is_empty() && self.lapsed == 0
    }

    pub(super) fn is_sole(&self) -> bool {
        matches!(self.holders, Holders::Sole(_))
    }

    pub(super) fn idle_since(&self) -> Option<Time> {
        match self.holders {
            Holders::Unheld { idle_since } if self.is_idle() => Some(idle_since),
            _ => None,
        }
    }

    /// True if there is room for one more hold of this mode, regardless of the queue.
    pub(super) fn has_room(&self, mode: Mode) -> bool {
        match (&self.holders, mode) {
            (Holders::Unheld { .. }, _) => true,
            (Holders::Many(members), Mode::Shared) => members.len() < MAX_SHARED_HOLDERS,
            (Holders::Many(members), Mode::Slot { .. }) => members.len() < self.limit,
            _ => false,
        }
    }

    /// True if the key is in use with another limit.
    pub(super) fn limit_mismatch(&self, mode: Mode) -> bool {
        let in_use = self.is_held() || !self.queue.is_empty();
        matches!(mode, Mode::Slot { limit } if limit.max(1) != self.limit && in_use)
    }

    pub(super) fn holder_count(&self) -> u32 {
        match &self.holders {
            Holders::Unheld { .. } => 0,
            Holders::Sole(_) => 1,
            Holders::Many(members) => members.len(),
        }
    }
}

impl Linked for Entry {
    fn links(&self) -> Links {
        self.links
    }

    fn links_mut(&mut self) -> &mut Links {
        &mut self.links
    }
}

impl Linked for Member {
    fn links(&self) -> Links {
        self.links
    }

    fn links_mut(&mut self) -> &mut Links {
        &mut self.links
    }
}

impl Linked for Place {
    fn links(&self) -> Links {
        self.links
    }

    fn links_mut(&mut self) -> &mut Links {
        &mut self.links
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn the_records_stay_small() {
        assert_eq!(size_of::<Option<Entry>>(), 128);
        assert_eq!(offset_of!(Entry, holders), 64, "start of the second cache line");
        assert!(size_of::<Option<Member>>() <= 80);
        assert!(size_of::<Option<Place>>() <= 72);
    }
}
