//! Setup of a simulation: rules, store, clients, and faults.

use std::time::Duration;

use tenure_core::{Random, Rules};

/// Model of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StoreKind {
    /// A lock server: a queue, leases on its own clock, pushed grants, restarts that keep the holds.
    ServerClock,
    /// Holds belong to connections: the server closes a connection that is idle for the ttl, or that broke.
    Session,
    /// A stream with one sequence for all keys, as of NATS: a record per key, conditional writes, and watches.
    /// Contenders observe the renewals in the record. Each record has a timestamp of the server that led when it was
    /// written; the clocks of the servers differ.
    Stream,
    /// A bucket: a compare-and-swap record with an age by two clocks that may differ, and a bell. A release hands over
    /// to the waiter that rings. A hold that is handed to a waiter that has just left lasts until its lease ends: this
    /// does not count as a breach.
    Bucket,
}

impl StoreKind {
    /// Every kind.
    pub const ALL: [Self; 4] = [Self::ServerClock, Self::Session, Self::Stream, Self::Bucket];
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
    /// True if the write of a claim names the version that it replaces. A claim that was decided on an old read would
    /// otherwise take the lock from its holder.
    pub claims_name_version: bool,
    /// True if a fencing token has an epoch. Without it, tokens fall when a stream is created again.
    pub tokens_have_epochs: bool,
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
            claims_name_version: true,
            tokens_have_epochs: true,
            length: 25.0,
            faults: Faults::MIXED,
        }
    }

    /// All rules, with the faults of a seed.
    pub fn drawn(store: StoreKind, seed: u64) -> Self {
        Self { faults: Faults::drawn(seed), ..Self::new(store) }
    }
}

/// Probabilities and sizes of faults. Probabilities are from 0 to 1, times in ttls, weights relative to each other.
#[derive(Clone, Copy, Debug, PartialEq)]
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
    /// Mean time between two restarts of the store; for [`StoreKind::Stream`], between two changes of the leading server.
    /// 0 for never.
    pub restart: f64,
    /// Largest difference between the clocks of two servers.
    pub max_server_skew: Duration,
    /// Probability that a bucket answers a read with the state before the last change, or that a server of a stream
    /// does so which no longer leads. A client that gets such an answer cannot know what it holds; two holders remain a
    /// breach.
    pub stale_read: f64,
    /// Largest difference between the two clocks of a bucket: one stamps records, the other dates replies.
    pub max_date_skew: f64,
    /// Probability that a watch does not deliver a message.
    pub lose_notification: f64,
    /// Mean time between two losses of acknowledged writes, of a bucket or a stream; 0 for never. A hold whose record
    /// is lost may overlap with another until its next renewal is answered, and no longer.
    pub lose_writes: f64,
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
        lose_notification: 0.05,
        lose_writes: 0.0,
    };

    /// No fault: messages take a little time, and clocks are right.
    pub const NONE: Self = Self {
        lose: 0.0,
        delay: 0.03,
        delay_spike: 0.0,
        max_delay_spike: 0.8,
        hang: 0.0,
        refuse: 0.0,
        overtake: 0.0,
        drift: 0,
        mean_fault_interval: 3.0,
        max_fault_duration: 1.6,
        pause: 0,
        suspend: 0,
        partition: 0,
        crash: 0,
        disconnect: 0,
        slew: 0,
        restart: 0.0,
        max_server_skew: Duration::ZERO,
        stale_read: 0.0,
        max_date_skew: 0.0,
        lose_notification: 0.0,
        lose_writes: 0.0,
    };

    /// Faults of a seed: none, one kind, or several, each more or less frequent.
    pub fn drawn(seed: u64) -> Self {
        // Another sequence than that of the run, which begins with the same seed.
        let mut random = Random::new(!seed);
        let count = match random.below(6) {
            0 => 0,
            1 => 1,
            _ => 2 + random.below(FaultKind::ALL.len() as u64),
        };
        let mut faults = Self::NONE;
        for _ in 0..count {
            let kind = random.below(FaultKind::ALL.len() as u64);
            let kind = FaultKind::ALL[usize::try_from(kind).unwrap_or(0)];
            faults.set(kind, 0.25 + 1.75 * random.unit());
        }
        faults.mean_fault_interval = 0.75 + 4.0 * random.unit();
        faults.max_fault_duration = 0.5 + 2.5 * random.unit();
        faults
    }

    /// These faults without one kind; `None` if this kind does not occur.
    pub fn without(self, kind: FaultKind) -> Option<Self> {
        let mut without = self;
        without.set(kind, 0.0);
        (without != self).then_some(without)
    }

    /// Sets a kind of fault to `strength` times its moderate frequency; 0 removes it.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "small weights"
    )]
    pub fn set(&mut self, kind: FaultKind, strength: f64) {
        let mixed = Self::MIXED;
        let weight = |moderate: u64| (moderate as f64 * strength).ceil() as u64;
        // A mean interval: the more frequent, the smaller.
        let interval = |moderate: f64| if strength == 0.0 { 0.0 } else { moderate / strength };
        match kind {
            FaultKind::Lose => self.lose = mixed.lose * strength,
            FaultKind::Delay => self.delay_spike = mixed.delay_spike * strength,
            FaultKind::Hang => self.hang = mixed.hang * strength,
            FaultKind::Refuse => self.refuse = mixed.refuse * strength,
            FaultKind::Overtake => self.overtake = mixed.overtake * strength,
            // The rules promise no more than the moderate error of a clock.
            FaultKind::Drift => self.drift = weight(mixed.drift).min(mixed.drift),
            FaultKind::Pause => self.pause = weight(mixed.pause),
            FaultKind::Suspend => self.suspend = weight(mixed.suspend),
            FaultKind::Partition => self.partition = weight(mixed.partition),
            FaultKind::Crash => self.crash = weight(mixed.crash),
            FaultKind::Disconnect => self.disconnect = weight(mixed.disconnect),
            FaultKind::Slew => self.slew = weight(mixed.slew),
            FaultKind::Restart => {
                self.restart = interval(mixed.restart);
                self.max_server_skew = mixed.max_server_skew.mul_f64(strength.min(1.0));
            }
            FaultKind::StaleRead => self.stale_read = 0.1 * strength,
            FaultKind::DateSkew => self.max_date_skew = mixed.max_date_skew * strength,
            FaultKind::LoseNotification => self.lose_notification = (0.3 * strength).min(1.0),
            FaultKind::LoseWrites => self.lose_writes = interval(3.0),
        }
    }
}

/// Kinds of faults that a seed draws.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultKind {
    /// Messages are lost.
    Lose,
    /// Messages are delayed.
    Delay,
    /// Requests hang beyond their time limit.
    Hang,
    /// Requests fail before they are sent.
    Refuse,
    /// Requests overtake each other.
    Overtake,
    /// Clocks run at a wrong rate.
    Drift,
    /// Processes are stopped.
    Pause,
    /// Machines are suspended.
    Suspend,
    /// Clients are cut off.
    Partition,
    /// Processes are killed.
    Crash,
    /// Connections break.
    Disconnect,
    /// Clocks change their rate.
    Slew,
    /// The store restarts, or another server leads.
    Restart,
    /// Reads are answered from an old copy.
    StaleRead,
    /// The two clocks of a bucket differ.
    DateSkew,
    /// Watches do not deliver all messages.
    LoseNotification,
    /// Acknowledged writes are lost.
    LoseWrites,
}

impl FaultKind {
    /// Every kind.
    pub const ALL: [Self; 17] = [
        Self::Lose,
        Self::Delay,
        Self::Hang,
        Self::Refuse,
        Self::Overtake,
        Self::Drift,
        Self::Pause,
        Self::Suspend,
        Self::Partition,
        Self::Crash,
        Self::Disconnect,
        Self::Slew,
        Self::Restart,
        Self::StaleRead,
        Self::DateSkew,
        Self::LoseNotification,
        Self::LoseWrites,
    ];
}
