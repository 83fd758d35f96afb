//! `tenure renew`: renews a hold of `tenure acquire`.

use tenure::ErrorKind;

use crate::args::Renew;
use crate::exit::Exit;
use crate::report;

pub(crate) fn run(arguments: Renew) -> Exit {
    super::on_runtime(renew(arguments))
}

async fn renew(arguments: Renew) -> Exit {
    let Renew { store, handle, ttl, name } = arguments;
    let handle = match handle.read() {
        Ok(handle) => handle,
        Err(error) => return super::fail("cannot read the handle from stdin", &error),
    };
    let renewed = async { store.connect().await?.renew(name, &handle, ttl).await };
    exit_for_handle(renewed.await)
}

/// Exit code of a command that acts on a handle. Reports the error.
pub(super) fn exit_for_handle(outcome: tenure::Result<()>) -> Exit {
    match outcome {
        Ok(()) => Exit::Success,
        Err(error) if matches!(error.kind(), ErrorKind::NotHeld | ErrorKind::Lost) => {
            let message = report::chain(&error);
            report::print_line(&format!("{message}; check the name and the handle"));
            Exit::Held
        }
        Err(error) => super::report_error(&error),
    }
}
