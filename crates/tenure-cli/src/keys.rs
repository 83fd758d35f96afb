//! Holders and waiters of keys: requests and output shared by several commands.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime};

use serde::Serialize;
use tenure::store::{HolderState, Identity, KeySpace, KeyState, WaiterState};
use tenure::{Client, Key, Result};

use crate::humanize;

/// One key, in those of its key spaces in which it is in use.
pub(crate) async fn one(client: &Client, name: &Key) -> Result<Vec<KeyState>> {
    let mut keys = both(client, name).await?;
    keys.retain(KeyState::is_in_use);
    Ok(keys)
}

/// One key in both key spaces, in use or not.
pub(crate) async fn both(client: &Client, name: &Key) -> Result<Vec<KeyState>> {
    let mut keys = Vec::new();
    for space in [KeySpace::Lock, KeySpace::Semaphore] {
        keys.push(client.store().inspect(name, space).await?);
    }
    Ok(keys)
}

/// Age of the oldest waiter.
pub(crate) fn longest_wait(key: &KeyState) -> Option<Duration> {
    key.waiters.iter().filter_map(|waiter| waiter.waited_for).max()
}

pub(crate) fn kind(space: KeySpace) -> &'static str {
    match space {
        KeySpace::Lock => "lock",
        KeySpace::Semaphore => "semaphore",
    }
}

/// Kind of fencing tokens that a store issues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Fencing {
    /// Tokens grow with every grant.
    Ordered,
    /// Holds have no token.
    None,
}

impl Fencing {
    pub(crate) fn of(client: &Client) -> Self {
        if client.store().capabilities().ordered_tokens { Self::Ordered } else { Self::None }
    }

    /// Line below a table of holds; empty if tokens are ordered.
    pub(crate) fn note(self) -> &'static str {
        match self {
            Self::Ordered => "",
            Self::None => {
                "holds have no fencing token here: the server does not say whether its tokens are ordered\n"
            }
        }
    }
}

/// A table of all holders and waiters, one line each.
pub(crate) fn table(keys: &[KeyState]) -> String {
    let mut rows =
        vec![["NAME", "KIND", "STATE", "CLIENT", "FOR", "EXPIRES", "TOKEN"].map(str::to_owned)];
    for key in keys {
        let name = &[key.key.to_string(), kind(key.space).to_owned()];
        rows.extend(key.holders.iter().map(|holder| held_row(name, holder)));
        rows.extend(
            key.waiters.iter().enumerate().map(|(i, waiter)| wait_row(name, i + 1, waiter)),
        );
    }
    columns(&rows)
}

fn held_row([name, kind]: &[String; 2], holder: &HolderState) -> [String; 7] {
    let expires = match holder.lease_left {
        Some(left) => format!("in {}", humanize::span(left)),
        None => "no lease".to_owned(),
    };
    [
        name.clone(),
        kind.clone(),
        "held".to_owned(),
        humanize::identity(holder.by.as_ref()),
        humanize::optional_span(holder.held_for),
        expires,
        humanize::token(holder.token).unwrap_or_else(|| "-".to_owned()),
    ]
}

fn wait_row([name, kind]: &[String; 2], place: usize, waiter: &WaiterState) -> [String; 7] {
    [
        name.clone(),
        kind.clone(),
        format!("waits {}", humanize::ordinal(place)),
        humanize::identity(waiter.by.as_ref()),
        humanize::optional_span(waiter.waited_for),
        "-".to_owned(),
        "-".to_owned(),
    ]
}

/// Rows with aligned columns.
pub(crate) fn columns<const N: usize>(rows: &[[String; N]]) -> String {
    let width =
        |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(widths) {
            let _ = write!(line, "{cell:<width$}  ");
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[derive(Serialize)]
struct KeyLine<'a> {
    name: &'a str,
    kind: &'static str,
    fencing: Fencing,
    holders: Vec<HolderLine<'a>>,
    waiters: Vec<WaiterLine<'a>>,
}

#[derive(Serialize)]
struct HolderLine<'a> {
    #[serde(flatten)]
    by: ClientFields<'a>,
    token: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    revision: Option<u64>,
    since: Option<String>,
    until: Option<String>,
}

#[derive(Serialize)]
struct WaiterLine<'a> {
    place: usize,
    #[serde(flatten)]
    by: ClientFields<'a>,
    since: Option<String>,
}

/// Fields of a holder or waiter. Those that the store does not know are `null`: a session of another program on
/// PostgreSQL has no process number.
#[derive(Default, Serialize)]
struct ClientFields<'a> {
    holder: Option<&'a str>,
    host: Option<&'a str>,
    pid: Option<u32>,
    note: Option<&'a str>,
}

impl<'a> ClientFields<'a> {
    fn of(by: Option<&'a Identity>) -> Self {
        let Some(Identity { id, host, pid, note }) = by else { return Self::default() };
        Self {
            holder: Some(id),
            host: Some(&**host).filter(|host| !host.is_empty()),
            pid: Some(*pid).filter(|pid| *pid != 0),
            note: Some(note),
        }
    }
}

/// JSON, one object per key and line.
pub(crate) fn lines(keys: &[KeyState], fencing: Fencing, now: SystemTime) -> String {
    let time =
        |at: Option<SystemTime>| at.map(|at| humantime::format_rfc3339_millis(at).to_string());
    let ago = |span: Option<Duration>| time(span.and_then(|span| now.checked_sub(span)));
    let ahead = |span: Option<Duration>| time(span.and_then(|span| now.checked_add(span)));
    let mut text = String::new();
    for key in keys {
        let holders = key.holders.iter().map(|state| HolderLine {
            by: ClientFields::of(state.by.as_ref()),
            token: humanize::token(state.token),
            revision: state.revision,
            since: ago(state.held_for),
            until: ahead(state.lease_left),
        });
        let waiters = key.waiters.iter().enumerate().map(|(i, state)| WaiterLine {
            place: i + 1,
            by: ClientFields::of(state.by.as_ref()),
            since: ago(state.waited_for),
        });
        let line = KeyLine {
            name: key.key.as_str(),
            kind: kind(key.space),
            fencing,
            holders: holders.collect(),
            waiters: waiters.collect(),
        };
        if let Ok(line) = serde_json::to_string(&line) {
            text.push_str(&line);
            text.push('\n');
        }
    }
    text
}
