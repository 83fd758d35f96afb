//! What the server's memory grows by for each idle connection, held key and parked waiter.
//!
//! The server should be fresh: memory that it has and does not use would be used first, and hide what is looked for.

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

/// How long a waiter is ready to wait: it is gone before.
const LONG_WAIT_SECS: u32 = 3_600;

/// How long a grant may take after a release.
const GRANT_TIMEOUT: Duration = Duration::from_secs(10);

/// How long the server's memory may take to come to rest.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct SettleOptions {
    /// Seconds that memory may take to come to rest
    #[arg(long, default_value_t = 6.0)]
    pub settle: f64,
}

impl SettleOptions {
    fn measure(self, process: Process) -> Result<u64> {
        process.memory_at_rest(Duration::from_secs_f64(self.settle))
    }
}

/// How many idle connections.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct IdleOptions {
    /// Connections
    #[arg(long, default_value_t = 9_000)]
    pub conns: usize,
    #[command(flatten)]
    #[expect(missing_docs, reason = "clap would print it as the text of the group")]
    pub rest: SettleOptions,
}

/// How many held keys.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct HoldOptions {
    /// Keys
    #[arg(long, default_value_t = 1_000_000)]
    pub keys: usize,
    /// Connections that they are spread over
    #[arg(long, default_value_t = 8)]
    pub conns: usize,
    #[command(flatten)]
    #[expect(missing_docs, reason = "clap would print it as the text of the group")]
    pub rest: SettleOptions,
}

/// How many waiters.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct WaiterOptions {
    /// Connections, each with one waiter, all on the same key
    #[arg(long, default_value_t = 9_000)]
    pub conns: usize,
    #[command(flatten)]
    #[expect(missing_docs, reason = "clap would print it as the text of the group")]
    pub rest: SettleOptions,
}

/// What was found.
#[derive(Debug, Serialize)]
pub struct MemoryOutcome {
    /// Connections.
    pub conns: usize,
    /// How many things there were of the kind that is measured.
    pub n: usize,
    /// Memory without them.
    pub before_bytes: u64,
    /// Memory with them.
    pub after_bytes: u64,
    /// The difference for each.
    pub bytes_each: f64,
}

/// Connections that have had one lock, given it back, and say nothing more.
///
/// # Errors
///
/// On a wrong reply, and without the server's process.
pub fn idle(target: &Target, options: IdleOptions) -> Result<MemoryOutcome> {
    let process = target.needs_process()?;
    dial::raise_file_limit(options.conns)?;
    let before = options.rest.measure(process)?;
    let callers = used(target, options.conns)?;
    let after = options.rest.measure(process)?;
    drop(callers);
    Ok(outcome(options.conns, options.conns, before, after))
}

/// Keys that are held.
///
/// # Errors
///
/// On a wrong reply, and without the server's process.
pub fn hold(target: &Target, options: HoldOptions) -> Result<MemoryOutcome> {
    let process = target.needs_process()?;
    let mut held = BulkHolds::connect(target, options.conns)?;
    let before = options.rest.measure(process)?;
    held.acquire("hold", options.keys)?;
    let after = options.rest.measure(process)?;
    drop(held);
    Ok(outcome(options.conns, options.keys, before, after))
}

/// Connections that wait for a key, compared with the same connections before they did.
///
/// # Errors
///
/// On a wrong reply, and without the server's process.
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

/// That all wait is not to be seen from outside, but that the key goes to one of them is.
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

/// Connections after one lock each; the key is the same, so that no server keeps more than one for them.
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
