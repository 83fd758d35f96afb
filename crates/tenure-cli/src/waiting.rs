//! Progress line and events while a command waits for another holder.

use std::fmt::Write as _;
use std::future::pending;
use std::time::Duration;

use tenure::store::{Identity, KeySpace, KeyState};
use tenure::{Client, Key};
use tokio::sync::watch;

use crate::args::hold::IdentityArgs;
use crate::humanize;
use crate::report::{Event, Reporter};

/// Shortest wait that is reported.
const MIN_REPORTED_WAIT: Duration = Duration::from_millis(40);
/// Shortest wait that is written to a log: a file or a pipe keeps every line.
const MIN_LOGGED_WAIT: Duration = Duration::from_millis(1_500);
/// Interval between updates of the line, which counts seconds.
const REFRESH_INTERVAL: Duration = Duration::from_secs(1);

/// Shows the wait for each lock in turn: `next` has the name of the present one. Never resolves.
pub(crate) async fn show_waits(
    client: &Client,
    mut next: watch::Receiver<Key>,
    space: KeySpace,
    identity: &IdentityArgs,
    reporter: &Reporter,
) {
    loop {
        let name = next.borrow_and_update().clone();
        tokio::select! {
            () = show_wait(client, &name, space, identity, reporter) => {}
            changed = next.changed() => if changed.is_err() {
                return show_wait(client, &name, space, identity, reporter).await;
            },
        }
    }
}

/// Shows the holder of the lock and this process's place in the queue: at every change on a terminal and as events, once
/// in a log. Never resolves.
async fn show_wait(
    client: &Client,
    name: &Key,
    space: KeySpace,
    identity: &IdentityArgs,
    reporter: &Reporter,
) {
    let logs = reporter.logs_waits();
    if !reporter.shows_progress() && !reporter.has_events() && !logs {
        return pending().await;
    }
    let Ok(process) = Identity::of_process() else { return pending().await };
    let id = identity.id.as_ref().unwrap_or(&process.id);
    let is_me =
        |by: &Option<Identity>| by.as_ref().is_some_and(|by| by.id == *id && by.pid == process.pid);
    let mut last_shown = None;
    tokio::time::sleep(if logs { MIN_LOGGED_WAIT } else { MIN_REPORTED_WAIT }).await;
    loop {
        // A failed request is retried: the acquisition itself reports a store that fails for good.
        if let Ok(state) = client.store().inspect(name, space).await {
            let place = state.waiters.iter().position(|waiter| is_me(&waiter.by)).map(|i| i + 1);
            let current = (holder(&state), place);
            if !state.holders.is_empty() && last_shown.as_ref() != Some(&current) {
                reporter.event(&Event::Waiting { holder: current.0.clone(), place });
                last_shown = Some(current);
            }
            if logs && !state.holders.is_empty() {
                reporter.log_wait(&line(name, &state, place));
                return pending().await;
            }
            if reporter.shows_progress() && !state.holders.is_empty() {
                reporter.show_progress(&line(name, &state, place));
            }
            tokio::select! {
                () = changed(client, name, space, &state) => {}
                () = tokio::time::sleep(REFRESH_INTERVAL) => {}
            }
        } else {
            tokio::time::sleep(REFRESH_INTERVAL).await;
        }
    }
}

async fn changed(client: &Client, name: &Key, space: KeySpace, state: &KeyState) {
    if !client.store().capabilities().push
        || client.store().changed(name, space, state.version).await.is_err()
    {
        pending::<()>().await;
    }
}

fn holder(state: &KeyState) -> Option<String> {
    state.holders.first()?.by.as_ref().map(|by| by.id.clone())
}

fn line(name: &Key, state: &KeyState, place: Option<usize>) -> String {
    let mut line = format!("waiting for {name}");
    if let Some(first) = state.holders.first() {
        // The note comes after the duration, which would read as a part of it.
        let mut by = first.by.clone();
        let note = by.as_mut().map(|by| std::mem::take(&mut by.note)).unwrap_or_default();
        let _ = write!(line, ": held by {}", humanize::identity(by.as_ref()));
        if let Some(held) = first.held_for {
            let _ = write!(line, " for {}", humanize::span(Duration::from_secs(held.as_secs())));
        }
        if state.holders.len() > 1 {
            let _ = write!(line, " and {} more", state.holders.len() - 1);
        }
        if !note.is_empty() {
            let _ = write!(line, " ({})", humanize::without_control_chars(&note));
        }
    }
    if let Some(place) = place {
        let _ = write!(line, ", you are {}", humanize::ordinal(place));
    }
    line
}
