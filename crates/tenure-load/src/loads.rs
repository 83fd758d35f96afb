//! The loads, one file each: what it does, its options, and what it finds.

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

/// How long a load looks at the clock at the latest while nothing comes.
const MAX_POLL_WAIT: Duration = Duration::from_millis(100);

/// How long a load runs.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Span {
    /// Seconds that are measured
    #[arg(long, default_value_t = 3.0)]
    pub secs: f64,
    /// Seconds before them that are not
    #[arg(long, default_value_t = 0.5)]
    pub warmup: f64,
}

/// The time between the end of the warm-up and the end of the load, and the server's processor time in it.
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

    /// Whether the measurement begins now: true once.
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

    /// How long it was open, and the server's processor time meanwhile.
    fn close(&self) -> Result<(Duration, Duration)> {
        let cpu = self.cpu()?;
        let (began, before) = self.opened.unwrap_or((self.opens, cpu));
        Ok((began.elapsed(), cpu.saturating_sub(before)))
    }

    fn cpu(&self) -> Result<Duration> {
        self.process.map_or(Ok(Duration::ZERO), Process::cpu)
    }
}
