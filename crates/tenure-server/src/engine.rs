//! The server without its sockets.

mod admin;
mod check;
mod commands;
mod connection;
mod extension;
mod history;
mod journal_sink;
mod look_ahead;
mod output;
mod peer_limits;
mod stats;
mod watch;

use std::collections::{BTreeSet, VecDeque};
use std::hash::RandomState;
use std::net::IpAddr;
use std::time::Duration;

use tenure_core::table::{
    Ending, Grant, KeyBytes, KeySpace, OnDisconnect, Owner, Redeemed, TableEvent,
};
use tenure_core::wire::{Framed, Reply, Request};
use tenure_core::{LockTable, LockToken, Time};

pub use self::admin::{AdminOutcome, Counters, KeyRow, RowHolder, ServerMetrics};
use self::connection::{Connection, ConnectionState, Wake};
use self::extension::Claims;
use self::history::History;
pub use self::history::{HistoryEvent, HistoryEventKind};
use self::journal_sink::JournalSink;
use self::output::Output;
pub use self::output::OutputSegment;
use self::peer_limits::PeerLimits;
use self::stats::LongReply;
use self::watch::Watches;
use crate::Settings;
use crate::token_mint::TokenMint;

/// How a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hangup {
    /// Its peer closed it, or its peer's system did because the process ended.
    Finished,
    /// It broke, or fell silent for good: the peer may live, and believe that it holds what it held.
    Aborted,
}

/// How long a connection that was turned away stays, so that its peer can read why.
const CLOSE_DELAY: Duration = Duration::from_millis(100);
/// A connection that is told so much at once has to read it before its next request is served.
const MAX_UNREAD_REPLY_BYTES: usize = 64 * 1024;

/// A lock server without sockets: bytes in, the table, bytes out. Time enters as an argument.
///
/// Whoever drives it tells what came ([`open`](Self::open), [`receive`](Self::receive), [`hang_up`](Self::hang_up),
/// [`handle_timeout`](Self::handle_timeout)), and then takes what is to be done: [`output`](Self::output) to send,
/// connections to [close](Self::poll_close), connections that can [go on reading](Self::poll_resumed). What has been
/// granted must be written down before it is sent: [`commit`](Self::commit).
#[derive(Debug)]
pub struct Engine {
    settings: Settings,
    secret: Option<Box<[u8]>>,
    instance: u128,
    table: LockTable<RandomState, TokenMint>,
    /// By the index of their owner in the table.
    connections: Vec<Option<Connection>>,
    count: usize,
    peer_limits: PeerLimits,
    claims: Claims,
    watches: Watches,
    /// One alarm a connection at most: at or before whatever it has to be looked at for.
    alarms: BTreeSet<(Time, u32)>,
    /// Connections whose wait is over, and what is to be said to others, in order.
    woken: VecDeque<(Owner, Wake)>,
    out: Output,
    resumed: VecDeque<Owner>,
    closing: VecDeque<Owner>,
    draining: bool,
    journal_sink: JournalSink,
    counters: Counters,
    history: History,
}

/// What the driver does.
impl Engine {
    /// A server without connections, whose first grant has the number `first`. `secret` is what clients must know.
    pub fn new(settings: Settings, secret: Option<&[u8]>, instance: u128, first: u64) -> Self {
        let mut table = LockTable::new(settings.table, RandomState::new(), TokenMint::from(first));
        let claims = Claims::new(table.connect());
        Self {
            secret: secret.map(Into::into),
            instance,
            table,
            connections: Vec::new(),
            count: 0,
            peer_limits: PeerLimits::new(
                settings.max_connections_per_peer,
                settings.max_auth_failures,
            ),
            claims,
            watches: Watches::default(),
            alarms: BTreeSet::new(),
            woken: VecDeque::new(),
            out: Output::default(),
            resumed: VecDeque::new(),
            closing: VecDeque::new(),
            draining: false,
            journal_sink: JournalSink::NONE,
            counters: Counters::default(),
            history: History::default(),
            settings,
        }
    }

    /// A new connection; `None` where it must be closed at once.
    pub fn open(&mut self, peer: Option<IpAddr>, now: Time) -> Option<Owner> {
        let full = self.draining || self.count >= self.settings.max_connections;
        if full || !peer.is_none_or(|peer| self.peer_limits.admit(peer, now)) {
            self.counters.connections_rejected += 1;
            return None;
        }
        self.counters.connections += 1;
        let owner = self.table.connect();
        if self.connections.len() <= owner.index() {
            self.connections.resize_with(owner.index() + 1, || None);
        }
        let authenticated = self.secret.is_none();
        self.connections[owner.index()] =
            Some(Connection::new(owner, peer, authenticated, self.settings.max_line));
        self.count += 1;
        if !authenticated {
            self.expect_handshake(owner, now);
        }
        Some(owner)
    }

    /// Bytes that came from a connection. Those that cannot be served yet are kept.
    pub fn receive(&mut self, from: Owner, bytes: &[u8], now: Time) {
        let first = self.out.segments().len();
        let Some(connection) = self.connection_mut(from) else { return };
        if connection.is_closing() {
            return;
        }
        if connection.pending.is_empty() {
            let used = self.serve(from, bytes, now);
            if let Some(connection) = self.connection_mut(from) {
                connection.pending.extend_from_slice(&bytes[used..]);
            }
        } else {
            connection.pending.extend_from_slice(bytes);
            self.serve_pending(from, now);
        }
        self.expect_end_of_line(from, now);
        self.process_woken(now);
        self.out.move_own_reply_last(from, first);
    }

    /// Whether bytes of this connection would be served now.
    pub fn is_ready(&self, owner: Owner) -> bool {
        self.connection(owner).is_some_and(Connection::is_ready)
    }

    /// Whether the connection waits for a grant.
    pub fn is_waiting(&self, owner: Owner) -> bool {
        self.connection(owner).is_some_and(|c| matches!(c.state, ConnectionState::Waiting { .. }))
    }

    /// Whether the connection was sent away and is about to be closed.
    pub fn is_closing(&self, owner: Owner) -> bool {
        self.connection(owner).is_some_and(Connection::is_closing)
    }

    /// The end of a connection, told by its peer or by the system.
    pub fn hang_up(&mut self, owner: Owner, how: Hangup, now: Time) {
        let Some(connection) = self.remove_connection(owner) else { return };
        // A server that stops closes connections itself, or lets them break. Their holders may live and believe: they
        // renew on the next server, which must find their holds. Only a client that closes says that it is done, and
        // one that was sent away did not close first: it follows the server's own close.
        let closed_first = how == Hangup::Finished && !connection.is_closing();
        let kept = if self.draining {
            !closed_first
        } else {
            how == Hangup::Aborted && connection.keeps_holds()
        };
        self.watches.remove_all(owner);
        let waited_for = self.watched_keys_of(owner);
        self.abandon_claims(&connection, now);
        let leave = if self.settings.auto_release && !kept {
            OnDisconnect::Release
        } else {
            OnDisconnect::KeepHolds
        };
        self.table.disconnect(owner, leave, now);
        for (space, key) in waited_for {
            self.key_changed(space, &key);
        }
        self.pump(now);
        self.process_woken(now);
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: Time) {
        self.table.handle_timeout(now);
        self.pump(now);
        self.shrink_lease_bound(now);
        while let Some(&(at, index)) = self.alarms.first()
            && at <= now
        {
            self.alarms.pop_first();
            let connection = self.connections.get_mut(index as usize).and_then(Option::as_mut);
            if let Some(connection) = connection {
                connection.alarm = Time::MAX;
                let owner = connection.owner;
                self.handle_alarm(owner, now);
                // What it was due for must be settled before it is armed again, or it would be due for ever.
                self.process_woken(now);
                self.arm(owner);
            }
        }
        self.process_woken(now);
    }

    /// When to call [`handle_timeout`](Self::handle_timeout).
    pub fn poll_timeout(&self) -> Option<Time> {
        let alarm = self.alarms.first().map(|(at, _)| *at);
        alarm.into_iter().chain(self.table.poll_timeout()).min()
    }

    /// What is to be sent, in order. To be taken after every call, and [dropped](Self::clear_output) when it was sent.
    pub fn output(&self) -> (&[u8], &[OutputSegment]) {
        (&self.out.bytes, self.out.segments())
    }

    /// The output was sent, or is kept by the driver.
    pub fn clear_output(&mut self) {
        self.out.clear();
    }

    /// A connection to close once its output is sent: to be ended for writing at once, and forgotten here by
    /// [`hang_up`](Self::hang_up) when it is closed.
    pub fn poll_close(&mut self) -> Option<Owner> {
        self.closing.pop_front()
    }

    /// A connection that waited, and that takes bytes again.
    pub fn poll_resumed(&mut self) -> Option<Owner> {
        self.resumed.pop_front()
    }

    /// The peer does not read: the connection has the time of [`Settings::write_timeout`] from here.
    pub fn write_blocked(&mut self, owner: Owner, now: Time) {
        let until = self.settings.write_timeout.map_or(Time::MAX, |timeout| now + timeout);
        if let Some(connection) = self.connection_mut(owner) {
            connection.write_by = connection.write_by.min(until);
            self.arm(owner);
        }
    }

    /// All that was for the peer has been sent: goes on with a long answer, if there is one.
    pub fn write_done(&mut self, owner: Owner, now: Time) {
        let Some(connection) = self.connection_mut(owner) else { return };
        connection.write_by = Time::MAX;
        if self.has_long_reply(owner) {
            if self.continue_long_reply(owner, now) {
                self.resume(owner, now);
            }
            self.out.seal(owner);
            self.process_woken(now);
        }
    }

    /// Whether there is more to say when [all was sent](Self::write_done).
    pub fn has_long_reply(&self, owner: Owner) -> bool {
        self.connection(owner).is_some_and(|c| matches!(c.state, ConnectionState::LongReply(_)))
    }

    /// A connection that has yet to shake hands, or to prove itself, has the time of a line for it.
    pub fn expect_handshake(&mut self, owner: Owner, now: Time) {
        let until = self.settings.read_timeout.map_or(Time::MAX, |timeout| now + timeout);
        if let Some(connection) = self.connection_mut(owner) {
            connection.read_by = until;
            self.arm(owner);
        }
    }

    /// The handshake is done.
    pub fn handshake_done(&mut self, owner: Owner) {
        if let Some(connection) = self.connection_mut(owner)
            && connection.authenticated
        {
            connection.read_by = Time::MAX;
        }
    }

    /// Begins to stop: waiters and new claims are refused. Holders may still renew and release, and their holds outlive
    /// the server if they are [written down](Self::is_durable), unless their client closes its connection.
    pub fn drain(&mut self, now: Time) {
        self.draining = true;
        // Whose turn has come by now is granted: who is turned away below really waits.
        self.table.handle_timeout(now);
        self.pump(now);
        self.process_woken(now);
        // A release must not pass a key to a two-phase waiter: its `w` is refused, so it would never learn of the grant,
        // and the next server would keep that hold until its lease ends.
        self.table.embargo_until(Time::MAX);
        let waiting: Vec<Owner> =
            self.connections().filter(|c| !c.is_ready()).map(|c| c.owner).collect();
        for owner in waiting {
            if let Some(ConnectionState::Waiting { place, .. }) =
                self.connection(owner).map(|c| &c.state)
            {
                let place = *place;
                self.table.abandon(place, now);
                self.pump(now);
                self.woken.push_back((owner, Wake::Refused(Reply::ERROR)));
            }
        }
        self.refuse_waiting_claims(now);
        self.process_woken(now);
    }

    /// The limits that it keeps.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// How many connections there are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Takes another secret from now on. Connections that have proven theirs stay.
    pub fn set_secret(&mut self, secret: Option<&[u8]>) {
        self.secret = secret.map(Into::into);
    }
}

/// Serving.
impl Engine {
    /// Serves the requests at the start of `bytes` as far as they go, and says how many bytes that took.
    fn serve(&mut self, from: Owner, bytes: &[u8], now: Time) -> usize {
        let mut used = 0;
        let mut foreseen = 0;
        let begin = self.out.bytes.len();
        while let Some(connection) = self.connection_mut(from)
            && connection.is_ready()
        {
            match connection.framer.next(&bytes[used..]) {
                Framed::Request { lines, len } => {
                    // The next line has its own time, also where it is as far into its request as this one was.
                    connection.read_by = Time::MAX;
                    if foreseen == 0 {
                        foreseen = self.look_ahead(&bytes[used..]);
                    }
                    foreseen = foreseen.saturating_sub(1);
                    used += len;
                    self.request(from, Request::parse(lines), now);
                }
                Framed::Partial => break,
                Framed::Discarded => used = bytes.len(),
                Framed::TooLong => {
                    used = bytes.len();
                    self.reply(Reply::ERROR);
                    self.begin_close(from, now);
                }
            }
            if self.out.bytes.len() - begin > MAX_UNREAD_REPLY_BYTES && self.is_ready(from) {
                self.set_state(from, ConnectionState::LongReply(Box::new(LongReply::pause())));
            }
            if used == bytes.len() {
                break;
            }
        }
        self.out.seal(from);
        used
    }

    fn serve_pending(&mut self, from: Owner, now: Time) {
        let Some(connection) = self.connection_mut(from) else { return };
        let mut pending = std::mem::take(&mut connection.pending);
        let used = self.serve(from, &pending, now);
        if used < pending.len()
            && let Some(connection) = self.connection_mut(from)
        {
            pending.drain(..used);
            connection.pending = pending;
        }
    }

    /// Wakes those whose turn it is, and goes on with what they sent meanwhile, until nobody is left to wake.
    fn process_woken(&mut self, now: Time) {
        while let Some((owner, wake)) = self.woken.pop_front() {
            let Some(connection) = self.connection_mut(owner) else { continue };
            match wake {
                Wake::Push(line) => {
                    if let Some(line) = connection.push_or_defer(&line) {
                        self.out.bytes.extend_from_slice(line);
                    }
                    self.out.seal(owner);
                    continue;
                }
                // It was cut off since it was woken, and must not be served again.
                _ if !matches!(connection.state, ConnectionState::Waiting { .. }) => continue,
                Wake::Granted(grant) => {
                    connection.state = ConnectionState::Ready;
                    self.reply(granted(&grant));
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

    /// Takes up a connection that has become ready.
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

    /// Sends the connection away, after a while in which its peer can read the last reply.
    fn begin_close(&mut self, owner: Owner, now: Time) {
        if let Some(connection) = self.connection_mut(owner) {
            connection.state = ConnectionState::Closing { until: now + CLOSE_DELAY };
            connection.pending = Vec::new();
            connection.read_by = Time::MAX;
            self.closing.push_back(owner);
            self.arm(owner);
        }
    }

    /// Passes on what happened beside the answers.
    fn pump(&mut self, now: Time) {
        while let Some(event) = self.table.poll_event() {
            match event {
                TableEvent::Granted { place, owner, space, key, mode, grant } => {
                    self.key_changed(space, &key);
                    if self.claim_granted(place, &key, mode, &grant, now) {
                        continue;
                    }
                    self.record_grant(&key, mode, &grant, (b"", owner), now);
                    let Some(connection) = self.connection(owner) else { continue };
                    let ConnectionState::Waiting { place: awaited_place, two_phase, .. } =
                        connection.state
                    else {
                        continue;
                    };
                    if awaited_place == place {
                        let grant = if two_phase {
                            self.redeem(owner, space, &key, grant, now)
                        } else {
                            grant
                        };
                        self.woken.push_back((owner, Wake::Granted(grant)));
                    }
                }
                TableEvent::Ended { how, owner, space, key, token } => {
                    self.hold_ended(how, owner, space, &key, token, now);
                }
                TableEvent::HandoffRequested { owner, token, .. } => {
                    self.notify_handoff_requested(Some(owner), token.number());
                }
            }
        }
    }

    /// A wait in two phases is over: its claim is settled, and the lease begins anew.
    fn redeem(
        &mut self,
        owner: Owner,
        space: KeySpace,
        key: &KeyBytes,
        grant: Grant,
        now: Time,
    ) -> Grant {
        match self.table.redeem(owner, space, key, now) {
            Redeemed::Granted(grant) => {
                self.record_renewal(grant.token, grant.lease, grant.ends);
                grant
            }
            _ => grant,
        }
    }

    fn hold_ended(
        &mut self,
        how: Ending,
        owner: Option<Owner>,
        space: KeySpace,
        key: &KeyBytes,
        token: LockToken,
        now: Time,
    ) {
        self.key_changed(space, key);
        self.record_end((space, key), token.number(), how.into(), now);
        self.claim_ended(how, owner, token.number());
    }

    /// Looks after a connection whose alarm went off.
    fn handle_alarm(&mut self, owner: Owner, now: Time) {
        let Some(connection) = self.connection(owner) else { return };
        let (read_by, write_by) = (connection.read_by, connection.write_by);
        match connection.state {
            ConnectionState::Closing { until } if until <= now => {
                self.abort(owner);
                return;
            }
            ConnectionState::Waiting { place, until, .. } if until <= now => {
                self.time_out_wait(owner, place, now);
            }
            _ => {}
        }
        if write_by <= now {
            tracing::info!(target: "tenure::server", connection = owner.id(), "write_timeout");
            self.abort(owner);
        } else if read_by <= now {
            self.reply(Reply::ERROR);
            self.out.seal(owner);
            self.begin_close(owner, now);
        }
    }

    /// Sends the connection away at once.
    fn abort(&mut self, owner: Owner) {
        if let Some(connection) = self.connection_mut(owner) {
            connection.state = ConnectionState::Closing { until: ConnectionState::CLOSE_REQUESTED };
            connection.write_by = Time::MAX;
            connection.read_by = Time::MAX;
            self.closing.push_back(owner);
        }
    }

    /// Whether the driver is to close the connection now, sent or not.
    pub fn must_close(&self, owner: Owner, now: Time) -> bool {
        match self.connection(owner).map(|connection| &connection.state) {
            Some(ConnectionState::Closing { until }) => *until <= now,
            Some(_) => false,
            None => true,
        }
    }

    fn time_out_wait(&mut self, owner: Owner, place: tenure_core::table::PlaceId, now: Time) {
        let key = self.observed_key_of(place);
        if let Some(Connection { state: ConnectionState::Waiting { until, .. }, .. }) =
            self.connection_mut(owner)
        {
            *until = Time::MAX;
        }
        if self.table.abandon(place, now) {
            self.counters.timeouts += 1;
            self.woken.push_back((owner, Wake::Refused(Reply::Timeout)));
        }
        if let Some((space, key)) = key {
            self.key_changed(space, &key);
            self.record_history((space, &key), HistoryEventKind::GaveUp, 0, b"", Some(owner), now);
        }
        self.pump(now);
    }
}

/// Book-keeping.
impl Engine {
    fn connection(&self, owner: Owner) -> Option<&Connection> {
        self.connections.get(owner.index())?.as_ref().filter(|c| c.owner == owner)
    }

    fn connection_mut(&mut self, owner: Owner) -> Option<&mut Connection> {
        self.connections.get_mut(owner.index())?.as_mut().filter(|c| c.owner == owner)
    }

    fn connections(&self) -> impl Iterator<Item = &Connection> {
        self.connections.iter().flatten()
    }

    fn remove_connection(&mut self, owner: Owner) -> Option<Connection> {
        self.connection(owner)?;
        let connection = self.connections[owner.index()].take()?;
        self.count -= 1;
        self.alarms.remove(&(connection.alarm, index(owner)));
        if let Some(peer) = connection.peer {
            self.peer_limits.connection_closed(peer);
        }
        Some(connection)
    }

    /// A line that has begun must end in time.
    fn expect_end_of_line(&mut self, owner: Owner, now: Time) {
        let timeout = self.settings.read_timeout;
        let Some(connection) = self.connection_mut(owner) else { return };
        if connection.expect_end_of_line(timeout, now) {
            self.arm(owner);
        }
    }

    /// Sees that the connection is looked at in time. An alarm that goes off too early will do: most waits are over
    /// long before their time, and setting one alarm for many of them costs nothing.
    fn arm(&mut self, owner: Owner) {
        let Some(connection) = self.connection_mut(owner) else { return };
        let due = connection.due();
        if due < connection.alarm {
            let old = std::mem::replace(&mut connection.alarm, due);
            self.alarms.remove(&(old, index(owner)));
            self.alarms.insert((due, index(owner)));
        }
    }
}

fn index(owner: Owner) -> u32 {
    u32::try_from(owner.index()).expect("an index of the table")
}

fn granted(grant: &Grant) -> Reply<'static> {
    Reply::Granted { token: grant.token, lease: grant.lease.as_secs() }
}
