//! The driver of a store's server, and its parameters.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use tenure_core::Random;

use super::super::build::Programs;
use super::super::log::Version;
use super::super::plan::{Phase, Plan};

/// Parameters of the start of a store.
pub(in super::super) struct SiteSetup<'a> {
    pub(in super::super) folder: &'a Path,
    pub(in super::super) programs: &'a Programs,
    pub(in super::super) random: Random,
    /// The length of the shortest phase.
    pub(in super::super) share: Duration,
    /// Servers of stores are crashed and restarted.
    pub(in super::super) restarts: bool,
    /// The phase in which the new version applies its schema.
    pub(in super::super) schema_in: Phase,
}

/// Drives the server of a store, on a thread of its own.
pub(in super::super) trait StoreDriver: Send {
    /// Performs the actions that are due; called repeatedly. May block for as long as a restart takes.
    fn poll(&mut self, programs: &Programs, now: &PlanPosition) -> Result<()>;

    /// Restarts a lock server as this version, by a clean stop or by a kill. Does nothing on other stores, which have
    /// no version.
    fn restart(&mut self, programs: &Programs, version: Version, kill: bool) -> Result<()>;

    /// Summary of the driver's actions, for the report.
    fn about(&self) -> String;

    /// Failures of the server: a lock server that ended by itself.
    fn failures(&self) -> &[String] {
        &[]
    }
}

/// A position in the plan.
pub(in super::super) struct PlanPosition {
    pub(in super::super) phase: Phase,
    /// Progress of the phase, from 0 to 1.
    pub(in super::super) progress: f64,
    /// Time since the start of the soak.
    pub(in super::super) time: Duration,
    pub(in super::super) plan: Plan,
}
