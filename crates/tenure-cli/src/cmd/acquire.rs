//! `tenure acquire`: makes one attempt; the hold outlives this process.

use std::time::Duration;

use clap::Args;
use serde_json::json;
use tenure::store::KeySpace;
use tenure::{ErrorKind, Key, Result};

use super::request;
use crate::args::hold::IdentityArgs;
use crate::args::output::Output;
use crate::args::store::{AdvisoryKeyArgs, StoreUrl};
use crate::args::value::duration;
use crate::exit::{self, Exit};
use crate::other_kind::OtherKindCheck;
use crate::report::Reporter;
use crate::{client, humanize, report};

/// Time that is waited, after the result is printed, for the check of the other kind of the name.
const OTHER_KIND_CHECK_TIMEOUT: Duration = Duration::from_millis(100);

#[derive(Args)]
#[command(after_help = exit::ACQUIRE)]
pub(crate) struct Acquire {
    #[command(flatten)]
    pub(crate) store: StoreUrl,
    /// Time that the hold lasts unless `tenure renew` extends it
    #[arg(long, value_name = "DURATION", default_value = "15s", value_parser = duration)]
    ttl: Duration,
    #[command(flatten)]
    identity: IdentityArgs,
    /// Only test whether the lock can be acquired, and release it at once
    #[arg(long)]
    check: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pub(crate) pair: AdvisoryKeyArgs,
    /// The name of the lock
    #[arg(
        required_unless_present = "key1",
        conflicts_with = "key1",
        allow_negative_numbers = true
    )]
    name: Option<Key>,
}

impl Acquire {
    fn name(&self) -> Key {
        let name = self.pair.key().or_else(|| self.name.clone());
        name.unwrap_or_else(|| unreachable!("clap requires one of the two"))
    }
}

pub(crate) fn run(arguments: &Acquire) -> Exit {
    super::on_runtime(async {
        let mut other_kind = None;
        let acquired = acquire(arguments, &mut other_kind).await;
        let exit = match acquired {
            Ok(text) => super::print(text.as_bytes()),
            Err(error) => {
                let message = error.chain();
                match error.kind() {
                    ErrorKind::Held | ErrorKind::Timeout | ErrorKind::Contention => {
                        report::print_line(&message);
                        Exit::Held
                    }
                    ErrorKind::Unsupported if !arguments.check => {
                        report::print_line(&format!(
                            "{message}, or hold the lock while a command runs: tenure run {} -- COMMAND",
                            arguments.name()
                        ));
                        Exit::Failed
                    }
                    _ => super::report_error(&error),
                }
            }
        };
        if let Some(mut other_kind) = other_kind {
            let output = Output { quiet: false, json: arguments.json, events_fd: None };
            let reporter = Reporter::new(arguments.name(), output, None);
            let _ =
                tokio::time::timeout(OTHER_KIND_CHECK_TIMEOUT, other_kind.warn(&reporter)).await;
            reporter.flush().await;
        }
        exit
    })
}

/// Acquires the lock and detaches the hold, or with `--check` releases it. Returns the text to print.
async fn acquire(arguments: &Acquire, other_kind: &mut Option<OtherKindCheck>) -> Result<String> {
    let Acquire { store, pair, ttl, identity, check, json, .. } = arguments;
    let name = &arguments.name();
    let client = pair.connect(store, client::builder()).await?;
    if !*json {
        report::print_creation_notice(&**client.store());
    }
    *other_kind = Some(OtherKindCheck::start(&client, name, KeySpace::Lock));
    let request = request::with_identity(client.lock(name).ttl(*ttl), identity);
    if *check {
        request.try_acquire().await?.release().await?;
        return Ok(if *json {
            format!("{}\n", json!({ "name": name.as_str() }))
        } else {
            String::new()
        });
    }
    let guard = request.detached().try_acquire().await?;
    let token = humanize::token(guard.fencing_token());
    let handle = guard.detach().await?;
    Ok(if *json {
        let ttl = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
        let line = json!({ "name": name.as_str(), "token": token, "handle": handle.expose(), "ttl_ms": ttl });
        format!("{line}\n")
    } else {
        // For `eval` in a shell. Exported, so that `renew` and `release` read the handle from the environment.
        let token = match token {
            Some(token) => format!("export TENURE_TOKEN={token}"),
            None => "unset TENURE_TOKEN".to_owned(),
        };
        format!("{token}\nexport TENURE_HANDLE={}\n", shell_quoted(handle.expose()))
    })
}

/// Quotes a text for a shell, if needed.
fn shell_quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=+@".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_reads_back_what_was_quoted() {
        assert_eq!(shell_quoted("00af"), "00af");
        assert_eq!(shell_quoted(""), "''");
        assert_eq!(shell_quoted("a b'c"), r"'a b'\''c'");
    }
}
