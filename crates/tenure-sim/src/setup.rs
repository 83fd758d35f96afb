//! Setup of a simulation: rules, store, clients, and faults.

use std::time::Duration;

use tenure_core::Rules;

/// Model of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StoreKind {
    /// A lock server: a queue, leases on its own clock, pushed grants, restarts that keep the holds.
    ServerClock,
    /// Holds belong to connections: the server closes a connection that is idle for the ttl, or that broke.
    Session,
    /// A compare-and-swap record: contenders observe its version. Each record has a timestamp of the server that led
    /// when it was written; the clocks of the servers differ.
    Observation,
    /// A bucket: a compare-and-swap record with an age by two clocks that may differ, and a bell. A release hands over
    /// to the waiter that rings. A hold that is handed to a waiter that has just left lasts until its lease ends: this
    /// does not count as a breach.
    Bucket,
}

impl StoreKind {
    /// Every kind.
    pub const ALL: [Self; 4] = [Self::ServerClock, Self::Session, Self::Observation, Self::Bucket];
}

/// A simulation, except for its seed.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Rules of the clients.
    pub rules: Rules,
    /// Model of the store.
    pub store: StoreKind,
    /// Maximum number of clients, at least 2; the seed decides.
    pub clients: u64,
    /// Maximum number of keys; the seed decides.
    pub keys: u64,
    /// Lease that all clients request.
    pub ttl: Duration,
    /// True if a connection keeps requests in order, as TCP does. A store driver that sends the requests of one claim
    /// over several connections must ensure their order itself: an abandon that arrives after a repetition of its claim
    /// would remove the grant of that repetition.
    pub ordered: bool,
    /// Duration of the faults, in ttls. Then all faults end, and everything must come to rest.
    pub length: f64,
    /// Faults.
    pub faults: Faults,
}

impl Setup {
    /// Up to four clients on up to two keys, all rules, faults of every kind.
    pub const fn new(store: StoreKind) -> Self {
        Self {
            rules: Rules::ALL,
            store,
            clients: 4,
            keys: 2,
            ttl: Duration::from_secs(3),
            ordered: true,
            length: 25.0,
            faults: Faults::MIXED,
        }
    }
}

/// Probabilities and sizes of faults. Probabilities are from 0 to 1, times in ttls, weights relative to each other.
#[derive(Clone, Copy, Debug)]
pub struct Faults {
    /// Probability that a message is lost.
    pub lose: f64,
    /// Longest normal delay of a message.
    pub delay: f64,
    /// Probability of an exceptional delay.
    pub delay_spike: f64,
    /// Longest exceptional delay.
    pub max_delay_spike: f64,
    /// Probability that a request hangs in a dead connection beyond its time limit.
    pub hang: f64,
    /// Probability that a request fails at once, before it is sent.
    pub refuse: f64,
    /// Probability that a request overtakes an earlier one, if requests are not ordered.
    pub overtake: f64,
    /// Largest error of a clock's rate, in parts per million.
    pub drift: u64,
    /// Mean time between two faults of a client.
    pub mean_fault_interval: f64,
    /// Longest pause, suspension or partition.
    pub max_fault_duration: f64,
    /// Weight: the process is stopped while its clock runs on.
    pub pause: u64,
    /// Weight: the whole machine is suspended.
    pub suspend: u64,
    /// Weight: no message passes between the client and the store.
    pub partition: u64,
    /// Weight: the process is killed and restarted.
    pub crash: u64,
    /// Weight: a connection breaks.
    pub disconnect: u64,
    /// Weight: the clock changes its rate.
    pub slew: u64,
    /// Mean time between two restarts of the store; for [`StoreKind::Observation`], between two changes of the leading
    /// server.
    pub restart: f64,
    /// Largest difference between the clocks of two servers.
    pub max_server_skew: Duration,
    /// Probability that a bucket answers a read with the state before the last change. A client that gets such an
    /// answer cannot know what it holds; two holders remain a breach.
    pub stale_read: f64,
    /// Largest difference between the two clocks of a bucket: one stamps records, the other dates replies.
    pub max_date_skew: f64,
}

impl Faults {
    /// A moderate mix of all faults.
    pub const MIXED: Self = Self {
        lose: 0.02,
        delay: 0.03,
        delay_spike: 0.04,
        max_delay_spike: 0.8,
        hang: 0.01,
        refuse: 0.01,
        overtake: 0.2,
        drift: 80_000,
        mean_fault_interval: 3.0,
        max_fault_duration: 1.6,
        pause: 3,
        suspend: 3,
        partition: 3,
        crash: 1,
        disconnect: 3,
        slew: 4,
        restart: 15.0,
        max_server_skew: Duration::from_secs(15),
        stale_read: 0.0,
        max_date_skew: 30.0,
    };
}
