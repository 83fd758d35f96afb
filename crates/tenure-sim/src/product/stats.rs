//! Counts of a run: what happened, and how often.

use std::ops::AddAssign;

use super::plan::{Fault, Work};

/// Event counts of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProductStats {
    /// Events of the simulation.
    pub events: u64,
    /// Segments on the network.
    pub segments: u64,
    /// Holds that users were told of.
    pub holds: u64,
    /// Holds that were lost.
    pub losses: u64,
    /// Places in queues.
    pub waits: u64,
    /// Starts of the server.
    pub server_starts: u64,
    /// Work that was done, and faults that struck, by kind.
    pub kinds: KindCounts,
}

/// Counts by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KindCounts {
    /// Work that was done to its end, in the order of [`Work::ALL`].
    pub work: [u64; Work::ALL.len()],
    /// Faults that struck, in the order of [`Fault::KINDS`].
    pub faults: [u64; Fault::KINDS.len()],
}

impl KindCounts {
    pub(super) fn worked(&mut self, work: Work) {
        let index = Work::ALL.iter().position(|kind| *kind == work);
        self.work[index.expect("all kinds of work are listed")] += 1;
    }
}

impl AddAssign for KindCounts {
    fn add_assign(&mut self, other: Self) {
        self.work.iter_mut().zip(other.work).for_each(|(sum, count)| *sum += count);
        self.faults.iter_mut().zip(other.faults).for_each(|(sum, count)| *sum += count);
    }
}

impl AddAssign for ProductStats {
    fn add_assign(&mut self, other: Self) {
        self.events += other.events;
        self.segments += other.segments;
        self.holds += other.holds;
        self.losses += other.losses;
        self.waits += other.waits;
        self.server_starts += other.server_starts;
        self.kinds += other.kinds;
    }
}
