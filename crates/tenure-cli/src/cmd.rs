//! The subcommands, one file each, and their shared functions.

pub(crate) mod acquire;
pub(crate) mod bench;
pub(crate) mod completions;
pub(crate) mod doctor;
pub(crate) mod evict;
pub(crate) mod gc;
pub(crate) mod history;
pub(crate) mod job;
pub(crate) mod lead;
pub(crate) mod ls;
pub(crate) mod man;
pub(crate) mod once;
pub(crate) mod release;
pub(crate) mod renew;
mod request;
pub(crate) mod run;
pub(crate) mod schema;
pub(crate) mod serve;
pub(crate) mod status;
pub(crate) mod top;
pub(crate) mod watch;
pub(crate) mod work;

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use nix::errno::Errno;
use tenure::store::Identity;
use tenure::{Client, Error, ErrorKind, Key};

use crate::args::hold::IdentityArgs;
use crate::child::StartError;
use crate::enclosing_hold::{self, EnclosingHold};
use crate::exit::Exit;
use crate::hold::{Hold, REVISION_VARIABLE};
use crate::humanize;
use crate::report::{self, Reporter};
use crate::signals;

/// Runs `work` on a single-threaded runtime. Tasks that are still running afterwards are not waited for.
fn on_runtime(work: impl Future<Output = Exit>) -> Exit {
    match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => {
            let exit = runtime.block_on(work);
            runtime.shutdown_background();
            exit
        }
        Err(error) => fail("cannot start", &error),
    }
}

/// Prints in one line what failed, and the error.
fn fail(what: &str, error: &dyn std::error::Error) -> Exit {
    report::print_line(&format!("{what}: {}", report::chain(error)));
    Exit::Failed
}

/// Prints an error of the store in one line.
fn report_error(error: &Error) -> Exit {
    report::print_line(&report::chain(error));
    exit_for(error)
}

/// Exit code of a command that failed with `error`.
fn exit_for(error: &Error) -> Exit {
    match error.kind() {
        ErrorKind::Held | ErrorKind::Timeout | ErrorKind::Contention => Exit::NotAcquired,
        ErrorKind::Invalid => Exit::Usage,
        _ => Exit::Failed,
    }
}

/// Prints on stdout. A reader that closed the pipe is no failure.
fn print(text: &[u8]) -> Exit {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text).and_then(|()| stdout.flush()) {
        Ok(()) => Exit::Success,
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Exit::Success,
        Err(error) => fail("cannot print", &error),
    }
}

/// Turns signals into bytes on a stream. Must be called before any thread is started.
fn listen_for_signals() -> io::Result<UnixStream> {
    signals::block_terminal_output_stop()?;
    signals::listen(&signals::FORWARDED)
}

/// Properties of a hold that the environment of its command shows.
struct HoldContext<'a> {
    client: &'a Client,
    name: &'a Key,
    identity: &'a IdentityArgs,
    ttl: Duration,
}

fn environment(
    context: &HoldContext<'_>,
    hold: Hold<'_>,
) -> tenure::Result<Vec<(&'static str, String)>> {
    let holder = match &context.identity.id {
        Some(id) => id.clone(),
        None => Identity::of_process()?.id.clone(),
    };
    let name = context.name.to_string();
    let store = context.client.store().to_string();
    let mut environment = vec![
        ("TENURE_NAME", name.clone()),
        ("TENURE_HOLDER", holder),
        ("TENURE_STORE", store.clone()),
        ("TENURE_TTL_MS", context.ttl.as_millis().to_string()),
    ];
    // A nested `run` recognises an enclosing hold by its token: a hold without a token is not listed.
    if let Some(token) = humanize::token(hold.token()) {
        environment.push(("TENURE_TOKEN", token.clone()));
        environment.push((
            enclosing_hold::VARIABLE,
            EnclosingHold { store, name, token }.child_variable(),
        ));
    }
    environment.extend(hold.revision().map(|revision| (REVISION_VARIABLE, revision.to_string())));
    if let Hold::Lead(_) = hold {
        environment.push(("TENURE_ROLE", "leader".to_owned()));
    }
    Ok(environment)
}

/// Reports why a command could not be started. Returns the exit code.
pub(crate) fn report_start_error(
    error: &StartError,
    command: &[OsString],
    reporter: &Reporter,
) -> Exit {
    let program = command.first().map(|program| program.to_string_lossy()).unwrap_or_default();
    let (message, exit) = match error {
        StartError::Guardian(error) => (
            format!("cannot start the guardian of {program}: {}", report::os_error_text(error)),
            Exit::Failed,
        ),
        StartError::Command(error) => {
            let exit = match error {
                Errno::ENOENT => Exit::NotFound,
                // No fault of the program: the system is out of processes, memory or descriptors.
                Errno::EAGAIN | Errno::ENOMEM | Errno::EMFILE | Errno::ENFILE => Exit::Failed,
                _ => Exit::CannotExecute,
            };
            let reason = report::os_error_text(&io::Error::from_raw_os_error(*error as i32));
            let hint =
                if program.starts_with('-') { "; options of tenure go before NAME" } else { "" };
            (format!("cannot run {program}: {reason}{hint}"), exit)
        }
    };
    reporter.error(&message);
    exit
}
