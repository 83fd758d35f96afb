//! Screen of holders and waiters.

use ratatui::Frame;
use ratatui::crossterm::event::KeyCode;
use ratatui::layout::{Constraint, Layout};
use ratatui::text::Line;
use ratatui::widgets::{Block, Paragraph, Row, TableState};
use tenure::store::KeyState;

use super::screen::{Screen, draw_table};
use crate::{humanize, keys};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sort {
    Waiting,
    Held,
    Name,
}

/// Holders and waiters of a store.
pub(super) struct HoldsScreen {
    store: String,
    keys: Vec<KeyState>,
    sort: Sort,
    selection: TableState,
}

impl HoldsScreen {
    pub(super) fn new(store: String) -> Self {
        Self { store, keys: Vec::new(), sort: Sort::Waiting, selection: TableState::new() }
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

    fn headline(&self, error: Option<&str>) -> String {
        let (names, waiting) =
            (self.keys.len(), self.keys.iter().map(|key| key.waiters.len()).sum::<usize>());
        let sort = match self.sort {
            Sort::Waiting => "waiting",
            Sort::Held => "held for",
            Sort::Name => "name",
        };
        match error {
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

impl Screen for HoldsScreen {
    type Data = Vec<KeyState>;

    /// The selected name stays selected, in whatever row it is now.
    fn update(&mut self, keys: Vec<KeyState>) {
        let selected = self.selected().map(|key| (key.key.clone(), key.space));
        self.keys = keys;
        self.sort_keys();
        let found = selected.and_then(|(name, space)| {
            self.keys.iter().position(|key| key.key == name && key.space == space)
        });
        let first = (!self.keys.is_empty()).then_some(0);
        self.selection.select(found.or(first));
    }

    fn selection(&mut self) -> &mut TableState {
        &mut self.selection
    }

    fn press(&mut self, code: KeyCode) {
        if code == KeyCode::Char('s') {
            self.sort = match self.sort {
                Sort::Waiting => Sort::Held,
                Sort::Held => Sort::Name,
                Sort::Name => Sort::Waiting,
            };
            self.keys.sort_by(|a, b| a.key.cmp(&b.key));
            self.sort_keys();
        }
    }

    fn draw(&mut self, frame: &mut Frame<'_>, error: Option<&str>) {
        let detail = self.detail();
        let height =
            u16::try_from(detail.len()).unwrap_or(u16::MAX).min(frame.area().height / 3) + 2;
        let parts = [Constraint::Length(1), Constraint::Min(3), Constraint::Length(height)];
        let [top, middle, bottom] = Layout::vertical(parts).areas(frame.area());
        frame.render_widget(Paragraph::new(self.headline(error)), top);
        let columns = [
            ("NAME", Constraint::Fill(3)),
            ("KIND", Constraint::Length(9)),
            ("HELD BY", Constraint::Fill(3)),
            ("FOR", Constraint::Length(12)),
            ("LEASE", Constraint::Length(12)),
            ("WAITING", Constraint::Length(7)),
            ("LONGEST WAIT", Constraint::Length(12)),
        ];
        draw_table(frame, middle, columns, self.keys.iter().map(row), &mut self.selection);
        let title = self.selected().map_or_else(String::new, |key| format!(" {} ", key.key));
        frame.render_widget(Paragraph::new(detail).block(Block::bordered().title(title)), bottom);
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
    use std::time::Duration;

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

    fn drawn(screen: &mut HoldsScreen, error: Option<&str>) -> String {
        let mut terminal = Terminal::new(TestBackend::new(110, 20)).unwrap();
        terminal.draw(|frame| screen.draw(frame, error)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn the_most_waited_for_comes_first_and_is_shown_closely() {
        let mut screen = HoldsScreen::new("memory:".to_owned());
        screen.update(vec![key("calm", 90, 0), key("busy", 5, 2)]);
        let text = drawn(&mut screen, None);
        let at = |what: &str| text.find(what).unwrap_or_else(|| panic!("no {what} in {text}"));
        assert!(at("busy") < at("calm"), "{text}");
        assert!(text.contains("2 names · 2 waiting"), "{text}");
        assert!(text.contains("waits 2nd web-2, for 3s"), "{text}");
    }

    #[test]
    fn the_choice_stays_with_its_name() {
        let mut screen = HoldsScreen::new("memory:".to_owned());
        screen.update(vec![key("a", 1, 0), key("b", 2, 1)]);
        screen.selection().select_next();
        assert_eq!(screen.selected().unwrap().key.as_str(), "a");
        screen.update(vec![key("a", 1, 3), key("b", 2, 1)]);
        assert_eq!(screen.selected().unwrap().key.as_str(), "a");
        screen.press(KeyCode::Char('s'));
        assert_eq!(screen.sort, Sort::Held);
    }

    #[test]
    fn a_store_that_fails_leaves_the_last_look_on_the_screen() {
        let mut screen = HoldsScreen::new("memory:".to_owned());
        screen.update(vec![key("a", 1, 0)]);
        let text = drawn(&mut screen, Some("the store is down"));
        assert!(text.contains("the store is down") && text.contains("web-1"), "{text}");
        screen.update(vec![]);
        assert!(drawn(&mut screen, None).contains("nothing is held"));
    }
}
