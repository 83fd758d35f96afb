//! Watches of keys: the server pushes a message when a key changes.

use std::sync::Arc;

use tenure_core::Key;
use tenure_core::wire::{ExtensionRequest, Request};
use tokio::sync::oneshot;

use super::claim::ServerConnection;
use super::errors::{unavailable, unexpected_reply};
use super::shared::{REQUEST_TIMEOUT, ServerShared};
use super::wire::{NoReply, OwnedReply, wire_key};
use crate::Result;
use crate::store::{KeySpace, Version};

/// Resolves when the key has changed since `since`.
pub(super) async fn changed(
    shared: &ServerShared,
    key: &Key,
    space: KeySpace,
    since: Version,
) -> Result<()> {
    let until = shared.clock.now() + REQUEST_TIMEOUT;
    let connection = shared.connection(until).await?;
    let (watch, changed) =
        ServerWatch::new(connection).ok_or_else(|| unavailable(NoReply::Unsent))?;
    // A version that does not fit is not one of this server's: the maximum differs from all of its own.
    let seen = u64::try_from(since.0).unwrap_or(u64::MAX);
    let (id, key) = (watch.id, &wire_key(key)[..]);
    let request = Request::Extended(ExtensionRequest::Watch { key, space, seen, id });
    match watch.connection.ask(&request, until).await {
        Ok(OwnedReply::Done) => changed.await.map_err(|_| unavailable(NoReply::Disconnected)),
        Ok(reply) => Err(unexpected_reply(&reply)),
        Err(no_reply) => Err(unavailable(no_reply)),
    }
}

/// Watch of a key. Dropping it ends the watch at the server.
struct ServerWatch {
    connection: Arc<ServerConnection>,
    id: u64,
}

impl ServerWatch {
    fn new(connection: Arc<ServerConnection>) -> Option<(Self, oneshot::Receiver<()>)> {
        let (id, changed) = connection.watch()?;
        Some((Self { connection, id }, changed))
    }
}

impl Drop for ServerWatch {
    fn drop(&mut self) {
        if self.connection.unwatch(self.id) {
            self.connection
                .send_without_reply(&Request::Extended(ExtensionRequest::Unwatch { id: self.id }));
        }
    }
}
