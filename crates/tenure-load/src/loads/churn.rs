//! Connect, acquire, release, hang up: what a client without a pool does.

use std::time::Instant;

use anyhow::Result;
use serde::Serialize;

use super::{Span, Window};
use crate::Target;
use crate::caller::Caller;
use crate::figures::{self, Percentiles, Times};
use crate::{dial, wire};

/// How long.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct ChurnOptions {
    #[command(flatten)]
    #[expect(missing_docs, reason = "clap would print it as the text of the group")]
    pub span: Span,
}

/// What was found.
#[derive(Debug, Serialize)]
pub struct ChurnOutcome {
    /// Connections each second, one after the other.
    pub cycles_per_s: f64,
    /// Processor time of the server for each.
    pub server_cpu_us_per_cycle: Option<f64>,
    /// From the connect to the hang-up.
    pub cycle: Percentiles,
}

/// Runs it.
///
/// # Errors
///
/// On a wrong reply.
pub fn run(target: &Target, options: ChurnOptions) -> Result<ChurnOutcome> {
    let key = wire::key("churn", 0);
    let (mut times, mut cycles) = (Times::default(), 0);
    let mut window = Window::new(options.span, target.process);
    while !window.is_over() {
        if window.begins()? {
            times.clear();
            cycles = 0;
        }
        let began = Instant::now();
        let mut caller = Caller::dial(target.address, 0)?;
        caller.acquire_release(&key)?;
        dial::close_with_reset(caller.into_stream())?;
        times.add(began.elapsed());
        cycles += 1;
    }
    let (time, cpu) = window.close()?;
    Ok(ChurnOutcome {
        cycles_per_s: figures::rate(cycles, time),
        server_cpu_us_per_cycle: target.process.and_then(|_| figures::micros_each(cpu, cycles)),
        cycle: times.percentiles(),
    })
}
