//! The lock table together with the claims of the extension.
//!
//! Every operation returns a [`Pending`] answer. [`Engine::change`](super::Engine::change) releases it when the events
//! of the operation are applied: no change can be forgotten.

use std::hash::RandomState;
use std::sync::Arc;
use std::time::Duration;

use tenure_core::table::{
    ClaimAnswer, Enqueued, KeySpace, Mode, NotHeld, OnDisconnect, Owner, PlaceId, Redeemed,
    Renewed, RestoreConflict, Summary, TableClaim, TableConfig, TableEvent, UpcomingOp, View,
};
use tenure_core::wire::ClaimId;
use tenure_core::{LockTable, LockToken, Time};

use super::claims::{Claim, ClaimRef, ClaimStage, Claims};
use crate::token_mint::TokenMint;

type Table = LockTable<RandomState, TokenMint>;

/// All locks and semaphores, with their holders and waiters.
#[derive(Debug)]
pub(super) struct Locks {
    table: Table,
    claims: Claims,
    /// Owner of the holds that were claimed as detached. It never disconnects.
    detached_owner: Owner,
    /// Number of the hold that an operator breaks, and the reason, until the event of its end.
    breaking: Option<(u64, Box<[u8]>)>,
}

/// Answer of an operation whose events are yet to be applied.
#[must_use = "the events of the operation must be applied: use `Engine::change`"]
#[derive(Debug)]
pub(super) struct Pending<T>(T);

impl<T> Pending<T> {
    /// The answer. For code that applies the events itself.
    pub(super) fn into_answer(self) -> T {
        self.0
    }
}

/// A change, and what the server knows about it beside the table.
#[derive(Debug)]
pub(super) struct LockEvent {
    pub(super) change: TableEvent,
    /// Claim of the extension that it concerns.
    pub(super) claim: Option<ClaimRef>,
    /// Operator's reason, if a hold was broken.
    pub(super) reason: Option<Box<[u8]>>,
}

impl Locks {
    pub(super) fn new(config: TableConfig, first_number: u64) -> Self {
        let mut table = LockTable::new(config, RandomState::new(), TokenMint::from(first_number));
        let detached_owner = table.connect();
        Self { table, claims: Claims::default(), detached_owner, breaking: None }
    }

    /// The table, to read.
    pub(super) fn table(&self) -> &Table {
        &self.table
    }

    /// The claims, to read.
    pub(super) fn claims(&self) -> &Claims {
        &self.claims
    }

    /// Owner of the holds that belong to no connection from the start.
    pub(super) fn detached_owner(&self) -> Owner {
        self.detached_owner
    }

    /// Removes the oldest event.
    pub(super) fn poll_event(&mut self) -> Option<LockEvent> {
        let change = self.table.poll_event()?;
        let claim = self.claims.apply(&change);
        let reason = match (&change, &self.breaking) {
            (TableEvent::Ended { token, .. }, Some((number, _))) if token.number() == *number => {
                self.breaking.take().map(|(_, reason)| reason)
            }
            _ => None,
        };
        Some(LockEvent { change, claim, reason })
    }

    pub(super) fn connect(&mut self) -> Owner {
        self.table.connect()
    }

    pub(super) fn disconnect(
        &mut self,
        owner: Owner,
        on_disconnect: OnDisconnect,
        now: Time,
    ) -> Pending<()> {
        self.table.disconnect(owner, on_disconnect, now);
        Pending(())
    }

    pub(super) fn handle_timeout(&mut self, now: Time) -> Pending<()> {
        self.table.handle_timeout(now);
        Pending(())
    }

    pub(super) fn embargo_until(&mut self, until: Time) {
        self.table.embargo_until(until);
    }

    /// Restores a hold of an earlier server, with the identity of its holder.
    pub(super) fn restore(
        &mut self,
        key: &[u8],
        (mode, token, ends): (Mode, LockToken, Time),
        by: &[u8],
        now: Time,
    ) -> Result<(), RestoreConflict> {
        self.table.restore(key, mode, token, ends, now)?;
        self.claims.add_restored_identity(token.number(), by);
        Ok(())
    }

    pub(super) fn prefetch<'a>(&mut self, upcoming: impl Iterator<Item = UpcomingOp<'a>>) {
        self.table.prefetch(upcoming);
    }

    pub(super) fn inspect(
        &mut self,
        space: KeySpace,
        key: &[u8],
        max_listed: usize,
        now: Time,
    ) -> Pending<Option<View>> {
        Pending(self.table.inspect(space, key, max_listed, now))
    }

    pub(super) fn list(
        &mut self,
        space: KeySpace,
        prefix: &[u8],
        after: Option<&[u8]>,
        max_listed: usize,
        now: Time,
    ) -> Pending<Vec<Summary>> {
        Pending(self.table.list(space, prefix, after, max_listed, now))
    }
}

/// Operations of both protocols, by key and token.
impl Locks {
    pub(super) fn claim(
        &mut self,
        key: &[u8],
        claim: TableClaim,
        now: Time,
    ) -> Pending<ClaimAnswer> {
        Pending(self.table.claim(key, claim, now))
    }

    pub(super) fn enqueue(
        &mut self,
        key: &[u8],
        claim: TableClaim,
        now: Time,
    ) -> Pending<Enqueued> {
        Pending(self.table.enqueue(key, claim, now))
    }

    pub(super) fn redeem(
        &mut self,
        owner: Owner,
        space: KeySpace,
        key: &[u8],
        now: Time,
    ) -> Pending<Redeemed> {
        Pending(self.table.redeem(owner, space, key, now))
    }

    pub(super) fn abandon(&mut self, place: PlaceId, now: Time) -> Pending<bool> {
        Pending(self.table.abandon(place, now))
    }

    pub(super) fn renew(
        &mut self,
        space: KeySpace,
        key: &[u8],
        token: LockToken,
        lease: Duration,
        now: Time,
    ) -> Pending<Result<Renewed, NotHeld>> {
        Pending(self.table.renew(space, key, token, lease, now))
    }

    pub(super) fn release(
        &mut self,
        space: KeySpace,
        key: &[u8],
        token: LockToken,
        now: Time,
    ) -> Pending<Result<(), NotHeld>> {
        Pending(self.table.release(space, key, token, now))
    }

    /// Breaks the hold with this number, for the reason that an operator gave.
    pub(super) fn evict(
        &mut self,
        space: KeySpace,
        key: &[u8],
        number: u64,
        reason: &[u8],
        now: Time,
    ) -> Pending<Result<Option<Owner>, NotHeld>> {
        let evicted = self.table.evict(space, key, number, now);
        self.breaking = evicted.is_ok().then(|| (number, reason.into()));
        Pending(evicted)
    }
}

/// Claims of the extension, by their id.
impl Locks {
    /// Makes a claim of the extension.
    pub(super) fn claim_as(
        &mut self,
        (id, from, by): (ClaimId, Owner, &[u8]),
        key: &[u8],
        claim: TableClaim,
        now: Time,
    ) -> Pending<ClaimAnswer> {
        let answer = self.table.claim(key, claim, now);
        let stage = match answer {
            ClaimAnswer::Granted(grant) => {
                ClaimStage::Held { token: grant.token, lease: grant.lease }
            }
            ClaimAnswer::Queued(place) => ClaimStage::Waiting(place),
            ClaimAnswer::Contended | ClaimAnswer::Refused(_) => return Pending(answer),
        };
        let (space, by) = (claim.mode.space(), Arc::from(by));
        self.claims.insert(id, Claim { from, space, key: key.into(), by, stage });
        Pending(answer)
    }

    /// Binds a claim to another connection.
    pub(super) fn rebind(&mut self, id: ClaimId, from: Owner) {
        self.claims.rebind(id, from);
    }

    /// Abandons a claim: it leaves the queue, or its hold is released. False if there is no such claim.
    pub(super) fn abandon_claim(&mut self, id: ClaimId, now: Time) -> Pending<bool> {
        let Some(claim) = self.claims.get(id) else { return Pending(false) };
        match claim.stage {
            ClaimStage::Waiting(place) => {
                self.table.abandon(place, now);
            }
            ClaimStage::Held { token, .. } => {
                // A hold that has just expired needs no release.
                let _expired: Result<(), NotHeld> =
                    self.table.release(claim.space, &claim.key, token, now);
            }
        }
        Pending(true)
    }

    /// Detaches the hold of a claim from its connection. False if the claim does not hold.
    pub(super) fn detach_claim(&mut self, id: ClaimId, now: Time) -> Pending<bool> {
        Pending(match self.claims.get(id) {
            Some(Claim { space, key, stage: ClaimStage::Held { token, .. }, .. }) => {
                self.table.detach(*space, key, *token, now).is_ok()
            }
            _ => false,
        })
    }

    /// Forgets which claims belong to a connection that has ended. Returns those that wait: they are to be abandoned,
    /// because a claim that would be detached has another owner in the table.
    pub(super) fn forget_connection(&mut self, connection: Owner) -> Vec<ClaimId> {
        self.claims.disconnect(connection)
    }
}
