//! Requests that only the plain protocol needs: a connection per wait, and statistics of all keys.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tenure_core::wire::{MAX_SECONDS, Request};
use tenure_core::{Key, Time};

use super::claim::ClaimState;
use super::connection::{Connection, OwnedReply};
use super::{
    MAX_POOLED_CONNECTIONS, REQUEST_TIMEOUT, ServerShared, inspect, unavailable, unexpected_reply,
    unknown_outcome, unreadable_reply, wire_key,
};
use crate::Result;
use crate::store::{Claim, KeySpace, KeyState};

impl ServerShared {
    /// Joins the queue, on a connection that is used for nothing else.
    pub(super) async fn enqueue(
        self: &Arc<Self>,
        claim: &Claim,
        until: Time,
    ) -> Result<Arc<ClaimState>> {
        let connection = self.free_connection(until).await?;
        let state = ClaimState::new(self, Arc::clone(&connection), claim, true);
        let key = &wire_key(&claim.key)[..];
        let lease = Some(self.protocol.lease_to_wire(claim.ttl));
        let enqueue = Request::Enqueue { key, mode: claim.mode, lease };
        // A wait that times out at the server loses its place, so it gets the longest timeout. To stop waiting, the
        // client closes the connection.
        let wait = Request::Wait { key, space: claim.mode.space(), timeout: MAX_SECONDS };
        connection.claim_and_wait(&enqueue, &wait, &state).map_err(unknown_outcome)?;
        Ok(state)
    }

    /// State of one key, taken from the server's statistics of all keys.
    pub(super) async fn inspect_plain(
        self: &Arc<Self>,
        key: &Key,
        space: KeySpace,
    ) -> Result<KeyState> {
        let until = self.clock.now() + REQUEST_TIMEOUT;
        let connection = self.free_connection(until).await?;
        let reply = connection.ask(&Request::Stats, until).await.map_err(unavailable)?;
        let OwnedReply::Json(json) = reply else { return Err(unexpected_reply(&reply)) };
        self.return_connection(connection);
        inspect::parse_stats(&json, key, &wire_key(key), space).ok_or_else(unreadable_reply)
    }

    async fn free_connection(self: &Arc<Self>, until: Time) -> Result<Arc<Connection>> {
        loop {
            let free = self.pool().pop();
            match free {
                Some(connection) if connection.is_open() => return Ok(connection),
                Some(_) => {}
                None => return self.dial(until).await,
            }
        }
    }

    /// Returns a connection that has no claims left to the pool.
    pub(super) fn return_connection(&self, connection: Arc<Connection>) {
        let mut pool = self.pool();
        if connection.is_open()
            && pool.len() < MAX_POOLED_CONNECTIONS
            && !self.closed.load(Ordering::SeqCst)
        {
            pool.push(connection);
        }
    }
}
