//! Measures the delay from the close of a holder's connection to the grant of its waiter, beside a million held keys.
//!
//! Only this load shows a server that visits all keys to find those of a connection.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;

use crate::Target;
use crate::bulk::BulkHolds;
use crate::caller::Caller;
use crate::figures::{Percentiles, Times};
use crate::wire::{self, LEASE_SECS};

/// Time for the server to receive the waiter's `w`, which has no reply yet.
const ENQUEUE_DELAY: Duration = Duration::from_millis(2);

/// Size of the load.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct CloseOptions {
    /// Connections to close
    #[arg(long, default_value_t = 200)]
    pub samples: usize,
    /// Keys held by other connections
    #[arg(long, default_value_t = 1_000_000)]
    pub keys: usize,
}

/// Results of the load.
#[derive(Debug, Serialize)]
pub struct CloseOutcome {
    /// Connections that were closed.
    pub samples: usize,
    /// Keys held by other connections.
    pub keys: usize,
    /// Time from the close of the holder's connection to the grant of its waiter.
    pub granted: Percentiles,
}

/// Runs the load.
///
/// # Errors
///
/// A reply is wrong.
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
