//! Invariants of the engine, for tests.

use tenure_core::Time;

use super::Engine;
use super::connection::ConnectionState;

impl Engine {
    /// Panics if one of the engine's invariants is violated. They apply between any two calls of the driver. Slow.
    #[doc(hidden)]
    pub fn check(&self) {
        self.table.check();
        let count = self.connections().count();
        assert_eq!(self.connection_count, count, "number of connections");
        let owners = self.table.sizes().owners;
        assert_eq!(owners, count + 1, "table owners: the connections and the detached owner");
        assert!(self.woken.is_empty(), "the woken queue is not empty");
        let armed = self.connections().filter(|connection| connection.alarm < Time::MAX).count();
        assert_eq!(self.alarms.len(), armed, "one alarm per connection");
        for connection in self.connections() {
            assert!(
                connection.alarm <= connection.earliest_deadline(),
                "an alarm is later than its deadline"
            );
            let alarm = (connection.alarm, super::slot_of(connection.owner));
            assert!(
                alarm.0 == Time::MAX || self.alarms.contains(&alarm),
                "an alarm is missing from the set"
            );
            if let ConnectionState::Waiting { place, .. } = connection.state {
                let queued = self.table.waiters_ahead(place).is_some();
                assert!(queued, "a connection waits without a place in a queue");
            }
        }
        self.watches.check(|owner| self.connection(owner).is_some());
        self.claims.check();
    }

    /// Numbers of connections, alarms, claims, watches, holds and waiters: all 0 once every client has left.
    #[doc(hidden)]
    pub fn leftovers(&self) -> [usize; 6] {
        let sizes = self.table.sizes();
        let (claims, watches) = (self.claims.len(), self.watches.len());
        [self.connection_count, self.alarms.len(), claims, watches, sizes.holds, sizes.waiters]
    }
}
