//! Screen of a job queue.

use std::time::{Duration, SystemTime};

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Block, Paragraph, Row, TableState, Wrap};
use tenure::jobs::{JobRow, JobState};

use super::screen::{Screen, draw_table};
use crate::humanize;
use crate::queue_monitor::QueueReading;

/// Maximum number of running and of failed jobs on the screen.
pub(super) const MAX_JOBS: usize = 50;
/// Maximum number of characters of a payload and of an error that are shown of the selected job.
const MAX_TEXT: usize = 2_000;

/// Jobs of a queue.
pub(super) struct JobsScreen {
    table: String,
    /// Running jobs, then failed jobs, each with the time for which it has run at least.
    jobs: Vec<(JobRow, Option<Duration>)>,
    /// Counts and rates.
    counts: String,
    selection: TableState,
}

impl JobsScreen {
    pub(super) fn new(table: String) -> Self {
        let (jobs, counts) = (Vec::new(), String::new());
        Self { table, jobs, counts, selection: TableState::new() }
    }

    fn selected(&self) -> Option<&JobRow> {
        self.jobs.get(self.selection.selected()?).map(|(job, _)| job)
    }

    fn headline(&self, error: Option<&str>) -> String {
        match error {
            Some(error) => format!("{error}; the jobs below are the last ones read"),
            None => format!("{} · ↑↓ choose, q quit", self.table),
        }
    }

    /// The selected job with its error and its payload.
    fn detail(&self) -> Vec<Line<'static>> {
        let Some(job) = self.selected() else {
            return vec![Line::from("no job runs or has failed")];
        };
        let mut lines = Vec::new();
        if let Some(error) = &job.error {
            lines.extend(text_lines("error    ", error));
        }
        if let Some(payload) = &job.payload {
            lines.extend(text_lines("payload  ", payload));
        }
        let key = job.unique_key.as_deref().map(humanize::without_control_chars);
        let key = key.map(|key| format!(", unique key {key}")).unwrap_or_default();
        lines.push(Line::from(format!("priority {}{key}", job.priority)));
        lines
    }
}

impl Screen for JobsScreen {
    type Data = (QueueReading, Vec<Option<Duration>>);

    /// The selected job stays selected, in whatever row it is now.
    fn update(&mut self, (reading, running_for): Self::Data) {
        let selected = self.selected().map(|job| job.id.clone());
        self.counts = counts(&reading);
        let running = reading.summary.running.into_iter().zip(running_for);
        let failed = reading.summary.failed.into_iter().map(|job| (job, None));
        self.jobs = running.chain(failed).collect();
        let found = selected.and_then(|id| self.jobs.iter().position(|(job, _)| job.id == id));
        let first = (!self.jobs.is_empty()).then_some(0);
        self.selection.select(found.or(first));
    }

    fn selection(&mut self) -> &mut TableState {
        &mut self.selection
    }

    fn draw(&mut self, frame: &mut Frame<'_>, error: Option<&str>) {
        let detail = self.detail();
        let height = frame.area().height / 3;
        let parts = [
            Constraint::Length(1),
            Constraint::Length(1),
            Constraint::Min(3),
            Constraint::Length(height.max(4)),
        ];
        let [top, counts, middle, bottom] = Layout::vertical(parts).areas(frame.area());
        frame.render_widget(Paragraph::new(self.headline(error)), top);
        frame.render_widget(Paragraph::new(self.counts.as_str()), counts);
        let now = SystemTime::now();
        let rows = self.jobs.iter().map(|(job, running_for)| row(job, *running_for, now));
        let columns = [
            ("JOB", Constraint::Length(12)),
            ("STATE", Constraint::Length(8)),
            ("ATTEMPT", Constraint::Length(8)),
            ("WORKER", Constraint::Fill(2)),
            ("FOR", Constraint::Length(12)),
            ("LEASE", Constraint::Length(12)),
            ("ERROR", Constraint::Fill(3)),
        ];
        draw_table(frame, middle, columns, rows, &mut self.selection);
        let title = self.selected().map_or_else(String::new, |job| {
            format!(" job {} ", humanize::without_control_chars(&job.id))
        });
        let detail = Paragraph::new(detail).wrap(Wrap { trim: false });
        frame.render_widget(detail.block(Block::bordered().title(title)), bottom);
    }
}

/// Number of jobs per state, with the rates and the age of the oldest available job.
fn counts(reading: &QueueReading) -> String {
    let rate = |rate: Option<f64>| rate.map(|rate| format!(" ({rate:.1}/s)")).unwrap_or_default();
    let parts = JobState::ALL.map(|state| {
        let more = match state {
            JobState::Available => reading
                .summary
                .oldest_available
                .map(|age| format!(" (oldest {})", humanize::span(age))),
            JobState::Completed => Some(rate(reading.rates.and_then(|rates| rates.completed))),
            JobState::Failed => Some(rate(reading.rates.and_then(|rates| rates.failed))),
            _ => None,
        };
        let name = state.to_string().to_lowercase();
        let before = if reading.is_estimate(state) { "~" } else { "" };
        let after = if reading.is_at_least(state) { "+" } else { "" };
        format!("{name} {before}{}{after}{}", reading.count(state), more.unwrap_or_default())
    });
    let paused = reading.summary.paused.as_ref().map(|pause| {
        let reason = pause.reason.as_deref().map(humanize::without_control_chars);
        format!("PAUSED{} · ", reason.map(|reason| format!(": {reason}")).unwrap_or_default())
    });
    format!("{}{}", paused.unwrap_or_default(), parts.join(" · "))
}

fn row(job: &JobRow, running_for: Option<Duration>, now: SystemTime) -> Row<'static> {
    let attempts = match job.max_attempts {
        Some(max) => format!("{}/{max}", job.attempts),
        None => job.attempts.to_string(),
    };
    let failed_for = job.failed_at.and_then(|at| now.duration_since(at).ok());
    let worker = job.locked_by.as_deref().map(humanize::without_control_chars);
    // The first line says most; the rest is below, once the job is selected.
    let error = job.error.as_deref().and_then(|error| error.lines().next()).unwrap_or("-");
    let row = Row::new([
        humanize::without_control_chars(&job.id),
        job.state.to_string().to_lowercase(),
        attempts,
        worker.unwrap_or_else(|| "-".to_owned()),
        humanize::optional_span(running_for.or(failed_for)),
        humanize::optional_span(job.left),
        humanize::without_control_chars(error),
    ]);
    match job.state {
        JobState::Failed | JobState::Expired => {
            row.style(Style::new().add_modifier(Modifier::BOLD))
        }
        _ => row,
    }
}

/// Lines of a text of the row, with a title before the first.
fn text_lines(title: &str, text: &str) -> Vec<Line<'static>> {
    let text: String = text.chars().take(MAX_TEXT).collect();
    let lines = text.lines().enumerate().map(|(at, line)| {
        let title = if at == 0 { title.to_owned() } else { " ".repeat(title.len()) };
        Line::from(title + &humanize::without_control_chars(line))
    });
    lines.collect()
}
