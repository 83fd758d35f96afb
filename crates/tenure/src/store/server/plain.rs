//! What the protocol of servers in the field needs beside the rest: a connection for each wait, and a look at all keys.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tenure_core::wire::{MAX_SECONDS, Request};
use tenure_core::{Key, Time};

use super::link::{Link, Said};
use super::seat::Seat;
use super::{PATIENCE, POOL, Shared, garbled, show, silent, strange, unread, wire_key};
use crate::Result;
use crate::store::{Claim, KeySpace, KeyState};

impl Shared {
    /// Joins the queue, on a connection that waits for nothing else.
    pub(super) async fn enqueue(self: &Arc<Self>, claim: &Claim, until: Time) -> Result<Arc<Seat>> {
        let link = self.free_link(until).await?;
        let seat = Seat::new(self, Arc::clone(&link), claim, true);
        let key = &wire_key(&claim.key)[..];
        let lease = Some(self.dialect.count(claim.ttl));
        let enqueue = Request::Enqueue { key, mode: claim.mode, lease };
        // A wait whose time is over gives up its place: ours is over when we close the connection.
        let wait = Request::Wait { key, space: claim.mode.space(), timeout: MAX_SECONDS };
        link.claim_and_wait(&enqueue, &wait, &seat).map_err(silent)?;
        Ok(seat)
    }

    /// What the server tells of all keys, for one of them.
    pub(super) async fn look_up(self: &Arc<Self>, key: &Key, space: KeySpace) -> Result<KeyState> {
        let until = self.clock.now() + PATIENCE;
        let link = self.free_link(until).await?;
        let said = link.ask(&Request::Stats, until).await.map_err(unread)?;
        let Said::Json(json) = said else { return Err(strange(&said)) };
        self.give_back(link);
        show::among_all(&json, key, &wire_key(key), space).ok_or_else(garbled)
    }

    async fn free_link(self: &Arc<Self>, until: Time) -> Result<Arc<Link>> {
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
    pub(super) fn give_back(&self, link: Arc<Link>) {
        let mut pool = self.pool();
        if link.is_open() && pool.len() < POOL && !self.closed.load(Ordering::SeqCst) {
            pool.push(link);
        }
    }
}
