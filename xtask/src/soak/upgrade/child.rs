//! `xtask upgrade-child`: the command that is run under locks and for jobs.
//!
//! A mode of xtask, not a script, because it must start within milliseconds.

use std::fs::File;
use std::io::Write as _;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use nix::sys::signal::{SigSet, Signal};
use tenure_core::Random;

use super::log::{self, Turn, TurnId, Version};

/// Interval at which a command logs that it runs. Every longer overlap is detected.
const BEAT_INTERVAL: Duration = Duration::from_millis(5);

#[derive(clap::Args)]
pub(crate) struct UpgradeChildArgs {
    /// Path of the log
    log: PathBuf,
    /// Name of the tenure process that runs this command
    by: String,
    /// Version of that process
    #[arg(value_parser = |text: &str| text.parse::<Version>())]
    version: Version,
    /// Time to run, in milliseconds
    hold: u64,
    /// Maximum of a random extension of that time, in milliseconds
    spread: u64,
    /// Do not end on SIGTERM
    #[arg(long)]
    stubborn: bool,
}

pub(crate) fn run(arguments: &UpgradeChildArgs) -> Result<()> {
    if arguments.stubborn {
        SigSet::from(Signal::SIGTERM).thread_block().context("blocking SIGTERM")?;
    }
    let file = File::options().append(true).open(&arguments.log);
    let file = file.with_context(|| format!("opening {}", arguments.log.display()))?;
    let variable = |name| std::env::var(name).ok();
    let name = match variable("TENURE_JOB_ID") {
        Some(job) => format!("job-{job}"),
        None => variable("TENURE_NAME").context("TENURE_NAME is not set")?,
    };
    let attempt = variable("TENURE_JOB_ATTEMPT").map(|text| text.parse()).transpose()?;
    let token = variable("TENURE_TOKEN").map(|text| text.parse()).transpose()?;
    let begin = log::now()?;
    let pid = std::process::id().cast_signed();
    let turn = Turn {
        name,
        by: arguments.by.clone(),
        version: arguments.version,
        token,
        attempt: attempt.unwrap_or(0),
        begin,
        last: begin,
        pause: 0,
        ended: false,
        pid,
    };
    append(&file, &log::begin_line(&turn))?;
    let id = TurnId { begin, pid };
    let longer = Random::new(begin).below(arguments.spread + 1);
    let end = begin + (arguments.hold + longer) * 1_000_000;
    loop {
        let now = log::now()?;
        if now >= end {
            return append(&file, &log::end_line(id, now));
        }
        append(&file, &log::beat_line(id, now))?;
        thread::sleep(BEAT_INTERVAL.min(Duration::from_nanos(end - now)));
    }
}

/// Appends a line in one write: with `O_APPEND` the kernel does not mix it with lines of other writers.
fn append(mut file: &File, line: &str) -> Result<()> {
    file.write_all(line.as_bytes()).context("writing to the log")
}
