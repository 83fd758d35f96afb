//! A simulator that drives the real machines of `tenure-core` through faults in logical time.
//!
//! Several clients, each with a clock that runs wrong, claim one or two keys of one of four [store models](StoreKind)
//! over a network that delays and loses. Clients are paused, put to sleep, cut off and killed. At every step that could
//! break a promise a referee, who knows the real time, checks it. Nothing is decided here that a machine of the core
//! decides: the simulator only carries messages and time.
//!
//! A run is a function of its seed and [`Setup`]. [`Rules`](tenure_core::Rules) is part of the setup: with one rule
//! taken away a breach must turn up, which shows both that the rule is needed and that the simulator can see.

#![forbid(unsafe_code)]

mod ablation;
mod client;
mod clock;
mod contract;
mod faults;
mod in_flight;
mod message;
pub mod model;
mod setup;
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
pub use setup::{Faults, Setup, StoreKind};
pub use soak::{Summary, soak};
use world::World;

/// Runs one simulation.
///
/// # Errors
///
/// The first promise that was broken, with the events that led to it.
pub fn simulate(seed: u64, setup: &Setup) -> Result<Stats, Box<Violation>> {
    // Writing the trace down costs more than the run: it is made in a second run where there is something to show.
    match World::new(seed, setup, false).run(seed) {
        Ok(stats) => Ok(stats),
        Err(_) => World::new(seed, setup, true).run(seed),
    }
}

/// What happened in a run, so that a tame one is noticed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Events of the simulation.
    pub events: u64,
    /// Grants by the store.
    pub grants: u64,
    /// Guards that reached their user.
    pub guards: u64,
    /// Answers to acquires, of any kind.
    pub answers: u64,
    /// Answers that nothing clear was heard.
    pub unknown: u64,
    /// Guards that were lost.
    pub losses: u64,
    /// Processes that died.
    pub crashes: u64,
    /// Keys that could be had in the end.
    pub probes: u64,
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
    }
}

/// A promise that was broken.
#[derive(Clone, Debug)]
pub struct Violation {
    /// The seed that shows it.
    pub seed: u64,
    /// Which promise.
    pub breach: Breach,
    /// Where and with whom.
    pub what: String,
    /// When, in the real time of the simulation.
    pub at: Duration,
    /// The last events before it.
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
