//! What the server knows of a connection.

use std::collections::HashSet;
use std::net::IpAddr;
use std::time::Duration;

use tenure_core::Time;
use tenure_core::table::{Grant, Owner, PlaceId};
use tenure_core::wire::{ClaimId, Framer, Reply};

use super::stats::LongReply;

/// One client. Small: most of many connections are idle.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) owner: Owner,
    pub(super) peer: Option<IpAddr>,
    /// What came and could not be served yet. Takes no memory while it is empty.
    pub(super) pending: Vec<u8>,
    pub(super) framer: Framer,
    pub(super) state: ConnectionState,
    /// When it is looked at, or never.
    pub(super) alarm: Time,
    /// When the line that has begun must have ended.
    pub(super) read_by: Time,
    /// How many lines of the request were there when that was set.
    lines: u8,
    /// When the peer must have read what was sent.
    pub(super) write_by: Time,
    /// Whether it may ask for anything but to prove itself.
    pub(super) authenticated: bool,
    /// Set by `hello`.
    pub(super) extension: Option<Box<Extension>>,
}

/// What a connection is doing.
#[derive(Debug)]
pub(super) enum ConnectionState {
    /// Its next request is served as soon as it is there.
    Ready,
    /// It waits for a grant.
    Waiting { place: PlaceId, until: Time, two_phase: bool },
    /// It is being told something long.
    LongReply(Box<LongReply>),
    /// It has been sent away, and is closed then; zero where that has been said.
    Closing { until: Time },
}

impl ConnectionState {
    /// Until when a connection stays that the driver has been told to close.
    pub(super) const CLOSE_REQUESTED: Time = Time::ZERO;
}

/// What clients of our extension have beside the rest.
#[derive(Debug, Default)]
pub(super) struct Extension {
    /// Who is there, as the client said.
    pub(super) about: Box<str>,
    /// Whether its holds outlive a connection that breaks.
    pub(super) keep_holds: bool,
    pub(super) claims: HashSet<ClaimId>,
    /// What is to be said when a long answer has come to its end: nothing may stand in the middle of it.
    pub(super) deferred_pushes: Vec<u8>,
}

/// What a connection is woken for.
#[derive(Debug)]
pub(super) enum Wake {
    Granted(Grant),
    Refused(Reply<'static>),
    Push(Box<[u8]>),
}

impl Connection {
    pub(super) fn new(
        owner: Owner,
        peer: Option<IpAddr>,
        authenticated: bool,
        max_line: usize,
    ) -> Self {
        Self {
            owner,
            peer,
            pending: Vec::new(),
            framer: Framer::new(max_line),
            state: ConnectionState::Ready,
            alarm: Time::MAX,
            read_by: Time::MAX,
            lines: 0,
            write_by: Time::MAX,
            authenticated,
            extension: None,
        }
    }

    pub(super) fn is_ready(&self) -> bool {
        matches!(self.state, ConnectionState::Ready)
    }

    pub(super) fn is_closing(&self) -> bool {
        matches!(self.state, ConnectionState::Closing { .. })
    }

    pub(super) fn keeps_holds(&self) -> bool {
        self.extension.as_ref().is_some_and(|extension| extension.keep_holds)
    }

    pub(super) fn accepts_pushes(&self) -> bool {
        self.extension.is_some() && !self.is_closing()
    }

    /// What can be said unasked right now. It is kept where that must wait.
    pub(super) fn push_or_defer<'a>(&mut self, line: &'a [u8]) -> Option<&'a [u8]> {
        if !self.accepts_pushes() {
            return None;
        }
        if let (ConnectionState::LongReply(_), Some(extension)) = (&self.state, &mut self.extension)
        {
            extension.deferred_pushes.extend_from_slice(line);
            return None;
        }
        Some(line)
    }

    /// When it must be looked at next.
    pub(super) fn due(&self) -> Time {
        let state = match self.state {
            ConnectionState::Closing { until: ConnectionState::CLOSE_REQUESTED }
            | ConnectionState::Ready
            | ConnectionState::LongReply(_) => Time::MAX,
            ConnectionState::Waiting { until, .. } | ConnectionState::Closing { until } => until,
        };
        state.min(self.read_by).min(self.write_by)
    }

    /// Sets until when the line that has begun must have ended, and says whether one has. Each line has its own time.
    pub(super) fn expect_end_of_line(&mut self, timeout: Option<Duration>, now: Time) -> bool {
        let begun = self.is_ready() && (!self.pending.is_empty() || self.framer.is_discarding());
        if !begun {
            if self.authenticated {
                self.read_by = Time::MAX;
            }
            return false;
        }
        if self.read_by == Time::MAX || self.lines != self.framer.lines() {
            self.lines = self.framer.lines();
            self.read_by = timeout.map_or(Time::MAX, |timeout| now + timeout);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_stays_small() {
        assert!(size_of::<Option<Connection>>() <= 192, "{}", size_of::<Option<Connection>>());
    }
}
