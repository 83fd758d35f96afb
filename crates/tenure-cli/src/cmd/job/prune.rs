//! `tenure job prune`: deletes jobs that ended long ago.

use std::time::Duration;

use clap::Args;
use tenure::jobs::Retention;

use super::queue_args::QueueArgs;
use crate::args::value::duration_or_zero;
use crate::cmd;
use crate::exit::Exit;

/// Retention of ended jobs.
#[derive(Args)]
pub(crate) struct RetentionArgs {
    /// Delete jobs that were completed longer ago than this
    #[arg(long, value_name = "DURATION", value_parser = duration_or_zero)]
    keep: Option<Duration>,
    /// Delete jobs that failed longer ago than this; without it failed jobs are kept
    #[arg(long, value_name = "DURATION", value_parser = duration_or_zero)]
    keep_failed: Option<Duration>,
}

impl RetentionArgs {
    pub(crate) fn retention(&self) -> Retention {
        let mut retention = Retention::new();
        if let Some(keep) = self.keep {
            retention = retention.completed(keep);
        }
        if let Some(keep) = self.keep_failed {
            retention = retention.failed(keep);
        }
        retention
    }
}

#[derive(Args)]
pub(crate) struct Prune {
    #[command(flatten)]
    queue: QueueArgs,
    #[command(flatten)]
    retention: RetentionArgs,
}

pub(super) async fn run(arguments: &Prune) -> Exit {
    let queue = match arguments.queue.connect().await {
        Ok(queue) => queue,
        Err(exit) => return exit,
    };
    match queue.prune(arguments.retention.retention()).await {
        Ok(jobs) if arguments.queue.json => {
            cmd::print(format!("{}\n", serde_json::json!({ "removed": jobs })).as_bytes())
        }
        Ok(1) => cmd::print(b"1 job removed\n"),
        Ok(jobs) => cmd::print(format!("{jobs} jobs removed\n").as_bytes()),
        Err(error) => cmd::report_error(&error),
    }
}
