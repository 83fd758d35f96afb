//! Output on stderr or on the descriptor of `--events-fd`: events for programs, lines for people.
//!
//! A separate thread writes: a pipe whose reader does not read must not block the renewal of the lock.

use std::fs::File;
use std::io::{self, IsTerminal as _, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, SystemTime};

use serde::Serialize;
use serde_json::Value;
use tenure::{Key, Store, StoreOutage};
use tokio::sync::oneshot;

use crate::args::output::Output;
use crate::humanize;

/// An event, as `--json` prints it. Names and fields are part of the interface.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum Event {
    /// Another process holds the lock, and this one waits.
    Waiting {
        /// Id of the holder.
        holder: Option<String>,
        /// Place of this process in the queue, from 1.
        place: Option<usize>,
    },
    /// The lock or leadership was acquired.
    Acquired {
        /// The fencing token, if the store has ordered ones.
        token: Option<String>,
        /// Number of the claim in an election, counted from the last leadership.
        #[serde(skip)]
        attempt: Option<u32>,
    },
    /// The lock or leadership was not acquired.
    AcquireFailed {
        /// Reason.
        reason: String,
    },
    /// The hold ended without a release.
    Lost {
        /// Reason.
        reason: String,
    },
    /// The hold was released.
    Released,
    /// A waiter has asked for the lock.
    HandoffRequested,
    /// The name is also held as the other kind; the two do not exclude each other.
    OtherKindHeld {
        /// The other kind: lock or semaphore.
        kind: &'static str,
        /// Id of one holder.
        holder: Option<String>,
    },
    /// A participant of an election changed its state.
    StateChange {
        /// The state before.
        from: String,
        /// The state now.
        to: String,
    },
    /// Another process has run the command in this slot, or is running it.
    Skipped {
        /// Id of that process.
        #[serde(skip_serializing_if = "Option::is_none")]
        holder: Option<String>,
        /// The slot.
        slot: String,
    },
    /// A job was claimed, and its command was started.
    JobStarted {
        /// Id of the job.
        job: String,
        /// Number of the attempt.
        attempt: u32,
        /// The fencing token.
        token: String,
    },
    /// The run of a job ended.
    JobEnded {
        /// Id of the job.
        job: String,
        /// Number of the attempt.
        attempt: u32,
        /// Outcome: completed, retried, failed, lost, released or unsettled.
        outcome: &'static str,
        /// Reason, if the job was not completed.
        #[serde(skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    /// The queue was paused: no job is claimed, and running jobs go on.
    Paused {
        /// Reason that the operator gave.
        #[serde(skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    /// The queue was resumed.
    Resumed,
    /// An operation failed.
    Error {
        /// Error message.
        message: String,
        /// The operation was the health check of a leadership.
        #[serde(skip)]
        health_check: bool,
    },
    /// The store answers again, after an `error` that reported it as away.
    StoreBack {
        /// Time for which it was away, in milliseconds.
        away_ms: u64,
    },
    /// The command is stopping.
    Stopped {
        /// Signal that stopped it.
        #[serde(skip_serializing_if = "Option::is_none")]
        signal: Option<&'static str>,
        /// Other reason.
        #[serde(skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
}

/// Maximum number of lines queued for a slow reader; further lines are dropped.
const MAX_QUEUED_LINES: usize = 1024;

/// Time that [`Reporter::flush`] waits for a slow reader.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// Reports the events of one name on stderr.
pub(crate) struct Reporter {
    name: Key,
    output: Output,
    /// The two numbers of the advisory lock, if the user named it by numbers.
    pair: Option<(i32, i32)>,
    /// Channel to the writing thread; `None` if it could not be started: then the caller's thread writes.
    writer: Option<SyncSender<WriterMessage>>,
    /// The progress line is on the terminal.
    progress_shown: AtomicBool,
    /// The log says that the command waits.
    wait_logged: AtomicBool,
}

enum WriterMessage {
    Text(Vec<u8>),
    /// A new progress line, in place of the one before.
    Progress(String),
    ClearProgress,
    /// Output of a command, and a channel to say that it is written.
    Output(Vec<u8>, OutputStream, SyncSender<()>),
    Flush(oneshot::Sender<()>),
}

/// Stream of a command whose output is passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OutputStream {
    Stdout,
    Stderr,
}

impl Reporter {
    /// Starts the writing thread. It writes to `events` if given, else to stderr.
    pub(crate) fn new(name: Key, output: Output, events: Option<File>) -> Self {
        let (writer, items) = sync_channel(MAX_QUEUED_LINES);
        let target: Box<dyn Write + Send> = match events {
            Some(file) => Box::new(file),
            None => Box::new(io::stderr()),
        };
        let thread = thread::Builder::new().name("stderr".to_owned());
        let thread = thread.spawn(move || write_loop(&items, target));
        let writer = thread.is_ok().then_some(writer);
        Self {
            name,
            output,
            pair: None,
            writer,
            progress_shown: AtomicBool::new(false),
            wait_logged: AtomicBool::new(false),
        }
    }

    /// Uses the log format of pgleaderlock if two numbers name the lock.
    pub(crate) fn with_pair(self, pair: Option<(i32, i32)>) -> Self {
        Self { pair, ..self }
    }

    /// Prints an event as JSON, with `--json`.
    pub(crate) fn event(&self, event: &Event) {
        #[derive(Serialize)]
        struct EventLine<'a> {
            #[serde(flatten)]
            event: &'a Event,
            name: &'a str,
            at: String,
        }
        if !self.output.has_events() {
            return;
        }
        let at = humantime::format_rfc3339_millis(SystemTime::now()).to_string();
        if let Ok(line) = serde_json::to_string(&EventLine { event, name: self.name.as_str(), at })
        {
            self.send(format!("{line}\n"));
        }
    }

    /// Prints an event: as JSON with `--json`, else as a log line unless `--quiet` is given.
    pub(crate) fn log(&self, event: &Event) {
        if self.output.has_events() {
            self.event(event);
        } else if !self.output.quiet {
            self.send(match self.pair {
                Some(pair) => pair_line(event, pair),
                None => log_line(event, &self.name),
            });
        }
    }

    /// Prints that a leadership has recovered without a loss, in the words of pgleaderlock. Other logs have only the
    /// change of the state.
    pub(crate) fn log_recovery(&self) {
        if let Some((first, second)) =
            self.pair.filter(|_| !self.has_events() && !self.output.quiet)
        {
            self.send(format!("leadership_recovered key1={first} key2={second}\n"));
        }
    }

    /// Prints an error: as an event with `--json`, else as one line, even with `--quiet`.
    pub(crate) fn error(&self, message: &str) {
        if self.output.has_events() {
            self.event(&Event::Error { message: message.to_owned(), health_check: false });
        } else {
            self.clear_progress();
            self.send(stderr_line(message));
        }
    }

    /// Prints a warning: `event` with `--json`, else `message` unless `--quiet` is given.
    pub(crate) fn warn(&self, event: &Event, message: &str) {
        if self.output.has_events() {
            self.event(event);
        } else if !self.output.quiet {
            self.clear_progress();
            self.send(stderr_line(message));
        }
    }

    /// Reports that the store is away, even with `--quiet`, or that it is back.
    pub(crate) fn outage(&self, outage: &StoreOutage) {
        match outage {
            StoreOutage::Back { after, .. } => self.warn(
                &Event::StoreBack { away_ms: u64::try_from(after.as_millis()).unwrap_or(u64::MAX) },
                &format!("{}: {outage}", self.name),
            ),
            _ => self.error(&format!("{}: {outage}", self.name)),
        }
    }

    /// Prints a line.
    pub(crate) fn info(&self, message: &str) {
        self.send(stderr_line(message));
    }

    /// True if the log has the words of pgleaderlock.
    pub(crate) fn speaks_as_pgleaderlock(&self) -> bool {
        self.pair.is_some() && !self.has_events()
    }

    /// True if events are printed as JSON.
    pub(crate) fn has_events(&self) -> bool {
        self.output.has_events()
    }

    /// True if a progress line can be shown: stderr is a terminal, without `--json` and `--quiet`.
    pub(crate) fn shows_progress(&self) -> bool {
        !self.output.has_events() && !self.output.quiet && io::stderr().is_terminal()
    }

    /// True if a wait is reported by one line, because stderr is no terminal.
    pub(crate) fn logs_waits(&self) -> bool {
        !self.output.has_events() && !self.output.quiet && !io::stderr().is_terminal()
    }

    /// Says in a log that the command waits.
    pub(crate) fn log_wait(&self, text: &str) {
        self.wait_logged.store(true, Ordering::Relaxed);
        self.send(stderr_line(text));
    }

    /// Says in a log that the wait has ended with the lock, if the log says that the command waits.
    pub(crate) fn log_wait_over(&self, waited: Duration) {
        if self.wait_logged.swap(false, Ordering::Relaxed) {
            let waited = humanize::span(Duration::from_secs(waited.as_secs()));
            self.send(stderr_line(&format!("acquired {} after {waited}", self.name)));
        }
    }

    /// Prints the store's notice for its first use, if there is one.
    pub(crate) fn print_creation_notice(&self, store: &dyn Store) {
        if let Some(notice) = store.creation_notice().filter(|_| self.shows_progress()) {
            self.send(stderr_line(&notice));
        }
    }

    /// Shows the progress line, which is updated in place.
    pub(crate) fn show_progress(&self, text: &str) {
        self.progress_shown.store(true, Ordering::Relaxed);
        self.send_message(WriterMessage::Progress(text.to_owned()));
    }

    /// Removes the progress line.
    pub(crate) fn clear_progress(&self) {
        if self.progress_shown.swap(false, Ordering::Relaxed) {
            self.send_message(WriterMessage::ClearProgress);
        }
    }

    /// Writes output of a command, and waits until it is written. With a progress line on the terminal, the one thread
    /// that writes it also writes the output: in any other way the two would mix.
    pub(crate) fn pass_on(&self, bytes: &[u8], stream: OutputStream) {
        if let (Some(writer), true) = (&self.writer, self.shows_progress()) {
            let (written, done) = sync_channel(1);
            // Waits for a slow terminal, as the command itself would.
            if writer.send(WriterMessage::Output(bytes.to_owned(), stream, written)).is_ok() {
                let _ = done.recv();
            }
        } else {
            write_output(bytes, stream);
        }
    }

    /// Waits until all lines are written, at most [`FLUSH_TIMEOUT`].
    pub(crate) async fn flush(&self) {
        let (done, written) = oneshot::channel();
        if let Some(writer) = &self.writer
            && writer.try_send(WriterMessage::Flush(done)).is_ok()
        {
            let _ = tokio::time::timeout(FLUSH_TIMEOUT, written).await;
        }
    }

    fn send(&self, text: String) {
        self.send_message(WriterMessage::Text(text.into_bytes()));
    }

    fn send_message(&self, message: WriterMessage) {
        match (&self.writer, message) {
            (Some(writer), message) => drop(writer.try_send(message)),
            (None, WriterMessage::Text(text)) => drop(io::stderr().write_all(&text)),
            // Without the thread there is no progress line.
            (None, _) => {}
        }
    }
}

/// Prints the store's notice for its first use, for commands without a [`Reporter`].
pub(crate) fn print_creation_notice(store: &dyn Store) {
    if let Some(notice) = store.creation_notice().filter(|_| io::stderr().is_terminal()) {
        print_line(&notice);
    }
}

/// Prints one line on stderr, for commands without a [`Reporter`].
pub(crate) fn print_line(message: &str) {
    let _ = io::stderr().write_all(stderr_line(message).as_bytes());
}

/// `state_change from=follower to=acquiring name=demo`
fn log_line(event: &Event, name: &Key) -> String {
    let (word, fields) = event_fields(event);
    let name = name.as_str();
    let name = if needs_no_quotes(name) { name.to_owned() } else { format!("{name:?}") };
    format!("{word}{fields} name={name}\n")
}

/// `lock_acquired attempt=3 key1=1234 key2=5678`
fn pair_line(event: &Event, (first, second): (i32, i32)) -> String {
    let (word, fields) = match event {
        Event::Error { message, health_check: true } => {
            ("health_check_failed".to_owned(), field("error", &Value::from(message.as_str())))
        }
        Event::Acquired { attempt, .. } => {
            let attempt = attempt.map(|attempt| field("attempt", &attempt.into()));
            ("lock_acquired".to_owned(), attempt.unwrap_or_default() + &event_fields(event).1)
        }
        Event::Released => ("lock_released".to_owned(), String::new()),
        _ => event_fields(event),
    };
    format!("{word}{fields} key1={first} key2={second}\n")
}

/// The name of an event, and its fields as `key=value`.
fn event_fields(event: &Event) -> (String, String) {
    let Ok(Value::Object(mut fields)) = serde_json::to_value(event) else {
        return Default::default();
    };
    let word = fields.remove("event");
    let word = word.as_ref().and_then(Value::as_str).unwrap_or_default().to_owned();
    let fields = fields.iter().filter(|(_, value)| !value.is_null());
    (word, fields.map(|(name, value)| field(name, value)).collect())
}

fn field(name: &str, value: &Value) -> String {
    match value {
        Value::String(text) if needs_no_quotes(text) => format!(" {name}={text}"),
        value => format!(" {name}={value}"),
    }
}

fn needs_no_quotes(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_./:+@".contains(c))
}

/// The system's text for an error, without its number.
pub(crate) fn os_error_text(error: &io::Error) -> String {
    let text = error.to_string();
    match text.rsplit_once(" (os error ") {
        Some((text, _)) => text.to_owned(),
        None => text,
    }
}

fn stderr_line(message: &str) -> String {
    let line: String = message.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    format!("tenure: {line}\n")
}

/// Writes output of a command to the same stream of this process.
fn write_output(bytes: &[u8], stream: OutputStream) {
    // A closed stream of ours must not stop the command.
    let _ = match stream {
        OutputStream::Stdout => {
            let mut stdout = io::stdout().lock();
            stdout.write_all(bytes).and_then(|()| stdout.flush())
        }
        OutputStream::Stderr => io::stderr().write_all(bytes),
    };
}

/// Moves to the beginning of the terminal's line, and clears it.
const CLEAR_LINE: &str = "\r\x1b[K";

fn write_loop(items: &Receiver<WriterMessage>, mut target: Box<dyn Write + Send>) {
    // The progress line is the last thing on the terminal.
    let mut progress_shown = false;
    // The last output of a command does not end with a line feed. A line of ours then begins a new line: it would be
    // appended to that output, or erase it.
    let mut line_open = false;
    while let Ok(item) = items.recv() {
        let clear = if progress_shown { CLEAR_LINE } else { "" };
        // A closed stderr must not stop the command: errors are ignored.
        let mut write = |parts: [&[u8]; 2]| drop(target.write_all(&parts.concat()));
        match item {
            WriterMessage::Flush(done) => {
                let _ = done.send(());
                continue;
            }
            WriterMessage::Output(bytes, stream, written) => {
                write([clear.as_bytes(), b""]);
                write_output(&bytes, stream);
                line_open = bytes.last().is_some_and(|last| *last != b'\n');
                let _ = written.send(());
            }
            WriterMessage::ClearProgress => write([clear.as_bytes(), b""]),
            WriterMessage::Text(text) => {
                let begin = if std::mem::take(&mut line_open) { "\n" } else { clear };
                write([begin.as_bytes(), &text]);
            }
            WriterMessage::Progress(line) => {
                let begin = if std::mem::take(&mut line_open) { "\n" } else { CLEAR_LINE };
                write([begin.as_bytes(), format!("tenure: {line}").as_bytes()]);
                progress_shown = true;
                continue;
            }
        }
        progress_shown = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_line_without_control_characters() {
        assert_eq!(stderr_line("a\nb\x1b[2J"), "tenure: a b [2J\n");
    }

    #[test]
    fn a_log_has_one_line_an_event() {
        let key = Key::new("demo").unwrap();
        let change = Event::StateChange { from: "follower".into(), to: "leader".into() };
        assert_eq!(log_line(&change, &key), "state_change from=follower to=leader name=demo\n");
        let lost = Event::Lost { reason: "the \"end\"\n".into() };
        let key = Key::new("a b").unwrap();
        assert_eq!(log_line(&lost, &key), "lost reason=\"the \\\"end\\\"\\n\" name=\"a b\"\n");
    }

    #[test]
    fn a_lock_that_numbers_name_is_told_in_the_words_of_pgleaderlock() {
        let change = Event::StateChange { from: "follower".into(), to: "acquiring".into() };
        let line = pair_line(&change, (1234, -5));
        assert_eq!(line, "state_change from=follower to=acquiring key1=1234 key2=-5\n");
        let acquired = Event::Acquired { token: Some("7".into()), attempt: Some(3) };
        let line = pair_line(&acquired, (1, 2));
        assert_eq!(line, "lock_acquired attempt=3 token=7 key1=1 key2=2\n");
        assert_eq!(pair_line(&Event::Released, (1, 2)), "lock_released key1=1 key2=2\n");
        let failed = Event::Error { message: "connection closed".into(), health_check: true };
        let line = pair_line(&failed, (1, 2));
        assert_eq!(line, "health_check_failed error=\"connection closed\" key1=1 key2=2\n");
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
        let acquired = Event::Acquired { token: None, attempt: None };
        assert_eq!(text(&acquired), r#"{"event":"acquired","token":null}"#);
        assert_eq!(log_line(&acquired, &Key::new("demo").unwrap()), "acquired name=demo\n");
        assert_eq!(
            text(&Event::Waiting { holder: None, place: Some(2) }),
            r#"{"event":"waiting","holder":null,"place":2}"#
        );
        assert_eq!(
            text(&Event::Stopped { signal: Some("SIGTERM"), reason: None }),
            r#"{"event":"stopped","signal":"SIGTERM"}"#
        );
    }
}
