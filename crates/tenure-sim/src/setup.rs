//! What is simulated: which rules, which store, how many clients, and how badly the world treats them.

use std::time::Duration;

use tenure_core::Rules;

/// The store that the clients meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StoreKind {
    /// A lock server: a queue, leases on its own clock, grants pushed, restarts that keep the holds.
    ServerClock,
    /// Holds live on connections: the server ends one that is silent for the ttl, or that broke.
    Session,
    /// A compare-and-swap record: challengers watch its version. Each record bears a timestamp of the server that led when
    /// it was written; the clocks of the servers differ.
    Observation,
    /// A bucket: a compare-and-swap record whose age the store tells, by two clocks that may differ, and a bell beside it. A
    /// release hands over to the waiter that rings. What is handed to a waiter that has just left lasts until its lease
    /// ends: that is the one thing which is not held against it.
    Bucket,
}

impl StoreKind {
    /// Every kind.
    pub const ALL: [Self; 4] = [Self::ServerClock, Self::Session, Self::Observation, Self::Bucket];
}

/// One simulation, but for its seed.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// The rules that the clients obey.
    pub rules: Rules,
    /// The store.
    pub store: StoreKind,
    /// How many clients at most, at least 2; the seed decides.
    pub clients: u64,
    /// How many keys at most; the seed decides.
    pub keys: u64,
    /// The lease that everybody asks for.
    pub ttl: Duration,
    /// Whether a connection keeps requests in order, as TCP does. A store that sends the requests of one claim over
    /// several must see to their order itself: an abandon that arrives after a later sending of its claim takes away
    /// what that sending was granted.
    pub ordered: bool,
    /// How long faults happen, in ttls; then the world heals and everything must come to rest.
    pub length: f64,
    /// How badly the world treats them.
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

/// How badly the world treats clients. Chances are of 1, times in ttls, weights relative to each other.
#[derive(Clone, Copy, Debug)]
pub struct Faults {
    /// The chance of each message to get lost.
    pub lose: f64,
    /// The longest delay of a usual message.
    pub delay: f64,
    /// The chance of a message to be held up...
    pub delay_spike: f64,
    /// ...for up to this long.
    pub max_delay_spike: f64,
    /// The chance that a request hangs in a dead connection, whatever time limit it was given.
    pub hang: f64,
    /// The chance that a request fails at once, unsent.
    pub refuse: f64,
    /// The chance that a request overtakes one before it, where nothing keeps them in order.
    pub overtake: f64,
    /// The largest error of a clock's rate, in millionths.
    pub drift: u64,
    /// The mean time between two misfortunes of a client.
    pub mean_fault_interval: f64,
    /// The longest pause, sleep or cut.
    pub max_fault_duration: f64,
    /// Weight: the process stops while its clock runs on.
    pub pause: u64,
    /// Weight: the whole machine sleeps.
    pub suspend: u64,
    /// Weight: nothing gets through to the store or back.
    pub partition: u64,
    /// Weight: the process dies and starts anew.
    pub crash: u64,
    /// Weight: a connection breaks.
    pub disconnect: u64,
    /// Weight: the clock changes its rate.
    pub slew: u64,
    /// The mean time between two restarts of the store; where its records bear timestamps, between two changes of the
    /// server that leads.
    pub restart: f64,
    /// The largest difference of the clocks of two servers.
    pub max_server_skew: Duration,
    /// The chance that a bucket answers a read with what was there before the last change. Whoever is shown that cannot
    /// know what it holds; two holders there must never be all the same.
    pub stale_read: f64,
    /// The largest difference between the two clocks of a bucket: one stamps records, the other dates answers.
    pub max_date_skew: f64,
}

impl Faults {
    /// A little of everything.
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
