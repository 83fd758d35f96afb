//! The queue of a subcommand of `job`.

use clap::Args;
use tenure::jobs::{Options, Queue};
use tenure::{Error, Result};

use crate::args::store::DatabaseUrl;
use crate::exit::Exit;
use crate::{cmd, report};

/// The queue of a subcommand.
#[derive(Args)]
pub(crate) struct QueueArgs {
    #[command(flatten)]
    pub(super) store: DatabaseUrl,
    /// Print JSON, one object per line
    #[arg(long)]
    pub(super) json: bool,
    /// Name of the queue, which is the name of its table
    pub(super) queue: String,
}

impl QueueArgs {
    pub(super) async fn connect(&self) -> Result<Queue, Exit> {
        let url = self.store.postgres_url().map_err(|(message, exit)| {
            report::print_line(&message);
            exit
        })?;
        let options = Options::default().connections(1);
        let connected = Queue::connect_with(url, &self.queue, options).await;
        connected.map_err(|error| cmd::report_error(&error))
    }
}

/// Reports an error of one job. A change that the job's state does not allow is no usage error.
pub(super) fn report_rejection(error: &Error) -> Exit {
    match cmd::report_error(error) {
        Exit::Usage => Exit::Refused,
        exit => exit,
    }
}
