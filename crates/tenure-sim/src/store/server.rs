//! A store with a queue and a clock of its own: a lock server, or a database whose sessions hold locks.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use tenure_core::Time;

use crate::message::{Letter, Parcel, Reply, Request};

#[derive(Debug)]
pub(crate) struct Server {
    ttl: Duration,
    /// Holds belong to connections, not to claims.
    by_session: bool,
    keys: Vec<Key>,
    closed: BTreeSet<usize>,
    last_token: u64,
    letters: Vec<Letter>,
    granted: Vec<Party>,
}

/// A claim, and the connection that it came over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Party {
    pub(crate) claim: u64,
    pub(crate) link: usize,
}

#[derive(Debug, Default)]
struct Key {
    holder: Option<Held>,
    queue: VecDeque<Place>,
}

#[derive(Clone, Copy, Debug)]
struct Held {
    party: Party,
    token: u64,
    ends: Time,
}

#[derive(Clone, Copy, Debug)]
struct Place {
    party: Party,
    /// The request that is answered when its turn comes.
    waits: Option<u32>,
}

impl Server {
    pub(crate) fn new(keys: usize, ttl: Duration, by_session: bool) -> Self {
        Self {
            ttl,
            by_session,
            keys: (0..keys).map(|_| Key::default()).collect(),
            closed: BTreeSet::new(),
            last_token: 0,
            letters: Vec::new(),
            granted: Vec::new(),
        }
    }

    pub(crate) fn handle(&mut self, parcel: Parcel, now: Time) {
        self.handle_timeout(now);
        if self.closed.contains(&parcel.link) {
            return self.answer(&parcel, Reply::Closed);
        }
        if self.by_session {
            self.hear(parcel.link, now);
        }
        match parcel.request {
            Request::Claim { claim, queue } => self.claim(&parcel, claim, queue, now),
            Request::Wait { claim } => self.wait(&parcel, claim),
            Request::Renew { token } => self.renew(&parcel, token, now),
            Request::Release { token } => {
                let ours = self.keys[parcel.key].holder.is_some_and(|held| held.token == token);
                if ours {
                    self.pass_on(parcel.key, now);
                }
                self.answer(&parcel, if ours { Reply::GivenBack } else { Reply::Refused });
            }
            Request::Abandon { claim } => {
                self.leave(parcel.key, Party { claim, link: parcel.link }, now);
                self.answer(&parcel, Reply::GivenBack);
            }
            Request::Read | Request::Write { .. } => {}
        }
    }

    pub(crate) fn poll_timeout(&self) -> Option<Time> {
        self.keys.iter().filter_map(|key| Some(key.holder?.ends)).min()
    }

    pub(crate) fn handle_timeout(&mut self, now: Time) {
        for key in 0..self.keys.len() {
            while let Some(held) = self.keys[key].holder.filter(|held| held.ends <= now) {
                if self.by_session {
                    self.disconnect(held.party.link, now);
                } else {
                    self.pass_on(key, now);
                }
            }
        }
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
        for key in 0..self.keys.len() {
            self.keys[key].queue.retain(|place| place.party.link != link);
            if self.keys[key].holder.is_some_and(|held| held.party.link == link) {
                self.pass_on(key, now);
            }
        }
    }

    /// Comes back after a stop: the holds were written down, the queue was not.
    pub(crate) fn restart(&mut self) {
        for key in &mut self.keys {
            key.queue.clear();
        }
    }

    /// Those who hold or wait for a key under a claim.
    pub(crate) fn parties(&self, claim: u64) -> impl Iterator<Item = Party> {
        let held = self.keys.iter().filter_map(|key| Some(key.holder?.party));
        let waiting = self.keys.iter().flat_map(|key| key.queue.iter().map(|place| place.party));
        held.chain(waiting).filter(move |party| party.claim == claim)
    }

    fn same(&self, one: Party, two: Party) -> bool {
        if self.by_session { one.link == two.link } else { one.claim == two.claim }
    }

    /// A connection that spoke is not idle.
    fn hear(&mut self, link: usize, now: Time) {
        for key in &mut self.keys {
            if let Some(held) = key.holder.as_mut().filter(|held| held.party.link == link) {
                held.ends = now + self.ttl;
            }
        }
    }

    fn claim(&mut self, parcel: &Parcel, claim: u64, queue: bool, now: Time) {
        let party = Party { claim, link: parcel.link };
        let key = &self.keys[parcel.key];
        let reply = match key.holder {
            None => Reply::Granted { token: self.grant(parcel.key, party, now) },
            Some(held) if self.same(held.party, party) => Reply::Granted { token: held.token },
            Some(_) if key.queue.iter().any(|place| self.same(place.party, party)) => Reply::Queued,
            Some(_) if queue => {
                self.keys[parcel.key].queue.push_back(Place { party, waits: None });
                Reply::Queued
            }
            Some(_) => Reply::Busy,
        };
        self.answer(parcel, reply);
    }

    fn wait(&mut self, parcel: &Parcel, claim: u64) {
        let party = Party { claim, link: parcel.link };
        let held = self.keys[parcel.key].holder.filter(|held| self.same(held.party, party));
        if let Some(held) = held {
            return self.answer(parcel, Reply::Granted { token: held.token });
        }
        let by_session = self.by_session;
        let place = self.keys[parcel.key].queue.iter_mut().find(|place| {
            if by_session { place.party.link == party.link } else { place.party.claim == claim }
        });
        match place {
            Some(place) => place.waits = Some(parcel.number),
            None => self.answer(parcel, Reply::Gone),
        }
    }

    fn renew(&mut self, parcel: &Parcel, token: u64, now: Time) {
        let Key { holder, queue } = &mut self.keys[parcel.key];
        let reply = match holder.as_mut().filter(|held| held.token == token) {
            Some(held) => {
                held.ends = now + self.ttl;
                Reply::Renewed { waiter: !queue.is_empty() }
            }
            None => Reply::Refused,
        };
        self.answer(parcel, reply);
    }

    fn leave(&mut self, key: usize, party: Party, now: Time) {
        if self.keys[key].holder.is_some_and(|held| self.same(held.party, party)) {
            return self.pass_on(key, now);
        }
        let places = std::mem::take(&mut self.keys[key].queue);
        self.keys[key].queue =
            places.into_iter().filter(|place| !self.same(place.party, party)).collect();
    }

    fn pass_on(&mut self, key: usize, now: Time) {
        self.keys[key].holder = None;
        if let Some(Place { party, waits }) = self.keys[key].queue.pop_front() {
            let token = self.grant(key, party, now);
            if let Some(number) = waits {
                let reply = Reply::Granted { token };
                self.letters.push(Letter { link: party.link, number, reply });
            }
        }
    }

    fn grant(&mut self, key: usize, party: Party, now: Time) -> u64 {
        self.last_token += 1;
        let token = self.last_token;
        self.keys[key].holder = Some(Held { party, token, ends: now + self.ttl });
        self.granted.push(party);
        token
    }

    fn answer(&mut self, parcel: &Parcel, reply: Reply) {
        self.letters.push(Letter { link: parcel.link, number: parcel.number, reply });
    }
}
