//! How long after the end of a holder's connection the next one has the key, while others hold a million keys.
//!
//! A server that walks all keys to find those of the connection is seen here, and nowhere else.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;

use crate::Target;
use crate::bulk::Held;
use crate::caller::Caller;
use crate::figures::{Percentiles, Times};
use crate::wire::{self, LEASE};

/// Gives the server time to see the waiter's `w`, after it has said that the waiter is queued.
const PAUSE: Duration = Duration::from_millis(2);

/// How many.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Options {
    /// Connections that are closed
    #[arg(long, default_value_t = 200)]
    pub samples: usize,
    /// Keys that others hold
    #[arg(long, default_value_t = 1_000_000)]
    pub keys: usize,
}

/// What was found.
#[derive(Debug, Serialize)]
pub struct Outcome {
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
pub fn run(target: &Target, options: &Options) -> Result<Outcome> {
    let mut held = Held::connect(target, 8)?;
    held.take("foreign", options.keys)?;
    let mut times = Times::default();
    let mut waiter = Caller::dial(target.address, 0)?;
    for sample in 0..options.samples {
        let key = wire::key("closed", sample);
        let mut holder = Caller::dial(target.address, 0)?;
        holder.take(&key, LEASE)?;
        let mut request = Vec::new();
        wire::request(&mut request, "e", &key, &LEASE.to_string());
        waiter.send(&request)?;
        wire::exactly(waiter.reply()?, "queued")?;
        request.clear();
        wire::request(&mut request, "w", &key, &wire::TIMEOUT.to_string());
        waiter.send(&request)?;
        std::thread::sleep(PAUSE);
        let closed = Instant::now();
        drop(holder);
        let token = wire::granted(waiter.reply()?, "ok", LEASE)?;
        times.add(closed.elapsed());
        waiter.release(&key, &token)?;
    }
    drop(held);
    let Options { samples, keys } = *options;
    Ok(Outcome { samples, keys, granted: times.percentiles() })
}
