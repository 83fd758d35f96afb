//! `tenure renew`: renews a hold of `tenure acquire`.

use std::time::Duration;

use clap::Args;
use tenure::{ErrorKind, Key};

use crate::args::hold::HandleArg;
use crate::args::store::StoreUrl;
use crate::args::value::duration;
use crate::exit::{self, Exit};
use crate::report;

#[derive(Args)]
#[command(after_help = exit::BY_HANDLE)]
pub(crate) struct Renew {
    #[command(flatten)]
    pub(crate) store: StoreUrl,
    #[command(flatten)]
    handle: HandleArg,
    /// Time that the hold lasts from now
    #[arg(long, value_name = "DURATION", default_value = "15s", value_parser = duration)]
    ttl: Duration,
    /// The name of the lock
    #[arg(allow_negative_numbers = true)]
    name: Key,
}

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
            let message = error.chain();
            report::print_line(&format!("{message}; check the name and the handle"));
            Exit::Held
        }
        Err(error) => super::report_error(&error),
    }
}
