//! One claim's stay in the memory store: first its place, then its hold.

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
use super::state::Shared;
use crate::{Error, ErrorKind, Result};

/// One claim's stay in the store: when the last who sits here goes, so does what it had, as if a process had died.
pub(super) struct Seat {
    pub(super) shared: Arc<Shared>,
    pub(super) owner: Owner,
    pub(super) key: Key,
    pub(super) space: KeySpace,
    pub(super) wake: Arc<Notify>,
}

impl Seat {
    fn not_held(&self) -> Error {
        Error::new(ErrorKind::NotHeld, "the hold has ended").on(&self.key).at(&self.shared)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.shared.with(|state, now| state.tidy(self.owner, now));
    }
}

impl fmt::Debug for Seat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {}", self.key, self.shared)
    }
}

#[derive(Debug)]
struct MemoryPlace {
    seat: Arc<Seat>,
}

#[async_trait]
impl Place for MemoryPlace {
    async fn wait(&mut self, limit: Duration) -> Result<Waited> {
        let Seat { shared, owner, wake, .. } = &*self.seat;
        let end = shared.clock.now() + limit;
        loop {
            // Whoever waits sees to it that leases end in time: the store has no timer of its own.
            shared.look(|state, now| state.table.handle_timeout(now));
            let due = {
                let state = shared.lock();
                let Some(seat) = state.seats.get(owner) else { return Ok(Waited::Gone) };
                match (seat.grant, seat.place) {
                    (Some(grant), _) => {
                        let seat = Arc::clone(&self.seat);
                        return Ok(Waited::Granted(granted(seat, grant, LeaseStart::FromConfirm)));
                    }
                    (None, None) => return Ok(Waited::Gone),
                    (None, Some(place)) if shared.clock.now() >= end => {
                        return Ok(Waited::Still { ahead: state.table.waiters_ahead(place) });
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
        let Seat { shared, owner, key, space, .. } = &*self.seat;
        shared.with(|state, now| {
            let Some(seat) = state.seats.get_mut(owner) else { return };
            if let Some(place) = seat.place.take() {
                state.table.abandon(place, now);
            }
            if let Some(grant) = seat.grant.take() {
                // A grant that is over already is as good as given back.
                let _ = state.table.release(*space, key.as_bytes(), grant.token, now);
            }
        });
        Ok(())
    }
}

#[derive(Debug)]
pub(super) struct MemoryHold {
    pub(super) seat: Arc<Seat>,
    pub(super) token: LockToken,
}

#[async_trait]
impl Hold for MemoryHold {
    async fn renew(&mut self, ttl: Duration, _limit: Duration) -> Result<Renewed> {
        let Seat { shared, key, space, .. } = &*self.seat;
        shared
            .with(|state, now| state.table.renew(*space, key.as_bytes(), self.token, ttl, now))
            .map(|renewed| Renewed { waiter: renewed.waiters > 0 })
            .map_err(|_| self.seat.not_held())
    }

    async fn look(&mut self, _limit: Duration) -> Result<bool> {
        let Seat { shared, key, space, .. } = &*self.seat;
        let view = shared.look(|state, now| state.table.inspect(*space, key.as_bytes(), 0, now));
        Ok(view.is_some_and(|view| view.summary.waiters > 0))
    }

    async fn event(&mut self) -> HoldEvent {
        let Seat { shared, owner, wake, .. } = &*self.seat;
        loop {
            if let Some(seat) = shared.lock().seats.get_mut(owner) {
                if let Some(loss) = seat.lost {
                    return HoldEvent::Lost(loss);
                }
                if std::mem::take(&mut seat.wanted) {
                    return HoldEvent::Wanted;
                }
            }
            wake.notified().await;
        }
    }

    async fn release(&mut self, _limit: Duration) -> Result<()> {
        let Seat { shared, key, space, owner, .. } = &*self.seat;
        shared.with(|state, now| {
            if let Some(seat) = state.seats.get_mut(owner) {
                seat.grant = None;
            }
            let released = state.table.release(*space, key.as_bytes(), self.token, now);
            released.map_err(|_| self.seat.not_held())
        })
    }

    fn handle(&self) -> Option<Handle> {
        let space = match self.seat.space {
            KeySpace::Lock => 'l',
            KeySpace::Semaphore => 's',
        };
        Some(Handle::new(format!("{space}{}", self.token)))
    }

    fn leave(self: Box<Self>) {
        if let Some(seat) = self.seat.shared.lock().seats.get_mut(&self.seat.owner) {
            seat.left = true;
        }
    }

    #[cfg(unix)]
    fn keep_open(&self) -> Option<Weak<dyn super::super::KeepOpen>> {
        None
    }
}

/// What a handle names.
pub(super) fn parse_handle(handle: &Handle) -> Option<(KeySpace, LockToken)> {
    let (space, token) = handle.expose().split_at_checked(1)?;
    let space = match space {
        "l" => KeySpace::Lock,
        "s" => KeySpace::Semaphore,
        _ => return None,
    };
    Some((space, token.parse().ok()?))
}

pub(super) fn answer(seat: Arc<Seat>, grant: Option<TableGrant>) -> Answer {
    match grant {
        Some(grant) => Answer::Granted(granted(seat, grant, LeaseStart::FromRequest)),
        None => Answer::Queued(Box::new(MemoryPlace { seat })),
    }
}

fn granted(seat: Arc<Seat>, grant: TableGrant, counts: LeaseStart) -> Grant {
    let TableGrant { token, waiters, .. } = grant;
    let hold = Box::new(MemoryHold { seat, token });
    Grant { token: token.fencing(), counts, waiter: waiters > 0, grants: None, hold }
}
