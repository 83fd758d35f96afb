//! Holds in bulk: a million held keys, as the background of other loads.

use std::io::Write as _;

use anyhow::Result;

use crate::Target;
use crate::caller::Caller;
use crate::wire::{self, FenceChecker};

/// Requests per write: enough to be fast, few enough that the replies fit into the kernel's buffers.
const BATCH_REQUESTS: usize = 200;

/// Held keys on a few connections. Dropping it closes the connections, which releases the keys.
#[derive(Debug)]
pub struct BulkHolds {
    callers: Vec<Caller>,
    fences: FenceChecker,
}

impl BulkHolds {
    /// Connects, without any holds yet.
    ///
    /// # Errors
    ///
    /// The server cannot be reached.
    pub fn connect(target: &Target, connections: usize) -> Result<Self> {
        let callers = (0..connections.max(1)).map(|number| Caller::dial(target.address, number));
        Ok(Self { callers: callers.collect::<Result<_>>()?, fences: FenceChecker::of(target) })
    }

    /// Acquires `keys` keys, with leases from one to two hours, so that they do not all end at once.
    ///
    /// # Errors
    ///
    /// A reply is not the expected grant.
    pub fn acquire(&mut self, load: &str, keys: usize) -> Result<()> {
        let mut out = Vec::new();
        let connections = self.callers.len();
        for (batch, first) in (0..keys).step_by(BATCH_REQUESTS).enumerate() {
            let caller = &mut self.callers[batch % connections];
            let numbers = first..keys.min(first + BATCH_REQUESTS);
            out.clear();
            for number in numbers.clone() {
                let (key, lease) = (wire::key(load, number), lease(number));
                write!(out, "l\n{key}\n0 {lease}\n")?;
            }
            caller.send(&out)?;
            for number in numbers {
                let token = wire::granted(caller.reply()?, "ok", lease(number))?;
                self.fences.check(&token)?;
            }
        }
        Ok(())
    }
}

fn lease(number: usize) -> u32 {
    3_600 + u32::try_from(number % 3_600).expect("below 3,600")
}
