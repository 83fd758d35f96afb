//! Invariants of the engine, for tests.

use super::Engine;
use super::connection::ConnectionState;

impl Engine {
    /// Panics if one of the engine's invariants is violated. They apply between any two calls of the driver. Slow.
    #[doc(hidden)]
    pub fn check(&self) {
        self.locks.table().check();
        self.connections.check();
        let owners = self.locks.table().sizes().owners;
        let connections = self.connections.len();
        assert_eq!(owners, connections + 1, "table owners: the connections and the detached owner");
        assert!(self.woken.is_empty(), "the woken queue is not empty");
        for connection in self.connections.iter() {
            if let ConnectionState::Waiting { place, .. } = connection.state {
                let queued = self.locks.table().waiters_ahead(place).is_some();
                assert!(queued, "a connection waits without a place in a queue");
            }
        }
        self.watches.check(|owner| self.connections.get(owner).is_some());
        self.locks.claims().check();
    }

    /// Numbers of connections, alarms, claims, watches, holds and waiters: all 0 once every client has left.
    #[doc(hidden)]
    pub fn leftovers(&self) -> [usize; 6] {
        let sizes = self.locks.table().sizes();
        let (connections, alarms) = (self.connections.len(), self.connections.alarm_count());
        let (claims, watches) = (self.locks.claims().len(), self.watches.len());
        [connections, alarms, claims, watches, sizes.holds, sizes.waiters]
    }
}
