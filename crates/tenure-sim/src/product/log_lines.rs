//! The log of the shipped code, as lines of the timeline.

use std::fmt::{self, Write as _};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use super::world::{self, note};

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
        add_line(&text.0);
    }

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}

/// Adds a line of the shipped code to the timeline.
fn add_line(text: &str) {
    let Some(world) = world::current() else { return };
    match world.running.get() {
        Some(client) => note!(world, &format!("client {client}"), "  {text}"),
        None => note!(world, "server", "  {text}"),
    }
}

/// Fields of an event, as text.
struct Fields(String);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string cannot fail.
        let _ = write!(self.0, " {}={value:?}", field.name());
    }
}
