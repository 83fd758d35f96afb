//! Acquires and releases in a loop on every connection: each on a key of its own, or all on one key.

use std::time::Instant;

use anyhow::{Result, ensure};
use serde::Serialize;

use super::{MAX_POLL_WAIT, Span, Window};
use crate::Target;
use crate::figures::{self, Percentiles, Times};
use crate::fleet::{Fleet, SendHalf};
use crate::wire::{self, FenceChecker, LEASE_SECS, Release, Token};

/// Seconds that a connection waits for the hot key: longer than a slow server needs for a round of a thousand grants.
const HOT_TIMEOUT: u32 = 60;

/// Number of connections, and duration.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct CycleOptions {
    /// Connections
    #[arg(long, default_value_t = 10)]
    pub conns: usize,
    #[command(flatten)]
    #[expect(missing_docs, reason = "clap would print it as the text of the group")]
    pub span: Span,
}

/// Keys and requests of the load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// True if all connections use one key, false if each has its own.
    pub hot: bool,
    /// True for two-phase claims (`e`, `w`), false for `l`.
    pub two_phase: bool,
}

/// Results of the load.
#[derive(Debug, Serialize)]
pub struct CycleOutcome {
    /// Connections.
    pub conns: usize,
    /// Seconds measured.
    pub secs: f64,
    /// Number of acquire-release pairs.
    pub pairs: u64,
    /// Pairs per second.
    pub pairs_per_s: f64,
    /// CPU time of the server per pair.
    pub server_cpu_us_per_pair: Option<f64>,
    /// Time from the request to the grant.
    pub acquire: Percentiles,
    /// Time from the release to its `ok`.
    pub release: Percentiles,
    /// Time from the request to the `ok` of the release.
    pub pair: Percentiles,
    /// Hand-offs, for a hot key only.
    #[serde(flatten)]
    pub hand_off: Option<HandoffStats>,
}

/// Hand-offs of a hot key.
#[derive(Debug, Serialize)]
pub struct HandoffStats {
    /// Time from a release to the next grant.
    pub gap: Percentiles,
    /// Jain's fairness index over the connections: 1 if all had the same number of grants.
    pub fairness: f64,
    /// Smallest number of grants of a connection.
    pub grants_min: u64,
    /// Largest number of grants of a connection.
    pub grants_max: u64,
}

/// Runs the load.
///
/// # Errors
///
/// A reply is wrong, for example a grant of a key that is held.
pub fn run(target: &Target, options: CycleOptions, shape: Shape) -> Result<CycleOutcome> {
    let mut fleet = Fleet::dial(target, options.conns)?;
    let mut cycle = Cycle::new(target, options.conns, shape);
    for (number, worker) in cycle.workers.iter_mut().enumerate() {
        worker.requested_at = Instant::now();
        fleet.sender(number).send(&worker.claim)?;
    }
    let mut window = Window::new(options.span, target.process);
    while !window.is_over() {
        fleet.turn(MAX_POLL_WAIT, |number, sender, reply| cycle.reply(number, sender, reply))?;
        if window.begins()? {
            cycle.reset();
        }
    }
    let (time, cpu) = window.close()?;
    Ok(cycle.outcome(time, target.process.map(|_| cpu)))
}

struct Cycle {
    shape: Shape,
    workers: Vec<Worker>,
    /// Holder of a hot key, by the replies so far.
    holder: Option<usize>,
    /// Time of the last release of a hot key.
    released_at: Option<Instant>,
    /// Checker for all grants of a hot key. Otherwise each worker has its own.
    fences: FenceChecker,
    acquire: Times,
    release: Times,
    pair: Times,
    gap: Times,
}

struct Worker {
    claim: Vec<u8>,
    wait: Vec<u8>,
    release: Release,
    expected: ExpectedReply,
    requested_at: Instant,
    granted: Instant,
    grants: u64,
    pairs: u64,
    fences: FenceChecker,
}

/// Reply that a worker expects next.
#[derive(Clone, Copy)]
enum ExpectedReply {
    /// Reply to `l`.
    Grant,
    /// Reply to `e`.
    Enqueue,
    /// Reply to `w`, with the token if `e` was granted at once.
    Wait(Option<Token>),
    /// Reply to `r`.
    Release,
}

impl Cycle {
    fn new(target: &Target, connections: usize, shape: Shape) -> Self {
        let load = if shape.hot { "hot" } else { "own" };
        let key = |number| wire::key(load, if shape.hot { 0 } else { number });
        Self {
            shape,
            workers: (0..connections)
                .map(|number| Worker::new(target, &key(number), shape))
                .collect(),
            holder: None,
            released_at: None,
            fences: FenceChecker::of(target),
            acquire: Times::default(),
            release: Times::default(),
            pair: Times::default(),
            gap: Times::default(),
        }
    }

    fn reply(&mut self, number: usize, sender: &mut SendHalf, reply: &[u8]) -> Result<()> {
        let now = Instant::now();
        let worker = &mut self.workers[number];
        match worker.expected {
            ExpectedReply::Grant => {
                let token = wire::granted(reply, "ok", LEASE_SECS)?;
                self.grant(number, &token, now)?;
                self.send_release(number, sender, &token, now)
            }
            ExpectedReply::Enqueue if reply == b"queued" && self.shape.hot => {
                worker.expected = ExpectedReply::Wait(None);
                sender.send(&worker.wait)
            }
            ExpectedReply::Enqueue => {
                let token = wire::granted(reply, "acquired", LEASE_SECS)?;
                worker.expected = ExpectedReply::Wait(Some(token));
                sender.send(&worker.wait)?;
                self.grant(number, &token, now)
            }
            ExpectedReply::Wait(before) => {
                let token = wire::granted(reply, "ok", LEASE_SECS)?;
                match before {
                    None => self.grant(number, &token, now)?,
                    Some(before) => ensure!(
                        token == before,
                        "wrong reply: `w` has another token than `e` had for the same hold"
                    ),
                }
                self.send_release(number, sender, &token, now)
            }
            ExpectedReply::Release => {
                wire::expect_reply(reply, "ok")?;
                self.release.add(now - worker.granted);
                self.pair.add(now - worker.requested_at);
                worker.pairs += 1;
                worker.send_next_claim(sender, now)
            }
        }
    }

    fn grant(&mut self, number: usize, token: &Token, now: Instant) -> Result<()> {
        let worker = &mut self.workers[number];
        self.acquire.add(now - worker.requested_at);
        worker.grants += 1;
        if self.shape.hot {
            if let Some(holder) = self.holder.replace(number) {
                anyhow::bail!("wrong reply: granted to {number} while {holder} holds it");
            }
            if let Some(released_at) = self.released_at.take() {
                self.gap.add(now - released_at);
            }
        }
        let fences = if self.shape.hot { &mut self.fences } else { &mut worker.fences };
        fences.check(token)
    }

    fn send_release(
        &mut self,
        number: usize,
        sender: &mut SendHalf,
        token: &Token,
        now: Instant,
    ) -> Result<()> {
        let worker = &mut self.workers[number];
        worker.granted = now;
        worker.expected = ExpectedReply::Release;
        self.holder = None;
        self.released_at = self.shape.hot.then_some(now);
        sender.send(worker.release.with(token))
    }

    /// Discards the results of the warm-up.
    fn reset(&mut self) {
        for times in [&mut self.acquire, &mut self.release, &mut self.pair, &mut self.gap] {
            times.clear();
        }
        for worker in &mut self.workers {
            (worker.grants, worker.pairs) = (0, 0);
        }
    }

    fn outcome(&self, time: std::time::Duration, cpu: Option<std::time::Duration>) -> CycleOutcome {
        let pairs = self.workers.iter().map(|worker| worker.pairs).sum();
        let grants = self.workers.iter().map(|worker| worker.grants);
        let hand_off = self.shape.hot.then(|| HandoffStats {
            gap: self.gap.percentiles(),
            fairness: figures::rounded(figures::fairness(grants.clone())),
            grants_min: grants.clone().min().unwrap_or(0),
            grants_max: grants.clone().max().unwrap_or(0),
        });
        CycleOutcome {
            conns: self.workers.len(),
            secs: figures::rounded(time.as_secs_f64()),
            pairs,
            pairs_per_s: figures::rate(pairs, time),
            server_cpu_us_per_pair: cpu.and_then(|cpu| figures::micros_each(cpu, pairs)),
            acquire: self.acquire.percentiles(),
            release: self.release.percentiles(),
            pair: self.pair.percentiles(),
            hand_off,
        }
    }
}

impl Worker {
    fn new(target: &Target, key: &str, shape: Shape) -> Self {
        let timeout = if shape.hot { HOT_TIMEOUT } else { wire::TIMEOUT_SECS };
        let (mut claim, mut wait) = (Vec::new(), Vec::new());
        if shape.two_phase {
            wire::request(&mut claim, "e", key, &LEASE_SECS.to_string());
            wire::request(&mut wait, "w", key, &timeout.to_string());
        } else {
            claim = wire::lock(key, timeout, LEASE_SECS);
        }
        let now = Instant::now();
        Self {
            claim,
            wait,
            release: Release::of(key),
            expected: if shape.two_phase { ExpectedReply::Enqueue } else { ExpectedReply::Grant },
            requested_at: now,
            granted: now,
            grants: 0,
            pairs: 0,
            fences: FenceChecker::of(target),
        }
    }

    fn send_next_claim(&mut self, sender: &mut SendHalf, now: Instant) -> Result<()> {
        self.expected =
            if self.wait.is_empty() { ExpectedReply::Grant } else { ExpectedReply::Enqueue };
        self.requested_at = now;
        sender.send(&self.claim)
    }
}
