//! A place in the queue of a key.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::Time;

use super::claim::ClaimState;
use super::hold::granted;
use crate::Result;
use crate::store::{LeaseStart, Place, Waited};

#[derive(Debug)]
pub(super) struct MemoryPlace {
    pub(super) claim: Arc<ClaimState>,
}

#[async_trait]
impl Place for MemoryPlace {
    async fn wait(&mut self, limit: Duration) -> Result<Waited> {
        let ClaimState { shared, owner, wake, .. } = &*self.claim;
        let end = shared.clock.now() + limit;
        loop {
            // The store has no timer of its own: waiters make expired leases end in time.
            shared.read(|state, now| state.table.handle_timeout(now));
            let due = {
                let state = shared.lock();
                let Some(entry) = state.entries.get(owner) else { return Ok(Waited::Gone) };
                match (entry.grant, entry.place) {
                    (Some(grant), _) => {
                        let claim = Arc::clone(&self.claim);
                        return Ok(Waited::Granted(granted(claim, grant, LeaseStart::FromConfirm)));
                    }
                    (None, None) => return Ok(Waited::Gone),
                    (None, Some(place)) if shared.clock.now() >= end => {
                        return Ok(Waited::StillQueued { ahead: state.table.waiters_ahead(place) });
                    }
                    (None, Some(_)) => state.table.poll_timeout().unwrap_or(Time::MAX).min(end),
                }
            };
            tokio::select! {
                () = wake.notified() => {}
                () = shared.clock.sleep_until(due) => {}
            }
        }
    }

    async fn abandon(&mut self, _limit: Duration) -> Result<()> {
        let ClaimState { shared, owner, key, space, .. } = &*self.claim;
        shared.with(|state, now| {
            let Some(entry) = state.entries.get_mut(owner) else { return };
            if let Some(place) = entry.place.take() {
                state.table.abandon(place, now);
            }
            if let Some(grant) = entry.grant.take() {
                // An error means that the grant has ended already: nothing is left to release.
                let _ = state.table.release(*space, key.as_bytes(), grant.token, now);
            }
        });
        Ok(())
    }
}
