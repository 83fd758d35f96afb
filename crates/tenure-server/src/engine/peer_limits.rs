//! Limits per client address: connections, and authentication failures.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use tenure_core::Time;

/// Window over which authentication failures are counted. An address that reaches the limit is blocked until its window
/// ends.
const AUTH_FAILURE_WINDOW: Duration = Duration::from_secs(60);
/// Number of tracked addresses above which the idle ones are dropped: no connection is open and no window is running.
const MAX_TRACKED_PEERS: usize = 100_000;

/// Connection counts and authentication failures by client address.
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
    /// Start of the window in which `failures` are counted.
    window_start: Time,
}

impl PeerState {
    fn is_blocked(&self, max_failures: u32, now: Time) -> bool {
        self.failures >= max_failures && now.since(self.window_start) < AUTH_FAILURE_WINDOW
    }
}

impl PeerLimits {
    pub(super) fn new(max_connections: usize, max_failures: u32) -> Self {
        Self { max_connections, max_failures, by_address: HashMap::new() }
    }

    /// Counts a new connection of an address, unless the address is blocked or at its limit. True if counted.
    pub(super) fn admit(&mut self, address: IpAddr, now: Time) -> bool {
        let peer = self.by_address.entry(address).or_default();
        let admitted =
            peer.connections < self.max_connections && !peer.is_blocked(self.max_failures, now);
        if admitted {
            peer.connections += 1;
        }
        admitted
    }

    pub(super) fn connection_closed(&mut self, address: IpAddr) {
        if let Some(peer) = self.by_address.get_mut(&address) {
            peer.connections -= 1;
            if peer.connections == 0 && peer.failures == 0 {
                self.by_address.remove(&address);
            }
        }
    }

    /// True while the address is blocked for its authentication failures.
    pub(super) fn is_blocked(&self, address: IpAddr, now: Time) -> bool {
        let peer = self.by_address.get(&address);
        peer.is_some_and(|peer| peer.is_blocked(self.max_failures, now))
    }

    /// Counts an authentication failure of an address.
    pub(super) fn auth_failed(&mut self, address: IpAddr, now: Time) {
        if self.by_address.len() > MAX_TRACKED_PEERS {
            self.by_address.retain(|_, peer| {
                peer.connections > 0 || now.since(peer.window_start) < AUTH_FAILURE_WINDOW
            });
        }
        let peer = self.by_address.entry(address).or_default();
        if now.since(peer.window_start) >= AUTH_FAILURE_WINDOW {
            peer.failures = 0;
        }
        if peer.failures == 0 {
            peer.window_start = now;
        }
        peer.failures = peer.failures.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCAL: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    #[test]
    fn connections_per_address_are_limited() {
        let mut limits = PeerLimits::new(2, 3);
        let now = Time::ZERO;
        assert!(limits.admit(LOCAL, now) && limits.admit(LOCAL, now) && !limits.admit(LOCAL, now));
        assert!(limits.admit("::1".parse().expect("an address"), now));
        limits.connection_closed(LOCAL);
        assert!(limits.admit(LOCAL, now));
    }

    #[test]
    fn too_many_auth_failures_block_an_address_for_the_window() {
        let mut limits = PeerLimits::new(9, 3);
        let now = Time::ZERO + Duration::from_secs(100);
        for _ in 0..3 {
            assert!(limits.admit(LOCAL, now));
            limits.auth_failed(LOCAL, now);
            limits.connection_closed(LOCAL);
        }
        assert!(!limits.admit(LOCAL, now + AUTH_FAILURE_WINDOW - Duration::from_nanos(1)));
        assert!(limits.admit(LOCAL, now + AUTH_FAILURE_WINDOW));
        limits.auth_failed(LOCAL, now + AUTH_FAILURE_WINDOW);
        assert!(limits.admit(LOCAL, now + AUTH_FAILURE_WINDOW), "first failure of a new window");
    }
}
