//! Faults that have struck so far, and the losses and errors that they explain.

use std::time::Duration;

use super::plan::{Link, Plan};

/// Trips of a link that a request may need if the window is small: its reply is sent piece by piece.
const SMALL_WINDOW_TRIPS: u32 = 30;

/// Faults that have struck.
#[derive(Debug)]
pub(super) struct Disturbances {
    /// Clients whose requests may have failed or been late.
    clients: Vec<bool>,
    /// A wall clock was set.
    pub(super) wall_clocks: bool,
    /// The server has discarded its holds: its machine crashed.
    pub(super) holds_discarded: bool,
    /// Real times at which requests to run once began that have not ended.
    once_begun: Vec<u64>,
    /// Time that the longest request to run once took.
    longest_once: u64,
}

impl Disturbances {
    pub(super) fn new(plan: &Plan) -> Self {
        let clients = vec![!plan.has_steady_link(); plan.clients];
        Self {
            clients,
            wall_clocks: false,
            holds_discarded: false,
            once_begun: Vec::new(),
            longest_once: 0,
        }
    }

    /// A fault strikes a client, or the server and so all clients.
    pub(super) fn strike(&mut self, client: Option<usize>) {
        match client {
            Some(client) => self.clients[client] = true,
            None => self.clients.fill(true),
        }
    }

    /// A request to run once begins at this real time.
    pub(super) fn once_begins(&mut self, now: u64) {
        self.once_begun.push(now);
    }

    /// The request that began at `begun` has ended.
    pub(super) fn once_ends(&mut self, begun: u64, now: u64) {
        if let Some(index) = self.once_begun.iter().position(|it| *it == begun) {
            self.once_begun.swap_remove(index);
        }
        self.longest_once = self.longest_once.max(now - begun);
    }

    /// Time by which a host may be ahead of its wall clock in a request to run once, with clocks whose rates are wrong by
    /// at most `drift` parts per million. A request reads the wall clock once, and counts on by the other clock.
    pub(super) fn once_is_ahead_by(&self, drift: u64, now: u64) -> Duration {
        let pending = self.once_begun.iter().map(|begun| now.saturating_sub(*begun)).max();
        let longest = self.longest_once.max(pending.unwrap_or(0));
        Duration::from_nanos(longest * drift / 1_000_000)
    }

    /// True if a request of this client may have failed or been late.
    pub(super) fn explain(&self, client: usize) -> bool {
        self.clients[client]
    }
}

impl Plan {
    /// True if every request is answered long before its time limit, unless a fault strikes.
    fn has_steady_link(&self) -> bool {
        let Link { delay, jitter, loss, window } = self.link;
        let trips = if window < Link::WIDE_WINDOW { SMALL_WINDOW_TRIPS } else { 2 };
        // Requests that must be in time get a quarter of the ttl. Clocks that run fast shorten it.
        let limit: Duration = self.ttl / 5;
        loss == 0.0 && (delay + jitter) * trips < limit
    }
}
