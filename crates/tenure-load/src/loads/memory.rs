//! Measures the server's memory per idle connection, per held key and per waiter.
//!
//! The server should be freshly started: memory that it has and does not use would be used first, and hide the growth.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde::Serialize;

use crate::Target;
use crate::bulk::BulkHolds;
use crate::caller::Caller;
use crate::figures;
use crate::fleet::Fleet;
use crate::process::Process;
use crate::{dial, wire};

/// Timeout of a waiter in seconds: longer than the load.
const LONG_WAIT_SECS: u32 = 3_600;

/// Time to wait for a grant after a release.
const GRANT_TIMEOUT: Duration = Duration::from_secs(10);

/// Time to wait for stable memory.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct SettleOptions {
    /// Maximum seconds to wait until the server's memory is stable
    #[arg(long, default_value_t = 6.0)]
    pub settle: f64,
}

impl SettleOptions {
    fn measure(self, process: Process) -> Result<u64> {
        process.memory_at_rest(Duration::from_secs_f64(self.settle))
    }
}

/// Number of idle connections.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct IdleOptions {
    /// Connections
    #[arg(long, default_value_t = 9_000)]
    pub conns: usize,
    #[command(flatten)]
    #[expect(missing_docs, reason = "clap would print it as the text of the group")]
    pub rest: SettleOptions,
}

/// Number of held keys.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct HoldOptions {
    /// Keys
    #[arg(long, default_value_t = 1_000_000)]
    pub keys: usize,
    /// Connections that hold the keys
    #[arg(long, default_value_t = 8)]
    pub conns: usize,
    #[command(flatten)]
    #[expect(missing_docs, reason = "clap would print it as the text of the group")]
    pub rest: SettleOptions,
}

/// Number of waiters.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct WaiterOptions {
    /// Connections, each with one waiter, all on the same key
    #[arg(long, default_value_t = 9_000)]
    pub conns: usize,
    #[command(flatten)]
    #[expect(missing_docs, reason = "clap would print it as the text of the group")]
    pub rest: SettleOptions,
}

/// Results of the load.
#[derive(Debug, Serialize)]
pub struct MemoryOutcome {
    /// Connections.
    pub conns: usize,
    /// Number of measured items: connections, keys or waiters.
    pub n: usize,
    /// Memory without the items.
    pub before_bytes: u64,
    /// Memory with the items.
    pub after_bytes: u64,
    /// Difference per item.
    pub bytes_each: f64,
}

/// Measures connections that have acquired and released one lock and are idle.
///
/// # Errors
///
/// A reply is wrong, or the server's process is not given.
pub fn idle(target: &Target, options: IdleOptions) -> Result<MemoryOutcome> {
    let process = target.needs_process()?;
    dial::raise_file_limit(options.conns)?;
    let before = options.rest.measure(process)?;
    let callers = used(target, options.conns)?;
    let after = options.rest.measure(process)?;
    drop(callers);
    Ok(outcome(options.conns, options.conns, before, after))
}

/// Measures held keys.
///
/// # Errors
///
/// A reply is wrong, or the server's process is not given.
pub fn hold(target: &Target, options: HoldOptions) -> Result<MemoryOutcome> {
    let process = target.needs_process()?;
    let mut held = BulkHolds::connect(target, options.conns)?;
    let before = options.rest.measure(process)?;
    held.acquire("hold", options.keys)?;
    let after = options.rest.measure(process)?;
    drop(held);
    Ok(outcome(options.conns, options.keys, before, after))
}

/// Measures waiting connections, compared with the same connections while they were idle.
///
/// # Errors
///
/// A reply is wrong, or the server's process is not given.
pub fn waiters(target: &Target, options: WaiterOptions) -> Result<MemoryOutcome> {
    let process = target.needs_process()?;
    dial::raise_file_limit(options.conns + 1)?;
    let key = wire::key("waited", 0);
    let mut holder = Caller::dial(target.address, 0)?;
    let token = holder.acquire(&key, LONG_WAIT_SECS)?;
    let mut callers = used(target, options.conns)?;
    let before = options.rest.measure(process)?;
    for caller in &mut callers {
        caller.send(&wire::lock(&key, LONG_WAIT_SECS, wire::LEASE_SECS))?;
    }
    let after = options.rest.measure(process)?;
    holder.release(&key, &token)?;
    one_is_granted(callers)?;
    Ok(outcome(options.conns, options.conns, before, after))
}

/// Checks that exactly one waiter is granted after the release. A client cannot see directly that the others wait.
fn one_is_granted(callers: Vec<Caller>) -> Result<()> {
    let mut fleet = Fleet::adopt(callers)?;
    let (began, mut grants) = (Instant::now(), 0);
    while grants == 0 {
        ensure!(began.elapsed() < GRANT_TIMEOUT, "no waiter was granted after the release");
        fleet.turn(GRANT_TIMEOUT, |_, _, reply| {
            grants += 1;
            wire::granted(reply, "ok", wire::LEASE_SECS).map(drop)
        })?;
    }
    ensure!(grants == 1, "wrong reply: {grants} waiters were granted at once");
    Ok(())
}

/// Connections that have each acquired and released a lock. They use the same key, so that the server keeps only one.
fn used(target: &Target, connections: usize) -> Result<Vec<Caller>> {
    let key = wire::key("used", 0);
    let caller = |number| {
        let mut caller = Caller::dial(target.address, number)?;
        caller.acquire_release(&key)?;
        Ok(caller)
    };
    (0..connections).map(caller).collect()
}

fn outcome(conns: usize, n: usize, before: u64, after: u64) -> MemoryOutcome {
    let grown = figures::to_f64(after) - figures::to_f64(before);
    let each = figures::rounded(grown / figures::to_f64(n.max(1) as u64));
    MemoryOutcome { conns, n, before_bytes: before, after_bytes: after, bytes_each: each }
}
