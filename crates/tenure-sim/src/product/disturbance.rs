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
}

impl Disturbances {
    pub(super) fn new(plan: &Plan) -> Self {
        let clients = vec![!plan.has_steady_link(); plan.clients];
        Self { clients, wall_clocks: false, holds_discarded: false }
    }

    /// A fault strikes a client, or the server and so all clients.
    pub(super) fn strike(&mut self, client: Option<usize>) {
        match client {
            Some(client) => self.clients[client] = true,
            None => self.clients.fill(true),
        }
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
