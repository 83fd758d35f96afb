//! `tenure job retry|cancel|rm`: changes jobs by their ids, or all jobs that a filter selects.

use std::fmt::Write as _;
use std::time::Duration;

use clap::Args;
use serde_json::json;
use tenure::jobs::{JobChange, JobFilter, JobState, JobsChanged, Queue};

use super::queue_args::{QueueArgs, report_rejection};
use crate::args::value::duration_or_zero;
use crate::exit::Exit;
use crate::{cmd, report};

#[derive(Args)]
pub(crate) struct ChangeArgs {
    #[command(flatten)]
    queue: QueueArgs,
    /// The jobs' ids; or else select jobs by --state, --older-than and --key
    ids: Vec<String>,
    #[command(flatten)]
    selection: SelectionArgs,
}

/// Selection of jobs without ids.
#[derive(Args)]
pub(crate) struct SelectionArgs {
    /// All jobs in this state, as far as it allows the change
    #[arg(long, value_name = "STATE", conflicts_with = "ids")]
    state: Option<JobState>,
    /// All jobs that were completed or failed longer ago than this, or if they are open, created longer ago
    #[arg(long, value_name = "DURATION", value_parser = duration_or_zero, conflicts_with = "ids")]
    older_than: Option<Duration>,
    /// All jobs whose unique key matches; `*` stands for any characters
    #[arg(long, value_name = "PATTERN", conflicts_with = "ids")]
    key: Option<String>,
    /// Maximum number of selected jobs: those with the lowest ids
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), conflicts_with = "ids")]
    limit: Option<u64>,
    /// Print the number of selected jobs and change none
    #[arg(long, conflicts_with_all = ["ids", "yes"])]
    dry_run: bool,
    /// Change the selected jobs; without it their number is printed and none is changed
    #[arg(long, conflicts_with = "ids")]
    yes: bool,
}

#[derive(Args)]
pub(crate) struct Cancel {
    #[command(flatten)]
    pub(super) jobs: ChangeArgs,
    /// Reason, shown as the error of the job
    #[arg(long, value_name = "TEXT", default_value = "cancelled by hand")]
    pub(super) reason: String,
}

impl SelectionArgs {
    /// The filter; `None` if nothing limits the selection.
    fn filter(&self) -> Option<JobFilter> {
        let Self { state, older_than, key, limit, .. } = self;
        if state.is_none() && older_than.is_none() && key.is_none() {
            return None;
        }
        let mut filter = JobFilter::new();
        if let Some(state) = state {
            filter = filter.state(*state);
        }
        if let Some(age) = older_than {
            filter = filter.older_than(*age);
        }
        if let Some(key) = key {
            filter = filter.key(key);
        }
        if let Some(limit) = limit {
            filter = filter.limit(*limit);
        }
        Some(filter)
    }
}

/// Changes the jobs that the arguments name or select.
pub(super) async fn run(arguments: &ChangeArgs, change: JobChange<'_>) -> Exit {
    let filter = arguments.selection.filter();
    if arguments.ids.is_empty() && filter.is_none() {
        report::print_line("no jobs are named: give ids, or --state, --older-than or --key");
        return Exit::Usage;
    }
    let queue = match arguments.queue.connect().await {
        Ok(queue) => queue,
        Err(exit) => return exit,
    };
    match filter {
        Some(filter) => change_selected(arguments, &queue, &filter, change).await,
        None => change_each(arguments, &queue, change).await,
    }
}

/// Name of the change, as a participle.
const fn done(change: JobChange<'_>) -> &'static str {
    match change {
        JobChange::Requeue => "retried",
        JobChange::Cancel(_) => "cancelled",
        _ => "removed",
    }
}

async fn change_each(arguments: &ChangeArgs, queue: &Queue, change: JobChange<'_>) -> Exit {
    let mut exit = Exit::Success;
    for id in &arguments.ids {
        let changed = match change {
            JobChange::Requeue => queue.requeue(id).await,
            JobChange::Cancel(reason) => queue.cancel(id, reason).await,
            _ => queue.remove(id).await,
        };
        match changed {
            Ok(()) if arguments.queue.json => {
                let line = json!({ "id": id, "done": done(change) });
                cmd::print(format!("{line}\n").as_bytes());
            }
            Ok(()) => {}
            Err(error) => exit = report_rejection(&error),
        }
    }
    exit
}

async fn change_selected(
    arguments: &ChangeArgs,
    queue: &Queue,
    filter: &JobFilter,
    change: JobChange<'_>,
) -> Exit {
    let SelectionArgs { yes, dry_run, .. } = arguments.selection;
    let counted = if yes {
        queue.change_many(filter, change).await
    } else {
        queue.count_many(filter, change).await
    };
    let counted = match counted {
        Ok(counted) => counted,
        Err(error) => return cmd::report_error(&error),
    };
    let JobsChanged { changed, duplicates, .. } = counted;
    let jobs = if changed == 1 { "1 job".to_owned() } else { format!("{changed} jobs") };
    if !yes && !dry_run {
        report::print_line(&format!("{jobs} would be {}: add --yes to do it", done(change)));
        return Exit::Usage;
    }
    if arguments.queue.json {
        let line = json!({ "done": done(change), "jobs": changed, "duplicates": duplicates, "dry_run": dry_run });
        return cmd::print(format!("{line}\n").as_bytes());
    }
    let would = if dry_run { "would be " } else { "" };
    let mut text = format!("{jobs} {would}{}\n", done(change));
    if duplicates > 0 {
        let _ = writeln!(text, "{duplicates} left: another job of the same unique key is open");
    }
    cmd::print(text.as_bytes())
}
