//! Reads along at the server's sockets, and checks that waiters are served in the order of their arrival.
//!
//! It knows the protocol only as its specification describes it: a request has three lines, each request has one reply,
//! and pushed lines begin with an exclamation mark.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// State of the tap.
#[derive(Debug, Default)]
pub(super) struct WireTap {
    connections: BTreeMap<usize, TappedConnection>,
    /// Exclusive claims that wait, by key, in the order of arrival.
    queues: BTreeMap<String, Vec<QueuedClaim>>,
    /// Claims that were granted or abandoned, or may have been. They are no longer judged: the reply to a repeat of
    /// such a claim may be no new grant.
    settled: BTreeSet<String>,
    /// Grants of this turn that were written while another claim was first in the queue.
    suspected: Vec<SuspectedGrant>,
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
    /// The socket had no room. What the server has said is not known from here on.
    blocked: bool,
}

#[derive(Debug)]
enum TappedRequest {
    Claim { key: String, id: String },
    Other,
}

#[derive(Debug)]
struct QueuedClaim {
    id: String,
    connection: usize,
}

/// A grant that may have overtaken a waiter. The server writes to its connections in another order than it grants: a
/// waiter with a shorter lease can be granted the key and lose it again before its grant is written.
#[derive(Debug)]
struct SuspectedGrant {
    key: String,
    id: String,
    handle: String,
    /// The claim that was first in the queue.
    first: String,
}

impl WireTap {
    /// The server has read these bytes.
    pub(super) fn read(&mut self, connection: usize, bytes: &[u8]) {
        let tapped = self.connections.entry(connection).or_default();
        tapped.input.extend_from_slice(bytes);
        let mut settled = Vec::new();
        while let Some([command, key, argument]) = take_request(&mut tapped.input) {
            let mut fields = argument.split(' ');
            let id = fields.next().unwrap_or_default().to_owned();
            tapped.requests.push_back(match &*command {
                "x" if fields.next() == Some("x") => {
                    if tapped.blocked {
                        settled.push(id.clone());
                    }
                    TappedRequest::Claim { key, id }
                }
                "xa" => {
                    settled.push(id);
                    TappedRequest::Other
                }
                _ => TappedRequest::Other,
            });
        }
        self.settle(settled);
    }

    /// The server has written these bytes.
    pub(super) fn written(&mut self, connection: usize, bytes: &[u8]) {
        let tapped = self.connections.entry(connection).or_default();
        tapped.output.extend_from_slice(bytes);
        while let Some(line) = self.take_line(connection) {
            let mut words = line.split(' ');
            let (first, second) = (words.next().unwrap_or_default(), words.next());
            if first == "!" {
                let (id, third) = (words.next().unwrap_or_default(), words.next());
                match second {
                    Some("granted") => self.granted(id, None, third),
                    Some("ended") if third == Some("expired") => {
                        self.expired.extend(id.parse::<u64>());
                    }
                    Some("gone") => self.remove(|claim| claim == id),
                    _ => {}
                }
            } else {
                let tapped = self.connections.entry(connection).or_default();
                match (tapped.requests.pop_front(), first) {
                    (Some(TappedRequest::Claim { key, id }), "queued") => {
                        self.queued(key, id, connection);
                    }
                    (Some(TappedRequest::Claim { key, id }), "ok") => {
                        self.granted(&id, Some(&key), second);
                    }
                    _ => {}
                }
            }
        }
    }

    /// The server has written all that it decided so far. Returns a description if a waiter was overtaken.
    pub(super) fn end_turn(&mut self) -> Option<String> {
        let overtaking = self.suspected.drain(..).next()?;
        let SuspectedGrant { key, id, first, .. } = overtaking;
        Some(format!("{key}: claim {id} was granted before claim {first}"))
    }

    /// A socket had no room for all of the output.
    pub(super) fn blocked(&mut self, connection: usize) {
        let tapped = self.connections.entry(connection).or_default();
        tapped.blocked = true;
        let claimed = tapped.requests.iter().filter_map(|request| match request {
            TappedRequest::Claim { id, .. } => Some(id.clone()),
            TappedRequest::Other => None,
        });
        let claimed: Vec<String> = claimed.collect();
        self.settle(claimed);
        self.forget(connection);
    }

    /// The server has closed a connection: its claims leave their queues.
    pub(super) fn closed(&mut self, connection: usize) {
        self.connections.remove(&connection);
        self.forget(connection);
    }

    /// Forgets the waiting claims of a connection whose end the server has read. They leave their queues, and may have
    /// been granted just before, without a word on the wire: the reply to a repeat of such a claim is not judged.
    pub(super) fn forget(&mut self, connection: usize) {
        let claims = self.queues.values().flatten();
        let ids = claims.filter(|claim| claim.connection == connection);
        let ids: Vec<String> = ids.map(|claim| claim.id.clone()).collect();
        self.settle(ids);
    }

    /// Takes these claims out of their queues, and does not judge their next grant.
    fn settle(&mut self, ids: Vec<String>) {
        self.remove(|claim| ids.iter().any(|id| id == claim));
        self.settled.extend(ids);
    }

    /// The server has ended: nothing waits.
    pub(super) fn server_ended(&mut self) {
        self.connections.clear();
        self.queues.clear();
        self.settled.clear();
        self.suspected.clear();
    }

    fn take_line(&mut self, connection: usize) -> Option<String> {
        let output = &mut self.connections.get_mut(&connection)?.output;
        let end = output.iter().position(|byte| *byte == b'\n')?;
        let line: Vec<u8> = output.drain(..=end).collect();
        Some(String::from_utf8_lossy(&line[..end]).into_owned())
    }

    fn queued(&mut self, key: String, id: String, connection: usize) {
        if self.settled.contains(&id) {
            return;
        }
        let queue = self.queues.entry(key).or_default();
        if queue.iter().all(|claim| claim.id != id) {
            self.waits += 1;
            queue.push(QueuedClaim { id, connection });
        }
    }

    /// A claim was granted: by a push, or in the reply to a claim for `key`. Handles begin with the token.
    fn granted(&mut self, id: &str, key: Option<&str>, handle: Option<&str>) {
        let handle = handle.unwrap_or_default();
        self.suspected.retain(|later| later.first != id || *later.handle < *handle);
        if !self.settled.insert(id.to_owned()) {
            return;
        }
        let waiting =
            self.queues.iter().find(|(_, queue)| queue.iter().any(|claim| claim.id == id));
        let key = waiting.map(|(key, _)| key.clone()).or_else(|| key.map(str::to_owned));
        let Some(key) = key else { return };
        let queue = self.queues.entry(key.clone()).or_default();
        let place = queue.iter().position(|claim| claim.id == id);
        if place != Some(0)
            && let Some(first) = queue.first()
        {
            let (id, handle, first) = (id.to_owned(), handle.to_owned(), first.id.clone());
            self.suspected.push(SuspectedGrant { key, id, handle, first });
        }
        if let Some(place) = place {
            queue.remove(place);
        }
    }

    /// Removes claims that left their queues.
    fn remove(&mut self, gone: impl Fn(&str) -> bool) {
        for queue in self.queues.values_mut() {
            queue.retain(|claim| !gone(&claim.id));
        }
        self.suspected.retain(|grant| !gone(&grant.first));
    }
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
