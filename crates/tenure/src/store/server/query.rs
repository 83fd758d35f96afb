//! Requests about keys: their holders and waiters, their history, and the end of a hold.

use tenure_core::wire::{ExtensionRequest, Request};
use tenure_core::{FencingToken, Key, Time};

use super::errors::{unavailable, unexpected_reply, unknown_outcome, unreadable_reply};
use super::inspect;
use super::shared::{REQUEST_TIMEOUT, ServerShared};
use super::wire::{OwnedReply, Protocol, wire_key, wire_text};
use crate::store::{HistoryEvent, KeySpace, KeyState};
use crate::{Error, ErrorKind, Result};

/// State of a key.
pub(super) async fn state(
    shared: &ServerShared,
    key: &Key,
    space: KeySpace,
    until: Time,
) -> Result<KeyState> {
    match shared.protocol {
        Protocol::Extended => query(shared, key, space, until).await,
        Protocol::Plain => inspect_plain(shared, key, space).await,
    }
}

async fn query(shared: &ServerShared, key: &Key, space: KeySpace, until: Time) -> Result<KeyState> {
    let connection = shared.connection(until).await?;
    let request = Request::Extended(ExtensionRequest::Query { key: &wire_key(key), space });
    match connection.ask(&request, until).await {
        Ok(OwnedReply::Json(json)) => inspect::parse_key(&json, space).ok_or_else(unreadable_reply),
        Ok(reply) => Err(unexpected_reply(&reply)),
        Err(no_reply) => Err(unavailable(no_reply)),
    }
}

/// State of one key, taken from the server's statistics of all keys.
async fn inspect_plain(shared: &ServerShared, key: &Key, space: KeySpace) -> Result<KeyState> {
    let until = shared.clock.now() + REQUEST_TIMEOUT;
    let connection = shared.free_connection(until).await?;
    let reply = connection.ask(&Request::Stats, until).await.map_err(unavailable)?;
    let OwnedReply::Json(json) = reply else { return Err(unexpected_reply(&reply)) };
    shared.pool.put(connection);
    inspect::parse_stats(&json, key, &wire_key(key), space).ok_or_else(unreadable_reply)
}

/// A page of the keys that begin with `prefix`.
pub(super) async fn list(
    shared: &ServerShared,
    space: KeySpace,
    prefix: &str,
    after: Option<&str>,
) -> Result<Vec<KeyState>> {
    // No key begins with such a prefix.
    if prefix.len() > Key::MAX_BYTES || prefix.chars().any(char::is_control) {
        return Ok(Vec::new());
    }
    if after.is_some_and(|after| Key::new(after).is_err()) {
        return Err(Error::new(
            ErrorKind::Invalid,
            "a list continues after a key, and this is not a valid key",
        )
        .at(shared));
    }
    let mut after = after.map(wire_text);
    loop {
        let until = shared.clock.now() + REQUEST_TIMEOUT;
        let connection = shared.connection(until).await.map_err(|error| error.at(shared))?;
        let prefix = &wire_text(prefix)[..];
        let request =
            Request::Extended(ExtensionRequest::List { prefix, space, after: after.as_deref() });
        let reply = connection
            .ask(&request, until)
            .await
            .map_err(|no_reply| unavailable(no_reply).at(shared))?;
        let OwnedReply::Json(json) = reply else {
            return Err(unexpected_reply(&reply).at(shared));
        };
        let (page, next) =
            inspect::parse_page(&json, space).ok_or_else(|| unreadable_reply().at(shared))?;
        // An empty page means the end of the list. So a page that has only keys that are invalid to us is skipped.
        if !page.is_empty() || next.is_none() {
            return Ok(page);
        }
        after = next;
    }
}

/// History of a key; `None` if the server does not know the request.
pub(super) async fn history(
    shared: &ServerShared,
    key: &Key,
    space: KeySpace,
) -> Result<Option<Vec<HistoryEvent>>> {
    let at = |error: Error| error.on(key).at(shared);
    let until = shared.clock.now() + REQUEST_TIMEOUT;
    let connection = shared.connection(until).await.map_err(at)?;
    let request = Request::Extended(ExtensionRequest::History { key: &wire_key(key), space });
    let reply =
        connection.ask(&request, until).await.map_err(|no_reply| at(unavailable(no_reply)))?;
    match reply {
        OwnedReply::Json(json) => match inspect::parse_history(&json) {
            Some((events, true)) => Ok(Some(events)),
            Some((_, false)) => {
                let message = "the server keeps no history: start it with --history 64";
                Err(at(Error::new(ErrorKind::Unsupported, message)))
            }
            None => Err(at(unreadable_reply())),
        },
        // The server is older than this request.
        _ => Ok(None),
    }
}

/// Ends the hold with the given token.
pub(super) async fn evict(
    shared: &ServerShared,
    key: &Key,
    token: FencingToken,
    reason: &str,
) -> Result<()> {
    let at = |error: Error| error.on(key).at(shared);
    let reason: String = reason.chars().filter(|c| !c.is_control()).take(50).collect();
    let (number, reason) = (token.number(), reason.as_bytes());
    if token.epoch() == 0 {
        let until = shared.clock.now() + REQUEST_TIMEOUT;
        let connection = shared.connection(until).await.map_err(at)?;
        for space in [KeySpace::Lock, KeySpace::Semaphore] {
            let key = &wire_key(key)[..];
            let request = Request::Extended(ExtensionRequest::Break { key, space, number, reason });
            match connection.ask(&request, until).await {
                Ok(OwnedReply::Done) => return Ok(()),
                Ok(OwnedReply::Error(why)) if why.is_empty() => {}
                Ok(reply) => return Err(at(unexpected_reply(&reply))),
                Err(no_reply) => return Err(at(unknown_outcome(no_reply))),
            }
        }
    }
    let message =
        format!("no hold has the token {token}: see `tenure status` for the present holder");
    Err(at(Error::new(ErrorKind::NotHeld, message)))
}
