//! Results of a run: counts, or a breach of the contract.

use std::fmt;
use std::ops::AddAssign;
use std::time::Duration;

use crate::contract::Breach;

/// Event counts of a run. They show a run in which too little happens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Events of the simulation.
    pub events: u64,
    /// Grants by the store.
    pub grants: u64,
    /// Guards handed to a user.
    pub guards: u64,
    /// Answers to acquires, of any kind.
    pub answers: u64,
    /// Answers with an unknown outcome.
    pub unknown: u64,
    /// Guards lost.
    pub losses: u64,
    /// Processes killed.
    pub crashes: u64,
    /// Keys that could be acquired at the end.
    pub probes: u64,
    /// Losses of acknowledged writes by the store.
    pub lost_writes: u64,
    /// Overlaps of two guards that such a loss excuses.
    pub excused_overlaps: u64,
}

impl AddAssign for Stats {
    fn add_assign(&mut self, other: Self) {
        self.events += other.events;
        self.grants += other.grants;
        self.guards += other.guards;
        self.answers += other.answers;
        self.unknown += other.unknown;
        self.losses += other.losses;
        self.crashes += other.crashes;
        self.probes += other.probes;
        self.lost_writes += other.lost_writes;
        self.excused_overlaps += other.excused_overlaps;
    }
}

/// A breach of the contract, with its circumstances.
#[derive(Clone, Debug)]
pub struct Violation {
    /// Seed of the run.
    pub seed: u64,
    /// Kind of breach.
    pub breach: Breach,
    /// Clients, tasks and keys concerned.
    pub what: String,
    /// Real time of the simulation.
    pub at: Duration,
    /// The last events before the breach.
    pub trace: Vec<String>,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, breach, what, at, trace } = self;
        writeln!(f, "seed {seed}, after {at:?}: {breach}: {what}")?;
        trace.iter().try_for_each(|line| writeln!(f, "{line}"))
    }
}

impl std::error::Error for Violation {}
