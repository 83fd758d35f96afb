//! A hold in the memory store.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::LockToken;
use tenure_core::table::Grant as TableGrant;

use super::claim::ClaimState;
use crate::Result;
use crate::store::{Grant, Handle, Hold, HoldEvent, KeySpace, LeaseStart, Renewed};

#[derive(Debug)]
pub(super) struct MemoryHold {
    pub(super) claim: Arc<ClaimState>,
    pub(super) token: LockToken,
}

#[async_trait]
impl Hold for MemoryHold {
    async fn renew(&mut self, ttl: Duration, _limit: Duration) -> Result<Renewed> {
        let ClaimState { shared, key, space, .. } = &*self.claim;
        shared
            .with(|state, now| state.table.renew(*space, key.as_bytes(), self.token, ttl, now))
            .map(|renewed| Renewed { handoff_requested: renewed.waiters > 0 })
            .map_err(|_| self.claim.not_held())
    }

    async fn check_handoff(&mut self, _limit: Duration) -> Result<bool> {
        let ClaimState { shared, key, space, .. } = &*self.claim;
        let view = shared.read(|state, now| state.table.inspect(*space, key.as_bytes(), 0, now));
        Ok(view.is_some_and(|view| view.summary.waiters > 0))
    }

    async fn event(&mut self) -> HoldEvent {
        let ClaimState { shared, owner, wake, .. } = &*self.claim;
        loop {
            if let Some(entry) = shared.lock().entries.get_mut(owner) {
                if let Some(loss) = entry.lost {
                    return HoldEvent::Lost(loss);
                }
                if std::mem::take(&mut entry.handoff_requested) {
                    return HoldEvent::HandoffRequested;
                }
            }
            wake.notified().await;
        }
    }

    async fn release(&mut self, _limit: Duration) -> Result<()> {
        let ClaimState { shared, key, space, owner, .. } = &*self.claim;
        shared.with(|state, now| {
            if let Some(entry) = state.entries.get_mut(owner) {
                entry.grant = None;
            }
            let released = state.table.release(*space, key.as_bytes(), self.token, now);
            released.map_err(|_| self.claim.not_held())
        })
    }

    fn handle(&self) -> Option<Handle> {
        let space = match self.claim.space {
            KeySpace::Lock => 'l',
            KeySpace::Semaphore => 's',
        };
        Some(Handle::new(format!("{space}{}", self.token)))
    }

    async fn detach(&mut self, _limit: Duration) -> Result<()> {
        if let Some(entry) = self.claim.shared.lock().entries.get_mut(&self.claim.owner) {
            entry.detached = true;
        }
        Ok(())
    }
}

/// Key space and token of a handle.
pub(super) fn parse_handle(handle: &Handle) -> Option<(KeySpace, LockToken)> {
    let (space, token) = handle.expose().split_at_checked(1)?;
    let space = match space {
        "l" => KeySpace::Lock,
        "s" => KeySpace::Semaphore,
        _ => return None,
    };
    Some((space, token.parse().ok()?))
}

/// The grant of a claim, with its hold.
pub(super) fn granted(claim: Arc<ClaimState>, grant: TableGrant, lease_start: LeaseStart) -> Grant {
    let TableGrant { token, waiters, .. } = grant;
    let hold = Box::new(MemoryHold { claim, token });
    Grant {
        token: token.fencing(),
        lease_start,
        handoff_requested: waiters > 0,
        grants: None,
        hold,
    }
}
