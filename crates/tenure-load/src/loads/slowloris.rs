//! What honest clients feel of thousands of connections that say nothing, or start a request and never end it.

use anyhow::Result;
use serde::Serialize;

use super::Span;
use super::cycle::{self, Shape};
use crate::caller::Caller;
use crate::figures::{self, Percentiles};
use crate::{Target, dial};

const UNCONTENDED: Shape = Shape { hot: false, two_phase: false };

/// How many of each.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct SlowlorisOptions {
    /// Honest connections
    #[arg(long, default_value_t = 10)]
    pub conns: usize,
    /// Connections that say nothing
    #[arg(long, default_value_t = 4_000)]
    pub idle: usize,
    /// Connections that have sent half a request
    #[arg(long, default_value_t = 4_000)]
    pub half: usize,
    #[command(flatten)]
    #[expect(missing_docs, reason = "clap would print it as the text of the group")]
    pub span: Span,
}

/// What was found.
#[derive(Debug, Serialize)]
pub struct SlowlorisOutcome {
    /// Honest connections.
    pub conns: usize,
    /// Connections that said nothing.
    pub idle: usize,
    /// Connections that had sent half a request.
    pub half: usize,
    /// Honest pairs without the others.
    pub alone: Percentiles,
    /// Honest pairs with them.
    pub crowded: Percentiles,
    /// How many times as long the slowest hundredth took.
    pub p99_ratio: f64,
    /// What was left of the rate.
    pub rate_ratio: f64,
}

/// Runs it. The measured time must end before the server's `--read-timeout` for half requests does.
///
/// # Errors
///
/// On a wrong reply.
pub fn run(target: &Target, options: &SlowlorisOptions) -> Result<SlowlorisOutcome> {
    let crowd = options.idle + options.half;
    dial::raise_file_limit(crowd + options.conns)?;
    let honest = cycle::CycleOptions { conns: options.conns, span: options.span };
    let alone = cycle::run(target, honest, UNCONTENDED)?;
    let mut callers = Vec::with_capacity(crowd);
    for number in 0..crowd {
        let mut caller = Caller::dial(target.address, number)?;
        if number >= options.idle {
            caller.send(b"l\nhalf-a-re")?;
        }
        callers.push(caller);
    }
    let crowded = cycle::run(target, honest, UNCONTENDED)?;
    drop(callers);
    Ok(SlowlorisOutcome {
        conns: options.conns,
        idle: options.idle,
        half: options.half,
        alone: alone.pair,
        crowded: crowded.pair,
        p99_ratio: figures::rounded(crowded.pair.p99_us / alone.pair.p99_us),
        rate_ratio: figures::rounded(crowded.pairs_per_s / alone.pairs_per_s),
    })
}
