//! `tenure status`: who holds what, and who waits.

use std::time::SystemTime;

use tenure::Result;
use tenure::store::KeyState;

use crate::args::Status;
use crate::exit::Exit;
use crate::{keys, report};

pub(crate) fn run(arguments: &Status) -> Exit {
    super::on_runtime(async {
        let keys = match look(arguments).await {
            Ok(keys) => keys,
            Err(error) => {
                super::refused(&error);
                return Exit::Failed;
            }
        };
        let held = keys.iter().any(|key| !key.holders.is_empty());
        let text = match &arguments.name() {
            _ if arguments.json => keys::lines(&keys, SystemTime::now()),
            _ if !keys.is_empty() => keys::table(&keys),
            Some(name) => format!("{name} is free\n"),
            None => "nothing is held\n".to_owned(),
        };
        match super::print(text.as_bytes()) {
            Exit::Success if arguments.name().is_some() && !held => Exit::NotAcquired,
            exit => exit,
        }
    })
}

/// One key in both its spaces, or all keys in use.
async fn look(arguments: &Status) -> Result<Vec<KeyState>> {
    let client = arguments.pair.connect(&arguments.store).await?;
    if !arguments.json {
        report::introduce(&**client.store());
    }
    match &arguments.name() {
        Some(name) => keys::one(&client, name).await,
        None => keys::all(&client, "").await,
    }
}
