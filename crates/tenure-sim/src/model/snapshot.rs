//! The one key of the table, as a value: what is needed to build the table again.

use std::time::Duration;

use tenure_core::table::{
    ClaimAnswer, KeySpace, LockTable, Mode, TableClaim, TableConfig, TableEvent,
};
use tenure_core::{LockToken, Time};

use super::{Body, TICK};
use crate::store::{Hasher, SequentialMint};

type Table = LockTable<Hasher, SequentialMint>;

const KEY: &[u8] = b"key";
const TTL: Duration = Duration::from_secs(6 * TICK.as_secs());

/// Who holds the key and who waits for it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Snapshot {
    holder: Option<Held>,
    /// The next one first.
    queue: Vec<Claim>,
    last_number: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Held {
    claim: Claim,
    token: u64,
    ends: Time,
}

/// A client, and which of its claims.
pub(super) type Claim = (usize, u8);
/// Whose turn came, and the token it got.
pub(super) type Promotion = (Claim, u64);

impl Snapshot {
    pub(super) fn is_held_by(&self, token: u64) -> bool {
        self.holder.is_some_and(|held| held.token == token)
    }

    /// Ends what is over.
    pub(super) fn expire(&mut self, now: Time) -> Option<Promotion> {
        if self.holder.is_none_or(|held| now < held.ends) {
            return None;
        }
        let mut table = self.table(now);
        table.handle_timeout(now);
        self.holder = None;
        self.promoted(&mut table)
    }

    /// The answer to a request, and whose turn came by it.
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
            answer => unreachable!("{answer:?} is no request"),
        }
    }

    /// The same claim is granted once, whichever sending of it arrives.
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
            if let TableEvent::Granted { grant, .. } = event {
                let claim = self.queue.remove(0);
                let token = grant.token.number();
                self.last_number = token;
                self.holder = Some(Held { claim, token, ends: grant.ends });
                return Some((claim, token));
            }
        }
        None
    }

    /// The table that this is the snapshot of.
    fn table(&self, now: Time) -> Table {
        let mut table = LockTable::new(
            TableConfig::default(),
            Hasher::default(),
            SequentialMint(self.last_number),
        );
        if let Some(Held { token, ends, .. }) = self.holder {
            let token = LockToken::new(token, 0);
            // As of before its end, so that it is the table's own clock work that ends it.
            let before = now.min(ends - TICK);
            table.restore(KEY, Mode::Exclusive, token, ends, before).expect("an empty table");
            for _ in &self.queue {
                let owner = table.connect();
                let want = TableClaim { owner, mode: Mode::Exclusive, lease: TTL, queue: true };
                let asked = table.claim(KEY, want, before);
                assert!(matches!(asked, ClaimAnswer::Queued(_)), "behind the holder: {asked:?}");
            }
        }
        table
    }
}
