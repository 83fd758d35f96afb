//! Store models: the behaviour of real stores, without their bugs.

mod register;
mod server;

use std::time::Duration;

use tenure_core::Time;
use tenure_core::object::ClockResolution;

use crate::message::{ReplyMessage, Request, RequestMessage};
use crate::setup::StoreKind;
pub(crate) use register::Register;
pub(crate) use server::{ClaimRef, Hasher, SequentialMint, Server};

#[derive(Debug)]
pub(crate) enum Store {
    Server(Box<Server>),
    Register {
        ttl: Duration,
        register: Register,
        replies: Vec<ReplyMessage>,
        granted: Vec<ClaimRef>,
    },
}

/// Clock resolution of a bucket: the coarsest that the ttl allows.
pub(crate) fn grain(ttl: Duration) -> ClockResolution {
    ClockResolution(ttl / 10)
}

impl Store {
    pub(crate) fn new(kind: StoreKind, keys: usize, ttl: Duration) -> Self {
        match kind {
            StoreKind::ServerClock => Self::Server(Box::new(Server::new(ttl, false))),
            StoreKind::Session => Self::Server(Box::new(Server::new(ttl, true))),
            StoreKind::Observation => Self::register(ttl, Register::new(keys)),
            StoreKind::Bucket => Self::register(ttl, Register::bucket(keys, grain(ttl).0, ttl)),
        }
    }

    fn register(ttl: Duration, register: Register) -> Self {
        Self::Register { ttl, register, replies: Vec::new(), granted: Vec::new() }
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
        }
    }

    pub(crate) fn poll_timeout(&self) -> Option<Time> {
        match self {
            Self::Server(server) => server.poll_timeout(),
            Self::Register { .. } => None,
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
            Self::Register { replies, .. } => replies.pop(),
        }
    }

    /// Next grant since the last call.
    pub(crate) fn poll_granted(&mut self) -> Option<ClaimRef> {
        match self {
            Self::Server(server) => server.poll_granted(),
            Self::Register { granted, .. } => granted.pop(),
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
        if let Self::Register { register, .. } = self {
            register.set_leader_skew(ahead);
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
        }
    }
}
