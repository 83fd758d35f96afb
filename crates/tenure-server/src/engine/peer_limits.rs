//! How many connections an address has, and how often it sent a wrong secret.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use tenure_core::Time;

/// Wrong secrets are counted over this long, and too many close the door for as long.
const AUTH_FAILURE_WINDOW: Duration = Duration::from_secs(60);
/// Beyond this many addresses, those without a connection are forgotten early.
const MAX_TRACKED_PEERS: usize = 100_000;

#[derive(Debug)]
pub(super) struct PeerLimits {
    max_connections: usize,
    max_failures: u32,
    by_address: HashMap<IpAddr, PeerState>,
}

#[derive(Clone, Copy, Debug, Default)]
struct PeerState {
    connections: usize,
    failures: u32,
    /// When the counting of failures began.
    since: Time,
}

impl PeerState {
    fn is_blocked(&self, max_failures: u32, now: Time) -> bool {
        self.failures >= max_failures && now.since(self.since) < AUTH_FAILURE_WINDOW
    }
}

impl PeerLimits {
    pub(super) fn new(max_connections: usize, max_failures: u32) -> Self {
        Self { max_connections, max_failures, by_address: HashMap::new() }
    }

    /// Lets one more connection of an address in, or not.
    pub(super) fn admit(&mut self, address: IpAddr, now: Time) -> bool {
        let guest = self.by_address.entry(address).or_default();
        let welcome =
            guest.connections < self.max_connections && !guest.is_blocked(self.max_failures, now);
        if welcome {
            guest.connections += 1;
        }
        welcome
    }

    pub(super) fn connection_closed(&mut self, address: IpAddr) {
        if let Some(guest) = self.by_address.get_mut(&address) {
            guest.connections -= 1;
            if guest.connections == 0 && guest.failures == 0 {
                self.by_address.remove(&address);
            }
        }
    }

    /// Whether too many wrong secrets came from there.
    pub(super) fn is_blocked(&self, address: IpAddr, now: Time) -> bool {
        let guest = self.by_address.get(&address);
        guest.is_some_and(|guest| guest.is_blocked(self.max_failures, now))
    }

    /// A wrong secret came from there.
    pub(super) fn auth_failed(&mut self, address: IpAddr, now: Time) {
        if self.by_address.len() > MAX_TRACKED_PEERS {
            self.by_address.retain(|_, guest| {
                guest.connections > 0 || now.since(guest.since) < AUTH_FAILURE_WINDOW
            });
        }
        let guest = self.by_address.entry(address).or_default();
        if now.since(guest.since) >= AUTH_FAILURE_WINDOW {
            guest.failures = 0;
        }
        if guest.failures == 0 {
            guest.since = now;
        }
        guest.failures = guest.failures.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOME: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    #[test]
    fn an_address_has_so_many_connections() {
        let mut guests = PeerLimits::new(2, 3);
        let now = Time::ZERO;
        assert!(guests.admit(HOME, now) && guests.admit(HOME, now) && !guests.admit(HOME, now));
        assert!(guests.admit("::1".parse().expect("an address"), now));
        guests.connection_closed(HOME);
        assert!(guests.admit(HOME, now));
    }

    #[test]
    fn too_many_wrong_secrets_close_the_door_for_a_while() {
        let mut guests = PeerLimits::new(9, 3);
        let now = Time::ZERO + Duration::from_secs(100);
        for _ in 0..3 {
            assert!(guests.admit(HOME, now));
            guests.auth_failed(HOME, now);
            guests.connection_closed(HOME);
        }
        assert!(!guests.admit(HOME, now + AUTH_FAILURE_WINDOW - Duration::from_nanos(1)));
        assert!(guests.admit(HOME, now + AUTH_FAILURE_WINDOW));
        guests.auth_failed(HOME, now + AUTH_FAILURE_WINDOW);
        assert!(guests.admit(HOME, now + AUTH_FAILURE_WINDOW), "one failure of a new count");
    }
}
