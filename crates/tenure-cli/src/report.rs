//! What is told on stderr: events for machines, lines for people.
//!
//! A thread of its own writes: a reader that does not read must not keep the lock from being renewed.

use std::error::Error as StdError;
use std::io::{self, IsTerminal as _, Write as _};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, SystemTime};

use serde::Serialize;
use tenure::Key;
use tokio::sync::oneshot;

use crate::args::Output;

/// Something that happened.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum Event {
    /// Another holds it, and we wait.
    Waiting {
        /// Who holds it.
        holder: Option<String>,
        /// Our place in the queue, from 1.
        place: Option<usize>,
    },
    /// It is ours.
    Acquired {
        /// The fencing token.
        token: String,
    },
    /// It did not become ours.
    AcquireFailed {
        /// Why.
        reason: String,
    },
    /// It ended against our will.
    Lost {
        /// Why.
        reason: String,
    },
    /// We gave it back.
    Released,
    /// Somebody waits.
    HandoffRequested,
    /// Something failed.
    Error {
        /// What.
        message: String,
    },
    /// We were told to stop.
    Stopped {
        /// By which signal.
        #[serde(skip_serializing_if = "Option::is_none")]
        signal: Option<&'static str>,
    },
}

/// The lines that may wait for a slow reader; what does not fit is dropped.
const CAPACITY: usize = 1024;

/// How long the end waits for a reader.
const PATIENCE: Duration = Duration::from_secs(1);

/// Tells what happens to the lock of one name.
pub(crate) struct Reporter {
    name: Key,
    output: Output,
    writer: SyncSender<Item>,
    /// There is a waiting line on the terminal.
    line: bool,
}

enum Item {
    Text(Vec<u8>),
    Flush(oneshot::Sender<()>),
}

impl Reporter {
    pub(crate) fn new(name: Key, output: Output) -> Self {
        let (writer, items) = sync_channel(CAPACITY);
        // Without a thread nothing is told; the lock works.
        let _ = thread::Builder::new().name("stderr".to_owned()).spawn(move || write(&items));
        Self { name, output, writer, line: false }
    }

    /// Tells an event to machines.
    pub(crate) fn event(&mut self, event: &Event) {
        #[derive(Serialize)]
        struct Line<'a> {
            #[serde(flatten)]
            event: &'a Event,
            name: &'a str,
            at: String,
        }
        if !self.output.json {
            return;
        }
        let at = humantime::format_rfc3339_millis(SystemTime::now()).to_string();
        if let Ok(line) = serde_json::to_string(&Line { event, name: self.name.as_str(), at }) {
            self.send(format!("{line}\n"));
        }
    }

    /// Tells people why it failed: always, in one line; machines get it as an event.
    pub(crate) fn complain(&mut self, message: &str) {
        if self.output.json {
            self.event(&Event::Error { message: message.to_owned() });
        } else {
            self.clear();
            self.send(complaint(message));
        }
    }

    /// Whether events are told.
    pub(crate) fn has_events(&self) -> bool {
        self.output.json
    }

    /// Whether a waiting line makes sense.
    pub(crate) fn has_line(&self) -> bool {
        !self.output.json && !self.output.quiet && io::stderr().is_terminal()
    }

    /// Shows the one line that is updated in place.
    pub(crate) fn line(&mut self, text: &str) {
        self.line = true;
        self.send(format!("\r\x1b[Ktenure: {text}"));
    }

    /// Takes that line away.
    pub(crate) fn clear(&mut self) {
        if std::mem::take(&mut self.line) {
            self.send("\r\x1b[K".to_owned());
        }
    }

    /// Waits until all is written, or its reader has had its time.
    pub(crate) async fn flush(&mut self) {
        let (done, written) = oneshot::channel();
        if self.writer.try_send(Item::Flush(done)).is_ok() {
            let _ = tokio::time::timeout(PATIENCE, written).await;
        }
    }

    fn send(&self, text: String) {
        let _ = self.writer.try_send(Item::Text(text.into_bytes()));
    }
}

/// Prints one line about a failure where there is no reporter.
pub(crate) fn complain(message: &str) {
    let _ = io::stderr().write_all(complaint(message).as_bytes());
}

/// An error and its causes, in one line.
pub(crate) fn chain(error: &dyn StdError) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        // Some libraries repeat their cause.
        if !text.ends_with(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        cause = error.source();
    }
    text
}

fn complaint(message: &str) -> String {
    let line: String = message.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    format!("tenure: {line}\n")
}

fn write(items: &Receiver<Item>) {
    let mut stderr = io::stderr();
    while let Ok(item) = items.recv() {
        match item {
            // A reader that went away misses the rest; the command goes on.
            Item::Text(text) => drop(stderr.write_all(&text)),
            Item::Flush(done) => drop(done.send(())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_told_once_and_in_one_line() {
        let cause = io::Error::other("connection refused");
        let error =
            tenure::Error::new(tenure::ErrorKind::Unavailable, "cannot claim").because(cause);
        assert_eq!(chain(&error), "cannot claim: connection refused");
        assert_eq!(complaint("a\nb\x1b[2J"), "tenure: a b [2J\n");
    }

    #[test]
    fn events_have_the_names_that_are_promised() {
        let text = |event: &Event| serde_json::to_string(event).unwrap();
        assert_eq!(text(&Event::Released), r#"{"event":"released"}"#);
        assert_eq!(
            text(&Event::AcquireFailed { reason: "held".into() }),
            r#"{"event":"acquire_failed","reason":"held"}"#
        );
        assert_eq!(text(&Event::HandoffRequested), r#"{"event":"handoff_requested"}"#);
        assert_eq!(
            text(&Event::Waiting { holder: None, place: Some(2) }),
            r#"{"event":"waiting","holder":null,"place":2}"#
        );
        assert_eq!(
            text(&Event::Stopped { signal: Some("SIGTERM") }),
            r#"{"event":"stopped","signal":"SIGTERM"}"#
        );
    }
}
