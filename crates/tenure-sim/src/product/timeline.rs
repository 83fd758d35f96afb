//! The timeline of a run: one line per event, for people.

use std::fmt::{self, Write as _};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use super::referee::seconds;
use super::world;

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

/// Adds the events of the shipped code to the timeline.
#[derive(Debug)]
pub(super) struct LogLines;

impl Subscriber for LogLines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event()
            && metadata.target().starts_with("tenure")
            && *metadata.level() <= Level::DEBUG
    }

    fn new_span(&self, _span: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut text = Fields(event.metadata().name().to_owned());
        event.record(&mut text);
        world::log(&text.0);
    }

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}

/// Fields of an event, as text.
struct Fields(String);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string cannot fail.
        let _ = write!(self.0, " {}={value:?}", field.name());
    }
}
