//! Whether those who ask first get first, when thousands ask at once.

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

/// How long the queue may take to empty.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(60);

/// How many.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct BurstOptions {
    /// Connections that ask back to back
    #[arg(long, default_value_t = 2_000)]
    pub conns: usize,
}

/// What was found.
#[derive(Debug, Serialize)]
pub struct BurstOutcome {
    /// Connections that asked.
    pub conns: usize,
    /// Pairs of them of which the later had the key before the earlier.
    pub inversions: u64,
    /// The furthest that one was from its place.
    pub max_displacement: usize,
    /// How fast the queue went down.
    pub hand_offs_per_s: f64,
}

/// Runs it: one holds the key, all others ask for it in turn, the one lets go, and each that is granted as well.
///
/// # Errors
///
/// On a wrong reply.
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
    // Whoever has not been read yet would be late by no fault of the server.
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
        ensure!(began.elapsed() < QUEUE_TIMEOUT, "{} were never served", options.conns - done);
        fleet.turn(MAX_POLL_WAIT, |number, line, reply| {
            if std::mem::replace(&mut granted[number], true) {
                done += 1;
                return wire::expect_reply(reply, "ok");
            }
            let token = wire::granted(reply, "ok", LEASE_SECS)?;
            fences.check(&token)?;
            order.push(number);
            line.send(release.with(&token))
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
