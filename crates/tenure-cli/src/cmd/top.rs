//! `tenure top`: holders and waiters, or the jobs of a queue, in a terminal, updated continuously.

mod holds;
mod jobs;
mod screen;

use std::io::IsTerminal as _;
use std::time::Duration;

use clap::Args;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use tokio::sync::mpsc;

use crate::args::store::StoreUrl;
use crate::args::value::poll_interval;
use crate::exit::{self, Exit};
use crate::queue_monitor::QueueMonitor;
use crate::report;
use holds::HoldsScreen;
use jobs::{JobsScreen, MAX_JOBS};
use screen::Screen;

#[derive(Args)]
#[command(after_help = exit::TOP)]
pub(crate) struct Top {
    #[command(flatten)]
    pub(crate) store: StoreUrl,
    /// Interval between updates
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = poll_interval)]
    every: Duration,
    /// Show the jobs of this queue in PostgreSQL instead: number of jobs, rates, running and failed jobs
    #[arg(long, value_name = "TABLE", conflicts_with = "prefix")]
    queue: Option<String>,
    /// Only names with this prefix
    #[arg(default_value = "")]
    prefix: String,
}

impl Top {
    /// The reason to refuse a queue on a store that has none.
    pub(crate) fn usage_error(&self) -> Option<String> {
        let refused = self.queue.is_some() && self.store.postgres_url().is_none();
        refused.then(|| {
            "--queue shows jobs, which need PostgreSQL: give its URL with --store postgres://…"
                .to_owned()
        })
    }
}

pub(crate) fn run(arguments: &Top) -> Exit {
    if !std::io::stdout().is_terminal() {
        let instead = match &arguments.queue {
            Some(_) => "`tenure job ls`",
            None => "`tenure ls` or `tenure watch`",
        };
        report::print_line(&format!("top needs a terminal: use {instead} here"));
        return Exit::Failed;
    }
    super::on_runtime(async {
        match (&arguments.queue, arguments.store.postgres_url()) {
            (Some(queue), Some(url)) => show_jobs(arguments, url, queue).await,
            _ => show_holds(arguments).await,
        }
    })
}

async fn show_holds(arguments: &Top) -> Exit {
    let client = match arguments.store.connect().await {
        Ok(client) => client,
        Err(error) => return super::report_error(&error),
    };
    let screen = HoldsScreen::new(client.store().to_string());
    run_screen(arguments.every, screen, async || client.list(&arguments.prefix).await).await
}

async fn show_jobs(arguments: &Top, url: &str, queue: &str) -> Exit {
    let monitor = match QueueMonitor::connect(url, queue).await {
        Ok(monitor) => monitor,
        Err(error) => return super::report_error(&error),
    };
    let screen = JobsScreen::new(monitor.queue().table());
    run_screen(arguments.every, screen, async || {
        let reading = monitor.read(MAX_JOBS).await?;
        let running = &reading.summary.running;
        let running_for = running.iter().map(|job| monitor.running_for(job)).collect();
        Ok((reading, running_for))
    })
    .await
}

/// Shows a screen until the user quits; `read` reads the store.
async fn run_screen<S: Screen>(
    every: Duration,
    mut screen: S,
    read: impl AsyncFn() -> tenure::Result<S::Data>,
) -> Exit {
    // Before the terminal is switched to the full screen: the error of a store that cannot be read stays readable.
    match read().await {
        Ok(data) => screen.update(data),
        Err(error) => {
            super::report_error(&error);
            return Exit::Failed;
        }
    }
    let mut terminal = match ratatui::try_init() {
        Ok(terminal) => terminal,
        Err(error) => return super::fail("cannot use the terminal", &error),
    };
    let ended = refresh_until_quit(every, &mut screen, &mut terminal, read).await;
    ratatui::restore();
    match ended {
        Ok(()) => Exit::Success,
        Err(error) => super::fail("cannot use the terminal", &error),
    }
}

async fn refresh_until_quit<S: Screen>(
    every: Duration,
    screen: &mut S,
    terminal: &mut ratatui::DefaultTerminal,
    read: impl AsyncFn() -> tenure::Result<S::Data>,
) -> std::io::Result<()> {
    let mut typed = key_events()?;
    let mut last_error: Option<String> = None;
    loop {
        terminal.draw(|frame| screen.draw(frame, last_error.as_deref()))?;
        let refresh = async {
            tokio::time::sleep(every).await;
            read().await
        };
        tokio::select! {
            biased;
            event = typed.recv() => match event {
                Some(Event::Key(key)) if quits(key) => return Ok(()),
                Some(Event::Key(key)) if key.kind != KeyEventKind::Release => match key.code {
                    KeyCode::Down | KeyCode::Char('j') => screen.selection().select_next(),
                    KeyCode::Up | KeyCode::Char('k') => screen.selection().select_previous(),
                    code => screen.press(code),
                },
                None => return Ok(()),
                Some(_) => {}
            },
            refreshed = refresh => match refreshed {
                Ok(data) => {
                    screen.update(data);
                    last_error = None;
                }
                Err(error) => last_error = Some(error.chain()),
            },
        }
    }
}

/// True if a key press ends the program.
fn quits(key: KeyEvent) -> bool {
    key.kind != KeyEventKind::Release
        && match key.code {
            KeyCode::Char('q') | KeyCode::Esc => true,
            KeyCode::Char('c') => key.modifiers.contains(KeyModifiers::CONTROL),
            _ => false,
        }
}

/// Events of the keyboard, read on a separate thread: reading blocks.
fn key_events() -> std::io::Result<mpsc::Receiver<Event>> {
    let (send, typed) = mpsc::channel(64);
    let read = move || {
        while let Ok(event) = event::read() {
            if send.blocking_send(event).is_err() {
                return;
            }
        }
    };
    std::thread::Builder::new().name("keys".to_owned()).spawn(read)?;
    Ok(typed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_keys_quit() {
        let key = |code, modifiers| quits(KeyEvent::new(code, modifiers));
        for code in [KeyCode::Char('q'), KeyCode::Esc] {
            assert!(key(code, KeyModifiers::NONE), "{code:?}");
        }
        assert!(key(KeyCode::Char('c'), KeyModifiers::CONTROL));
        assert!(!key(KeyCode::Char('c'), KeyModifiers::NONE));
        assert!(!key(KeyCode::Down, KeyModifiers::NONE));
    }
}
