//! Connects, acquires, releases and closes, as a client without a connection pool does.

use std::time::Instant;

use anyhow::Result;
use serde::Serialize;

use super::{Span, Window};
use crate::Target;
use crate::caller::Caller;
use crate::figures::{self, Percentiles, Times};
use crate::{dial, wire};

/// Duration of the load.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct ChurnOptions {
    #[command(flatten)]
    #[expect(missing_docs, reason = "clap would print it as the text of the group")]
    pub span: Span,
}

/// Results of the load.
#[derive(Debug, Serialize)]
pub struct ChurnOutcome {
    /// Connections per second, one after the other.
    pub cycles_per_s: f64,
    /// CPU time of the server per connection.
    pub server_cpu_us_per_cycle: Option<f64>,
    /// Time from connect to close.
    pub cycle: Percentiles,
}

/// Runs the load.
///
/// # Errors
///
/// A reply is wrong.
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
