//! What is shown while we wait for another holder.

use std::fmt::Write as _;
use std::future::pending;
use std::time::Duration;

use tenure::store::{Identity, KeySpace, KeyState};
use tenure::{Client, Key};

use crate::args::Who;
use crate::people;
use crate::report::{Event, Reporter};

/// A wait shorter than this is not worth a word.
const UNWORTHY: Duration = Duration::from_millis(40);
/// How often the line is brought up to date: it counts seconds.
const REFRESH: Duration = Duration::from_secs(1);

/// Shows who holds the lock and our place, as often as that changes. Never resolves.
pub(crate) async fn watch(
    client: &Client,
    name: &Key,
    space: KeySpace,
    who: &Who,
    reporter: &Reporter,
) {
    if !reporter.has_line() && !reporter.has_events() {
        return pending().await;
    }
    let Ok(process) = Identity::of_process() else { return pending().await };
    let id = who.id.as_ref().unwrap_or(&process.id);
    let is_me =
        |by: &Option<Identity>| by.as_ref().is_some_and(|by| by.id == *id && by.pid == process.pid);
    let mut told = None;
    tokio::time::sleep(UNWORTHY).await;
    loop {
        // A store that cannot tell now will be asked again; the acquisition has its own ways to fail.
        if let Ok(state) = client.store().inspect(name, space).await {
            let place = state.waiters.iter().position(|waiter| is_me(&waiter.by)).map(|i| i + 1);
            let news = (holder(&state), place);
            if !state.holders.is_empty() && told.as_ref() != Some(&news) {
                reporter.event(&Event::Waiting { holder: news.0.clone(), place });
                told = Some(news);
            }
            if reporter.has_line() && !state.holders.is_empty() {
                reporter.line(&line(name, &state, place));
            }
            tokio::select! {
                () = changed(client, name, space, &state) => {}
                () = tokio::time::sleep(REFRESH) => {}
            }
        } else {
            tokio::time::sleep(REFRESH).await;
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
        let _ = write!(line, ": held by {}", people::who(first.by.as_ref()));
        if let Some(held) = first.held_for {
            let _ = write!(line, " for {}", people::span(Duration::from_secs(held.as_secs())));
        }
        if state.holders.len() > 1 {
            let _ = write!(line, " and {} more", state.holders.len() - 1);
        }
    }
    if let Some(place) = place {
        let _ = write!(line, ", you are {}", people::ordinal(place));
    }
    line
}
