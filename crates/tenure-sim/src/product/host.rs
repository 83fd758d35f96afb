//! The machine of the server: its program, its clocks, its disk, and the faults that wait for its next operations.

use std::fmt;
use std::io;
use std::time::Duration;

use tenure_core::Random;
use tenure_server::Handle;

use super::disk::SimulatedDisk;
use super::plan::{Fault, Plan, ServerPoint};
use crate::clock::Clock;

/// Secret of the server: without one it does not break holds.
pub(super) const SECRET: &str = "simulated";
/// Wall clock at the start of a run.
pub(super) const WALL_EPOCH: u64 = 1_700_000_000_000_000_000;
/// Interval at which an idle server is woken while a fault waits for its next operation.
pub(super) const POKE_INTERVAL: u64 = 300_000_000;

/// The machine of the server.
#[derive(Debug)]
pub(super) struct Host {
    /// The server, unless it is down or in the middle of a step.
    pub(super) server: Option<Box<dyn ServerProgram>>,
    pub(super) handle: Option<Handle>,
    pub(super) clock: Clock,
    pub(super) wall_offset: i64,
    pub(super) disk: SimulatedDisk,
    pub(super) boot: u32,
    /// Number of starts.
    pub(super) starts: u32,
    /// Faults that strike after some more operations.
    pub(super) armed: Vec<(ServerPoint, u64, Fault)>,
    /// A command waits for the server.
    pub(super) commands: bool,
    /// Real time of the next step; `u64::MAX` if no step is scheduled.
    pub(super) scheduled: u64,
    /// True while the server's code runs.
    pub(super) serving: bool,
    /// A step is due that came while the server was stopped.
    pub(super) missed: bool,
    /// Time from the end of the process to its restart, once it was told to stop.
    pub(super) restart_after: u64,
    /// Real time at which the disk has space again.
    pub(super) full_until: u64,
}

impl Host {
    pub(super) fn new(plan: &Plan, random: &mut Random) -> Self {
        Self {
            server: None,
            handle: None,
            clock: Clock::new(1_000_000_000 + random.below(1 << 40), drift(plan.drift, random)),
            wall_offset: 0,
            disk: SimulatedDisk::new(),
            boot: 0,
            starts: 0,
            armed: Vec::new(),
            commands: false,
            scheduled: u64::MAX,
            serving: false,
            missed: false,
            restart_after: 0,
            full_until: 0,
        }
    }

    /// Notes that the server has a step at this time. Returns true if no earlier step is noted.
    pub(super) fn schedule_step(&mut self, at: u64) -> bool {
        if self.server.is_none() {
            // Down, or in the middle of a step, after which it is scheduled again.
            self.missed |= self.serving;
            return false;
        }
        let earlier = at < self.scheduled;
        if earlier {
            self.scheduled = at;
        }
        earlier
    }
}

/// The server's program.
pub(super) trait ServerProgram: fmt::Debug {
    /// Serves what is ready. Returns true once the program has nothing left to do.
    fn step(&mut self) -> io::Result<bool>;

    /// Time until the next step that no event of the network begins.
    fn next_timeout(&self) -> Option<Duration>;

    /// Ends the program after its last step.
    fn shut_down(self: Box<Self>) -> io::Result<()>;
}

/// Draws the error of a clock's rate.
pub(super) fn drift(most: u64, random: &mut Random) -> i64 {
    let most = i64::try_from(most).unwrap_or(0);
    i64::try_from(random.below(2 * most.unsigned_abs() + 1)).unwrap_or(0) - most
}
