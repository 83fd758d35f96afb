//! The records of the table: a key, a hold, a place, an owner.

use super::bytes::KeyBytes;
use super::list::{Linked, Links, List};
use super::slab::Slab;
use super::types::{KeySpace, Mode};
use crate::{LockToken, Time};

/// What the table knows of a key. Two cache lines side by side: all that a renewal needs beside the index, and all but
/// the seat with its owner that an uncontended ask or release needs.
#[derive(Debug)]
#[repr(C, align(128))]
pub(super) struct Entry {
    pub(super) key: KeyBytes,
    /// When the alarm of its slot goes off: at or before the end of a sole hold. Stays set when the hold ends, so that
    /// the next one need not set it.
    pub(super) alarm: Time,
    /// Places, the next one first.
    pub(super) queue: List,
    /// The slots of a semaphore.
    pub(super) limit: u32,
    /// Two-phase claims whose grant ran out and whose owner has not heard of it.
    pub(super) lapsed: u32,
    /// The neighbours among the idle keys.
    pub(super) links: Links,
    pub(super) space: KeySpace,
    // The second line begins here.
    pub(super) holders: Holders,
}

/// Those who hold a key.
#[derive(Debug)]
pub(super) enum Holders {
    /// Where the key is idle, since when.
    Unheld { idle_since: Time },
    /// The usual case, kept here to spare a look elsewhere.
    Sole(Hold),
    /// Those who share a lock or have slots, in the order of their grants.
    Many(List),
}

#[derive(Debug)]
pub(super) struct Hold {
    pub(super) token: LockToken,
    pub(super) granted: Time,
    pub(super) ends: Time,
    /// In nanoseconds.
    pub(super) lease: u64,
    /// The slot of its owner, or none.
    pub(super) owner: u32,
    /// Where among the holds of its owner it stands.
    pub(super) owner_index: u32,
    /// The two-phase claim that has not been redeemed, or none.
    pub(super) place: u32,
}

/// A hold of a key that has several.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) hold: Hold,
    pub(super) key: u32,
    pub(super) links: Links,
}

/// Where a hold is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HoldRef {
    /// In the entry of this key.
    Key(u32),
    /// Among the members of crowds.
    Member(u32),
}

/// A place in a queue, or a two-phase claim in any of its stages.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) serial: u64,
    pub(super) since: Time,
    pub(super) lease: u64,
    pub(super) owner: u32,
    /// Where among the places of its owner it stands.
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
    /// Granted and not redeemed: two-phase only.
    Granted(HoldRef),
    /// The grant ended before it was redeemed: two-phase only.
    Lapsed,
}

/// An owner and all that goes with it when it leaves.
#[derive(Debug)]
pub(super) struct OwnerState {
    pub(super) serial: u64,
    /// In slabs, so that one that goes moves no other.
    pub(super) holds: Slab<HoldRef>,
    pub(super) places: Slab<u32>,
}

/// Beyond this many, those who want to share a lock wait.
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

    /// Whether this is what the table knows of `key`.
    pub(super) fn matches(&self, space: KeySpace, key: &[u8]) -> bool {
        self.space == space && self.key.as_bytes() == key
    }

    /// Something of each of its two lines.
    pub(super) fn touch(&self) -> u32 {
        self.limit ^ u32::from(self.is_held())
    }

    /// Takes over the limit of a semaphore that nobody uses.
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

    /// Whether there is room for one more of this mode, the queue aside.
    pub(super) fn has_room(&self, mode: Mode) -> bool {
        match (&self.holders, mode) {
            (Holders::Unheld { .. }, _) => true,
            (Holders::Many(members), Mode::Shared) => members.len() < MAX_SHARED_HOLDERS,
            (Holders::Many(members), Mode::Slot { .. }) => members.len() < self.limit,
            _ => false,
        }
    }

    /// Whether the key is in use with another limit.
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
        assert_eq!(offset_of!(Entry, holders), 64, "where the second line begins");
        assert!(size_of::<Option<Member>>() <= 80);
        assert!(size_of::<Option<Place>>() <= 72);
    }
}
