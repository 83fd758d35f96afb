//! Checks that thousands of requests sent back to back are granted in their order.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde::Serialize;

use super::MAX_POLL_WAIT;
use crate::Target;
use crate::caller::Caller;
use crate::dial;
use crate::figures;
use crate::fleet::Fleet;
use crate::wire::{self, FenceChecker, LEASE_SECS, Release};

/// Time that the queue may take to empty.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(60);

/// Size of the load.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct BurstOptions {
    /// Connections that send a request back to back
    #[arg(long, default_value_t = 2_000)]
    pub conns: usize,
}

/// Results of the load.
#[derive(Debug, Serialize)]
pub struct BurstOutcome {
    /// Connections that sent a request.
    pub conns: usize,
    /// Number of pairs of connections that were granted in the opposite order of their requests.
    pub inversions: u64,
    /// Largest distance between the position of a request and the position of its grant.
    pub max_displacement: usize,
    /// Grants per second while the queue emptied.
    pub hand_offs_per_s: f64,
}

/// Runs the load: one connection holds the key while all others request it in order. Then the holder releases, and each
/// connection that is granted the key releases it at once.
///
/// # Errors
///
/// A reply is wrong.
pub fn run(target: &Target, options: BurstOptions) -> Result<BurstOutcome> {
    dial::raise_file_limit(options.conns + 1)?;
    let key = wire::key("burst", 0);
    let mut holder = Caller::dial(target.address, 0)?;
    let token = holder.acquire(&key, 3_600)?;
    let mut fleet = Fleet::dial(target, options.conns)?;
    let claim = wire::lock(&key, 60, LEASE_SECS);
    for number in 0..options.conns {
        fleet.sender(number).send(&claim)?;
    }
    // The server has to read all requests before the release. A request that it reads later would be granted later,
    // which is not a fault of the server.
    std::thread::sleep(Duration::from_millis(500));
    let mut fences = FenceChecker::of(target);
    fences.check(&token)?;
    let began = Instant::now();
    holder.release(&key, &token)?;

    let mut release = Release::of(&key);
    let mut order = Vec::with_capacity(options.conns);
    let mut granted = vec![false; options.conns];
    let mut done = 0;
    while done < options.conns {
        let left = options.conns - done;
        ensure!(began.elapsed() < QUEUE_TIMEOUT, "{left} connections were never served");
        fleet.turn(MAX_POLL_WAIT, |number, sender, reply| {
            if std::mem::replace(&mut granted[number], true) {
                done += 1;
                return wire::expect_reply(reply, "ok");
            }
            let token = wire::granted(reply, "ok", LEASE_SECS)?;
            fences.check(&token)?;
            order.push(number);
            sender.send(release.with(&token))
        })?;
    }
    Ok(BurstOutcome {
        conns: options.conns,
        inversions: inversions(&order),
        max_displacement: order
            .iter()
            .enumerate()
            .map(|(at, n)| at.abs_diff(*n))
            .max()
            .unwrap_or(0),
        hand_offs_per_s: figures::rate(order.len() as u64, began.elapsed()),
    })
}

fn inversions(order: &[usize]) -> u64 {
    let later = order.iter().enumerate();
    later.map(|(at, n)| order[at..].iter().filter(|later| *later < n).count() as u64).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inversions_are_the_pairs_out_of_order() {
        assert_eq!(inversions(&[0, 1, 2, 3]), 0);
        assert_eq!(inversions(&[1, 0, 2, 3]), 1);
        assert_eq!(inversions(&[3, 2, 1, 0]), 6);
    }
}
