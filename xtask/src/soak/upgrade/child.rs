//! `xtask upgrade-child`: the command that is run under locks and for jobs.
//!
//! A mode of xtask, and no script: it has to begin within milliseconds.

use std::fs::File;
use std::io::Write as _;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use nix::sys::signal::{SigSet, Signal};
use tenure_core::Random;

use super::log::{self, Turn, TurnId, Version};

/// How often a command says that it runs: overlaps that last longer are seen for certain.
const BEAT_INTERVAL: Duration = Duration::from_millis(5);

#[derive(clap::Args)]
pub(crate) struct UpgradeChildArgs {
    /// The log
    log: PathBuf,
    /// The process of tenure that runs this
    by: String,
    /// Its version
    #[arg(value_parser = |text: &str| text.parse::<Version>())]
    version: Version,
    /// How long to go on, in milliseconds
    hold: u64,
    /// At most this much longer, at random
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

/// One write: with `O_APPEND` the kernel lets no other writer in between.
fn append(mut file: &File, line: &str) -> Result<()> {
    file.write_all(line.as_bytes()).context("writing to the log")
}
