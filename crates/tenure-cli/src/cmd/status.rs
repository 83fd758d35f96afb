//! `tenure status`: holders and waiters.

use std::time::SystemTime;

use clap::Args;
use tenure::store::KeyState;
use tenure::{Key, Result};

use crate::args::store::{AdvisoryKeyArgs, StoreUrl};
use crate::exit::{self, Exit};
use crate::keys::Fencing;
use crate::{client, keys, report};

#[derive(Args)]
#[command(after_help = exit::STATUS)]
pub(crate) struct Status {
    #[command(flatten)]
    pub(crate) store: StoreUrl,
    /// Print JSON, one object per line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pub(crate) pair: AdvisoryKeyArgs,
    /// The name of one lock; by default all names in use
    #[arg(conflicts_with = "key1", allow_negative_numbers = true)]
    name: Option<Key>,
}

impl Status {
    fn name(&self) -> Option<Key> {
        self.pair.key().or_else(|| self.name.clone())
    }
}

pub(crate) fn run(arguments: &Status) -> Exit {
    super::on_runtime(async {
        let (keys, fencing) = match inspect(arguments).await {
            Ok(state) => state,
            Err(error) => {
                super::report_error(&error);
                return Exit::Failed;
            }
        };
        let held = keys.iter().any(|key| !key.holders.is_empty());
        let text = match &arguments.name() {
            _ if arguments.json => keys::lines(&keys, fencing, SystemTime::now()),
            _ if !keys.is_empty() => keys::table(&keys) + fencing.note(),
            Some(name) => format!("{name} is free\n"),
            None => "nothing is held\n".to_owned(),
        };
        match super::print(text.as_bytes()) {
            Exit::Success if arguments.name().is_some() && !held => Exit::NotAcquired,
            exit => exit,
        }
    })
}

/// One key, as a lock and as a semaphore if in use, or all keys in use.
async fn inspect(arguments: &Status) -> Result<(Vec<KeyState>, Fencing)> {
    let client = arguments.pair.connect(&arguments.store, client::builder()).await?;
    if !arguments.json {
        report::print_creation_notice(&**client.store());
    }
    let fencing = Fencing::of(&client);
    let keys = match &arguments.name() {
        Some(name) => keys::one(&client, name).await,
        None => client.list("").await,
    };
    Ok((keys?, fencing))
}
