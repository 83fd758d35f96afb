//! Reads along at the server's sockets, and checks that waiters are served in the order of their arrival, and at once.
//!
//! It knows the protocol only as its specification describes it: a request has three lines, each request has one reply,
//! and pushed lines begin with an exclamation mark.

mod claim;
mod holders;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use tenure_core::Time;
use tenure_core::table::KeySpace;

use self::claim::{SpaceKey, TappedClaim};
use self::holders::TappedHolders;
use super::referee::{HoldMode, ProductBreach};

/// State of the tap.
#[derive(Debug, Default)]
pub(super) struct WireTap {
    connections: BTreeMap<usize, TappedConnection>,
    /// Claims that were made and not abandoned, by id.
    claims: BTreeMap<String, TappedClaim>,
    /// Claims that wait, by key, in the order of arrival.
    queues: BTreeMap<SpaceKey, Vec<QueuedClaim>>,
    /// Claims that were granted or abandoned, or may have been. They are no longer judged: the reply to a repeat of
    /// such a claim may be no new grant.
    settled: BTreeSet<String>,
    /// Settled claims that may still wait, at an unknown place, by id.
    unplaced: BTreeMap<String, QueuedClaim>,
    /// Grants of this turn that were written while other claims were before them in the queue.
    suspected: Vec<SuspectedGrant>,
    holders: TappedHolders,
    /// Connection on which each hold was granted, by fencing number. Holds that no connection ends are left out.
    bound: BTreeMap<u64, usize>,
    pub(super) waits: u64,
    /// Numbers of the holds that the server has declared expired since they were last taken.
    pub(super) expired: Vec<u64>,
}

#[derive(Debug, Default)]
struct TappedConnection {
    /// Bytes of an incomplete request.
    input: Vec<u8>,
    /// Bytes of an incomplete line.
    output: Vec<u8>,
    /// Requests without a reply.
    requests: VecDeque<TappedRequest>,
    /// The socket had no room for all of the output. What the server has said since is not known.
    blocked: bool,
}

#[derive(Debug)]
enum TappedRequest {
    Claim(TappedClaim),
    Abandon {
        id: String,
    },
    /// A release or a break.
    End {
        number: u64,
    },
    Other,
}

#[derive(Debug)]
struct QueuedClaim {
    claim: TappedClaim,
    connection: usize,
}

/// A grant that may have overtaken waiters. The server writes to its connections in another order than it grants: a
/// waiter with a shorter lease can be granted the key and lose it again before its grant is written.
#[derive(Debug)]
struct SuspectedGrant {
    key: SpaceKey,
    id: String,
    handle: String,
    /// Claims before this one in the queue.
    ahead: Vec<String>,
}

/// Reading of the wire.
impl WireTap {
    /// The server has read these bytes.
    pub(super) fn read(&mut self, connection: usize, bytes: &[u8]) {
        let tapped = self.connections.entry(connection).or_default();
        tapped.input.extend_from_slice(bytes);
        let mut abandoned = Vec::new();
        while let Some([command, key, argument]) = take_request(&mut tapped.input) {
            let request = TappedRequest::parse(&command, key.clone(), &argument);
            match &request {
                TappedRequest::Claim(claim) => {
                    self.claims.insert(claim.id.clone(), claim.clone());
                }
                TappedRequest::Abandon { id } => {
                    self.claims.remove(id);
                    abandoned.push(id.clone());
                }
                TappedRequest::Other if command.ends_with("xn") => {
                    self.holders.renewed(&space_key(&command, key), &argument);
                }
                _ => {}
            }
            tapped.requests.push_back(request);
        }
        // Ended by the client itself: whether granted or not, nothing is left of the claim.
        self.remove(|claim| abandoned.iter().any(|id| id == claim));
        self.settled.extend(abandoned);
    }

    /// The server has written these bytes.
    pub(super) fn written(&mut self, connection: usize, bytes: &[u8]) {
        let tapped = self.connections.entry(connection).or_default();
        tapped.output.extend_from_slice(bytes);
        while let Some(line) = self.take_line(connection) {
            let words: Vec<&str> = line.split(' ').collect();
            match words[..] {
                ["!", "granted", id, handle, lease] => self.granted(connection, id, handle, lease),
                ["!", "ended", number, why, ..] => {
                    if let Ok(number) = number.parse::<u64>() {
                        self.holders.ended(number);
                        self.expired.extend(Some(number).filter(|_| why == "expired"));
                    }
                }
                ["!", "gone", id] => self.remove(|claim| claim == id),
                ["!", ..] => {}
                _ => self.replied(connection, &words),
            }
        }
    }

    fn replied(&mut self, connection: usize, words: &[&str]) {
        let tapped = self.connections.entry(connection).or_default();
        match (tapped.requests.pop_front(), words) {
            (Some(TappedRequest::Claim(claim)), ["queued"]) => self.queued(claim, connection),
            (Some(TappedRequest::Claim(claim)), ["ok", handle, lease]) => {
                self.granted(connection, &claim.id, handle, lease);
            }
            (Some(TappedRequest::Abandon { id }), ["ok"]) => self.holders.abandoned(&id),
            (Some(TappedRequest::End { number }), ["ok"]) => self.holders.ended(number),
            _ => {}
        }
    }

    /// The server has written all that it decided so far, at this time of its clock. Returns a breach if a waiter was
    /// overtaken, or not served although its key has room.
    pub(super) fn end_turn(&mut self, now: Time) -> Option<(ProductBreach, String)> {
        let blocked = self.connections.iter().filter(|(_, tapped)| tapped.blocked);
        for connection in blocked.map(|(connection, _)| *connection).collect::<Vec<_>>() {
            self.granted_unseen(connection);
        }
        self.holders.end_turn(now);
        if let Some(SuspectedGrant { key, id, ahead, .. }) = self.suspected.drain(..).next() {
            let what = format!("{key:?}: claim {id} was granted before {}", ahead.join(", "));
            return Some((ProductBreach::Overtaken, what));
        }
        let idle = self.queues.iter().find_map(|(key, queue)| {
            let first = &queue.first()?.claim;
            let alone = self.unplaced.values().all(|other| other.claim.key != *key);
            self.holders.has_room(first, alone).then(|| format!("{key:?}: claim {}", first.id))
        });
        idle.map(|what| (ProductBreach::NotWoken, format!("{what} waits although there is room")))
    }

    /// A socket had no room for all of the output.
    pub(super) fn blocked(&mut self, connection: usize) {
        let claims = self.claims_of(connection);
        let tapped = self.connections.entry(connection).or_default();
        tapped.blocked = true;
        self.settle(&claims);
        for claim in claims {
            self.unplaced.insert(claim.id.clone(), QueuedClaim { claim, connection });
        }
    }

    /// The whole backlog of a socket was written.
    pub(super) fn unblocked(&mut self, connection: usize) {
        let tapped = self.connections.entry(connection).or_default();
        if std::mem::take(&mut tapped.blocked) {
            self.granted_unseen(connection);
        }
    }

    /// The server has closed a connection: its claims leave their queues.
    pub(super) fn closed(&mut self, connection: usize) {
        self.unblocked(connection);
        self.forget(connection);
        self.connections.remove(&connection);
    }

    /// Forgets the claims of a connection whose end the server has read. They leave their queues, and may have been
    /// granted just before, without a word on the wire: the reply to a repeat of such a claim is not judged.
    pub(super) fn forget(&mut self, connection: usize) {
        let claims = self.claims_of(connection);
        self.settle(&claims);
        self.granted_unseen(connection);
        self.unplaced.retain(|_, queued| queued.connection != connection);
    }

    /// The server has ended: nothing waits.
    pub(super) fn server_ended(&mut self) {
        let Self { bound, waits, .. } = std::mem::take(self);
        (self.bound, self.waits) = (bound, waits);
    }

    /// The server starts with these holds: key, mode, fencing number and end. It grants nothing before `embargo`.
    pub(super) fn server_started(
        &mut self,
        holds: impl IntoIterator<Item = (SpaceKey, HoldMode, u64, Time)>,
        embargo: Option<Time>,
        now: Time,
    ) {
        self.holders = TappedHolders::restored(holds, embargo, now);
    }

    /// Connection whose end releases the hold with this fencing number.
    pub(super) fn bound_to(&self, number: u64) -> Option<usize> {
        self.bound.get(&number).copied()
    }
}

/// Queues.
impl WireTap {
    /// Claims of a connection that wait, or have no reply.
    fn claims_of(&self, connection: usize) -> Vec<TappedClaim> {
        let queued =
            self.queues.values().flatten().filter(|queued| queued.connection == connection);
        let requests = self.connections.get(&connection).into_iter().flat_map(|c| &c.requests);
        let unanswered = requests.filter_map(|request| match request {
            TappedRequest::Claim(claim) => Some(claim),
            _ => None,
        });
        queued.map(|queued| &queued.claim).chain(unanswered).cloned().collect()
    }

    /// Takes these claims out of their queues, and does not judge their next grant: they may be held without a word on
    /// the wire.
    fn settle(&mut self, claims: &[TappedClaim]) {
        self.holders.unclear(claims);
        self.remove(|id| claims.iter().any(|claim| claim.id == id));
        self.settled.extend(claims.iter().map(|claim| claim.id.clone()));
    }

    /// Claims at unknown places may have been granted: the grants are not written yet, or never.
    fn granted_unseen(&mut self, connection: usize) {
        let claims = self.unplaced.values().filter(|queued| queued.connection == connection);
        let claims: Vec<TappedClaim> = claims.map(|queued| queued.claim.clone()).collect();
        self.holders.unclear(&claims);
    }

    fn take_line(&mut self, connection: usize) -> Option<String> {
        let output = &mut self.connections.get_mut(&connection)?.output;
        let end = output.iter().position(|byte| *byte == b'\n')?;
        let line: Vec<u8> = output.drain(..=end).collect();
        Some(String::from_utf8_lossy(&line[..end]).into_owned())
    }

    fn queued(&mut self, claim: TappedClaim, connection: usize) {
        if self.settled.contains(&claim.id) {
            self.unplaced.insert(claim.id.clone(), QueuedClaim { claim, connection });
            return;
        }
        let queue = self.queues.entry(claim.key.clone()).or_default();
        if queue.iter().all(|queued| queued.claim.id != claim.id) {
            self.waits += 1;
            queue.push(QueuedClaim { claim, connection });
        }
    }

    /// A claim was granted, by a push or in a reply. Handles begin with the token.
    fn granted(&mut self, connection: usize, id: &str, handle: &str, lease: &str) {
        // An overtaken claim that is granted later in the turn has a larger token than the one that overtook it.
        for later in self.suspected.iter_mut().filter(|later| *later.handle > *handle) {
            later.ahead.retain(|ahead| ahead != id);
        }
        self.suspected.retain(|later| !later.ahead.is_empty());
        self.unplaced.remove(id);
        // Abandoned in the same turn: nothing is held at its end.
        let Some(claim) = self.claims.get(id).cloned() else { return };
        if let Some(number) = self.holders.granted(&claim, handle, lease)
            && !claim.detached
        {
            self.bound.insert(number, connection);
        }
        if !self.settled.insert(id.to_owned()) {
            return;
        }
        let queue = self.queues.entry(claim.key.clone()).or_default();
        let place = queue.iter().position(|queued| queued.claim.id == id);
        let ahead = &queue[..place.unwrap_or(queue.len())];
        if !ahead.is_empty() {
            let ahead = ahead.iter().map(|queued| queued.claim.id.clone()).collect();
            let (id, handle) = (id.to_owned(), handle.to_owned());
            self.suspected.push(SuspectedGrant { key: claim.key, id, handle, ahead });
        }
        if let Some(place) = place {
            queue.remove(place);
        }
    }

    /// Removes claims that left their queues.
    fn remove(&mut self, gone: impl Fn(&str) -> bool) {
        for queue in self.queues.values_mut() {
            queue.retain(|queued| !gone(&queued.claim.id));
        }
        self.unplaced.retain(|id, _| !gone(id));
        for grant in &mut self.suspected {
            grant.ahead.retain(|id| !gone(id));
        }
        self.suspected.retain(|grant| !grant.ahead.is_empty());
    }
}

impl TappedRequest {
    fn parse(command: &str, key: String, argument: &str) -> Self {
        let fields: Vec<&str> = argument.split(' ').collect();
        match (command, &fields[..]) {
            ("x", [id, mode, lease, _, bound, ..]) => {
                let mode = match *mode {
                    "x" => HoldMode::Exclusive,
                    "s" => HoldMode::Shared,
                    slots => HoldMode::Slot { limit: slots.parse().unwrap_or(1) },
                };
                Self::Claim(TappedClaim {
                    id: (*id).to_owned(),
                    key: (mode.space(), key),
                    mode,
                    lease: Duration::from_millis(lease.parse().unwrap_or(u64::MAX)),
                    detached: *bound == "detached",
                })
            }
            ("xa", [id, ..]) => Self::Abandon { id: (*id).to_owned() },
            ("r" | "sr", [handle, ..]) => {
                holders::number_of(handle).map_or(Self::Other, |number| Self::End { number })
            }
            ("brk" | "sbrk", [number, ..]) => {
                number.parse().map_or(Self::Other, |number| Self::End { number })
            }
            _ => Self::Other,
        }
    }
}

/// Key of a command. An initial `s` stands for semaphores.
fn space_key(command: &str, key: String) -> SpaceKey {
    (if command.starts_with('s') { KeySpace::Semaphore } else { KeySpace::Lock }, key)
}

/// Takes the three lines of a request.
fn take_request(input: &mut Vec<u8>) -> Option<[String; 3]> {
    let ends: Vec<usize> =
        input.iter().enumerate().filter(|(_, byte)| **byte == b'\n').map(|(at, _)| at).collect();
    let &[first, second, third, ..] = &ends[..] else { return None };
    let text = |from: usize, to: usize| String::from_utf8_lossy(&input[from..to]).into_owned();
    let request = [text(0, first), text(first + 1, second), text(second + 1, third)];
    input.drain(..=third);
    Some(request)
}
