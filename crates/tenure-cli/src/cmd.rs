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
mod session;
pub(crate) mod status;
mod supervised_command;
pub(crate) mod top;
pub(crate) mod watch;
pub(crate) mod work;

use std::io::{self, Write as _};

use tenure::{Error, ErrorKind};

use crate::exit::Exit;
use crate::report;

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
    report::print_line(&format!("{what}: {}", Error::chain_of(error)));
    Exit::Failed
}

/// Prints an error of the store in one line.
fn report_error(error: &Error) -> Exit {
    report::print_line(&error.chain());
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
