//! Sends many requests in one write: measures a server without the cost of a system call per request.

use std::time::Instant;

use anyhow::Result;
use serde::Serialize;

use super::{MAX_POLL_WAIT, Span, Window};
use crate::Target;
use crate::figures::{self, Percentiles, Times};
use crate::fleet::{Fleet, SendHalf};
use crate::wire::{self, FenceChecker, LEASE_SECS, Release};

/// Number of connections and requests, and duration.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct PipelineOptions {
    /// Connections
    #[arg(long, default_value_t = 1)]
    pub conns: usize,
    /// Requests per write
    #[arg(long, default_value_t = 128)]
    pub depth: usize,
    #[command(flatten)]
    #[expect(missing_docs, reason = "clap would print it as the text of the group")]
    pub span: Span,
}

/// Results of the load.
#[derive(Debug, Serialize)]
pub struct PipelineOutcome {
    /// Connections.
    pub conns: usize,
    /// Requests per write.
    pub depth: usize,
    /// Replies per second.
    pub requests_per_s: f64,
    /// CPU time of the server per request.
    pub server_cpu_us_per_request: Option<f64>,
    /// Time from a write to the last of its replies.
    pub batch: Percentiles,
}

/// Runs the load: claims of `depth` keys in one write, then their releases in one write.
///
/// # Errors
///
/// A reply is wrong.
pub fn run(target: &Target, options: &PipelineOptions) -> Result<PipelineOutcome> {
    let mut fleet = Fleet::dial(target, options.conns)?;
    let depth = options.depth.max(1);
    let batches = (0..options.conns).map(|number| Batch::new(target, number, depth));
    let mut batches: Vec<_> = batches.collect();
    for (number, batch) in batches.iter_mut().enumerate() {
        batch.sent = Instant::now();
        fleet.sender(number).send(&batch.claims)?;
    }
    let (mut times, mut replies) = (Times::default(), 0);
    let mut window = Window::new(options.span, target.process);
    while !window.is_over() {
        fleet.turn(MAX_POLL_WAIT, |number, sender, reply| {
            replies += 1;
            batches[number].reply(sender, reply, &mut times)
        })?;
        if window.begins()? {
            times.clear();
            replies = 0;
        }
    }
    let (time, cpu) = window.close()?;
    Ok(PipelineOutcome {
        conns: options.conns,
        depth,
        requests_per_s: figures::rate(replies, time),
        server_cpu_us_per_request: target.process.and_then(|_| figures::micros_each(cpu, replies)),
        batch: times.percentiles(),
    })
}

struct Batch {
    /// All claims, sent in each round.
    claims: Vec<u8>,
    /// Releases of the granted claims, in order.
    releases: Vec<u8>,
    release: Vec<Release>,
    releasing: bool,
    answered: usize,
    sent: Instant,
    fences: FenceChecker,
}

impl Batch {
    fn new(target: &Target, number: usize, depth: usize) -> Self {
        let keys = (0..depth).map(|at| wire::key("pipeline", number * depth + at));
        let keys: Vec<_> = keys.collect();
        Self {
            claims: keys
                .iter()
                .flat_map(|key| wire::lock(key, wire::TIMEOUT_SECS, LEASE_SECS))
                .collect(),
            releases: Vec::new(),
            release: keys.iter().map(|key| Release::of(key)).collect(),
            releasing: false,
            answered: 0,
            sent: Instant::now(),
            fences: FenceChecker::of(target),
        }
    }

    fn reply(&mut self, sender: &mut SendHalf, reply: &[u8], times: &mut Times) -> Result<()> {
        if self.releasing {
            wire::expect_reply(reply, "ok")?;
        } else {
            let token = wire::granted(reply, "ok", LEASE_SECS)?;
            self.fences.check(&token)?;
            self.releases.extend_from_slice(self.release[self.answered].with(&token));
        }
        self.answered += 1;
        if self.answered < self.release.len() {
            return Ok(());
        }
        let now = Instant::now();
        times.add(now - self.sent);
        (self.sent, self.answered) = (now, 0);
        self.releasing = !self.releasing;
        if self.releasing {
            sender.send(&self.releases)?;
            self.releases.clear();
            return Ok(());
        }
        sender.send(&self.claims)
    }
}
