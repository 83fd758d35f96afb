//! Store models: the behaviour of real stores, without their bugs.

mod register;
mod server;
mod stream;

use std::time::Duration;

use tenure_core::Time;
use tenure_core::object::ClockResolution;

use crate::message::{Reply, ReplyMessage, Request, RequestMessage, StreamMessage};
use crate::setup::StoreKind;
pub(crate) use register::Register;
pub(crate) use server::{ClaimRef, Hasher, SequentialMint, Server};
pub(crate) use stream::{Stream, StreamLoss};

#[derive(Debug)]
pub(crate) enum Store {
    Server(Box<Server>),
    Register {
        ttl: Duration,
        register: Register,
        replies: Vec<ReplyMessage>,
        granted: Vec<ClaimRef>,
    },
    Stream {
        ttl: Duration,
        stream: Stream,
        replies: Vec<ReplyMessage>,
        granted: Vec<ClaimRef>,
        /// Messages that a watch has not delivered yet.
        appended: Vec<StreamMessage>,
    },
}

/// Clock resolution of a bucket: the coarsest that the ttl allows.
pub(crate) fn grain(ttl: Duration) -> ClockResolution {
    ClockResolution(ttl / 10)
}

impl Store {
    pub(crate) fn new(kind: StoreKind, keys: usize, ttl: Duration, now: Time) -> Self {
        match kind {
            StoreKind::ServerClock => Self::Server(Box::new(Server::new(ttl, false))),
            StoreKind::Session => Self::Server(Box::new(Server::new(ttl, true))),
            StoreKind::Stream => Self::Stream {
                ttl,
                stream: Stream::new(now),
                replies: Vec::new(),
                granted: Vec::new(),
                appended: Vec::new(),
            },
            StoreKind::Bucket => Self::Register {
                ttl,
                register: Register::new(keys, grain(ttl).0, ttl),
                replies: Vec::new(),
                granted: Vec::new(),
            },
        }
    }

    /// Handles a request. `date` is the time with which a bucket dates its reply.
    pub(crate) fn handle(&mut self, message: RequestMessage, now: Time, date: Time) {
        match self {
            Self::Server(server) => server.handle(message, now),
            Self::Register { register, replies, granted, .. } => {
                let RequestMessage { connection, number, key, request, .. } = message;
                let before = register.record(key);
                let (reply, changed) = register.handle(key, request, message.stale, (now, date));
                replies.push(ReplyMessage { connection, number, reply });
                if let Request::Write { record, .. } = request
                    && changed
                    && record.claim != before.claim
                    && record.claim != 0
                {
                    granted.push(ClaimRef { claim: record.claim, connection });
                }
            }
            Self::Stream { stream, replies, granted, appended, .. } => {
                let RequestMessage { connection, number, key, request, .. } = message;
                let before = stream.holder(key);
                let reply = stream.handle(key, request, message.stale, now);
                replies.push(ReplyMessage { connection, number, reply });
                if let Reply::Landed { .. } = reply {
                    appended.extend(stream.last(key));
                    let holder = stream.holder(key).filter(|claim| before != Some(*claim));
                    granted.extend(holder.map(|claim| ClaimRef { claim, connection }));
                }
            }
        }
    }

    pub(crate) fn poll_timeout(&self) -> Option<Time> {
        match self {
            Self::Server(server) => server.poll_timeout(),
            Self::Register { .. } | Self::Stream { .. } => None,
        }
    }

    pub(crate) fn handle_timeout(&mut self, now: Time) {
        if let Self::Server(server) = self {
            server.handle_timeout(now);
        }
    }

    pub(crate) fn poll_reply(&mut self) -> Option<ReplyMessage> {
        match self {
            Self::Server(server) => server.poll_reply(),
            Self::Register { replies, .. } | Self::Stream { replies, .. } => replies.pop(),
        }
    }

    /// Next grant since the last call.
    pub(crate) fn poll_granted(&mut self) -> Option<ClaimRef> {
        match self {
            Self::Server(server) => server.poll_granted(),
            Self::Register { granted, .. } | Self::Stream { granted, .. } => granted.pop(),
        }
    }

    /// Next message for the watches of a stream.
    pub(crate) fn poll_appended(&mut self) -> Option<StreamMessage> {
        match self {
            Self::Stream { appended, .. } => appended.pop(),
            _ => None,
        }
    }

    /// Claim that holds a key of a bucket, or 0.
    pub(crate) fn bucket_holder(&self, key: usize) -> Option<u64> {
        match self {
            Self::Register { register, .. } => Some(register.record(key).claim),
            _ => None,
        }
    }

    pub(crate) fn disconnect(&mut self, connection: usize, now: Time) {
        if let Self::Server(server) = self {
            server.disconnect(connection, now);
        }
    }

    pub(crate) fn restart(&mut self, now: Time) {
        if let Self::Server(server) = self {
            server.restart(now);
        }
    }

    /// Changes the leading server to one whose clock is `ahead`.
    pub(crate) fn set_leader_skew(&mut self, ahead: Duration) {
        if let Self::Stream { stream, .. } = self {
            stream.set_leader_skew(ahead);
        }
    }

    /// True if a claim holds the key, or may be granted it without a further request, over a connection that `lives`.
    pub(crate) fn may_hold(
        &self,
        claim: u64,
        key: usize,
        lives: impl Fn(usize) -> bool,
        now: Time,
    ) -> bool {
        match self {
            Self::Server(server) => {
                server.claim_refs(claim).any(|claim_ref| lives(claim_ref.connection))
            }
            Self::Register { ttl, register, .. } => register.is_held_by(claim, key, *ttl, now),
            Self::Stream { ttl, stream, .. } => stream.is_held_by(claim, key, *ttl, now),
        }
    }
}
