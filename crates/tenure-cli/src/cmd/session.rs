//! The frame around the commands that supervise other commands: `run`, `once`, `lead` and `work`.
//!
//! All four start in the same order. Signals are blocked first, because every thread inherits the mask. The runtime, the
//! reporter's thread and the listener of `--metrics` come next, and then the store. At the end the last lines are written,
//! and a Ctrl-C is passed on to the caller.

use std::fs::File;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::Signal;
use tenure::{Client, ClientBuilder};

use crate::args::output::Output;
use crate::exit::Exit;
use crate::health::{HealthState, MetricsArgs};
use crate::report::{self, Event, Reporter};
use crate::signals::{self, Signals};
use crate::{client, events_fd};

/// Inputs and outputs of a command that supervises another.
pub(super) struct Session {
    pub(super) signals: Signals,
    pub(super) reporter: Arc<Reporter>,
    pub(super) health: Arc<HealthState>,
}

/// Runs `work` in a session. Must be called before any thread is started and any file is opened.
///
/// `reporter` is called after signals are blocked: a reporter starts a thread.
pub(super) fn run(
    output: Output,
    reporter: impl FnOnce(Option<File>) -> Reporter,
    metrics: Option<&MetricsArgs>,
    work: impl AsyncFnOnce(Session) -> Exit,
) -> Exit {
    // First of all: a descriptor that this process opened itself must not be taken for that of the events.
    let events = match output.events_fd.map(events_fd::take).transpose() {
        Ok(events) => events,
        Err(message) => {
            report::print_line(&message);
            return Exit::Failed;
        }
    };
    let stream = match listen_for_signals() {
        Ok(stream) => stream,
        Err(error) => return super::fail("cannot listen for signals", &error),
    };
    super::on_runtime(async {
        let reporter = Arc::new(reporter(events));
        let exit = match begin(stream, metrics, &reporter) {
            Ok(session) => work(session).await,
            Err(message) => {
                reporter.error(&message);
                Exit::Failed
            }
        };
        reporter.clear_progress();
        reporter.flush().await;
        match exit {
            Exit::Interrupted => {
                signals::interrupt_own_group();
                Exit::Signal(Signal::SIGINT as i32)
            }
            exit => exit,
        }
    })
}

/// Turns signals into bytes on a stream.
fn listen_for_signals() -> io::Result<UnixStream> {
    signals::stop_ignoring_child_exits()?;
    signals::block_terminal_output_stop()?;
    signals::listen(&signals::FORWARDED)
}

fn begin(
    stream: UnixStream,
    metrics: Option<&MetricsArgs>,
    reporter: &Arc<Reporter>,
) -> Result<Session, String> {
    let signals = Signals::new(stream)
        .map_err(|error| format!("cannot listen for signals: {}", report::os_error_text(&error)))?;
    let health = metrics.map_or_else(|| Ok(Arc::default()), MetricsArgs::start)?;
    Ok(Session { signals, reporter: Arc::clone(reporter), health })
}

/// Settings of a client that waits up to `patience` for a store that is away, and reports it; `None` does not wait.
pub(super) fn client_builder(
    patience: Option<Duration>,
    reporter: &Arc<Reporter>,
) -> ClientBuilder {
    let reporter = Arc::clone(reporter);
    let builder = client::builder().on_outage(move |outage| reporter.outage(outage));
    match patience {
        Some(patience) => builder.wait_for_store(patience),
        None => builder,
    }
}

/// Runs `work` until a signal asks to stop, which is reported and returned.
pub(super) async fn unless_stopped<T>(
    work: impl Future<Output = T>,
    signals: &mut Signals,
    reporter: &Reporter,
) -> Result<T, Signal> {
    // On the heap: the future of a store that connects is large.
    let mut work = Box::pin(work);
    loop {
        tokio::select! {
            biased;
            done = &mut work => return Ok(done),
            signal = signals.next() => match signal {
                signal if signals::asks_to_stop(signal) => {
                    reporter.event(&Event::Stopped { signal: Some(signal.as_str()), reason: None });
                    return Err(signal);
                }
                // Ctrl-Z, as for any other program that waits.
                Signal::SIGTSTP => drop(signals::raise_with_default_action(signal)),
                _ => {}
            }
        }
    }
}

/// Opens the store, and prints its notice for the first use. Reports an error and returns its exit code.
pub(super) async fn open_store(
    connecting: impl Future<Output = tenure::Result<Client>>,
    reporter: &Reporter,
) -> Result<Client, Exit> {
    match connecting.await {
        Ok(client) => {
            reporter.print_creation_notice(&**client.store());
            Ok(client)
        }
        Err(error) => {
            reporter.error(&error.chain());
            Err(Exit::Failed)
        }
    }
}
