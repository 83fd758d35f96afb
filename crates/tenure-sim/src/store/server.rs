//! A store with a queue and a clock of its own: a lock server, or a database whose sessions hold locks.
//!
//! The queue, the leases and the passing on are the real [`LockTable`]'s. What is added is what a server adds: which
//! claim or connection a hold belongs to, and that the same claim is granted once.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasherDefault, DefaultHasher};
use std::time::Duration;

use tenure_core::table::{
    ClaimAnswer, Ending, Grant, KeySpace, Mint, Mode, OnDisconnect, TableClaim, TableConfig,
    TableEvent,
};
use tenure_core::table::{LockTable, Owner, PlaceId};
use tenure_core::{LockToken, Time};

use crate::message::{Reply, ReplyMessage, Request, RequestMessage};

pub(crate) type Hasher = BuildHasherDefault<DefaultHasher>;

#[derive(Debug)]
pub(crate) struct Server {
    ttl: Duration,
    /// Holds belong to connections, not to claims.
    by_session: bool,
    table: LockTable<Hasher, SequentialMint>,
    /// By the number of the claim, or of the connection where those hold.
    claims: BTreeMap<u64, ClaimEntry>,
    closed: BTreeSet<usize>,
    last_number: u64,
    replies: Vec<ReplyMessage>,
    granted: Vec<ClaimRef>,
}

/// A claim, and the connection that it came over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClaimRef {
    pub(crate) claim: u64,
    pub(crate) connection: usize,
}

/// How a claim stands at the table.
#[derive(Clone, Copy, Debug)]
struct ClaimEntry {
    claim_ref: ClaimRef,
    key: usize,
    owner: Owner,
    stage: ClaimStage,
}

#[derive(Clone, Copy, Debug)]
enum ClaimStage {
    /// `number` is the request that is answered when its turn comes.
    Waiting { place: PlaceId, number: Option<u32> },
    /// A lock server writes `token` and `ends` down; a restart reads them.
    Held { token: LockToken, ends: Time },
}

/// Tokens in order. The secret is left out: nobody guesses here.
#[derive(Debug)]
pub(crate) struct SequentialMint(pub(crate) u64);

impl Mint for SequentialMint {
    fn mint(&mut self) -> LockToken {
        self.0 += 1;
        LockToken::new(self.0, 0)
    }
}

impl Server {
    pub(crate) fn new(ttl: Duration, by_session: bool) -> Self {
        Self {
            ttl,
            by_session,
            table: LockTable::new(TableConfig::default(), Hasher::default(), SequentialMint(0)),
            claims: BTreeMap::new(),
            closed: BTreeSet::new(),
            last_number: 0,
            replies: Vec::new(),
            granted: Vec::new(),
        }
    }

    pub(crate) fn handle(&mut self, parcel: RequestMessage, now: Time) {
        self.handle_timeout(now);
        if self.closed.contains(&parcel.connection) {
            return self.answer(&parcel, Reply::Closed);
        }
        let reply = match parcel.request {
            Request::Claim { claim, queue } => Some(self.claim(&parcel, claim, queue, now)),
            Request::Wait { claim } => self.wait(&parcel, claim),
            Request::Renew { token } => Some(self.renew(&parcel, token, now)),
            Request::Release { token } => Some(self.release(&parcel, token, now)),
            Request::Abandon { claim } => {
                self.remove_claim(self.id(claim, parcel.connection), now);
                Some(Reply::Released)
            }
            Request::Read
            | Request::Write { .. }
            | Request::Ring { .. }
            | Request::Silence { .. } => None,
        };
        if let Some(reply) = reply {
            self.answer(&parcel, reply);
        }
        if self.by_session {
            self.reset_idle_timeout(parcel.connection, now);
        }
        self.take_events(now);
    }

    pub(crate) fn poll_timeout(&self) -> Option<Time> {
        self.table.poll_timeout()
    }

    pub(crate) fn handle_timeout(&mut self, now: Time) {
        self.table.handle_timeout(now);
        self.take_events(now);
    }

    pub(crate) fn poll_reply(&mut self) -> Option<ReplyMessage> {
        self.replies.pop()
    }

    /// Who was granted something since the last question.
    pub(crate) fn poll_granted(&mut self) -> Option<ClaimRef> {
        self.granted.pop()
    }

    /// The server learns that a connection is gone.
    pub(crate) fn disconnect(&mut self, link: usize, now: Time) {
        self.closed.insert(link);
        for standing in self.remove(|standing| standing.claim_ref.connection == link) {
            self.table.disconnect(standing.owner, OnDisconnect::Release, now);
        }
        self.take_events(now);
    }

    /// Comes back after a stop: the holds were written down, the queue was not.
    pub(crate) fn restart(&mut self, now: Time) {
        self.table = LockTable::new(
            TableConfig::default(),
            Hasher::default(),
            SequentialMint(self.last_number),
        );
        self.claims.retain(|_, standing| matches!(standing.stage, ClaimStage::Held { .. }));
        for standing in self.claims.values_mut() {
            standing.owner = self.table.connect();
            if let ClaimStage::Held { token, ends } = standing.stage {
                let key = key_bytes(standing.key);
                let restored = self.table.restore(&key, Mode::Exclusive, token, ends, now);
                restored.expect("one hold a key was written down");
            }
        }
        self.take_events(now);
    }

    /// Those who hold or wait for a key under a claim.
    pub(crate) fn claim_refs(&self, claim: u64) -> impl Iterator<Item = ClaimRef> {
        self.claims.values().map(|s| s.claim_ref).filter(move |party| party.claim == claim)
    }

    fn id(&self, claim: u64, link: usize) -> u64 {
        if self.by_session { link as u64 } else { claim }
    }

    fn claim(&mut self, parcel: &RequestMessage, claim: u64, queue: bool, now: Time) -> Reply {
        let id = self.id(claim, parcel.connection);
        match self.claims.get(&id).map(|standing| standing.stage) {
            Some(ClaimStage::Held { token, .. }) => {
                return Reply::Granted { token: token.number() };
            }
            Some(ClaimStage::Waiting { .. }) => return Reply::Queued,
            None => {}
        }
        let owner = self.table.connect();
        let want = TableClaim { owner, mode: Mode::Exclusive, lease: self.ttl, queue };
        let (stage, reply) = match self.table.claim(&key_bytes(parcel.key), want, now) {
            ClaimAnswer::Granted(Grant { token, ends, .. }) => {
                (ClaimStage::Held { token, ends }, Reply::Granted { token: token.number() })
            }
            ClaimAnswer::Queued(place) => {
                (ClaimStage::Waiting { place, number: None }, Reply::Queued)
            }
            ClaimAnswer::Contended | ClaimAnswer::Refused(_) => {
                self.table.disconnect(owner, OnDisconnect::Release, now);
                return Reply::Contended;
            }
        };
        let party = ClaimRef { claim, connection: parcel.connection };
        self.claims.insert(id, ClaimEntry { claim_ref: party, key: parcel.key, owner, stage });
        if let ClaimStage::Held { token, .. } = stage {
            self.last_number = token.number();
            self.granted.push(party);
        }
        reply
    }

    fn wait(&mut self, parcel: &RequestMessage, claim: u64) -> Option<Reply> {
        let id = self.id(claim, parcel.connection);
        match self.claims.get_mut(&id).map(|standing| &mut standing.stage) {
            Some(ClaimStage::Held { token, .. }) => Some(Reply::Granted { token: token.number() }),
            Some(ClaimStage::Waiting { number, .. }) => {
                *number = Some(parcel.number);
                None
            }
            None => Some(Reply::NotQueued),
        }
    }

    fn renew(&mut self, parcel: &RequestMessage, number: u64, now: Time) -> Reply {
        let Some(id) = self.holder(parcel, number) else { return Reply::Refused };
        match self.extend_lease(id, now) {
            Some(waiter) => Reply::Renewed { handoff_requested: waiter },
            None => Reply::Refused,
        }
    }

    fn release(&mut self, parcel: &RequestMessage, number: u64, now: Time) -> Reply {
        let Some(id) = self.holder(parcel, number) else { return Reply::Refused };
        self.remove_claim(id, now);
        Reply::Released
    }

    /// Whose hold has this number. A session can speak for itself only.
    fn holder(&self, parcel: &RequestMessage, number: u64) -> Option<u64> {
        let link = self.by_session.then_some(parcel.connection);
        self.claims.iter().find_map(|(id, standing)| {
            let held =
                matches!(standing.stage, ClaimStage::Held { token, .. } if token.number() == number);
            (held && link.is_none_or(|link| link == standing.claim_ref.connection)).then_some(*id)
        })
    }

    /// A connection that spoke is not idle.
    fn reset_idle_timeout(&mut self, link: usize, now: Time) {
        self.extend_lease(link as u64, now);
    }

    /// Lets the lease of a hold begin anew, and says whether somebody waits.
    fn extend_lease(&mut self, id: u64, now: Time) -> Option<bool> {
        let standing = self.claims.get_mut(&id)?;
        let ClaimStage::Held { token, ends } = &mut standing.stage else { return None };
        let key = key_bytes(standing.key);
        let renewed = self.table.renew(KeySpace::Lock, &key, *token, self.ttl, now).ok()?;
        *ends = renewed.ends;
        Some(renewed.waiters > 0)
    }

    fn remove_claim(&mut self, id: u64, now: Time) {
        if let Some(ClaimEntry { key, owner, stage, .. }) = self.claims.remove(&id) {
            if let ClaimStage::Held { token, .. } = stage {
                // Over already where its lease has just ended; then there is nothing to give back.
                self.table.release(KeySpace::Lock, &key_bytes(key), token, now).ok();
            }
            self.table.disconnect(owner, OnDisconnect::Release, now);
        }
    }

    fn take_events(&mut self, now: Time) {
        while let Some(event) = self.table.poll_event() {
            match event {
                TableEvent::Granted { place, grant, .. } => self.promoted(place, grant),
                TableEvent::Ended { how: Ending::Expired, token, .. } => self.expired(token, now),
                TableEvent::Ended { .. } | TableEvent::HandoffRequested { .. } => {}
            }
        }
    }

    fn promoted(&mut self, promoted: PlaceId, grant: Grant) {
        let Grant { token, ends, .. } = grant;
        self.last_number = token.number();
        for standing in self.claims.values_mut() {
            let ClaimStage::Waiting { place, number } = standing.stage else { continue };
            if place == promoted {
                let ClaimRef { connection: link, .. } = standing.claim_ref;
                standing.stage = ClaimStage::Held { token, ends };
                self.granted.push(standing.claim_ref);
                if let Some(number) = number {
                    let reply = Reply::Granted { token: token.number() };
                    self.replies.push(ReplyMessage { connection: link, number, reply });
                }
            }
        }
    }

    /// A lease is over. Where connections hold, it was the idle time-out, which ends the connection.
    fn expired(&mut self, expired: LockToken, now: Time) {
        let is_it = |standing: &ClaimEntry| matches!(standing.stage, ClaimStage::Held { token, .. } if token == expired);
        for standing in self.remove(is_it) {
            if self.by_session {
                self.closed.insert(standing.claim_ref.connection);
            }
            self.table.disconnect(standing.owner, OnDisconnect::Release, now);
        }
    }

    fn remove(&mut self, which: impl Fn(&ClaimEntry) -> bool) -> Vec<ClaimEntry> {
        let gone = self.claims.values().copied().filter(&which).collect();
        self.claims.retain(|_, standing| !which(standing));
        gone
    }

    fn answer(&mut self, parcel: &RequestMessage, reply: Reply) {
        self.replies.push(ReplyMessage {
            connection: parcel.connection,
            number: parcel.number,
            reply,
        });
    }
}

/// A key as the bytes that the table wants.
pub(crate) fn key_bytes(key: usize) -> [u8; 8] {
    key.to_be_bytes()
}
