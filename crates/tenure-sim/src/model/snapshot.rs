//! Snapshot of the table's only key: a comparable value from which the table is rebuilt.

use std::time::Duration;

use tenure_core::table::{
    ClaimAnswer, KeySpace, LockTable, Mode, TableClaim, TableConfig, TableEvent,
};
use tenure_core::{LockToken, Time};

use super::protocol::{Body, TICK};
use crate::store::{Hasher, SequentialMint};

type Table = LockTable<Hasher, SequentialMint>;

const KEY: &[u8] = b"key";
const TTL: Duration = Duration::from_secs(6 * TICK.as_secs());

/// Holder and waiters of the key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Snapshot {
    holder: Option<Held>,
    /// Waiters, the next one first.
    queue: Vec<Claim>,
    last_number: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Held {
    claim: Claim,
    token: u64,
    ends: Time,
}

/// A client, and the number of its claim.
pub(super) type Claim = (usize, u8);
/// A waiter that was granted the key, and its token.
pub(super) type Promotion = (Claim, u64);

impl Snapshot {
    pub(super) fn is_held_by(&self, token: u64) -> bool {
        self.holder.is_some_and(|held| held.token == token)
    }

    /// Ends a hold whose lease has expired.
    pub(super) fn expire(&mut self, now: Time) -> Option<Promotion> {
        if self.holder.is_none_or(|held| now < held.ends) {
            return None;
        }
        let mut table = self.table(now);
        table.handle_timeout(now);
        self.holder = None;
        self.promoted(&mut table)
    }

    /// Handles a request: returns the reply, and the waiter that was granted the key by it.
    pub(super) fn handle(
        &mut self,
        client: usize,
        body: Body,
        now: Time,
    ) -> (Body, Option<Promotion>) {
        let mut table = self.table(now);
        match body {
            Body::Claim { want } => (self.claim((client, want), &mut table, now), None),
            Body::Renew { token } => {
                let proof = LockToken::new(token, 0);
                match (table.renew(KeySpace::Lock, KEY, proof, TTL, now), &mut self.holder) {
                    (Ok(renewed), Some(held)) => {
                        held.ends = renewed.ends;
                        (Body::Renewed, None)
                    }
                    _ => (Body::Refused, None),
                }
            }
            Body::Release { token } => {
                if table.release(KeySpace::Lock, KEY, LockToken::new(token, 0), now).is_err() {
                    return (Body::Refused, None);
                }
                self.holder = None;
                let passed = self.promoted(&mut table);
                (Body::Released, passed)
            }
            reply => unreachable!("{reply:?} is not a request"),
        }
    }

    /// Grants or queues a claim. A repeated claim gets the same answer.
    fn claim(&mut self, claim: Claim, table: &mut Table, now: Time) -> Body {
        if let Some(held) = self.holder.filter(|held| held.claim == claim) {
            return Body::Granted { token: held.token };
        }
        if self.queue.contains(&claim) {
            return Body::Queued;
        }
        let owner = table.connect();
        let want = TableClaim { owner, mode: Mode::Exclusive, lease: TTL, queue: true };
        match table.claim(KEY, want, now) {
            ClaimAnswer::Granted(grant) => {
                let token = grant.token.number();
                self.last_number = token;
                self.holder = Some(Held { claim, token, ends: grant.ends });
                Body::Granted { token }
            }
            ClaimAnswer::Queued(_) => {
                self.queue.push(claim);
                Body::Queued
            }
            refused => unreachable!("{refused:?}: there is room"),
        }
    }

    fn promoted(&mut self, table: &mut Table) -> Option<Promotion> {
        while let Some(event) = table.poll_event() {
            if let TableEvent::Granted { place: Some(_), grant, .. } = event {
                let claim = self.queue.remove(0);
                let token = grant.token.number();
                self.last_number = token;
                self.holder = Some(Held { claim, token, ends: grant.ends });
                return Some((claim, token));
            }
        }
        None
    }

    /// Rebuilds the table.
    fn table(&self, now: Time) -> Table {
        let mut table = LockTable::new(
            TableConfig::default(),
            Hasher::default(),
            SequentialMint(self.last_number),
        );
        if let Some(Held { token, ends, .. }) = self.holder {
            let token = LockToken::new(token, 0);
            // Restored at a time before its end, so that the table's own expiry ends it.
            let before = now.min(ends - TICK);
            table.restore(KEY, Mode::Exclusive, token, ends, before).expect("an empty table");
            for _ in &self.queue {
                let owner = table.connect();
                let want = TableClaim { owner, mode: Mode::Exclusive, lease: TTL, queue: true };
                let answer = table.claim(KEY, want, before);
                assert!(matches!(answer, ClaimAnswer::Queued(_)), "behind the holder: {answer:?}");
            }
        }
        table
    }
}
