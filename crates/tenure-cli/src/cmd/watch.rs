//! `tenure watch`: prints every change of holders and waiters that is observed.

use std::future::pending;
use std::time::{Duration, SystemTime};

use clap::Args;
use nix::sys::signal::Signal;
use serde::Serialize;
use tenure::store::{HolderState, Identity, KeySpace, KeyState};
use tenure::{Client, Key, Result};

use crate::args::store::StoreUrl;
use crate::args::value::poll_interval;
use crate::exit::{self, Exit};
use crate::signals::{self, Signals};
use crate::{humanize, keys, report};

#[derive(Args)]
#[command(after_help = exit::WATCH)]
pub(crate) struct Watch {
    #[command(flatten)]
    pub(crate) store: StoreUrl,
    /// Print JSON, one object per line
    #[arg(long)]
    json: bool,
    /// Interval between polls; with NAME, stores that push changes are also read at every change
    #[arg(long, value_name = "DURATION", default_value = "500ms", value_parser = poll_interval)]
    every: Duration,
    /// The name of one lock; by default all names in use. A change that is undone between two polls is not printed
    #[arg(allow_negative_numbers = true)]
    name: Option<Key>,
}

pub(crate) fn run(arguments: &Watch) -> Exit {
    let stream = match signals::listen(&[Signal::SIGTERM, Signal::SIGINT]) {
        Ok(stream) => stream,
        Err(error) => return super::fail("cannot listen for signals", &error),
    };
    super::on_runtime(async {
        let mut signals = match Signals::new(stream) {
            Ok(signals) => signals,
            Err(error) => return super::fail("cannot listen for signals", &error),
        };
        let watched = tokio::select! {
            watched = watch(arguments) => watched,
            _ = signals.next() => return Exit::Success,
        };
        watched.unwrap_or_else(|error| {
            super::report_error(&error);
            Exit::Failed
        })
    })
}

async fn watch(arguments: &Watch) -> Result<Exit> {
    let client = arguments.store.connect().await?;
    if !arguments.json {
        report::print_creation_notice(&**client.store());
    }
    let mut before = Vec::new();
    loop {
        let now = match &arguments.name {
            // A key without holders and waiters is kept too: `changed` compares against its version.
            Some(name) => keys::both(&client, name).await?,
            None => client.list("").await?,
        };
        let text: String = changes(&before, &now)
            .iter()
            .map(|change| if arguments.json { change.json() } else { change.text() })
            .collect();
        if !text.is_empty() && !print_now(&text) {
            return Ok(Exit::Success);
        }
        tokio::select! {
            () = tokio::time::sleep(arguments.every) => {}
            () = changed(&client, arguments.name.as_ref(), &now) => {}
        }
        before = now;
    }
}

/// Resolves when the key has changed since `now`. Never resolves without `name` or on a store that does not push.
async fn changed(client: &Client, name: Option<&Key>, now: &[KeyState]) {
    let Some(name) = name.filter(|_| client.store().capabilities().push) else {
        return pending().await;
    };
    let version = |space| now.iter().find(|key| key.space == space).map(|key| key.version);
    let changed_in = async |space| {
        let version = version(space).unwrap_or_default();
        if client.store().changed(name, space, version).await.is_err() {
            pending::<()>().await;
        }
    };
    tokio::select! {
        () = changed_in(KeySpace::Lock) => {}
        () = changed_in(KeySpace::Semaphore) => {}
    }
}

/// Prints and flushes. False if the reader has closed the output.
fn print_now(text: &str) -> bool {
    use std::io::Write as _;
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).is_ok()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum ChangeKind {
    Acquired,
    Ended,
    Waiting,
    Left,
}

/// A holder or waiter that appeared or disappeared.
#[derive(Debug, PartialEq, Eq)]
struct Change<'a> {
    kind: ChangeKind,
    key: &'a KeyState,
    by: Option<&'a Identity>,
    token: Option<String>,
}

impl Change<'_> {
    fn text(&self) -> String {
        let at = humantime::format_rfc3339_millis(SystemTime::now());
        let (name, by) = (&self.key.key, humanize::identity(self.by));
        let token = self.token.as_ref().map(|token| format!(" token={token}")).unwrap_or_default();
        let change = match self.kind {
            ChangeKind::Acquired => "acquired by",
            ChangeKind::Ended => "no longer held by",
            ChangeKind::Waiting => "now waiting:",
            ChangeKind::Left => "no longer waiting:",
        };
        format!("{at} {name}: {change} {by}{token}\n")
    }

    fn json(&self) -> String {
        let at = humantime::format_rfc3339_millis(SystemTime::now()).to_string();
        let line = serde_json::json!({
            "event": self.kind, "name": self.key.key.as_str(), "kind": keys::kind(self.key.space),
            "holder": self.by.map(|by| &by.id), "host": self.by.map(|by| &by.host),
            "pid": self.by.map(|by| by.pid), "note": self.by.map(|by| &by.note),
            "token": self.token, "at": at,
        });
        format!("{line}\n")
    }
}

/// Differences between two snapshots: first the holders and waiters that are gone, then the new ones.
fn changes<'a>(before: &'a [KeyState], now: &'a [KeyState]) -> Vec<Change<'a>> {
    let mut changes = Vec::new();
    for (from, to, held, waits) in [
        (before, now, ChangeKind::Ended, ChangeKind::Left),
        (now, before, ChangeKind::Acquired, ChangeKind::Waiting),
    ] {
        for key in from {
            let other = to.iter().find(|other| other.key == key.key && other.space == key.space);
            let (holders, waiters) = other.map_or((&[][..], &[][..]), |other| {
                (other.holders.as_slice(), other.waiters.as_slice())
            });
            // With the token: a hold that was granted again to the same client is a new hold.
            let identity = |holder: &HolderState| (holder.token, holder.by.clone());
            let missing = without(&key.holders, holders, identity);
            changes.extend(missing.into_iter().map(|holder| Change {
                kind: held,
                key,
                by: holder.by.as_ref(),
                token: humanize::token(holder.token),
            }));
            let missing = without(&key.waiters, waiters, |waiter| waiter.by.clone());
            changes.extend(missing.into_iter().map(|waiter| Change {
                kind: waits,
                key,
                by: waiter.by.as_ref(),
                token: None,
            }));
        }
    }
    changes
}

/// Multiset difference: the items of `all` that `others` does not contain, compared by `id`.
fn without<'a, T, N: PartialEq>(all: &'a [T], others: &[T], id: impl Fn(&T) -> N) -> Vec<&'a T> {
    let mut others: Vec<N> = others.iter().map(&id).collect();
    // Each entry of `others` matches one item only: a client may wait several times under one identity.
    let mut take_match = |item: &T| {
        let found = others.iter().position(|other| *other == id(item));
        found.map(|at| others.swap_remove(at)).is_some()
    };
    all.iter().filter(|item| !take_match(item)).collect()
}

#[cfg(test)]
mod tests {
    use tenure::FencingToken;
    use tenure::store::{Version, WaiterState};

    use super::*;

    fn key(name: &str, holders: &[u64], waiters: &[&str]) -> KeyState {
        let by = |id: &str| Some(Identity { id: id.to_owned(), ..Identity::default() });
        let holder = |number: &u64| HolderState::new(by("h"), FencingToken::new(0, *number));
        let mut state = KeyState::free(Key::new(name).unwrap(), KeySpace::Lock, Version::default());
        state.holders = holders.iter().map(holder).collect();
        state.waiters = waiters.iter().map(|id| WaiterState::new(by(id))).collect();
        state
    }

    fn observed(before: &[KeyState], now: &[KeyState]) -> Vec<(ChangeKind, String)> {
        let changes = changes(before, now);
        let id = |change: &Change<'_>| change.by.map(|by| by.id.clone()).unwrap_or_default();
        changes.iter().map(|change| (change.kind, id(change))).collect()
    }

    #[test]
    fn watch_reports_each_arrival_and_departure_once() {
        let before = [key("a", &[1], &["x", "y"]), key("b", &[2], &[])];
        let now = [key("a", &[3], &["y", "z", "z"])];
        let expected = [
            (ChangeKind::Ended, "h"),
            (ChangeKind::Left, "x"),
            (ChangeKind::Ended, "h"),
            (ChangeKind::Acquired, "h"),
            (ChangeKind::Waiting, "z"),
            (ChangeKind::Waiting, "z"),
        ];
        assert_eq!(observed(&before, &now), expected.map(|(kind, id)| (kind, id.to_owned())));
        assert_eq!(observed(&now, &now), []);
    }

    #[test]
    fn a_hold_that_was_granted_anew_is_another() {
        let (before, now) = ([key("a", &[1], &[])], [key("a", &[2], &[])]);
        let changes = changes(&before, &now);
        assert_eq!(changes[0].token.as_deref(), Some("1"));
        assert_eq!(changes[1].token.as_deref(), Some("2"));
    }
}
