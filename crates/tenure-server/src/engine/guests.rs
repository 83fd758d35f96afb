//! How many connections an address has, and how often it sent a wrong secret.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use tenure_core::Time;

/// Wrong secrets are counted over this long, and too many close the door for as long.
const WINDOW: Duration = Duration::from_secs(60);
/// Beyond this many addresses, those without a connection are forgotten early.
const MANY: usize = 100_000;

#[derive(Debug)]
pub(super) struct Guests {
    most: usize,
    most_failures: u32,
    by_address: HashMap<IpAddr, Guest>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Guest {
    connections: usize,
    failures: u32,
    /// When the counting of failures began.
    since: Time,
}

impl Guest {
    fn is_barred(&self, most: u32, now: Time) -> bool {
        self.failures >= most && now.since(self.since) < WINDOW
    }
}

impl Guests {
    pub(super) fn new(most: usize, most_failures: u32) -> Self {
        Self { most, most_failures, by_address: HashMap::new() }
    }

    /// Lets one more connection of an address in, or not.
    pub(super) fn enter(&mut self, address: IpAddr, now: Time) -> bool {
        let guest = self.by_address.entry(address).or_default();
        let welcome = guest.connections < self.most && !guest.is_barred(self.most_failures, now);
        if welcome {
            guest.connections += 1;
        }
        welcome
    }

    pub(super) fn leave(&mut self, address: IpAddr) {
        if let Some(guest) = self.by_address.get_mut(&address) {
            guest.connections -= 1;
            if guest.connections == 0 && guest.failures == 0 {
                self.by_address.remove(&address);
            }
        }
    }

    /// Whether too many wrong secrets came from there.
    pub(super) fn is_barred(&self, address: IpAddr, now: Time) -> bool {
        let guest = self.by_address.get(&address);
        guest.is_some_and(|guest| guest.is_barred(self.most_failures, now))
    }

    /// A wrong secret came from there.
    pub(super) fn failed(&mut self, address: IpAddr, now: Time) {
        if self.by_address.len() > MANY {
            self.by_address
                .retain(|_, guest| guest.connections > 0 || now.since(guest.since) < WINDOW);
        }
        let guest = self.by_address.entry(address).or_default();
        if now.since(guest.since) >= WINDOW {
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
        let mut guests = Guests::new(2, 3);
        let now = Time::ZERO;
        assert!(guests.enter(HOME, now) && guests.enter(HOME, now) && !guests.enter(HOME, now));
        assert!(guests.enter("::1".parse().expect("an address"), now));
        guests.leave(HOME);
        assert!(guests.enter(HOME, now));
    }

    #[test]
    fn too_many_wrong_secrets_close_the_door_for_a_while() {
        let mut guests = Guests::new(9, 3);
        let now = Time::ZERO + Duration::from_secs(100);
        for _ in 0..3 {
            assert!(guests.enter(HOME, now));
            guests.failed(HOME, now);
            guests.leave(HOME);
        }
        assert!(!guests.enter(HOME, now + WINDOW - Duration::from_nanos(1)));
        assert!(guests.enter(HOME, now + WINDOW));
        guests.failed(HOME, now + WINDOW);
        assert!(guests.enter(HOME, now + WINDOW), "one failure of a new count");
    }
}
