//! `tenure job pause|resume`: stops and restarts the claims of a queue.

use std::time::SystemTime;

use clap::Args;
use tenure::jobs::{Queue, QueuePause};

use super::queue_args::QueueArgs;
use crate::exit::Exit;
use crate::{cmd, humanize, report};

#[derive(Args)]
pub(crate) struct Pause {
    #[command(flatten)]
    queue: QueueArgs,
    /// Reason, shown to operators and workers
    #[arg(long, value_name = "TEXT", default_value = "")]
    reason: String,
}

pub(super) async fn pause(arguments: &Pause) -> Exit {
    change(&arguments.queue, async |queue| queue.pause(&arguments.reason).await).await
}

pub(super) async fn resume(arguments: &QueueArgs) -> Exit {
    change(arguments, async |queue| queue.resume().await).await
}

async fn change(arguments: &QueueArgs, change: impl AsyncFn(&Queue) -> tenure::Result<()>) -> Exit {
    let queue = match arguments.connect().await {
        Ok(queue) => queue,
        Err(exit) => return exit,
    };
    if let Err(error) = change(&queue).await {
        return cmd::report_error(&error);
    }
    if !arguments.json {
        return Exit::Success;
    }
    match queue.paused().await {
        Ok(pause) => {
            let line = serde_json::json!({ "queue": queue.table(), "paused": pause.is_some() });
            cmd::print(format!("{line}\n").as_bytes())
        }
        Err(error) => cmd::report_error(&error),
    }
}

/// Reports on stderr that a queue is paused, if it is: stdout has one line per job.
pub(super) async fn warn_of_pause(queue: &Queue) -> tenure::Result<()> {
    if let Some(pause) = queue.paused().await? {
        report::print_line(&format!("{} {}", queue.table(), described(&pause)));
    }
    Ok(())
}

/// `is paused for 3m: reason`
pub(crate) fn described(pause: &QueuePause) -> String {
    let since = pause.since.and_then(|at| SystemTime::now().duration_since(at).ok());
    let mut text = "is paused".to_owned();
    if let Some(span) = since {
        text = format!("{text} for {}", humanize::span(span));
    }
    match pause.reason.as_deref() {
        Some(reason) => format!("{text}: {}", humanize::without_control_chars(reason)),
        None => text,
    }
}
