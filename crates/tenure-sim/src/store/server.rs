//! Store with a queue and a clock of its own: a lock server, or a database whose sessions hold locks.
//!
//! Queue, leases and grants to waiters are those of the real [`LockTable`]. This model adds what a server adds: the
//! claim or connection that a hold belongs to, and that a repeated claim is granted once.

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
    /// True if holds belong to connections, false if they belong to claims.
    by_session: bool,
    table: LockTable<Hasher, SequentialMint>,
    /// Claims by their number, or, with `by_session`, by that of their connection.
    claims: BTreeMap<u64, ClaimEntry>,
    closed: BTreeSet<usize>,
    last_number: u64,
    replies: Vec<ReplyMessage>,
    granted: Vec<ClaimRef>,
}

/// A claim and its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClaimRef {
    pub(crate) claim: u64,
    pub(crate) connection: usize,
}

/// State of a claim.
#[derive(Clone, Copy, Debug)]
struct ClaimEntry {
    claim_ref: ClaimRef,
    key: usize,
    owner: Owner,
    stage: ClaimStage,
}

#[derive(Clone, Copy, Debug)]
enum ClaimStage {
    /// `number` is the request that is answered by the grant.
    Waiting { place: PlaceId, number: Option<u32> },
    /// Durable on a lock server: a restart restores `token` and `ends`.
    Held { token: LockToken, ends: Time },
}

/// Mint of sequential tokens without a secret: no simulated client guesses tokens.
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

    pub(crate) fn handle(&mut self, message: RequestMessage, now: Time) {
        self.handle_timeout(now);
        if self.closed.contains(&message.connection) {
            return self.answer(&message, Reply::Closed);
        }
        let reply = match message.request {
            Request::Claim { claim, queue } => Some(self.claim(&message, claim, queue, now)),
            Request::Wait { claim } => self.wait(&message, claim),
            Request::Renew { token } => Some(self.renew(&message, token, now)),
            Request::Release { token } => Some(self.release(&message, token, now)),
            Request::Abandon { claim } => {
                self.remove_claim(self.id(claim, message.connection), now);
                Some(Reply::Released)
            }
            Request::Read
            | Request::Write { .. }
            | Request::Ring { .. }
            | Request::Silence { .. }
            | Request::StreamInfo
            | Request::StreamRead
            | Request::StreamWrite { .. } => None,
        };
        if let Some(reply) = reply {
            self.answer(&message, reply);
        }
        if self.by_session {
            self.reset_idle_timeout(message.connection, now);
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

    /// Next grant since the last call.
    pub(crate) fn poll_granted(&mut self) -> Option<ClaimRef> {
        self.granted.pop()
    }

    /// Closes a connection: its claims end.
    pub(crate) fn disconnect(&mut self, connection: usize, now: Time) {
        self.closed.insert(connection);
        for entry in self.remove(|entry| entry.claim_ref.connection == connection) {
            self.table.disconnect(entry.owner, OnDisconnect::Release, now);
        }
        self.take_events(now);
    }

    /// Restarts the server: holds are durable, the queue is not.
    pub(crate) fn restart(&mut self, now: Time) {
        self.table = LockTable::new(
            TableConfig::default(),
            Hasher::default(),
            SequentialMint(self.last_number),
        );
        self.claims.retain(|_, entry| matches!(entry.stage, ClaimStage::Held { .. }));
        for entry in self.claims.values_mut() {
            entry.owner = self.table.connect();
            if let ClaimStage::Held { token, ends } = entry.stage {
                let key = key_bytes(entry.key);
                let restored = self.table.restore(&key, Mode::Exclusive, token, ends, now);
                restored.expect("each key has at most one durable hold");
            }
        }
        self.take_events(now);
    }

    /// Holds and places of a claim, with their connections.
    pub(crate) fn claim_refs(&self, claim: u64) -> impl Iterator<Item = ClaimRef> {
        self.claims.values().map(|s| s.claim_ref).filter(move |claim_ref| claim_ref.claim == claim)
    }

    fn id(&self, claim: u64, connection: usize) -> u64 {
        if self.by_session { connection as u64 } else { claim }
    }

    fn claim(&mut self, message: &RequestMessage, claim: u64, queue: bool, now: Time) -> Reply {
        let id = self.id(claim, message.connection);
        match self.claims.get(&id).map(|entry| entry.stage) {
            Some(ClaimStage::Held { token, .. }) => {
                return Reply::Granted { token: token.number() };
            }
            Some(ClaimStage::Waiting { .. }) => return Reply::Queued,
            None => {}
        }
        let owner = self.table.connect();
        let want = TableClaim { owner, mode: Mode::Exclusive, lease: self.ttl, queue };
        let (stage, reply) = match self.table.claim(&key_bytes(message.key), want, now) {
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
        let claim_ref = ClaimRef { claim, connection: message.connection };
        self.claims.insert(id, ClaimEntry { claim_ref, key: message.key, owner, stage });
        if let ClaimStage::Held { token, .. } = stage {
            self.last_number = token.number();
            self.granted.push(claim_ref);
        }
        reply
    }

    fn wait(&mut self, message: &RequestMessage, claim: u64) -> Option<Reply> {
        let id = self.id(claim, message.connection);
        match self.claims.get_mut(&id).map(|entry| &mut entry.stage) {
            Some(ClaimStage::Held { token, .. }) => Some(Reply::Granted { token: token.number() }),
            Some(ClaimStage::Waiting { number, .. }) => {
                *number = Some(message.number);
                None
            }
            None => Some(Reply::NotQueued),
        }
    }

    fn renew(&mut self, message: &RequestMessage, number: u64, now: Time) -> Reply {
        let Some(id) = self.holder(message, number) else { return Reply::Refused };
        match self.extend_lease(id, now) {
            Some(waiter) => Reply::Renewed { handoff_requested: waiter },
            None => Reply::Refused,
        }
    }

    fn release(&mut self, message: &RequestMessage, number: u64, now: Time) -> Reply {
        let Some(id) = self.holder(message, number) else { return Reply::Refused };
        self.remove_claim(id, now);
        Reply::Released
    }

    /// Id of the hold with this number. A session has access to its own hold only.
    fn holder(&self, message: &RequestMessage, number: u64) -> Option<u64> {
        let connection = self.by_session.then_some(message.connection);
        self.claims.iter().find_map(|(id, entry)| {
            let held =
                matches!(entry.stage, ClaimStage::Held { token, .. } if token.number() == number);
            (held && connection.is_none_or(|connection| connection == entry.claim_ref.connection))
                .then_some(*id)
        })
    }

    /// Restarts the idle timeout of a connection.
    fn reset_idle_timeout(&mut self, connection: usize, now: Time) {
        self.extend_lease(connection as u64, now);
    }

    /// Renews the lease of a hold. True if there are waiters; `None` if there is no such hold.
    fn extend_lease(&mut self, id: u64, now: Time) -> Option<bool> {
        let entry = self.claims.get_mut(&id)?;
        let ClaimStage::Held { token, ends } = &mut entry.stage else { return None };
        let key = key_bytes(entry.key);
        let renewed = self.table.renew(KeySpace::Lock, &key, *token, self.ttl, now).ok()?;
        *ends = renewed.ends;
        Some(renewed.waiters > 0)
    }

    fn remove_claim(&mut self, id: u64, now: Time) {
        if let Some(ClaimEntry { key, owner, stage, .. }) = self.claims.remove(&id) {
            if let ClaimStage::Held { token, .. } = stage {
                // Fails if the lease has just ended: then there is nothing to release.
                self.table.release(KeySpace::Lock, &key_bytes(key), token, now).ok();
            }
            self.table.disconnect(owner, OnDisconnect::Release, now);
        }
    }

    fn take_events(&mut self, now: Time) {
        while let Some(event) = self.table.poll_event() {
            match event {
                TableEvent::Granted { place: Some(place), grant, .. } => {
                    self.promoted(place, grant);
                }
                TableEvent::Ended { how: Ending::Expired, token, .. } => self.expired(token, now),
                _ => {}
            }
        }
    }

    fn promoted(&mut self, promoted: PlaceId, grant: Grant) {
        let Grant { token, ends, .. } = grant;
        self.last_number = token.number();
        for entry in self.claims.values_mut() {
            let ClaimStage::Waiting { place, number } = entry.stage else { continue };
            if place == promoted {
                let ClaimRef { connection, .. } = entry.claim_ref;
                entry.stage = ClaimStage::Held { token, ends };
                self.granted.push(entry.claim_ref);
                if let Some(number) = number {
                    let reply = Reply::Granted { token: token.number() };
                    self.replies.push(ReplyMessage { connection, number, reply });
                }
            }
        }
    }

    /// Removes a hold whose lease expired. With `by_session` that is the idle timeout, which closes the connection.
    fn expired(&mut self, expired: LockToken, now: Time) {
        let is_it = |entry: &ClaimEntry| matches!(entry.stage, ClaimStage::Held { token, .. } if token == expired);
        for entry in self.remove(is_it) {
            if self.by_session {
                self.closed.insert(entry.claim_ref.connection);
            }
            self.table.disconnect(entry.owner, OnDisconnect::Release, now);
        }
    }

    fn remove(&mut self, which: impl Fn(&ClaimEntry) -> bool) -> Vec<ClaimEntry> {
        let removed = self.claims.values().copied().filter(&which).collect();
        self.claims.retain(|_, entry| !which(entry));
        removed
    }

    fn answer(&mut self, message: &RequestMessage, reply: Reply) {
        self.replies.push(ReplyMessage {
            connection: message.connection,
            number: message.number,
            reply,
        });
    }
}

/// Key bytes for the table.
pub(crate) fn key_bytes(key: usize) -> [u8; 8] {
    key.to_be_bytes()
}
