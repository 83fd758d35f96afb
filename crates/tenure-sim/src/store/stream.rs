//! Model of a stream: one sequence for all keys, a conditional write per key, and losses of acknowledged writes.
//!
//! Messages are stamped by the clock of the leading server. A read can be answered by a server that no longer leads,
//! and then shows an old state. After a crash the last messages may be gone, and their sequences are given again.

use std::time::Duration;

use tenure_core::Time;
use tenure_core::record::StreamState;

use crate::message::{Reply, Request, StreamMessage, StreamRecord};

/// Time between the creation of the first stream and the begin of a run. Larger than any difference between clocks of
/// servers: a stream that is created again has a later creation time.
const AGE_AT_START: Duration = Duration::from_secs(600);
/// Largest number of messages that a server which no longer leads has missed.
const MAX_STALE_MESSAGES: usize = 3;
/// Smallest number of sequences of a stream that is deleted and created again.
const MIN_SEQUENCES: u64 = 40;

#[derive(Debug)]
pub(crate) struct Stream {
    created: u64,
    messages: Vec<StreamMessage>,
    last_sequence: u64,
    /// Lead of the leading server's clock.
    leader_skew: Duration,
}

/// Loss of acknowledged writes, or of whole records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamLoss {
    /// A crash: this many of the last messages are gone.
    Tail(usize),
    /// The stream is deleted and created again.
    Created,
    /// A key is deleted.
    Key(usize),
}

impl Stream {
    pub(crate) fn new(now: Time) -> Self {
        let created = now
            .as_nanos()
            .saturating_sub(u64::try_from(AGE_AT_START.as_nanos()).unwrap_or(u64::MAX));
        let (messages, last_sequence, leader_skew) = (Vec::new(), 0, Duration::ZERO);
        Self { created, messages, last_sequence, leader_skew }
    }

    pub(crate) fn set_leader_skew(&mut self, ahead: Duration) {
        self.leader_skew = ahead;
    }

    /// Last message of a key.
    pub(crate) fn last(&self, key: usize) -> Option<StreamMessage> {
        self.last_before(key, self.messages.len())
    }

    fn last_before(&self, key: usize, end: usize) -> Option<StreamMessage> {
        self.messages[..end].iter().rev().find(|message| message.key == key).copied()
    }

    /// Claim that holds a key by its last message.
    pub(crate) fn holder(&self, key: usize) -> Option<u64> {
        Some(self.last(key)?.record?.holder?.claim)
    }

    /// True if a claim holds the key. A record whose lease has ended does not count: any contender may take it.
    pub(crate) fn is_held_by(&self, claim: u64, key: usize, ttl: Duration, now: Time) -> bool {
        self.holder(key) == Some(claim)
            && self.last(key).is_some_and(|message| now < message.changed + ttl)
    }

    /// Handles a request. A read that is `stale` is answered by a server that has missed the last messages.
    pub(crate) fn handle(&mut self, key: usize, request: Request, stale: bool, now: Time) -> Reply {
        match request {
            Request::StreamInfo => Reply::StreamInfo(StreamState {
                created: self.created,
                last_sequence: self.last_sequence,
                time: (now + self.leader_skew).as_nanos(),
            }),
            Request::StreamWrite { over, record } => {
                let last = self.last(key).map_or(0, |message| message.sequence);
                if over.is_some_and(|over| over != last) {
                    return Reply::Conflict;
                }
                Reply::Landed { sequence: self.append(key, Some(record), now) }
            }
            _ => {
                let missed = if stale { MAX_STALE_MESSAGES } else { 0 };
                let end = self.messages.len().saturating_sub(missed);
                Reply::StreamRecord(self.last_before(key, end))
            }
        }
    }

    /// Applies a loss. Returns the claims whose records were lost.
    pub(crate) fn lose(&mut self, loss: StreamLoss, now: Time) -> Vec<u64> {
        let from = match loss {
            StreamLoss::Tail(count) => self.messages.len().saturating_sub(count),
            StreamLoss::Created => 0,
            StreamLoss::Key(key) => {
                let holder = self.holder(key);
                self.append(key, None, now);
                return holder.into_iter().collect();
            }
        };
        let removed = self.messages.split_off(from);
        self.last_sequence = self.messages.last().map_or(0, |message| message.sequence);
        if loss == StreamLoss::Created {
            self.created = (now + self.leader_skew).as_nanos();
        }
        let records = removed.iter().filter_map(|message| message.record?.holder);
        records.map(|holder| holder.claim).collect()
    }

    /// True if a re-creation is within the promises.
    ///
    /// - Clients that know the old stream do not notice at once. If the new one reached a sequence that they know, their
    ///   write would replace a record that they never saw. So the old stream must have enough sequences.
    /// - The creation time is that of the leading server. It must be later, although the clocks of servers differ.
    pub(crate) fn may_be_created_again(&self, now: Time) -> bool {
        self.last_sequence >= MIN_SEQUENCES && (now + self.leader_skew).as_nanos() > self.created
    }

    pub(crate) fn last_sequence(&self) -> u64 {
        self.last_sequence
    }

    pub(crate) fn created(&self) -> u64 {
        self.created
    }

    fn append(&mut self, key: usize, record: Option<StreamRecord>, now: Time) -> u64 {
        self.last_sequence += 1;
        let stamp = (now + self.leader_skew).as_nanos();
        let sequence = self.last_sequence;
        self.messages.push(StreamMessage { key, sequence, record, stamp, changed: now });
        sequence
    }
}
