//! What the protocol of servers in the field needs beside the rest: a connection for each wait, and a look at all keys.

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
    /// Joins the queue, on a connection that waits for nothing else.
    pub(super) async fn enqueue(
        self: &Arc<Self>,
        claim: &Claim,
        until: Time,
    ) -> Result<Arc<ClaimState>> {
        let link = self.free_connection(until).await?;
        let seat = ClaimState::new(self, Arc::clone(&link), claim, true);
        let key = &wire_key(&claim.key)[..];
        let lease = Some(self.protocol.lease_to_wire(claim.ttl));
        let enqueue = Request::Enqueue { key, mode: claim.mode, lease };
        // A wait whose time is over gives up its place: ours is over when we close the connection.
        let wait = Request::Wait { key, space: claim.mode.space(), timeout: MAX_SECONDS };
        link.claim_and_wait(&enqueue, &wait, &seat).map_err(unknown_outcome)?;
        Ok(seat)
    }

    /// What the server tells of all keys, for one of them.
    pub(super) async fn inspect_plain(
        self: &Arc<Self>,
        key: &Key,
        space: KeySpace,
    ) -> Result<KeyState> {
        let until = self.clock.now() + REQUEST_TIMEOUT;
        let link = self.free_connection(until).await?;
        let said = link.ask(&Request::Stats, until).await.map_err(unavailable)?;
        let OwnedReply::Json(json) = said else { return Err(unexpected_reply(&said)) };
        self.return_connection(link);
        inspect::parse_stats(&json, key, &wire_key(key), space).ok_or_else(unreadable_reply)
    }

    async fn free_connection(self: &Arc<Self>, until: Time) -> Result<Arc<Connection>> {
        loop {
            let free = self.pool().pop();
            match free {
                Some(link) if link.is_open() => return Ok(link),
                Some(_) => {}
                None => return self.dial(until).await,
            }
        }
    }

    /// Keeps a connection that nothing lives on any more for the next who needs one.
    pub(super) fn return_connection(&self, link: Arc<Connection>) {
        let mut pool = self.pool();
        if link.is_open()
            && pool.len() < MAX_POOLED_CONNECTIONS
            && !self.closed.load(Ordering::SeqCst)
        {
            pool.push(link);
        }
    }
}
