//! `tenure release`: releases a hold of `tenure acquire`.

use clap::Args;
use tenure::Key;

use crate::args::hold::HandleArg;
use crate::args::store::StoreUrl;
use crate::exit::{self, Exit};

#[derive(Args)]
#[command(after_help = exit::BY_HANDLE)]
pub(crate) struct Release {
    #[command(flatten)]
    pub(crate) store: StoreUrl,
    #[command(flatten)]
    handle: HandleArg,
    /// The name of the lock
    #[arg(allow_negative_numbers = true)]
    name: Key,
}

pub(crate) fn run(arguments: Release) -> Exit {
    super::on_runtime(release(arguments))
}

async fn release(arguments: Release) -> Exit {
    let Release { store, handle, name } = arguments;
    let handle = match handle.read() {
        Ok(handle) => handle,
        Err(error) => return super::fail("cannot read the handle from stdin", &error),
    };
    let released = async { store.connect().await?.release(name, &handle).await };
    super::renew::exit_for_handle(released.await)
}
