//! Simulator that drives the real state machines of `tenure-core` through faults in logical time.
//!
//! Several clients, each with a drifting clock, claim one or two keys of one of four [store models](StoreKind) over a
//! network that delays and loses messages. Clients are paused, suspended, partitioned and killed. A checker that knows
//! the real time checks the contract at every step that could break it. The simulator only carries messages and time;
//! every decision is taken by the state machines of the core.
//!
//! A run is a function of its seed and its [`Setup`]. [`Rules`](tenure_core::Rules) are part of the setup: with one
//! rule disabled, a breach must occur. That shows that the rule is needed, and that the simulator detects breaches.

#![forbid(unsafe_code)]

mod ablation;
mod client;
mod clock;
mod contract;
mod faults;
mod in_flight;
mod message;
pub mod model;
mod notifications;
pub mod product;
mod requests;
mod setup;
mod shrink;
mod soak;
mod store;
mod task;
mod world;

use std::fmt;
use std::ops::AddAssign;
use std::time::Duration;

pub use ablation::Ablation;
pub use contract::Breach;
pub use model::SmallWorld;
pub use setup::{FaultKind, Faults, Setup, StoreKind};
pub use shrink::{SeededSetup, Shrunk, shrink, shrink_run};
pub use soak::{Summary, soak};
use world::World;

/// Runs one simulation.
///
/// # Errors
///
/// The first breach of the contract, with the events that led to it.
pub fn simulate(seed: u64, setup: &Setup) -> Result<Stats, Box<Violation>> {
    // A trace costs more than the run itself, so it is recorded in a second run, and only after a breach.
    match World::new(seed, setup, false).run(seed) {
        Ok(stats) => Ok(stats),
        Err(_) => World::new(seed, setup, true).run(seed),
    }
}

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
