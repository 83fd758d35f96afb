//! One run of the first world.

use crate::setup::Setup;
use crate::violation::{Stats, Violation};
use crate::world::World;

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
