//! The loads, one file each, with their options and results.

pub mod burst;
pub mod churn;
pub mod close;
pub mod cycle;
pub mod expiry;
pub mod memory;
pub mod pipeline;
pub mod scrape;
pub mod slowloris;

use std::time::{Duration, Instant};

use anyhow::Result;

use crate::process::Process;

/// Maximum time to wait for replies before the clock is checked again.
const MAX_POLL_WAIT: Duration = Duration::from_millis(100);

/// Duration of a load.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Span {
    /// Seconds to measure
    #[arg(long, default_value_t = 3.0)]
    pub secs: f64,
    /// Seconds to run before the measurement
    #[arg(long, default_value_t = 0.5)]
    pub warmup: f64,
}

/// Measured interval: from the end of the warm-up to the end of the load, with the server's CPU time.
#[derive(Clone, Copy, Debug)]
struct Window {
    process: Option<Process>,
    opens: Instant,
    closes: Instant,
    opened: Option<(Instant, Duration)>,
}

impl Window {
    fn new(span: Span, process: Option<Process>) -> Self {
        let opens = Instant::now() + Duration::from_secs_f64(span.warmup);
        let closes = opens + Duration::from_secs_f64(span.secs);
        Self { process, opens, closes, opened: None }
    }

    /// True, once, when the measurement begins.
    fn begins(&mut self) -> Result<bool> {
        if self.opened.is_some() || Instant::now() < self.opens {
            return Ok(false);
        }
        self.opened = Some((Instant::now(), self.cpu()?));
        Ok(true)
    }

    fn is_over(&self) -> bool {
        Instant::now() >= self.closes
    }

    /// Length of the interval, and the server's CPU time within it.
    fn close(&self) -> Result<(Duration, Duration)> {
        let cpu = self.cpu()?;
        let (began, before) = self.opened.unwrap_or((self.opens, cpu));
        Ok((began.elapsed(), cpu.saturating_sub(before)))
    }

    fn cpu(&self) -> Result<Duration> {
        self.process.map_or(Ok(Duration::ZERO), Process::cpu)
    }
}
