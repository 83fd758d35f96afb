//! Identity and random numbers of simulated processes, for simulators that run this library.
//!
//! Several simulated processes share one real process, and a run must be a function of its seed. So the simulator says
//! which of them runs at present, and random numbers come from that process's own seed.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

use tenure_core::Random;

use crate::process::Process;

thread_local! {
    static RUNNING: RefCell<Option<Rc<RefCell<Simulated>>>> = const { RefCell::new(None) };
}

struct Simulated {
    process: Process,
    random: Random,
}

/// A simulated process.
#[derive(Clone)]
pub struct SimulatedProcess(Rc<RefCell<Simulated>>);

impl SimulatedProcess {
    /// Creates a process whose random numbers are determined by `seed`. Processes of one simulation need different
    /// seeds: claim ids derive from them.
    pub fn new(host: &str, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let process = Process::simulated(host, random.bits());
        Self(Rc::new(RefCell::new(Simulated { process, random })))
    }

    /// Runs `f` as this process, on the present thread.
    pub fn run<T>(&self, f: impl FnOnce() -> T) -> T {
        let outer = RUNNING.replace(Some(Rc::clone(&self.0)));
        let _restore = RestoreRunning(outer);
        f()
    }
}

/// Restores the process that was simulated before, also after a panic.
struct RestoreRunning(Option<Rc<RefCell<Simulated>>>);

impl Drop for RestoreRunning {
    fn drop(&mut self) {
        RUNNING.set(self.0.take());
    }
}

impl fmt::Debug for SimulatedProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SimulatedProcess")
    }
}

/// Calls `f` with the process that is simulated at present; returns `f` if no process is simulated.
pub(crate) fn with_process<T, F: FnOnce(&mut Process) -> T>(f: F) -> Result<T, F> {
    RUNNING.with_borrow(|running| match running {
        Some(simulated) => Ok(f(&mut simulated.borrow_mut().process)),
        None => Err(f),
    })
}

/// Fills `bytes` with random numbers of the process that is simulated at present. False if no process is
/// simulated.
pub(crate) fn fill(bytes: &mut [u8]) -> bool {
    RUNNING.with_borrow(|running| {
        let Some(simulated) = running else { return false };
        let random = &mut simulated.borrow_mut().random;
        for chunk in bytes.chunks_mut(size_of::<u64>()) {
            chunk.copy_from_slice(&random.bits().to_ne_bytes()[..chunk.len()]);
        }
        true
    })
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[test]
    fn a_panic_ends_the_simulation_of_its_process() {
        let process = SimulatedProcess::new("host", 1);
        let run = || process.run(|| panic!("in the process"));
        catch_unwind(AssertUnwindSafe(run)).expect_err("it panics");
        assert!(!fill(&mut [0]), "no process is simulated");
    }
}
