//! The invariants of the engine, for tests.

use tenure_core::Time;

use super::Engine;
use super::connection::ConnectionState;

impl Engine {
    /// Panics unless the parts of the engine agree with each other, as they must between any two calls. Slow.
    #[doc(hidden)]
    pub fn check(&self) {
        self.table.check();
        let count = self.connections().count();
        assert_eq!(self.count, count, "connections are counted");
        assert_eq!(self.table.sizes().owners, count + 1, "owners: the connections, and nobody");
        assert!(self.woken.is_empty(), "somebody was not woken");
        let armed = self.connections().filter(|connection| connection.alarm < Time::MAX).count();
        assert_eq!(self.alarms.len(), armed, "one alarm a connection");
        for connection in self.connections() {
            assert!(connection.alarm <= connection.due(), "an alarm is too late");
            let alarm = (connection.alarm, super::index(connection.owner));
            assert!(alarm.0 == Time::MAX || self.alarms.contains(&alarm), "an alarm is not set");
            if let ConnectionState::Waiting { place, .. } = connection.state {
                assert!(self.table.waiters_ahead(place).is_some(), "somebody waits for nothing");
            }
        }
        self.watches.check(|owner| self.connection(owner).is_some());
        self.claims.check();
    }

    /// How much there is of what must go when everybody has left: connections, alarms, claims, watches, holds, waiters.
    #[doc(hidden)]
    pub fn leftovers(&self) -> [usize; 6] {
        let counts = self.table.sizes();
        let (claims, watches) = (self.claims.len(), self.watches.len());
        [self.count, self.alarms.len(), claims, watches, counts.holds, counts.waiters]
    }
}
