//! All connections: their states, alarms and closes, and the limits per client address.

use std::collections::{BTreeSet, VecDeque};
use std::net::IpAddr;
use std::time::Duration;

use tenure_core::Time;
use tenure_core::table::Owner;

use super::connection::{Connection, ConnectionState};
use super::peer_limits::PeerLimits;

/// Time for which a connection that the engine closes stays open after the last reply, so that the peer can read it.
const CLOSE_DELAY: Duration = Duration::from_millis(100);

/// The open connections.
#[derive(Debug)]
pub(super) struct Connections {
    /// Indexed by the slot of their owner in the table.
    slots: Vec<Option<Connection>>,
    count: usize,
    peer_limits: PeerLimits,
    /// Alarms: time, and slot of the connection. At most one per connection, at or before its earliest deadline.
    alarms: BTreeSet<(Time, u32)>,
    /// Connections that the driver is to close.
    closing: VecDeque<Owner>,
}

impl Connections {
    pub(super) fn new(peer_limits: PeerLimits) -> Self {
        Self {
            slots: Vec::new(),
            count: 0,
            peer_limits,
            alarms: BTreeSet::new(),
            closing: VecDeque::new(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.count
    }

    pub(super) fn get(&self, owner: Owner) -> Option<&Connection> {
        self.slots.get(owner.index())?.as_ref().filter(|c| c.owner == owner)
    }

    pub(super) fn get_mut(&mut self, owner: Owner) -> Option<&mut Connection> {
        self.slots.get_mut(owner.index())?.as_mut().filter(|c| c.owner == owner)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Connection> {
        self.slots.iter().flatten()
    }

    /// Counts a connection of this address. False if the address is at its limit or blocked.
    pub(super) fn admit(&mut self, peer: IpAddr, now: Time) -> bool {
        self.peer_limits.admit(peer, now)
    }

    pub(super) fn insert(&mut self, connection: Connection) {
        let index = connection.owner.index();
        if self.slots.len() <= index {
            self.slots.resize_with(index + 1, || None);
        }
        self.slots[index] = Some(connection);
        self.count += 1;
    }

    pub(super) fn remove(&mut self, owner: Owner) -> Option<Connection> {
        self.get(owner)?;
        let connection = self.slots[owner.index()].take()?;
        self.count -= 1;
        self.alarms.remove(&(connection.alarm, slot_of(owner)));
        if let Some(peer) = connection.peer {
            self.peer_limits.connection_closed(peer);
        }
        Some(connection)
    }

    pub(super) fn set_state(&mut self, owner: Owner, state: ConnectionState) {
        if let Some(connection) = self.get_mut(owner) {
            connection.state = state;
        }
    }

    /// Identity of the client of a connection: the one sent with `hello`, or the client's address. Empty if neither is
    /// known.
    pub(super) fn identity(&self, owner: Owner) -> String {
        match self.get(owner).map(|connection| (&connection.extension, connection.peer)) {
            Some((Some(extension), _)) => extension.about.to_string(),
            Some((None, Some(peer))) => peer.to_string(),
            _ => String::new(),
        }
    }

    /// True while the address is blocked for its authentication failures.
    pub(super) fn is_blocked(&self, peer: IpAddr, now: Time) -> bool {
        self.peer_limits.is_blocked(peer, now)
    }

    /// Counts an authentication failure of an address.
    pub(super) fn auth_failed(&mut self, peer: IpAddr, now: Time) {
        self.peer_limits.auth_failed(peer, now);
    }
}

/// Alarms.
impl Connections {
    /// Time of the first alarm.
    pub(super) fn poll_timeout(&self) -> Option<Time> {
        self.alarms.first().map(|(at, _)| *at)
    }

    /// Removes the first alarm if it is due, and returns its connection.
    pub(super) fn poll_alarm(&mut self, now: Time) -> Option<Owner> {
        while let Some(&(at, slot)) = self.alarms.first()
            && at <= now
        {
            self.alarms.pop_first();
            if let Some(connection) = self.slots.get_mut(slot as usize).and_then(Option::as_mut) {
                connection.alarm = Time::MAX;
                return Some(connection.owner);
            }
        }
        None
    }

    /// Sets the connection's alarm so that it is not later than the connection's earliest deadline.
    ///
    /// An alarm may become earlier, never later. Most waits end long before their deadline, so an early alarm that
    /// finds nothing due is cheaper than an update of the set at every wait.
    pub(super) fn arm(&mut self, owner: Owner) {
        let Some(connection) = self.get_mut(owner) else { return };
        let due = connection.earliest_deadline();
        if due < connection.alarm {
            let old = std::mem::replace(&mut connection.alarm, due);
            self.alarms.remove(&(old, slot_of(owner)));
            self.alarms.insert((due, slot_of(owner)));
        }
    }

    /// Starts the deadline for the rest of a line of which the first bytes have arrived.
    pub(super) fn expect_end_of_line(
        &mut self,
        owner: Owner,
        timeout: Option<Duration>,
        now: Time,
    ) {
        let Some(connection) = self.get_mut(owner) else { return };
        if connection.expect_end_of_line(timeout, now) {
            self.arm(owner);
        }
    }
}

/// Closes.
impl Connections {
    /// Begins to close the connection. It stays open for [`CLOSE_DELAY`], so that its peer can read the last reply.
    pub(super) fn begin_close(&mut self, owner: Owner, now: Time) {
        if let Some(connection) = self.get_mut(owner) {
            connection.state = ConnectionState::Closing { until: now + CLOSE_DELAY };
            connection.pending = Vec::new();
            connection.read_by = Time::MAX;
            self.closing.push_back(owner);
            self.arm(owner);
        }
    }

    /// Requests the immediate close of a connection; unsent output is dropped.
    pub(super) fn force_close(&mut self, owner: Owner) {
        if let Some(connection) = self.get_mut(owner) {
            connection.state = ConnectionState::Closing { until: ConnectionState::CLOSE_REQUESTED };
            connection.write_by = Time::MAX;
            connection.read_by = Time::MAX;
            self.closing.push_back(owner);
        }
    }

    /// Next connection to close.
    pub(super) fn poll_close(&mut self) -> Option<Owner> {
        self.closing.pop_front()
    }

    /// Panics if a count or an alarm is wrong.
    pub(super) fn check(&self) {
        assert_eq!(self.count, self.iter().count(), "number of connections");
        let armed = self.iter().filter(|connection| connection.alarm < Time::MAX).count();
        assert_eq!(self.alarms.len(), armed, "one alarm per connection");
        for connection in self.iter() {
            assert!(
                connection.alarm <= connection.earliest_deadline(),
                "an alarm is later than its deadline"
            );
            let alarm = (connection.alarm, slot_of(connection.owner));
            assert!(
                alarm.0 == Time::MAX || self.alarms.contains(&alarm),
                "an alarm is missing from the set"
            );
        }
    }

    /// Number of alarms.
    pub(super) fn alarm_count(&self) -> usize {
        self.alarms.len()
    }
}

fn slot_of(owner: Owner) -> u32 {
    u32::try_from(owner.index()).expect("table slots fit into 32 bits")
}
