//! Effects of every change of the lock table, in one place: journal, history, watches, and messages to other clients
//! than the one whose request is being served.

use tenure_core::Time;
use tenure_core::table::{Ending, Grant, KeyBytes, KeySpace, Owner, PlaceId, Redeemed, TableEvent};
use tenure_core::wire::Push;

use super::Engine;
use super::claims::ClaimRef;
use super::connection::{Connection, ConnectionState, Wake};
use super::locks::{LockEvent, Locks, Pending};
use crate::units::millis;

impl Engine {
    /// Runs an operation on the locks, and applies the changes that it made.
    pub(super) fn change<T>(
        &mut self,
        now: Time,
        operation: impl FnOnce(&mut Locks) -> Pending<T>,
    ) -> T {
        let pending = operation(&mut self.locks);
        while let Some(event) = self.locks.poll_event() {
            self.apply(&event, now);
        }
        pending.into_answer()
    }

    /// Applies one change.
    fn apply(&mut self, event: &LockEvent, now: Time) {
        let connections = &self.connections;
        self.audit.record(event, |owner| connections.identity(owner), now);
        let claim = event.claim.as_ref();
        match &event.change {
            TableEvent::Granted { place, owner, space, key, grant, .. } => {
                self.key_changed(*space, key);
                if let Some(place) = place {
                    self.notify_granted(*place, *owner, (*space, key), grant, claim, now);
                }
            }
            TableEvent::Ended { how, owner, space, key, token } => {
                self.key_changed(*space, key);
                let why = match how {
                    Ending::Expired => b"expired".to_vec(),
                    Ending::Evicted => {
                        [b"evicted ", event.reason.as_deref().unwrap_or_default()].concat()
                    }
                    // The holder ended it, or its connection is gone.
                    Ending::Released | Ending::Disconnected | Ending::Abandoned => return,
                };
                if let Some(holder) = claim.map(|claim| claim.from).or(*owner) {
                    self.push(holder, Push::Ended { number: token.number(), why: &why });
                }
            }
            TableEvent::Queued { space, key, .. } | TableEvent::Left { space, key, .. } => {
                self.key_changed(*space, key);
            }
            TableEvent::HandoffRequested { owner, token, .. } => {
                let holder = claim.map_or(*owner, |claim| claim.from);
                self.push(holder, Push::HandoffRequested { number: token.number() });
            }
            TableEvent::Renewed { .. } | TableEvent::Detached { .. } => {}
        }
    }

    /// Tells the client of a waiter that it was granted the key.
    fn notify_granted(
        &mut self,
        place: PlaceId,
        owner: Owner,
        (space, key): (KeySpace, &KeyBytes),
        grant: &Grant,
        claim: Option<&ClaimRef>,
        now: Time,
    ) {
        if let Some(ClaimRef { id, from, .. }) = claim {
            let (token, lease) = (grant.token, millis(grant.lease));
            self.push(*from, Push::Granted { id: *id, token, lease });
            return;
        }
        // The client of a two-phase claim may not have sent `w` yet, or may wait for another key. No reply is due then:
        // the grant stays in the table until `w` redeems it.
        let state = self.connections.get(owner).map(|connection| &connection.state);
        let Some(&ConnectionState::Waiting { place: awaited, two_phase, .. }) = state else {
            return;
        };
        if awaited == place {
            let mut grant = *grant;
            if two_phase {
                // The lease restarts now. If it has ended already, the client receives the grant as it was. The caller
                // of `apply` applies the renewal.
                let redeemed = self.locks.redeem(owner, space, key, now).into_answer();
                if let Redeemed::Granted(renewed) = redeemed {
                    grant = renewed;
                }
            }
            self.woken.push_back((owner, Wake::Granted(grant)));
        }
    }

    /// Fires the watches of a key whose holders or waiters changed.
    pub(super) fn key_changed(&mut self, space: KeySpace, key: &[u8]) {
        if self.watches.is_empty() {
            return;
        }
        for (owner, id) in self.watches.take(space, key) {
            let mut line = Vec::new();
            Push::Changed { id }.write(&mut line);
            self.woken.push_back((owner, Wake::Push(line.into())));
        }
    }

    /// Queues a push to a client. False if the connection is gone or does not accept pushes.
    pub(super) fn push(&mut self, to: Owner, push: Push<'_>) -> bool {
        let accepted = self.connections.get(to).is_some_and(Connection::accepts_pushes);
        if accepted {
            let mut line = Vec::new();
            push.write(&mut line);
            self.woken.push_back((to, Wake::Push(line.into())));
        }
        accepted
    }
}
