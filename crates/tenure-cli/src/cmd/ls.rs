//! `tenure ls`: the names in use.

use std::time::SystemTime;

use clap::Args;
use tenure::store::KeyState;

use crate::args::store::StoreUrl;
use crate::exit::{self, Exit};
use crate::keys::Fencing;
use crate::{humanize, keys, report};

#[derive(Args)]
#[command(after_help = exit::LS)]
pub(crate) struct Ls {
    #[command(flatten)]
    pub(crate) store: StoreUrl,
    /// Print JSON, one object per line
    #[arg(long)]
    json: bool,
    /// Only names with this prefix
    #[arg(default_value = "")]
    prefix: String,
}

pub(crate) fn run(arguments: &Ls) -> Exit {
    super::on_runtime(async {
        let listed = async {
            let client = arguments.store.connect().await?;
            if !arguments.json {
                report::print_creation_notice(&**client.store());
            }
            let keys = client.list(&arguments.prefix).await?;
            Ok::<_, tenure::Error>((keys, Fencing::of(&client)))
        };
        match listed.await {
            Ok((keys, fencing)) if arguments.json => {
                super::print(keys::lines(&keys, fencing, SystemTime::now()).as_bytes())
            }
            Ok((keys, _)) => super::print(table(&keys).as_bytes()),
            Err(error) => {
                super::report_error(&error);
                Exit::Failed
            }
        }
    })
}

/// A table with one line per key.
fn table(keys: &[KeyState]) -> String {
    let titles = ["NAME", "KIND", "HELD", "BY", "FOR", "WAITING", "LONGEST WAIT"];
    let mut rows = vec![titles.map(str::to_owned)];
    rows.extend(keys.iter().map(|key| {
        let first = key.holders.first();
        [
            key.key.to_string(),
            keys::kind(key.space).to_owned(),
            key.holders.len().to_string(),
            first.map_or_else(|| "-".to_owned(), |holder| humanize::identity(holder.by.as_ref())),
            humanize::optional_span(first.and_then(|holder| holder.held_for)),
            key.waiters.len().to_string(),
            humanize::optional_span(keys::longest_wait(key)),
        ]
    }));
    keys::columns(&rows)
}
