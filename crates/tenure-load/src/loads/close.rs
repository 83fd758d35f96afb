//! How long after the end of a holder's connection the next one has the key, while others hold a million keys.
//!
//! A server that walks all keys to find those of the connection is seen here, and nowhere else.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;

use crate::Target;
use crate::bulk::BulkHolds;
use crate::caller::Caller;
use crate::figures::{Percentiles, Times};
use crate::wire::{self, LEASE_SECS};

/// Gives the server time to see the waiter's `w`, after it has said that the waiter is queued.
const ENQUEUE_DELAY: Duration = Duration::from_millis(2);

/// How many.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct CloseOptions {
    /// Connections that are closed
    #[arg(long, default_value_t = 200)]
    pub samples: usize,
    /// Keys that others hold
    #[arg(long, default_value_t = 1_000_000)]
    pub keys: usize,
}

/// What was found.
#[derive(Debug, Serialize)]
pub struct CloseOutcome {
    /// Connections that were closed.
    pub samples: usize,
    /// Keys that others held.
    pub keys: usize,
    /// From the close of the holder's connection to the grant of its waiter.
    pub granted: Percentiles,
}

/// Runs it.
///
/// # Errors
///
/// On a wrong reply.
pub fn run(target: &Target, options: &CloseOptions) -> Result<CloseOutcome> {
    let mut held = BulkHolds::connect(target, 8)?;
    held.acquire("foreign", options.keys)?;
    let mut times = Times::default();
    let mut waiter = Caller::dial(target.address, 0)?;
    for sample in 0..options.samples {
        let key = wire::key("closed", sample);
        let mut holder = Caller::dial(target.address, 0)?;
        holder.acquire(&key, LEASE_SECS)?;
        let mut request = Vec::new();
        wire::request(&mut request, "e", &key, &LEASE_SECS.to_string());
        waiter.send(&request)?;
        wire::expect_reply(waiter.reply()?, "queued")?;
        request.clear();
        wire::request(&mut request, "w", &key, &wire::TIMEOUT_SECS.to_string());
        waiter.send(&request)?;
        std::thread::sleep(ENQUEUE_DELAY);
        let closed = Instant::now();
        drop(holder);
        let token = wire::granted(waiter.reply()?, "ok", LEASE_SECS)?;
        times.add(closed.elapsed());
        waiter.release(&key, &token)?;
    }
    drop(held);
    let CloseOptions { samples, keys } = *options;
    Ok(CloseOutcome { samples, keys, granted: times.percentiles() })
}
