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

use crate::message::{Letter, Parcel, Reply, Request};

pub(crate) type Hasher = BuildHasherDefault<DefaultHasher>;

#[derive(Debug)]
pub(crate) struct Server {
    ttl: Duration,
    /// Holds belong to connections, not to claims.
    by_session: bool,
    table: LockTable<Hasher, Numbers>,
    /// By the number of the claim, or of the connection where those hold.
    standings: BTreeMap<u64, Standing>,
    closed: BTreeSet<usize>,
    last_number: u64,
    letters: Vec<Letter>,
    granted: Vec<Party>,
}

/// A claim, and the connection that it came over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Party {
    pub(crate) claim: u64,
    pub(crate) link: usize,
}

/// How a claim stands at the table.
#[derive(Clone, Copy, Debug)]
struct Standing {
    party: Party,
    key: usize,
    owner: Owner,
    stage: Stage,
}

#[derive(Clone, Copy, Debug)]
enum Stage {
    /// `number` is the request that is answered when its turn comes.
    Waiting { place: PlaceId, number: Option<u32> },
    /// A lock server writes `token` and `ends` down; a restart reads them.
    Held { token: LockToken, ends: Time },
}

/// Tokens in order. The secret is left out: nobody guesses here.
#[derive(Debug)]
pub(crate) struct Numbers(pub(crate) u64);

impl Mint for Numbers {
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
            table: LockTable::new(TableConfig::default(), Hasher::default(), Numbers(0)),
            standings: BTreeMap::new(),
            closed: BTreeSet::new(),
            last_number: 0,
            letters: Vec::new(),
            granted: Vec::new(),
        }
    }

    pub(crate) fn handle(&mut self, parcel: Parcel, now: Time) {
        self.handle_timeout(now);
        if self.closed.contains(&parcel.link) {
            return self.answer(&parcel, Reply::Closed);
        }
        let reply = match parcel.request {
            Request::Claim { claim, queue } => Some(self.claim(&parcel, claim, queue, now)),
            Request::Wait { claim } => self.wait(&parcel, claim),
            Request::Renew { token } => Some(self.renew(&parcel, token, now)),
            Request::Release { token } => Some(self.release(&parcel, token, now)),
            Request::Abandon { claim } => {
                self.leave(self.id(claim, parcel.link), now);
                Some(Reply::GivenBack)
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
            self.hear(parcel.link, now);
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

    pub(crate) fn poll_letter(&mut self) -> Option<Letter> {
        self.letters.pop()
    }

    /// Who was granted something since the last question.
    pub(crate) fn poll_granted(&mut self) -> Option<Party> {
        self.granted.pop()
    }

    /// The server learns that a connection is gone.
    pub(crate) fn disconnect(&mut self, link: usize, now: Time) {
        self.closed.insert(link);
        for standing in self.remove(|standing| standing.party.link == link) {
            self.table.disconnect(standing.owner, OnDisconnect::Release, now);
        }
        self.take_events(now);
    }

    /// Comes back after a stop: the holds were written down, the queue was not.
    pub(crate) fn restart(&mut self, now: Time) {
        self.table =
            LockTable::new(TableConfig::default(), Hasher::default(), Numbers(self.last_number));
        self.standings.retain(|_, standing| matches!(standing.stage, Stage::Held { .. }));
        for standing in self.standings.values_mut() {
            standing.owner = self.table.connect();
            if let Stage::Held { token, ends } = standing.stage {
                let key = name(standing.key);
                let restored = self.table.restore(&key, Mode::Exclusive, token, ends, now);
                restored.expect("one hold a key was written down");
            }
        }
        self.take_events(now);
    }

    /// Those who hold or wait for a key under a claim.
    pub(crate) fn parties(&self, claim: u64) -> impl Iterator<Item = Party> {
        self.standings.values().map(|s| s.party).filter(move |party| party.claim == claim)
    }

    fn id(&self, claim: u64, link: usize) -> u64 {
        if self.by_session { link as u64 } else { claim }
    }

    fn claim(&mut self, parcel: &Parcel, claim: u64, queue: bool, now: Time) -> Reply {
        let id = self.id(claim, parcel.link);
        match self.standings.get(&id).map(|standing| standing.stage) {
            Some(Stage::Held { token, .. }) => return Reply::Granted { token: token.number() },
            Some(Stage::Waiting { .. }) => return Reply::Queued,
            None => {}
        }
        let owner = self.table.connect();
        let want = TableClaim { owner, mode: Mode::Exclusive, lease: self.ttl, queue };
        let (stage, reply) = match self.table.claim(&name(parcel.key), want, now) {
            ClaimAnswer::Granted(Grant { token, ends, .. }) => {
                (Stage::Held { token, ends }, Reply::Granted { token: token.number() })
            }
            ClaimAnswer::Queued(place) => (Stage::Waiting { place, number: None }, Reply::Queued),
            ClaimAnswer::Contended | ClaimAnswer::Refused(_) => {
                self.table.disconnect(owner, OnDisconnect::Release, now);
                return Reply::Busy;
            }
        };
        let party = Party { claim, link: parcel.link };
        self.standings.insert(id, Standing { party, key: parcel.key, owner, stage });
        if let Stage::Held { token, .. } = stage {
            self.last_number = token.number();
            self.granted.push(party);
        }
        reply
    }

    fn wait(&mut self, parcel: &Parcel, claim: u64) -> Option<Reply> {
        let id = self.id(claim, parcel.link);
        match self.standings.get_mut(&id).map(|standing| &mut standing.stage) {
            Some(Stage::Held { token, .. }) => Some(Reply::Granted { token: token.number() }),
            Some(Stage::Waiting { number, .. }) => {
                *number = Some(parcel.number);
                None
            }
            None => Some(Reply::Gone),
        }
    }

    fn renew(&mut self, parcel: &Parcel, number: u64, now: Time) -> Reply {
        let Some(id) = self.holder(parcel, number) else { return Reply::Refused };
        match self.prolong(id, now) {
            Some(waiter) => Reply::Renewed { waiter },
            None => Reply::Refused,
        }
    }

    fn release(&mut self, parcel: &Parcel, number: u64, now: Time) -> Reply {
        let Some(id) = self.holder(parcel, number) else { return Reply::Refused };
        self.leave(id, now);
        Reply::GivenBack
    }

    /// Whose hold has this number. A session can speak for itself only.
    fn holder(&self, parcel: &Parcel, number: u64) -> Option<u64> {
        let link = self.by_session.then_some(parcel.link);
        self.standings.iter().find_map(|(id, standing)| {
            let held =
                matches!(standing.stage, Stage::Held { token, .. } if token.number() == number);
            (held && link.is_none_or(|link| link == standing.party.link)).then_some(*id)
        })
    }

    /// A connection that spoke is not idle.
    fn hear(&mut self, link: usize, now: Time) {
        self.prolong(link as u64, now);
    }

    /// Lets the lease of a hold begin anew, and says whether somebody waits.
    fn prolong(&mut self, id: u64, now: Time) -> Option<bool> {
        let standing = self.standings.get_mut(&id)?;
        let Stage::Held { token, ends } = &mut standing.stage else { return None };
        let key = name(standing.key);
        let renewed = self.table.renew(KeySpace::Lock, &key, *token, self.ttl, now).ok()?;
        *ends = renewed.ends;
        Some(renewed.waiters > 0)
    }

    fn leave(&mut self, id: u64, now: Time) {
        if let Some(Standing { key, owner, stage, .. }) = self.standings.remove(&id) {
            if let Stage::Held { token, .. } = stage {
                // Over already where its lease has just ended; then there is nothing to give back.
                self.table.release(KeySpace::Lock, &name(key), token, now).ok();
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
        for standing in self.standings.values_mut() {
            let Stage::Waiting { place, number } = standing.stage else { continue };
            if place == promoted {
                let Party { link, .. } = standing.party;
                standing.stage = Stage::Held { token, ends };
                self.granted.push(standing.party);
                if let Some(number) = number {
                    let reply = Reply::Granted { token: token.number() };
                    self.letters.push(Letter { link, number, reply });
                }
            }
        }
    }

    /// A lease is over. Where connections hold, it was the idle time-out, which ends the connection.
    fn expired(&mut self, expired: LockToken, now: Time) {
        let is_it = |standing: &Standing| matches!(standing.stage, Stage::Held { token, .. } if token == expired);
        for standing in self.remove(is_it) {
            if self.by_session {
                self.closed.insert(standing.party.link);
            }
            self.table.disconnect(standing.owner, OnDisconnect::Release, now);
        }
    }

    fn remove(&mut self, which: impl Fn(&Standing) -> bool) -> Vec<Standing> {
        let gone = self.standings.values().copied().filter(&which).collect();
        self.standings.retain(|_, standing| !which(standing));
        gone
    }

    fn answer(&mut self, parcel: &Parcel, reply: Reply) {
        self.letters.push(Letter { link: parcel.link, number: parcel.number, reply });
    }
}

/// A key as the bytes that the table wants.
pub(crate) fn name(key: usize) -> [u8; 8] {
    key.to_be_bytes()
}
