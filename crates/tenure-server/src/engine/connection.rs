//! State of a connection.

use std::net::IpAddr;
use std::time::Duration;

use tenure_core::Time;
use tenure_core::table::{Grant, Owner, PlaceId};
use tenure_core::wire::{Framer, Reply};

use super::long_reply::LongReply;

/// A client connection. Kept small, because a server has many connections and most are idle.
#[derive(Debug)]
pub(super) struct Connection {
    /// The connection's id in the table. Slots are reused, ids are not.
    pub(super) owner: Owner,
    pub(super) peer: Option<IpAddr>,
    /// Bytes that arrived and could not be served yet. Takes no memory while it is empty.
    pub(super) pending: Vec<u8>,
    pub(super) framer: Framer,
    pub(super) state: ConnectionState,
    /// Time of the connection's entry in the engine's alarms; `Time::MAX` if it has none.
    pub(super) alarm: Time,
    /// Deadline for the rest of a line that has begun, or for the handshake; `Time::MAX` for none.
    pub(super) read_by: Time,
    /// Number of complete lines of the request when `read_by` was set.
    complete_lines: u8,
    /// Deadline for the peer to read what was sent; `Time::MAX` for none.
    pub(super) write_by: Time,
    /// True if the client has sent the secret, or if the server has none.
    pub(super) authenticated: bool,
    /// State of tenure's protocol extension; set by `hello`.
    pub(super) extension: Option<Box<Extension>>,
}

/// Activity of a connection. Requests are served only in `Ready`. Their bytes are buffered in `Waiting` and in
/// `LongReply`, and dropped in `Closing`.
#[derive(Debug)]
pub(super) enum ConnectionState {
    /// The next request is served when it arrives.
    Ready,
    /// An `l` or `w` is blocked until a grant or until its timeout.
    Waiting { place: PlaceId, until: Time, two_phase: bool },
    /// A reply that is written in slices is in progress.
    LongReply(Box<LongReply>),
    /// The connection is closed at `until`, or now if that is [`CLOSE_REQUESTED`](Self::CLOSE_REQUESTED).
    Closing { until: Time },
}

impl ConnectionState {
    /// Value of `until` for a connection that the driver is to close now. Such a connection needs no alarm.
    pub(super) const CLOSE_REQUESTED: Time = Time::ZERO;
}

/// State of a client that uses tenure's protocol extension.
#[derive(Debug, Default)]
pub(super) struct Extension {
    /// Identity that the client sent with `hello`, as JSON.
    pub(super) about: Box<str>,
    /// True if the client's holds survive a broken connection.
    pub(super) keep_holds: bool,
    /// Pushes that arrived during a long reply. They are sent after it, because a line must not be interrupted.
    pub(super) deferred_pushes: Vec<u8>,
}

/// Output other than the reply to the request that is being served: the result of a wait, or a push.
#[derive(Debug)]
pub(super) enum Wake {
    /// Ends a wait with a grant.
    Granted(Grant),
    /// Ends a wait without a grant.
    Refused(Reply<'static>),
    /// A line that the client did not ask for.
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
            complete_lines: 0,
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

    /// Returns the pushed line if it can be sent now. During a long reply it is deferred; without the extension or on a
    /// closing connection it is dropped.
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

    /// Earliest deadline of the connection; `Time::MAX` for none.
    pub(super) fn earliest_deadline(&self) -> Time {
        let state = match self.state {
            ConnectionState::Closing { until: ConnectionState::CLOSE_REQUESTED }
            | ConnectionState::Ready
            | ConnectionState::LongReply(_) => Time::MAX,
            ConnectionState::Waiting { until, .. } | ConnectionState::Closing { until } => until,
        };
        state.min(self.read_by).min(self.write_by)
    }

    /// Sets the deadline for a line of which the first bytes have arrived. True if there is such a line.
    pub(super) fn expect_end_of_line(&mut self, timeout: Option<Duration>, now: Time) -> bool {
        let begun = self.is_ready() && (!self.pending.is_empty() || self.framer.is_discarding());
        if !begun {
            // A client that has not authenticated keeps the deadline for `auth`.
            if self.authenticated {
                self.read_by = Time::MAX;
            }
            return false;
        }
        // The deadline is per line and does not move while the line grows. If every byte restarted it, a client that
        // sends one byte at a time could keep its connection forever.
        if self.read_by == Time::MAX || self.complete_lines != self.framer.lines() {
            self.complete_lines = self.framer.lines();
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
