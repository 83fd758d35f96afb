//! The lock server as a pure state machine: bytes in, bytes out, no sockets, no clock.
//!
//! One request takes this path: [`Engine::receive`] → framing and [look-ahead](look_ahead) → [`commands`] or
//! [`extension`] → an operation on [`locks`] → the reply in [`output`]. Each change of the lock table is an event, and
//! [`apply`] is the only place where an event takes effect: in the journal, the history, the watches, and for other
//! clients in the `woken` queue. Draining that queue may serve further requests, so every public method that can
//! produce events ends with [`Engine::process_woken`].

mod admin;
mod apply;
mod audit;
mod check;
mod claims;
mod commands;
mod connection;
mod connections;
mod encode;
mod extension;
mod history;
mod locks;
mod long_reply;
mod look_ahead;
mod output;
mod peer_limits;
mod report;
mod stats;
mod views;
mod watch;

use std::collections::VecDeque;
use std::net::IpAddr;

use tenure_core::Time;
use tenure_core::table::{Grant, OnDisconnect, Owner, PlaceId};
use tenure_core::wire::{Framed, Reply, Request};

use self::audit::Audit;
use self::connection::{Connection, ConnectionState, Wake};
use self::connections::Connections;
pub use self::history::{HistoryEvent, HistoryEventKind};
use self::locks::Locks;
use self::long_reply::LongReply;
use self::output::Output;
pub use self::output::OutputSegment;
use self::peer_limits::PeerLimits;
pub use self::report::{AdminOutcome, Counters, KeyRow, RowHolder, ServerMetrics};
use self::watch::Watches;
use crate::Settings;
use crate::journal::{JournalError, OpenedJournal};

/// The end of a connection, as the driver saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hangup {
    /// The peer closed the connection, or the peer's kernel closed it because the process ended.
    Finished,
    /// The connection broke or timed out: the peer may still run and believe in its holds.
    Aborted,
}

/// Reply bytes that one read may cause before the connection is paused. Its next pipelined request is then served when
/// all replies were sent.
const MAX_UNSENT_REPLY_BYTES: usize = 64 * 1024;

/// A lock server without sockets: requests in, replies out. Time enters as an argument.
///
/// The driver reports events: [`open`](Self::open), [`receive`](Self::receive), [`hang_up`](Self::hang_up),
/// [`handle_timeout`](Self::handle_timeout). After each batch of events the driver, in this order:
///
/// 1. calls [`commit`](Self::commit): a grant must be in the journal before its reply leaves the process;
/// 2. sends [`output`](Self::output), then calls [`clear_output`](Self::clear_output);
/// 3. reads again from the connections that [`poll_resumed`](Self::poll_resumed) returns;
/// 4. closes the connections that [`poll_close`](Self::poll_close) returns.
#[derive(Debug)]
pub struct Engine {
    settings: Settings,
    secret: Option<Box<[u8]>>,
    /// Random id of the server's data, shown by `hello`.
    instance: u128,
    locks: Locks,
    connections: Connections,
    watches: Watches,
    audit: Audit,
    /// Results of ended waits, and pushes, that have yet to be written to the output, in order.
    woken: VecDeque<(Owner, Wake)>,
    out: Output,
    /// Connections that became ready and may have unread bytes in their socket.
    resumed: VecDeque<Owner>,
    /// True once [`Engine::drain`] was called: the server is stopping.
    draining: bool,
    counters: Counters,
}

/// Interface of the driver.
impl Engine {
    /// Creates a server without connections. The first grant has the fencing number `first_number`. Clients must send
    /// `secret`, if there is one, before any other request.
    pub fn new(
        settings: Settings,
        secret: Option<&[u8]>,
        instance: u128,
        first_number: u64,
    ) -> Self {
        let peer_limits =
            PeerLimits::new(settings.max_connections_per_peer, settings.max_auth_failures);
        Self {
            secret: secret.map(Into::into),
            instance,
            locks: Locks::new(settings.table, first_number),
            connections: Connections::new(peer_limits),
            watches: Watches::default(),
            audit: Audit::new(),
            woken: VecDeque::new(),
            out: Output::default(),
            resumed: VecDeque::new(),
            draining: false,
            counters: Counters::default(),
            settings,
        }
    }

    /// Creates a server with the holds and the fencing numbers of a data directory.
    ///
    /// # Errors
    ///
    /// Two holds of the directory conflict, which no server can have written. The error is the key of one of them.
    pub fn restore(
        settings: Settings,
        secret: Option<&[u8]>,
        opened: OpenedJournal,
        now: Time,
    ) -> Result<Self, Box<[u8]>> {
        let OpenedJournal { journal, holds, next_number, embargo_until, instance, .. } = opened;
        let mut engine = Self::new(settings, secret, instance, next_number);
        for hold in holds {
            let about = (hold.mode, hold.token, hold.ends);
            let restored = engine.locks.restore(&hold.key, about, &hold.note, now);
            restored.map_err(|_| hold.key)?;
        }
        // After the holds: they were granted before the embargo and stay valid. Only new grants have to wait.
        if let Some(until) = embargo_until {
            engine.locks.embargo_until(until);
        }
        engine.audit.keep_journal(journal, now);
        Ok(engine)
    }

    /// True if grants are journaled and survive a restart.
    pub fn is_durable(&self) -> bool {
        self.audit.has_journal()
    }

    /// Writes the grants, renewals and ends since the last commit to the journal.
    ///
    /// To be called before output is sent. A restarted server does not know a grant that was sent but not journaled,
    /// and could grant the key to a second client.
    ///
    /// # Errors
    ///
    /// The journal cannot be written. The server must stop and send nothing more.
    pub fn commit(&mut self) -> Result<(), JournalError> {
        self.audit.commit()
    }

    /// Closes the journal cleanly, for a server that stops. The next server restores the remaining holds.
    ///
    /// # Errors
    ///
    /// The journal cannot be written. The next server then starts as after a kill.
    pub fn close(self, now: Time) -> Result<(), JournalError> {
        self.audit.close(now)
    }

    /// Registers a new connection. `None`: a limit is reached or the server is stopping, and the driver must close the
    /// connection at once.
    pub fn open(&mut self, peer: Option<IpAddr>, now: Time) -> Option<Owner> {
        let admits_none = self.draining || self.connections.len() >= self.settings.max_connections;
        if admits_none || peer.is_some_and(|peer| !self.connections.admit(peer, now)) {
            self.counters.connections_rejected += 1;
            return None;
        }
        self.counters.connections += 1;
        let owner = self.locks.connect();
        let authenticated = self.secret.is_none();
        self.connections.insert(Connection::new(
            owner,
            peer,
            authenticated,
            self.settings.max_line,
        ));
        if !authenticated {
            self.expect_handshake(owner, now);
        }
        Some(owner)
    }

    /// Serves bytes that a connection sent. Bytes that cannot be served yet are buffered.
    pub fn receive(&mut self, from: Owner, bytes: &[u8], now: Time) {
        let first_segment = self.out.segments().len();
        let Some(connection) = self.connections.get_mut(from) else { return };
        if connection.is_closing() {
            return;
        }
        // Usually nothing is buffered: the bytes are then served from the driver's buffer, without a copy.
        if connection.pending.is_empty() {
            let used = self.serve(from, bytes, now);
            if let Some(connection) = self.connections.get_mut(from) {
                connection.pending.extend_from_slice(&bytes[used..]);
            }
        } else {
            connection.pending.extend_from_slice(bytes);
            self.serve_pending(from, now);
        }
        self.expect_end_of_line(from, now);
        self.process_woken(now);
        self.out.move_own_reply_last(from, first_segment);
    }

    /// True if bytes of this connection would be served now.
    pub fn is_ready(&self, owner: Owner) -> bool {
        self.connections.get(owner).is_some_and(Connection::is_ready)
    }

    /// True while the connection is blocked in a wait for a grant.
    pub fn is_waiting(&self, owner: Owner) -> bool {
        self.connections
            .get(owner)
            .is_some_and(|c| matches!(c.state, ConnectionState::Waiting { .. }))
    }

    /// True once the engine has decided to close the connection.
    pub fn is_closing(&self, owner: Owner) -> bool {
        self.connections.get(owner).is_some_and(Connection::is_closing)
    }

    /// Removes a connection that was closed by its peer, by the system or by the driver.
    ///
    /// The connection leaves every queue. Its holds are released or kept, depending on [`Settings::auto_release`], on
    /// the client's `keep` option and on `how`.
    pub fn hang_up(&mut self, owner: Owner, how: Hangup, now: Time) {
        let Some(connection) = self.connections.remove(owner) else { return };
        // Only a client that closes first is known to be done. A client in `Closing` merely follows the server's own
        // close, or a proxy answers for it: its holder may still run and believe in its holds. While the server stops,
        // that is true of every connection that did not close first: holders reconnect to the next server and renew
        // there. If the holds were released here, the next server would grant the keys to other clients.
        let closed_first = how == Hangup::Finished && !connection.is_closing();
        let keep_holds = !closed_first && (self.draining || connection.keeps_holds());
        self.watches.remove_all(owner);
        self.abandon_waiting_claims(owner, now);
        let on_disconnect = if self.settings.auto_release && !keep_holds {
            OnDisconnect::Release
        } else {
            OnDisconnect::KeepHolds
        };
        self.change(now, |locks| locks.disconnect(owner, on_disconnect, now));
        self.process_woken(now);
    }

    /// Expires leases and runs the connection alarms that are due at `now`.
    pub fn handle_timeout(&mut self, now: Time) {
        self.change(now, |locks| locks.handle_timeout(now));
        let table = self.locks.table();
        let last_end = || table.holds().map(|hold| hold.ends).max().unwrap_or(Time::ZERO);
        self.audit.shrink_lease_bound(last_end, now);
        while let Some(owner) = self.connections.poll_alarm(now) {
            self.handle_alarm(owner, now);
            self.process_woken(now);
            // The alarm is set last, after every deadline that was due has been handled. An alarm for a past deadline
            // would be due at once, and this loop would not end.
            self.connections.arm(owner);
        }
        self.process_woken(now);
    }

    /// Time at which to call [`handle_timeout`](Self::handle_timeout). May be too early, never too late.
    pub fn poll_timeout(&self) -> Option<Time> {
        let alarm = self.connections.poll_timeout();
        alarm.into_iter().chain(self.locks.table().poll_timeout()).min()
    }

    /// Bytes to send, and the connection that each segment is for, in sending order.
    ///
    /// Output accumulates until [`clear_output`](Self::clear_output).
    pub fn output(&self) -> (&[u8], &[OutputSegment]) {
        (&self.out.bytes, self.out.segments())
    }

    /// Discards the output. To be called when the driver has sent or copied it.
    pub fn clear_output(&mut self) {
        self.out.clear();
    }

    /// Next connection to close.
    ///
    /// If [`must_close`](Self::must_close) is true, the driver closes the connection now. Otherwise the driver shuts
    /// down writing once the output is sent, and waits until the peer closes or until `poll_close` returns the same
    /// connection again. In both cases the driver reports the close by [`hang_up`](Self::hang_up).
    pub fn poll_close(&mut self) -> Option<Owner> {
        self.connections.poll_close()
    }

    /// True if the driver must close the connection now, even with unsent output.
    pub fn must_close(&self, owner: Owner, now: Time) -> bool {
        match self.connections.get(owner).map(|connection| &connection.state) {
            Some(ConnectionState::Closing { until }) => *until <= now,
            Some(_) => false,
            None => true,
        }
    }

    /// Next connection that was blocked and is ready for more bytes.
    pub fn poll_resumed(&mut self) -> Option<Owner> {
        self.resumed.pop_front()
    }

    /// Reports that the peer does not read: the connection is closed unless all is sent within
    /// [`Settings::write_timeout`].
    pub fn write_blocked(&mut self, owner: Owner, now: Time) {
        let until = self.settings.write_timeout.map_or(Time::MAX, |timeout| now + timeout);
        if let Some(connection) = self.connections.get_mut(owner) {
            connection.write_by = connection.write_by.min(until);
            self.connections.arm(owner);
        }
    }

    /// Reports that all output for the peer was sent. Continues a long reply, if one is in progress.
    pub fn write_done(&mut self, owner: Owner, now: Time) {
        let Some(connection) = self.connections.get_mut(owner) else { return };
        connection.write_by = Time::MAX;
        if self.has_long_reply(owner) {
            if self.continue_long_reply(owner, now) {
                self.resume(owner, now);
            }
            self.out.seal(owner);
            self.process_woken(now);
        }
    }

    /// True while a long reply is in progress: call [`write_done`](Self::write_done) when the output was sent.
    pub fn has_long_reply(&self, owner: Owner) -> bool {
        self.connections
            .get(owner)
            .is_some_and(|c| matches!(c.state, ConnectionState::LongReply(_)))
    }

    /// Starts the deadline ([`Settings::read_timeout`]) for a TLS handshake or for `auth`.
    pub fn expect_handshake(&mut self, owner: Owner, now: Time) {
        let until = self.settings.read_timeout.map_or(Time::MAX, |timeout| now + timeout);
        if let Some(connection) = self.connections.get_mut(owner) {
            connection.read_by = until;
            self.connections.arm(owner);
        }
    }

    /// Reports the end of the TLS handshake. A client that must still send `auth` keeps its deadline.
    pub fn handshake_done(&mut self, owner: Owner) {
        if let Some(connection) = self.connections.get_mut(owner)
            && connection.authenticated
        {
            connection.read_by = Time::MAX;
        }
    }

    /// Begins to stop: waiters and new claims are refused, and holders may still renew and release.
    ///
    /// Holds survive the server if there is a [journal](Self::is_durable), unless their client closes its connection
    /// before the server does.
    pub fn drain(&mut self, now: Time) {
        self.draining = true;
        // Grants that are due by now are made first. A waiter whose turn has come would otherwise be refused below.
        self.change(now, |locks| locks.handle_timeout(now));
        self.process_woken(now);
        // From here on a release must not grant the key to a two-phase waiter. The waiter's `w` is refused, so it would
        // never learn of the grant, and the next server would restore that hold and keep it until its lease ends.
        self.locks.embargo_until(Time::MAX);
        let not_ready: Vec<Owner> =
            self.connections.iter().filter(|c| !c.is_ready()).map(|c| c.owner).collect();
        for owner in not_ready {
            if let Some(ConnectionState::Waiting { place, .. }) =
                self.connections.get(owner).map(|c| &c.state)
            {
                let place = *place;
                self.change(now, |locks| locks.abandon(place, now));
                self.woken.push_back((owner, Wake::Refused(Reply::ERROR)));
            }
        }
        self.refuse_waiting_claims(now);
        self.process_woken(now);
    }

    /// Limits and timeouts of this server.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Number of open connections.
    pub fn connection_count(&self) -> usize {
        self.connections.len()
    }

    /// Replaces the secret. Connections that have authenticated stay authenticated.
    pub fn set_secret(&mut self, secret: Option<&[u8]>) {
        self.secret = secret.map(Into::into);
    }
}

/// Serving of requests.
impl Engine {
    /// Serves the complete requests at the start of `bytes` until one blocks, and returns the number of bytes used.
    fn serve(&mut self, from: Owner, bytes: &[u8], now: Time) -> usize {
        let mut used = 0;
        let mut prefetched_requests = 0;
        let output_start = self.out.bytes.len();
        while let Some(connection) = self.connections.get_mut(from)
            && connection.is_ready()
        {
            match connection.framer.next(&bytes[used..]) {
                Framed::Request { lines, len } => {
                    // `expect_end_of_line` recognizes a new line only by its number within the request. If the deadline
                    // were not cleared here, the line of the same number in the next request would inherit it.
                    connection.read_by = Time::MAX;
                    if prefetched_requests == 0 {
                        prefetched_requests = self.look_ahead(&bytes[used..]);
                    }
                    prefetched_requests = prefetched_requests.saturating_sub(1);
                    used += len;
                    self.serve_request(from, Request::parse(lines), now);
                }
                Framed::Partial => break,
                Framed::Discarded => used = bytes.len(),
                Framed::TooLong => {
                    used = bytes.len();
                    self.reply(Reply::ERROR);
                    self.connections.begin_close(from, now);
                }
            }
            // A client that pipelines requests and reads no replies must not grow the output without limit. An empty
            // long reply pauses it: the next request is served when the driver reports that all was sent.
            let unsent = self.out.bytes.len() - output_start;
            if unsent > MAX_UNSENT_REPLY_BYTES && self.is_ready(from) {
                self.connections
                    .set_state(from, ConnectionState::LongReply(Box::new(LongReply::pause())));
            }
            if used == bytes.len() {
                break;
            }
        }
        self.out.seal(from);
        used
    }

    fn serve_pending(&mut self, from: Owner, now: Time) {
        let Some(connection) = self.connections.get_mut(from) else { return };
        let mut pending = std::mem::take(&mut connection.pending);
        let used = self.serve(from, &pending, now);
        if used < pending.len()
            && let Some(connection) = self.connections.get_mut(from)
        {
            pending.drain(..used);
            connection.pending = pending;
        }
    }

    /// Writes the replies and pushes of the `woken` queue, and serves what those connections sent while they were
    /// blocked. That may wake further connections; returns when the queue is empty.
    fn process_woken(&mut self, now: Time) {
        while let Some((owner, wake)) = self.woken.pop_front() {
            let Some(connection) = self.connections.get_mut(owner) else { continue };
            match wake {
                Wake::Push(line) => {
                    if let Some(line) = connection.push_or_defer(&line) {
                        self.out.bytes.extend_from_slice(line);
                    }
                    self.out.seal(owner);
                    continue;
                }
                // The engine has begun to close the connection since its wait ended. `Ready` would serve its requests
                // again. If the wait ended with a grant, `hang_up` releases or keeps that hold.
                _ if !matches!(connection.state, ConnectionState::Waiting { .. }) => continue,
                Wake::Granted(grant) => {
                    connection.state = ConnectionState::Ready;
                    self.reply(granted_reply(&grant));
                }
                Wake::Refused(reply) => {
                    connection.state = ConnectionState::Ready;
                    self.reply(reply);
                }
            }
            self.out.seal(owner);
            self.resume(owner, now);
        }
    }

    /// Serves the buffered requests of a connection that has become ready.
    fn resume(&mut self, owner: Owner, now: Time) {
        self.serve_pending(owner, now);
        self.expect_end_of_line(owner, now);
        if self.is_ready(owner) {
            self.resumed.push_back(owner);
        }
    }

    fn reply(&mut self, reply: Reply<'_>) {
        reply.write(&mut self.out.bytes);
    }

    /// Checks the deadlines of a connection whose alarm is due. The alarm may be early: then nothing happens.
    fn handle_alarm(&mut self, owner: Owner, now: Time) {
        let Some(connection) = self.connections.get(owner) else { return };
        let (read_by, write_by) = (connection.read_by, connection.write_by);
        match connection.state {
            ConnectionState::Closing { until } if until <= now => {
                self.connections.force_close(owner);
                return;
            }
            ConnectionState::Waiting { place, until, .. } if until <= now => {
                self.time_out_wait(owner, place, now);
            }
            _ => {}
        }
        if write_by <= now {
            tracing::info!(target: "tenure::server", connection = owner.id(), "write_timeout");
            self.connections.force_close(owner);
        } else if read_by <= now {
            self.reply(Reply::ERROR);
            self.out.seal(owner);
            self.connections.begin_close(owner, now);
        }
    }

    fn time_out_wait(&mut self, owner: Owner, place: PlaceId, now: Time) {
        // The state stays `Waiting` until `process_woken` writes the reply. A deadline left in the past would make a
        // further alarm time out the same wait again.
        if let Some(Connection { state: ConnectionState::Waiting { until, .. }, .. }) =
            self.connections.get_mut(owner)
        {
            *until = Time::MAX;
        }
        if self.change(now, |locks| locks.abandon(place, now)) {
            self.counters.timeouts += 1;
            self.woken.push_back((owner, Wake::Refused(Reply::Timeout)));
        }
    }

    fn expect_end_of_line(&mut self, owner: Owner, now: Time) {
        self.connections.expect_end_of_line(owner, self.settings.read_timeout, now);
    }
}

fn granted_reply(grant: &Grant) -> Reply<'static> {
    Reply::Granted { token: grant.token, lease: grant.lease.as_secs() }
}
