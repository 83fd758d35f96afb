//! `tenure top`: holders and waiters in a terminal, updated continuously. On any store that can list its keys.

use std::io::IsTerminal as _;
use std::time::Duration;

use clap::Args;
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Block, Paragraph, Row, Table, TableState};
use tenure::Client;
use tenure::store::KeyState;
use tokio::sync::mpsc;

use crate::args::store::StoreUrl;
use crate::args::value::poll_interval;
use crate::exit::{self, Exit};
use crate::{humanize, keys, report};

#[derive(Args)]
#[command(after_help = exit::TOP)]
pub(crate) struct Top {
    #[command(flatten)]
    pub(crate) store: StoreUrl,
    /// Interval between updates
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = poll_interval)]
    every: Duration,
    /// Only names with this prefix
    #[arg(default_value = "")]
    prefix: String,
}

pub(crate) fn run(arguments: &Top) -> Exit {
    if !std::io::stdout().is_terminal() {
        report::print_line("top needs a terminal: use `tenure ls` or `tenure watch` here");
        return Exit::Failed;
    }
    super::on_runtime(async {
        let client = match arguments.store.connect().await {
            Ok(client) => client,
            Err(error) => return super::report_error(&error),
        };
        let mut screen = Screen::new(client.store().to_string());
        // Before the terminal is switched to the full screen: the error of a store that cannot list stays readable.
        match client.list(&arguments.prefix).await {
            Ok(keys) => screen.update(keys),
            Err(error) => {
                super::report_error(&error);
                return Exit::Failed;
            }
        }
        let mut terminal = match ratatui::try_init() {
            Ok(terminal) => terminal,
            Err(error) => return super::fail("cannot use the terminal", &error),
        };
        let ended = run_screen(arguments, &client, &mut screen, &mut terminal).await;
        ratatui::restore();
        match ended {
            Ok(()) => Exit::Success,
            Err(error) => super::fail("cannot use the terminal", &error),
        }
    })
}

async fn run_screen(
    arguments: &Top,
    client: &Client,
    screen: &mut Screen,
    terminal: &mut ratatui::DefaultTerminal,
) -> std::io::Result<()> {
    let mut typed = key_events()?;
    loop {
        terminal.draw(|frame| screen.draw(frame))?;
        let refresh = async {
            tokio::time::sleep(arguments.every).await;
            client.list(&arguments.prefix).await
        };
        tokio::select! {
            biased;
            event = typed.recv() => match event {
                Some(Event::Key(key)) if !screen.handle_key(key) => return Ok(()),
                None => return Ok(()),
                Some(_) => {}
            },
            refreshed = refresh => match refreshed {
                Ok(keys) => screen.update(keys),
                Err(error) => screen.last_error = Some(error.chain()),
            },
        }
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sort {
    Waiting,
    Held,
    Name,
}

/// State of the screen.
struct Screen {
    store: String,
    keys: Vec<KeyState>,
    sort: Sort,
    selection: TableState,
    last_error: Option<String>,
}

impl Screen {
    fn new(store: String) -> Self {
        Self {
            store,
            keys: Vec::new(),
            sort: Sort::Waiting,
            selection: TableState::new(),
            last_error: None,
        }
    }

    /// Shows a new snapshot. The selected name stays selected, in whatever row it is now.
    fn update(&mut self, keys: Vec<KeyState>) {
        let selected = self.selected().map(|key| (key.key.clone(), key.space));
        self.keys = keys;
        self.last_error = None;
        self.sort_keys();
        let found = selected.and_then(|(name, space)| {
            self.keys.iter().position(|key| key.key == name && key.space == space)
        });
        let first = (!self.keys.is_empty()).then_some(0);
        self.selection.select(found.or(first));
    }

    fn sort_keys(&mut self) {
        let held = |key: &KeyState| key.holders.first().and_then(|holder| holder.held_for);
        match self.sort {
            // The sort is stable and the keys come in order of name: equal rows do not swap between updates.
            Sort::Waiting => {
                self.keys.sort_by_key(|key| std::cmp::Reverse((key.waiters.len(), held(key))));
            }
            Sort::Held => self.keys.sort_by_key(|key| std::cmp::Reverse(held(key))),
            Sort::Name => self.keys.sort_by(|a, b| a.key.cmp(&b.key)),
        }
    }

    fn selected(&self) -> Option<&KeyState> {
        self.keys.get(self.selection.selected()?)
    }

    /// Handles a key press. False if it ends the program.
    fn handle_key(&mut self, key: KeyEvent) -> bool {
        if key.kind == KeyEventKind::Release {
            return true;
        }
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return false,
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return false,
            KeyCode::Down | KeyCode::Char('j') => self.selection.select_next(),
            KeyCode::Up | KeyCode::Char('k') => self.selection.select_previous(),
            KeyCode::Char('s') => {
                self.sort = match self.sort {
                    Sort::Waiting => Sort::Held,
                    Sort::Held => Sort::Name,
                    Sort::Name => Sort::Waiting,
                };
                self.keys.sort_by(|a, b| a.key.cmp(&b.key));
                self.sort_keys();
            }
            _ => {}
        }
        true
    }

    fn draw(&mut self, frame: &mut Frame<'_>) {
        let detail = self.detail();
        let height =
            u16::try_from(detail.len()).unwrap_or(u16::MAX).min(frame.area().height / 3) + 2;
        let parts = [Constraint::Length(1), Constraint::Min(3), Constraint::Length(height)];
        let [top, middle, bottom] = Layout::vertical(parts).areas(frame.area());
        frame.render_widget(Paragraph::new(self.headline()), top);
        let titles = ["NAME", "KIND", "HELD BY", "FOR", "LEASE", "WAITING", "LONGEST WAIT"];
        let rows = self.keys.iter().map(row);
        let widths = [
            Constraint::Fill(3),
            Constraint::Length(9),
            Constraint::Fill(3),
            Constraint::Length(12),
            Constraint::Length(12),
            Constraint::Length(7),
            Constraint::Length(12),
        ];
        let table = Table::new(rows, widths)
            .header(Row::new(titles).style(Style::new().add_modifier(Modifier::BOLD)))
            .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
        frame.render_stateful_widget(table, middle, &mut self.selection);
        let title = self.selected().map_or_else(String::new, |key| format!(" {} ", key.key));
        frame.render_widget(Paragraph::new(detail).block(Block::bordered().title(title)), bottom);
    }

    fn headline(&self) -> String {
        let (names, waiting) =
            (self.keys.len(), self.keys.iter().map(|key| key.waiters.len()).sum::<usize>());
        let sort = match self.sort {
            Sort::Waiting => "waiting",
            Sort::Held => "held for",
            Sort::Name => "name",
        };
        match &self.last_error {
            Some(error) => format!("{error}; the list below is the last one read"),
            None => format!(
                "{} · {names} names · {waiting} waiting · sorted by {sort} · s sort, ↑↓ choose, q quit",
                self.store
            ),
        }
    }

    /// Holders and waiters of the selected name.
    fn detail(&self) -> Vec<Line<'static>> {
        let Some(key) = self.selected() else { return vec![Line::from("nothing is held")] };
        let holders = key.holders.iter().map(|holder| {
            let by = humanize::identity(holder.by.as_ref());
            let token = humanize::token(holder.token).map(|token| format!(", token {token}"));
            let held = humanize::optional_span(holder.held_for);
            format!("holds     {by}, for {held}{}", token.unwrap_or_default())
        });
        let waiters = key.waiters.iter().zip(1..).map(|(waiter, place)| {
            let by = humanize::identity(waiter.by.as_ref());
            format!(
                "waits {:<4}{by}, for {}",
                humanize::ordinal(place),
                humanize::optional_span(waiter.waited_for)
            )
        });
        holders.chain(waiters).map(Line::from).collect()
    }
}

fn row(key: &KeyState) -> Row<'static> {
    let first = key.holders.first();
    let left = first.and_then(|holder| holder.lease_left);
    Row::new([
        key.key.to_string(),
        keys::kind(key.space).to_owned(),
        first.map_or_else(|| "-".to_owned(), |holder| humanize::identity(holder.by.as_ref())),
        humanize::optional_span(first.and_then(|holder| holder.held_for)),
        humanize::optional_span(left),
        key.waiters.len().to_string(),
        humanize::optional_span(keys::longest_wait(key)),
    ])
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use tenure::store::{HolderState, Identity, KeySpace, Version, WaiterState};
    use tenure::{FencingToken, Key};

    use super::*;

    fn key(name: &str, held: u64, waiters: usize) -> KeyState {
        let by = |id: &str| Some(Identity { id: id.to_owned(), ..Identity::default() });
        let mut holder = HolderState::new(by("web-1"), FencingToken::new(0, 7));
        holder.held_for = Some(Duration::from_secs(held));
        holder.lease_left = Some(Duration::from_secs(9));
        let mut waiter = WaiterState::new(by("web-2"));
        waiter.waited_for = Some(Duration::from_secs(3));
        let mut state = KeyState::free(Key::new(name).unwrap(), KeySpace::Lock, Version::default());
        state.holders = vec![holder];
        state.waiters = vec![waiter; waiters];
        state
    }

    fn drawn(screen: &mut Screen) -> String {
        let mut terminal = Terminal::new(TestBackend::new(110, 20)).unwrap();
        terminal.draw(|frame| screen.draw(frame)).unwrap();
        terminal.backend().to_string()
    }

    fn pressed(screen: &mut Screen, code: KeyCode) -> bool {
        screen.handle_key(KeyEvent::new(code, KeyModifiers::NONE))
    }

    #[test]
    fn the_most_waited_for_comes_first_and_is_shown_closely() {
        let mut screen = Screen::new("memory:".to_owned());
        screen.update(vec![key("calm", 90, 0), key("busy", 5, 2)]);
        let text = drawn(&mut screen);
        let at = |what: &str| text.find(what).unwrap_or_else(|| panic!("no {what} in {text}"));
        assert!(at("busy") < at("calm"), "{text}");
        assert!(text.contains("2 names · 2 waiting"), "{text}");
        assert!(text.contains("waits 2nd web-2, for 3s"), "{text}");
    }

    #[test]
    fn the_choice_stays_with_its_name() {
        let mut screen = Screen::new("memory:".to_owned());
        screen.update(vec![key("a", 1, 0), key("b", 2, 1)]);
        assert!(pressed(&mut screen, KeyCode::Down));
        assert_eq!(screen.selected().unwrap().key.as_str(), "a");
        screen.update(vec![key("a", 1, 3), key("b", 2, 1)]);
        assert_eq!(screen.selected().unwrap().key.as_str(), "a");
        assert!(pressed(&mut screen, KeyCode::Char('s')));
        assert_eq!(screen.sort, Sort::Held);
        assert!(!pressed(&mut screen, KeyCode::Char('q')));
    }

    #[test]
    fn a_store_that_fails_leaves_the_last_look_on_the_screen() {
        let mut screen = Screen::new("memory:".to_owned());
        screen.update(vec![key("a", 1, 0)]);
        screen.last_error = Some("the store is down".to_owned());
        let text = drawn(&mut screen);
        assert!(text.contains("the store is down") && text.contains("web-1"), "{text}");
        screen.update(vec![]);
        assert!(drawn(&mut screen).contains("nothing is held"));
    }
}
