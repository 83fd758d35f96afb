//! `tenure job schedule`: jobs that are enqueued at the times of a cron expression.

use std::time::SystemTime;

use clap::{Args, Subcommand};
use serde_json::json;
use tenure::jobs::{CatchUp, NewJob, NewSchedule, ScheduleRow};

use super::queue_args::QueueArgs;
use crate::exit::{self, Exit};
use crate::keys::columns;
use crate::{cmd, humanize, report};

#[derive(Subcommand)]
pub(crate) enum ScheduleSubcommand {
    /// Add a schedule, or replace the one of its name; workers of the queue enqueue its jobs
    #[command(after_help = exit::QUEUE)]
    Add(AddSchedule),
    /// List the schedules of a queue, with their next and last time
    #[command(after_help = exit::QUEUE)]
    Ls(QueueArgs),
    /// Remove a schedule; the jobs that it has enqueued stay
    #[command(after_help = exit::SCHEDULE_RM)]
    Rm(RemoveSchedule),
}

#[derive(Args)]
pub(crate) struct AddSchedule {
    #[command(flatten)]
    queue: QueueArgs,
    /// Name of the schedule, unique in the queue
    name: String,
    /// Cron expression of five fields (minute, hour, day of the month, month, day of the week), or @hourly, @daily, @weekly,
    /// @monthly, @yearly
    #[arg(long, value_name = "EXPRESSION")]
    cron: String,
    /// Time zone of the expression, by its IANA name
    #[arg(long, value_name = "ZONE", default_value = "UTC")]
    time_zone: String,
    /// Times that passed while no worker ran: none fires them if they are at most a minute late, last fires the latest, all
    /// fires the latest hundred
    #[arg(long, value_name = "POLICY", default_value = "last")]
    catch_up: CatchUp,
    /// Payload of the jobs
    #[arg(long, value_name = "JSON", default_value = "null")]
    payload: String,
    /// Priority of the jobs
    #[arg(long, value_name = "N", default_value = "0", allow_negative_numbers = true)]
    priority: i32,
    /// Maximum number of attempts of a job, after which it fails
    #[arg(long, value_name = "N", default_value = "10", value_parser = clap::value_parser!(u32).range(1..))]
    max_attempts: u32,
}

#[derive(Args)]
pub(crate) struct RemoveSchedule {
    #[command(flatten)]
    queue: QueueArgs,
    /// Name of the schedule
    name: String,
}

pub(super) async fn run(command: &ScheduleSubcommand) -> Exit {
    match command {
        ScheduleSubcommand::Add(add) => self::add(add).await,
        ScheduleSubcommand::Ls(queue) => list(queue).await,
        ScheduleSubcommand::Rm(rm) => remove(rm).await,
    }
}

impl AddSchedule {
    fn schedule(&self) -> tenure::Result<NewSchedule> {
        let job =
            NewJob::json(&*self.payload)?.priority(self.priority).max_attempts(self.max_attempts);
        let schedule = NewSchedule::new(&*self.name, &*self.cron, job)?;
        Ok(schedule.time_zone(&*self.time_zone)?.catch_up(self.catch_up))
    }
}

async fn add(arguments: &AddSchedule) -> Exit {
    let schedule = match arguments.schedule() {
        Ok(schedule) => schedule,
        Err(error) => return cmd::report_error(&error),
    };
    let queue = match arguments.queue.connect().await {
        Ok(queue) => queue,
        Err(exit) => return exit,
    };
    match queue.add_schedule(&schedule).await {
        Ok(row) if arguments.queue.json => cmd::print(line(&row).as_bytes()),
        Ok(row) => cmd::print(format!("next: {}\n", shown(row.next_at)).as_bytes()),
        Err(error) => cmd::report_error(&error),
    }
}

async fn list(arguments: &QueueArgs) -> Exit {
    let queue = match arguments.connect().await {
        Ok(queue) => queue,
        Err(exit) => return exit,
    };
    let rows = match queue.schedules().await {
        Ok(rows) => rows,
        Err(error) => return cmd::report_error(&error),
    };
    let text = if arguments.json {
        rows.iter().map(line).collect()
    } else if rows.is_empty() {
        "no schedules\n".to_owned()
    } else {
        table(&rows)
    };
    cmd::print(text.as_bytes())
}

async fn remove(arguments: &RemoveSchedule) -> Exit {
    let queue = match arguments.queue.connect().await {
        Ok(queue) => queue,
        Err(exit) => return exit,
    };
    match queue.remove_schedule(&arguments.name).await {
        Ok(true) => Exit::Success,
        Ok(false) => {
            report::print_line(&format!(
                "there is no schedule {:?} in {}",
                arguments.name,
                queue.table()
            ));
            Exit::Refused
        }
        Err(error) => cmd::report_error(&error),
    }
}

fn shown(at: Option<SystemTime>) -> String {
    at.and_then(humanize::rfc3339).unwrap_or_else(|| "-".to_owned())
}

fn table(rows: &[ScheduleRow]) -> String {
    let heads = ["NAME", "CRON", "TIME ZONE", "CATCH-UP", "NEXT", "LAST"];
    let mut lines = vec![heads.map(str::to_owned)];
    let clean = humanize::without_control_chars;
    lines.extend(rows.iter().map(|row| {
        [
            clean(&row.name),
            clean(&row.cron),
            clean(&row.time_zone),
            clean(&row.catch_up),
            shown(row.next_at),
            shown(row.last_at),
        ]
    }));
    columns(&lines)
}

fn line(row: &ScheduleRow) -> String {
    let time = |at: Option<SystemTime>| at.and_then(humanize::rfc3339);
    let payload: Option<serde_json::Value> = serde_json::from_str(&row.payload).ok();
    let line = json!({
        "name": row.name, "cron": row.cron, "time_zone": row.time_zone, "catch_up": row.catch_up,
        "next_at": time(row.next_at), "last_at": time(row.last_at), "payload": payload,
        "priority": row.priority, "max_attempts": row.max_attempts,
    });
    format!("{line}\n")
}
