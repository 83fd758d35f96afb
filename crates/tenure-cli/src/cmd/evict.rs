//! `tenure break`: ends a hold of another process on an operator's request.

use clap::Args;
use tenure::{ErrorKind, FencingToken, Key, Result};

use crate::args::store::StoreUrl;
use crate::exit::{self, Exit};
use crate::{humanize, keys, report};

#[derive(Args)]
#[command(after_help = exit::BREAK)]
pub(crate) struct Break {
    #[command(flatten)]
    pub(crate) store: StoreUrl,
    /// Fencing token of the hold to break, as `tenure status` shows it; 0 for a hold that is shown without a token. If the
    /// lock has been granted again since, nothing is broken
    #[arg(long, value_name = "TOKEN")]
    token: FencingToken,
    /// Reason, written to the logs
    #[arg(long, value_name = "TEXT", value_parser = reason)]
    reason: String,
    /// The name of the lock
    #[arg(allow_negative_numbers = true)]
    name: Key,
}

pub(crate) fn run(arguments: &Break) -> Exit {
    super::on_runtime(async {
        match evict(arguments).await {
            Ok(text) => super::print(text.as_bytes()),
            Err(error) if error.kind() == ErrorKind::NotHeld => {
                report::print_line(&error.chain());
                Exit::Held
            }
            Err(error) => super::report_error(&error),
        }
    })
}

/// Breaks the hold. Returns the text to print.
async fn evict(arguments: &Break) -> Result<String> {
    let Break { store, token, reason, name } = arguments;
    let client = store.connect().await?;
    // Read for the message only. The holder may change between this and the next request: `evict` compares the token.
    let before = keys::one(&client, name).await?;
    let mut holders = before.iter().flat_map(|key| &key.holders);
    let holder = holders.find(|holder| holder.token == *token);
    client.evict(name, *token, reason).await?;
    client.store().close().await;
    let by = humanize::identity(holder.and_then(|holder| holder.by.as_ref()));
    let with = humanize::token(*token).map(|token| format!(", token {token}"));
    Ok(format!("{name}: broke the hold of {by}{}\n", with.unwrap_or_default()))
}

fn reason(text: &str) -> Result<String, String> {
    match text.trim() {
        "" => Err("give a reason for the logs".to_owned()),
        text => Ok(text.to_owned()),
    }
}
