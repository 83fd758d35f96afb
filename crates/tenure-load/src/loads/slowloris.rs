//! Measures well-behaved clients beside thousands of connections that are silent or never complete a request.

use anyhow::Result;
use serde::Serialize;

use super::Span;
use super::cycle::{self, Shape};
use crate::caller::Caller;
use crate::figures::{self, Percentiles};
use crate::{Target, dial};

const UNCONTENDED: Shape = Shape { hot: false, two_phase: false };

/// Numbers of connections, and duration.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct SlowlorisOptions {
    /// Well-behaved connections
    #[arg(long, default_value_t = 10)]
    pub conns: usize,
    /// Silent connections
    #[arg(long, default_value_t = 4_000)]
    pub idle: usize,
    /// Connections with an incomplete request
    #[arg(long, default_value_t = 4_000)]
    pub half: usize,
    #[command(flatten)]
    #[expect(missing_docs, reason = "clap would print it as the text of the group")]
    pub span: Span,
}

/// Results of the load.
#[derive(Debug, Serialize)]
pub struct SlowlorisOutcome {
    /// Well-behaved connections.
    pub conns: usize,
    /// Silent connections.
    pub idle: usize,
    /// Connections with an incomplete request.
    pub half: usize,
    /// Times of acquire-release pairs without the other connections.
    pub alone: Percentiles,
    /// Times of acquire-release pairs beside the other connections.
    pub crowded: Percentiles,
    /// Ratio of the 99th percentiles, crowded to alone.
    pub p99_ratio: f64,
    /// Ratio of the rates, crowded to alone.
    pub rate_ratio: f64,
}

/// Runs the load. It must end before the server's `--read-timeout` closes the incomplete requests.
///
/// # Errors
///
/// A reply is wrong.
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
