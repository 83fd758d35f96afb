//! The subcommands, one file each, and what they share.

pub(crate) mod acquire;
pub(crate) mod completions;
pub(crate) mod man;
pub(crate) mod release;
pub(crate) mod renew;
pub(crate) mod run;
pub(crate) mod status;

use std::io::{self, Write as _};

use tenure::{Error, ErrorKind};

use crate::exit::Exit;
use crate::report;

/// Runs `work` on a runtime of one thread. What is still under way afterwards is not waited for.
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

/// Says in one line what failed, and why.
fn fail(what: &str, error: &dyn std::error::Error) -> Exit {
    report::complain(&format!("{what}: {}", report::chain(error)));
    Exit::Failed
}

/// Says in one line why the store did not do it.
fn refused(error: &Error) -> Exit {
    report::complain(&report::chain(error));
    exit_for(error)
}

/// How a command ends that the store did not serve.
fn exit_for(error: &Error) -> Exit {
    match error.kind() {
        ErrorKind::Held | ErrorKind::Timeout | ErrorKind::Contention => Exit::NotAcquired,
        ErrorKind::Invalid => Exit::Usage,
        _ => Exit::Failed,
    }
}

/// Prints on stdout; a reader that has seen enough is no failure.
fn print(text: &[u8]) -> Exit {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text).and_then(|()| stdout.flush()) {
        Ok(()) => Exit::Success,
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Exit::Success,
        Err(error) => fail("cannot print", &error),
    }
}
