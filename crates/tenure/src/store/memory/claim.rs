//! A claim in the memory store: first its place in the queue, then its hold.

use std::fmt;
use std::sync::Arc;
#[cfg(unix)]
use std::sync::Weak;
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::table::{Grant as TableGrant, Owner};
use tenure_core::{Key, LockToken, Time};
use tokio::sync::Notify;

use super::super::{
    Answer, Grant, Handle, Hold, HoldEvent, KeySpace, LeaseStart, Place, Renewed, Waited,
};
use super::state::MemoryShared;
use crate::{Error, ErrorKind, Result};

/// Shared state of a claim. When the last reference is dropped, the claim loses its place or its hold, as if its
/// process had died.
pub(super) struct ClaimState {
    pub(super) shared: Arc<MemoryShared>,
    pub(super) owner: Owner,
    pub(super) key: Key,
    pub(super) space: KeySpace,
    pub(super) wake: Arc<Notify>,
}

impl ClaimState {
    fn not_held(&self) -> Error {
        Error::new(ErrorKind::NotHeld, "the hold has ended").on(&self.key).at(&self.shared)
    }
}

impl Drop for ClaimState {
    fn drop(&mut self) {
        self.shared.with(|state, now| state.remove_if_unused(self.owner, now));
    }
}

impl fmt::Debug for ClaimState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {}", self.key, self.shared)
    }
}

#[derive(Debug)]
struct MemoryPlace {
    claim: Arc<ClaimState>,
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

    fn detach(self: Box<Self>) {
        if let Some(entry) = self.claim.shared.lock().entries.get_mut(&self.claim.owner) {
            entry.detached = true;
        }
    }

    #[cfg(unix)]
    fn keep_open(&self) -> Option<Weak<dyn super::super::KeepOpen>> {
        None
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

pub(super) fn answer(claim: Arc<ClaimState>, grant: Option<TableGrant>) -> Answer {
    match grant {
        Some(grant) => Answer::Granted(granted(claim, grant, LeaseStart::FromRequest)),
        None => Answer::Queued(Box::new(MemoryPlace { claim })),
    }
}

fn granted(claim: Arc<ClaimState>, grant: TableGrant, lease_start: LeaseStart) -> Grant {
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
