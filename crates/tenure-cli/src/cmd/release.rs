//! `tenure release`: releases a hold of `tenure acquire`.

use crate::args::Release;
use crate::exit::Exit;

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
