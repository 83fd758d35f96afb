//! `tenure gc`: deletes the objects that released locks left in a store.

use std::time::Duration;

use clap::Args;
use tenure::Client;

use crate::args::store::StoreUrl;
use crate::args::value::duration_or_zero;
use crate::exit::{self, Exit};

#[derive(Args)]
#[command(after_help = exit::GC)]
pub(crate) struct Gc {
    #[command(flatten)]
    pub(crate) store: StoreUrl,
    /// Keep objects of locks that were released within this time
    #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = duration_or_zero)]
    older_than: Duration,
}

pub(crate) fn run(arguments: &Gc) -> Exit {
    super::on_runtime(async {
        match clean(arguments).await {
            Ok(1) => super::print(b"removed 1 object\n"),
            Ok(removed) => super::print(format!("removed {removed} objects\n").as_bytes()),
            Err(error) => super::report_error(&error),
        }
    })
}

async fn clean(arguments: &Gc) -> tenure::Result<u64> {
    let client: Client = arguments.store.connect().await?;
    let removed = client.gc(arguments.older_than).await;
    client.store().close().await;
    removed
}
