//! Measures the delay from the end of a lease to the grant of its waiter, beside many other leases.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde::Serialize;

use crate::Target;
use crate::bulk::BulkHolds;
use crate::dial;
use crate::figures::{Percentiles, Times};
use crate::fleet::{Fleet, SendHalf};
use crate::wire;

/// Lease that expires: the shortest possible.
const SHORT_LEASE_SECS: u32 = 1;

/// Time between two leases, so that they expire one by one. Not a multiple of a millisecond, unlike servers' timers.
const LEASE_SPACING: Duration = Duration::from_micros(4_300);

/// Time after which a waiter counts as never granted.
const GRANT_TIMEOUT: Duration = Duration::from_secs(10);

/// Numbers of leases.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct ExpiryOptions {
    /// Leases that expire, each with a waiter
    #[arg(long, default_value_t = 300)]
    pub samples: usize,
    /// Other leases that run meanwhile
    #[arg(long, default_value_t = 100_000)]
    pub leases: usize,
}

/// Results of the load.
#[derive(Debug, Serialize)]
pub struct ExpiryOutcome {
    /// Leases that expired.
    pub samples: usize,
    /// Other leases that ran meanwhile.
    pub leases: usize,
    /// Time from the end of the lease to the grant. The lease is counted from before its request was sent, so this is
    /// an upper bound.
    pub late: Percentiles,
}

/// Runs the load.
///
/// # Errors
///
/// A reply is wrong, for example a grant before the lease can have ended.
pub fn run(target: &Target, options: &ExpiryOptions) -> Result<ExpiryOutcome> {
    let samples = options.samples;
    dial::raise_file_limit(2 * samples + 8)?;
    let mut held = BulkHolds::connect(target, 4)?;
    held.acquire("others", options.leases)?;
    // Connections with even numbers hold; each odd one waits for the key of the even one before it.
    let mut fleet = Fleet::dial(target, 2 * samples)?;
    let mut started: Vec<Option<Instant>> = vec![None; samples];
    let mut late = Times::default();
    let (mut next, mut next_at, mut granted) = (0, Instant::now(), 0);
    let last_at = next_at + LEASE_SPACING * u32::try_from(samples)? + GRANT_TIMEOUT;
    while granted < samples {
        let now = Instant::now();
        ensure!(now < last_at, "{} waiters were never granted", samples - granted);
        if next < samples && now >= next_at {
            started[next] = Some(Instant::now());
            fleet.sender(2 * next).send(&wire::lock(&key(next), 0, SHORT_LEASE_SECS))?;
            (next, next_at) = (next + 1, next_at + LEASE_SPACING);
        }
        let pause = if next < samples { LEASE_SPACING / 4 } else { GRANT_TIMEOUT };
        let mut waiters = Vec::new();
        fleet.turn(pause, |number, _: &mut SendHalf, reply| {
            let now = Instant::now();
            if number % 2 == 0 {
                wire::granted(reply, "ok", SHORT_LEASE_SECS)?;
                waiters.push(number / 2);
                return Ok(());
            }
            wire::granted(reply, "ok", wire::LEASE_SECS)?;
            let ends =
                started[number / 2].map(|at| at + Duration::from_secs(SHORT_LEASE_SECS.into()));
            let overdue = ends.and_then(|ends| now.checked_duration_since(ends));
            late.add(
                overdue.ok_or_else(|| anyhow::anyhow!("wrong reply: granted while a lease ran"))?,
            );
            granted += 1;
            Ok(())
        })?;
        for sample in waiters {
            fleet.sender(2 * sample + 1).send(&wire::lock(&key(sample), 30, wire::LEASE_SECS))?;
        }
    }
    drop(held);
    Ok(ExpiryOutcome { samples, leases: options.leases, late: late.percentiles() })
}

fn key(sample: usize) -> String {
    wire::key("expiry", sample)
}
