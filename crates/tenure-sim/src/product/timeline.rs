//! The timeline of a run: one line per event, for people.

use super::referee::seconds;

/// Lines of a run.
#[derive(Debug, Default)]
pub(super) struct Timeline(Option<Vec<String>>);

impl Timeline {
    /// A timeline that records its lines.
    pub(super) fn recorded() -> Self {
        Self(Some(Vec::new()))
    }

    pub(super) fn is_recorded(&self) -> bool {
        self.0.is_some()
    }

    pub(super) fn add(&mut self, at: u64, actor: &str, text: &str) {
        if let Some(lines) = &mut self.0 {
            lines.push(format!("{:>12}  {actor:<9} {text}", seconds(at)));
        }
    }

    pub(super) fn into_lines(self) -> Vec<String> {
        self.0.unwrap_or_default()
    }
}
