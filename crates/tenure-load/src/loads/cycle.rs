//! Acquire and release in a loop on every connection: each on a key of its own, or all on one.

use std::time::Instant;

use anyhow::{Result, ensure};
use serde::Serialize;

use super::{Span, TURN, Window};
use crate::Target;
use crate::figures::{self, Percentiles, Times};
use crate::fleet::{Fleet, Line};
use crate::wire::{self, Fences, LEASE, Release, Token};

/// How long a connection waits for the hot key: longer than a slow server needs for a round of a thousand.
const HOT_TIMEOUT: u32 = 60;

/// How many connections, for how long.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Options {
    /// Connections
    #[arg(long, default_value_t = 10)]
    pub conns: usize,
    #[command(flatten)]
    #[expect(missing_docs, reason = "clap would print it as the text of the group")]
    pub span: Span,
}

/// Which keys, and in how many steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// All on one key, or each on its own.
    pub hot: bool,
    /// Enqueue and wait (`e`, `w`), or both at once (`l`).
    pub two_phase: bool,
}

/// What was found.
#[derive(Debug, Serialize)]
pub struct Outcome {
    /// Connections.
    pub conns: usize,
    /// Seconds measured.
    pub secs: f64,
    /// Acquisitions with their release.
    pub pairs: u64,
    /// The same each second.
    pub pairs_per_s: f64,
    /// Processor time of the server for each.
    pub server_cpu_us_per_pair: Option<f64>,
    /// From the request to the grant.
    pub acquire: Percentiles,
    /// From the release sent to its `ok`.
    pub release: Percentiles,
    /// From the request to the `ok` of the release.
    pub pair: Percentiles,
    /// On a hot key only.
    #[serde(flatten)]
    pub hand_off: Option<HandOff>,
}

/// How a hot key went from one to the next.
#[derive(Debug, Serialize)]
pub struct HandOff {
    /// From a release sent to the next grant seen.
    pub gap: Percentiles,
    /// Jain's index over the connections: 1 when all had the same share.
    pub fairness: f64,
    /// The smallest share.
    pub grants_min: u64,
    /// The largest share.
    pub grants_max: u64,
}

/// Runs it.
///
/// # Errors
///
/// On a wrong reply: a grant of a key that is held among them.
pub fn run(target: &Target, options: Options, shape: Shape) -> Result<Outcome> {
    let mut fleet = Fleet::dial(target, options.conns)?;
    let mut cycle = Cycle::new(target, options.conns, shape);
    for (number, worker) in cycle.workers.iter_mut().enumerate() {
        worker.asked = Instant::now();
        fleet.line(number).send(&worker.ask)?;
    }
    let mut window = Window::new(options.span, target.process);
    while !window.is_over() {
        fleet.turn(TURN, |number, line, reply| cycle.reply(number, line, reply))?;
        if window.begins()? {
            cycle.forget();
        }
    }
    let (time, cpu) = window.close()?;
    Ok(cycle.outcome(time, target.process.map(|_| cpu)))
}

struct Cycle {
    shape: Shape,
    workers: Vec<Worker>,
    /// On a hot key: who has it, by the replies so far.
    holder: Option<usize>,
    /// On a hot key: when it was last given back.
    given_back: Option<Instant>,
    /// On a hot key, those of all grants; else each worker has its own.
    fences: Fences,
    acquire: Times,
    release: Times,
    pair: Times,
    gap: Times,
}

struct Worker {
    ask: Vec<u8>,
    wait: Vec<u8>,
    give_back: Release,
    due: Due,
    asked: Instant,
    granted: Instant,
    grants: u64,
    pairs: u64,
    fences: Fences,
}

/// Which reply comes next.
#[derive(Clone, Copy)]
enum Due {
    /// That of `l`.
    Grant,
    /// That of `e`.
    Place,
    /// That of `w`, with the token if `e` had one already.
    Turn(Option<Token>),
    /// That of `r`.
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
            given_back: None,
            fences: Fences::of(target),
            acquire: Times::default(),
            release: Times::default(),
            pair: Times::default(),
            gap: Times::default(),
        }
    }

    fn reply(&mut self, number: usize, line: &mut Line, reply: &[u8]) -> Result<()> {
        let now = Instant::now();
        let worker = &mut self.workers[number];
        match worker.due {
            Due::Grant => {
                let token = wire::granted(reply, "ok", LEASE)?;
                self.grant(number, &token, now)?;
                self.give_back(number, line, &token, now)
            }
            Due::Place if reply == b"queued" && self.shape.hot => {
                worker.due = Due::Turn(None);
                line.send(&worker.wait)
            }
            Due::Place => {
                let token = wire::granted(reply, "acquired", LEASE)?;
                worker.due = Due::Turn(Some(token));
                line.send(&worker.wait)?;
                self.grant(number, &token, now)
            }
            Due::Turn(before) => {
                let token = wire::granted(reply, "ok", LEASE)?;
                match before {
                    None => self.grant(number, &token, now)?,
                    Some(before) => ensure!(
                        token == before,
                        "wrong reply: `w` has another token than `e` had for the same hold"
                    ),
                }
                self.give_back(number, line, &token, now)
            }
            Due::Release => {
                wire::exactly(reply, "ok")?;
                self.release.add(now - worker.granted);
                self.pair.add(now - worker.asked);
                worker.pairs += 1;
                worker.again(line, now)
            }
        }
    }

    fn grant(&mut self, number: usize, token: &Token, now: Instant) -> Result<()> {
        let worker = &mut self.workers[number];
        self.acquire.add(now - worker.asked);
        worker.grants += 1;
        if self.shape.hot {
            if let Some(holder) = self.holder.replace(number) {
                anyhow::bail!("wrong reply: granted to {number} while {holder} holds it");
            }
            if let Some(given_back) = self.given_back.take() {
                self.gap.add(now - given_back);
            }
        }
        let fences = if self.shape.hot { &mut self.fences } else { &mut worker.fences };
        fences.next(token)
    }

    fn give_back(
        &mut self,
        number: usize,
        line: &mut Line,
        token: &Token,
        now: Instant,
    ) -> Result<()> {
        let worker = &mut self.workers[number];
        worker.granted = now;
        worker.due = Due::Release;
        self.holder = None;
        self.given_back = self.shape.hot.then_some(now);
        line.send(worker.give_back.with(token))
    }

    /// Drops what the warm-up found.
    fn forget(&mut self) {
        for times in [&mut self.acquire, &mut self.release, &mut self.pair, &mut self.gap] {
            times.clear();
        }
        for worker in &mut self.workers {
            (worker.grants, worker.pairs) = (0, 0);
        }
    }

    fn outcome(&self, time: std::time::Duration, cpu: Option<std::time::Duration>) -> Outcome {
        let pairs = self.workers.iter().map(|worker| worker.pairs).sum();
        let grants = self.workers.iter().map(|worker| worker.grants);
        let hand_off = self.shape.hot.then(|| HandOff {
            gap: self.gap.percentiles(),
            fairness: figures::rounded(figures::fairness(grants.clone())),
            grants_min: grants.clone().min().unwrap_or(0),
            grants_max: grants.clone().max().unwrap_or(0),
        });
        Outcome {
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
        let timeout = if shape.hot { HOT_TIMEOUT } else { wire::TIMEOUT };
        let (mut ask, mut wait) = (Vec::new(), Vec::new());
        if shape.two_phase {
            wire::request(&mut ask, "e", key, &LEASE.to_string());
            wire::request(&mut wait, "w", key, &timeout.to_string());
        } else {
            ask = wire::lock(key, timeout, LEASE);
        }
        let now = Instant::now();
        Self {
            ask,
            wait,
            give_back: Release::of(key),
            due: if shape.two_phase { Due::Place } else { Due::Grant },
            asked: now,
            granted: now,
            grants: 0,
            pairs: 0,
            fences: Fences::of(target),
        }
    }

    fn again(&mut self, line: &mut Line, now: Instant) -> Result<()> {
        self.due = if self.wait.is_empty() { Due::Grant } else { Due::Place };
        self.asked = now;
        line.send(&self.ask)
    }
}
