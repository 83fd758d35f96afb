//! Interface of the screens, and the table that they share.

use ratatui::Frame;
use ratatui::crossterm::event::KeyCode;
use ratatui::layout::{Constraint, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::widgets::{Row, Table, TableState};

/// Contents of the terminal.
pub(super) trait Screen {
    /// Data of one reading of the store.
    type Data;

    /// Shows a new reading.
    fn update(&mut self, data: Self::Data);

    /// Selected row.
    fn selection(&mut self) -> &mut TableState;

    /// Handles a key that neither ends the program nor moves the selection.
    fn press(&mut self, _code: KeyCode) {}

    /// Draws the last reading, and why the one after it failed.
    fn draw(&mut self, frame: &mut Frame<'_>, error: Option<&str>);
}

/// Draws a table with titles and a selected row.
pub(super) fn draw_table<'a, const N: usize>(
    frame: &mut Frame<'_>,
    area: Rect,
    columns: [(&'a str, Constraint); N],
    rows: impl Iterator<Item = Row<'a>>,
    selection: &mut TableState,
) {
    let titles = Row::new(columns.map(|(title, _)| title));
    let table = Table::new(rows, columns.map(|(_, width)| width))
        .header(titles.style(Style::new().add_modifier(Modifier::BOLD)))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    frame.render_stateful_widget(table, area, selection);
}
