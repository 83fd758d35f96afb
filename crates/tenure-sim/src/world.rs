//! The simulated world: real time, network, store, clients, and the event queue.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

use tenure_core::lease::{Lease, LeaseTerms};
use tenure_core::{Random, Time};

use crate::client::Client;
use crate::clock::Clock;
use crate::contract::{Breach, Condition, ContractChecker};
use crate::in_flight::Operation;
use crate::message::{ReplyMessage, Request, RequestMessage, StreamMessage};
use crate::setup::{Setup, StoreKind};
use crate::store::Store;
use crate::{Stats, Violation};

/// Number of events shown of a run with a breach.
const MAX_TRACE_LINES: usize = 60;
/// Origin of the store's clocks, larger than any difference between them.
const STORE_CLOCK_ORIGIN: u64 = 3_600_000_000_000;

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) setup: Setup,
    pub(crate) lease: Lease,
    pub(crate) now: u64,
    pub(crate) random: Random,
    /// Number of clients at the start.
    pub(crate) client_count: u64,
    pub(crate) clients: Vec<Client>,
    pub(crate) keys: usize,
    pub(crate) store: Store,
    pub(crate) store_clock: Clock,
    /// Clock that dates the replies of a bucket, as that of a proxy in front of it.
    pub(crate) date_clock: Clock,
    pub(crate) store_down: bool,
    store_wake: Option<u64>,
    /// Number of the present connections to a stream: a crash of its server ends them.
    pub(crate) stream_connection: u64,
    /// Number that a new object would have had when an object of a bucket was last gone.
    pub(crate) last_gone: u64,
    pub(crate) connections: Vec<Connection>,
    pub(crate) checker: ContractChecker,
    pub(crate) stats: Stats,
    /// True once the faults have ended.
    pub(crate) healed: bool,
    pub(crate) next_task: u64,
    breach: Option<(Breach, String)>,
    events: BinaryHeap<Reverse<ScheduledEvent>>,
    scheduled: u64,
    trace: Option<VecDeque<String>>,
}

/// A connection between one task and the store. Messages arrive in order, or not at all.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) client: usize,
    pub(crate) task: u64,
    /// True if the client knows that the connection is broken.
    pub(crate) broken: bool,
    /// True if no message passes any longer, and neither side knows.
    pub(crate) silent: bool,
    last_request_at: u64,
    last_reply_at: u64,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Event {
    Wake(usize),
    StoreWake,
    ToStore(RequestMessage),
    ToClient(ReplyMessage),
    /// A client suffers a fault.
    Fault(usize),
    Resume(usize),
    PartitionEnd(usize),
    ClientRestart(usize),
    /// The store learns that a connection is closed.
    Disconnect(usize),
    StoreSlew,
    StoreDown,
    StoreUp,
    /// A watch delivers a message of a stream to a client, over this connection.
    Notify(usize, StreamMessage, u64),
    /// The store loses acknowledged writes.
    StoreLoss,
    /// Another server, with another clock, becomes the leading one.
    LeaderChange,
    Heal,
    /// Everything must have ended by now; a new client acquires each key.
    Probe,
    Finish,
}

#[derive(Debug)]
struct ScheduledEvent {
    at: u64,
    order: u64,
    event: Event,
}

impl PartialEq for ScheduledEvent {
    fn eq(&self, other: &Self) -> bool {
        self.order == other.order
    }
}

impl Eq for ScheduledEvent {}

impl PartialOrd for ScheduledEvent {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for ScheduledEvent {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

/// Adds an event to the trace; costs nothing if there is no trace.
macro_rules! note {
    ($world:expr, $($text:tt)*) => {
        if $world.is_traced() {
            let line = format!($($text)*);
            $world.write(&line);
        }
    };
}
pub(crate) use note;

impl World {
    pub(crate) fn new(seed: u64, setup: &Setup, traced: bool) -> Self {
        let mut random = Random::new(seed);
        let terms = LeaseTerms::new(setup.ttl);
        let lease =
            Lease::new(terms).expect("the simulated ttl is possible").with_rules(setup.rules);
        let client_count = 2 + random.below(setup.clients.max(2) - 1);
        let keys = usize::try_from(1 + random.below(setup.keys.max(1))).unwrap_or(1);
        let drift = setup.faults.drift;
        let origin = random.below(1_000_000_000);
        let store_clock = Clock::new(STORE_CLOCK_ORIGIN + origin, ppm(&mut random, drift));
        let date_clock = match setup.store {
            StoreKind::Bucket => {
                let skew = skew(&mut random, setup.ttl.mul_f64(setup.faults.max_date_skew));
                Clock::new(
                    (STORE_CLOCK_ORIGIN + origin).saturating_add_signed(skew),
                    ppm(&mut random, drift),
                )
            }
            _ => store_clock.clone(),
        };
        Self {
            setup: *setup,
            lease,
            now: 0,
            client_count,
            clients: Vec::new(),
            keys,
            store: Store::new(setup.store, keys, setup.ttl, store_clock.read(0)),
            store_clock,
            date_clock,
            store_down: false,
            store_wake: None,
            stream_connection: 1,
            last_gone: 0,
            connections: Vec::new(),
            checker: ContractChecker::new(keys, setup.rules.validity_is_a_deadline),
            stats: Stats::default(),
            healed: false,
            next_task: 1,
            breach: None,
            events: BinaryHeap::new(),
            scheduled: 0,
            trace: traced.then(VecDeque::new),
            random,
        }
    }

    /// Takes the next event, and advances the time to it.
    pub(crate) fn next_event(&mut self) -> Option<Event> {
        let Reverse(due) = self.events.pop()?;
        self.now = due.at;
        self.stats.events += 1;
        Some(due.event)
    }

    /// Takes the breach of the contract, if there was one.
    pub(crate) fn take_violation(&mut self, seed: u64) -> Option<Box<Violation>> {
        let (breach, detail) = self.breach.take()?;
        let trace = self.trace.take().unwrap_or_default().into();
        let at = Duration::from_nanos(self.now);
        Some(Box::new(Violation { seed, breach, what: detail, at, trace }))
    }

    pub(crate) fn schedule(&mut self, at: u64, event: Event) {
        self.scheduled += 1;
        self.events.push(Reverse(ScheduledEvent { at, order: self.scheduled, event }));
    }

    pub(crate) fn fail(&mut self, breach: Breach, detail: impl FnOnce() -> String) {
        if self.breach.is_none() {
            let detail = detail();
            note!(self, "BREACH: {breach}: {detail}");
            self.breach = Some((breach, detail));
        }
    }

    pub(crate) fn check_verdict(
        &mut self,
        verdict: Result<(), Breach>,
        detail: impl FnOnce() -> String,
    ) {
        if let Err(breach) = verdict {
            self.fail(breach, detail);
        }
    }

    pub(crate) fn is_traced(&self) -> bool {
        self.trace.is_some()
    }

    pub(crate) fn write(&mut self, line: &str) {
        let at = Duration::from_nanos(self.now).as_secs_f64();
        if let Some(trace) = &mut self.trace {
            if trace.len() == MAX_TRACE_LINES {
                trace.pop_front();
            }
            trace.push_back(format!("{at:10.4} s  {line}"));
        }
    }

    /// Converts a duration in ttls to nanoseconds.
    pub(crate) fn ttls(&self, share: f64) -> u64 {
        u64::try_from(self.setup.ttl.mul_f64(share).as_nanos()).unwrap_or(u64::MAX)
    }

    /// Random duration of up to `share` ttls, in nanoseconds.
    pub(crate) fn random_span(&mut self, share: f64) -> u64 {
        let bound = self.ttls(share);
        1 + self.random.below(bound)
    }

    pub(crate) fn local(&self, client: usize) -> Time {
        self.clients[client].clock.read(self.now)
    }

    pub(crate) fn condition(&self) -> impl Fn(usize) -> Condition {
        let now = self.now;
        move |client| {
            let client = &self.clients[client];
            Condition { now: client.clock.read(now), awake: client.awake() }
        }
    }

    pub(crate) fn connect(&mut self, client: usize, task: u64) -> usize {
        let (broken, silent, up, down) = (false, false, 0, 0);
        self.connections.push(Connection {
            client,
            task,
            broken,
            silent,
            last_request_at: up,
            last_reply_at: down,
        });
        self.connections.len() - 1
    }

    pub(crate) fn send(&mut self, message: RequestMessage) {
        let lost = self.loses(message.connection);
        let RequestMessage { connection, number, key, request, .. } = message;
        note!(
            self,
            "{}: sends {request:?} for key {key} (#{number} on connection {connection}){}",
            self.name(connection),
            if lost { ", which gets lost" } else { "" }
        );
        if lost {
            return;
        }
        let mut at = self.now + self.delay();
        let by_record = matches!(self.setup.store, StoreKind::Stream | StoreKind::Bucket);
        let free = !self.setup.ordered || by_record;
        if !(free && self.random.chance(self.setup.faults.overtake)) {
            at = at.max(self.connections[connection].last_request_at);
            self.connections[connection].last_request_at = at;
        }
        self.schedule(at, Event::ToStore(message));
    }

    pub(crate) fn arrive(&mut self, mut message: RequestMessage) {
        if self.store_down || self.connections[message.connection].silent {
            return;
        }
        if self.setup.store == StoreKind::Stream
            && message.stream_connection != self.stream_connection
        {
            return;
        }
        note!(self, "store: gets #{} on connection {}", message.number, message.connection);
        self.checker.note_request(self.connections[message.connection].task, message.number);
        let late = self.local(self.connections[message.connection].client) > message.deadline;
        let granted = match message.request {
            Request::Write { record, .. } => Some(record.claim),
            Request::StreamWrite { record, .. } => record.holder.map(|holder| holder.claim),
            _ => None,
        };
        if let Some(claim) = granted {
            let writer = self.connections[message.connection].task;
            let left = claim != writer && !self.waits(claim);
            if late || left {
                // Not a breach. An acquire's answer cannot take into account a request that arrives after its time
                // limit, if requests are not ordered; nor a hold that its owner hands to a waiter that has just left.
                self.checker.excuse(claim);
            }
        }
        if matches!(self.setup.store, StoreKind::Bucket | StoreKind::Stream) {
            message.stale = !self.healed && self.random.chance(self.setup.faults.stale_read);
            if message.stale {
                self.checker.excuse(self.connections[message.connection].task);
            }
        }
        let date = self.date_clock.read(self.now);
        self.store.handle(message, self.store_clock.read(self.now), date);
        if let Request::Write { if_version: Some(0), record } = message.request
            && record.fence <= self.last_gone
            && self.store.bucket_holder(message.key) == Some(record.claim)
        {
            // Not a breach. The number of a new object is the store's time, as of the read before the write. The object
            // has existed since that read, and is gone: its numbers were larger.
            self.checker.tokens_lost(message.key, u128::from(record.fence - 1));
        }
        self.after_store();
    }

    pub(crate) fn wake_store(&mut self) {
        // The event of an alarm that was moved stays in the queue and is ignored.
        if self.store_wake == Some(self.now) {
            self.store_wake = None;
            self.store.handle_timeout(self.store_clock.read(self.now));
            self.after_store();
        }
    }

    /// Sends the store's replies, checks its grants, and sets its timer.
    pub(crate) fn after_store(&mut self) {
        while let Some(claim_ref) = self.store.poll_granted() {
            note!(
                self,
                "store: claim {} is granted on connection {}",
                claim_ref.claim,
                claim_ref.connection
            );
            self.stats.grants += 1;
            if self.checker.must_not_hold(claim_ref.claim)
                && !self.connections[claim_ref.connection].broken
            {
                self.fail(Breach::HeldAfterNo, || {
                    format!("claim {} was granted late", claim_ref.claim)
                });
            }
        }
        while let Some(message) = self.store.poll_reply() {
            self.send_back(message);
        }
        while let Some(message) = self.store.poll_appended() {
            self.send_notifications(message);
        }
        let due = self.store.poll_timeout().and_then(|at| self.store_clock.when(at, self.now));
        if let Some(at) = due.filter(|_| !self.store_down)
            && self.store_wake.is_none_or(|set| at < set)
        {
            self.store_wake = Some(at);
            self.schedule(at, Event::StoreWake);
        }
    }

    fn send_back(&mut self, message: ReplyMessage) {
        let lost = self.loses(message.connection);
        let ReplyMessage { connection, number, reply } = message;
        let fate = if lost { ", which gets lost" } else { "" };
        note!(self, "store: answers {reply:?} to #{number} on connection {connection}{fate}");
        if !lost {
            let at = (self.now + self.delay()).max(self.connections[connection].last_reply_at);
            self.connections[connection].last_reply_at = at;
            self.schedule(at, Event::ToClient(message));
        }
    }

    fn loses(&mut self, connection: usize) -> bool {
        let chance = if self.healed { 0.0 } else { self.setup.faults.lose };
        let Connection { client, broken, silent, .. } = self.connections[connection];
        let dropped = self.random.chance(chance);
        broken || silent || dropped || self.clients[client].partitioned || self.store_down
    }

    pub(crate) fn delay(&mut self) -> u64 {
        let faults = self.setup.faults;
        if !self.healed && self.random.chance(faults.delay_spike) {
            self.random_span(faults.max_delay_spike)
        } else {
            self.random_span(faults.delay)
        }
    }

    /// Name of a client in the trace.
    pub(crate) fn name(&self, connection: usize) -> String {
        let Connection { client, task, .. } = self.connections[connection];
        format!("client {client} task {task} at {:?}", self.local(client))
    }

    pub(crate) fn drift(&mut self) -> i64 {
        ppm(&mut self.random, self.setup.faults.drift)
    }

    /// True if a task waits for a grant of this claim.
    fn waits(&self, claim: u64) -> bool {
        let mut tasks = self.clients.iter().flat_map(|client| &client.tasks);
        tasks.any(|task| {
            let operation = task.in_flight.map(|in_flight| in_flight.operation);
            task.id == claim
                && matches!(operation, Some(Operation::Wait | Operation::Claim { queue: true }))
        })
    }
}

/// Random difference between the two clocks of a bucket: none, small, or up to `max` in either direction.
fn skew(random: &mut Random, max: Duration) -> i64 {
    let max = match random.below(3) {
        0 => return 0,
        1 => max / 16,
        _ => max,
    };
    let max = i64::try_from(max.as_nanos()).unwrap_or(i64::MAX / 4);
    i64::try_from(random.below(max.unsigned_abs() * 2 + 1)).unwrap_or(0) - max
}

/// Random error of a clock's rate. The extremes are frequent: they test the margins.
fn ppm(random: &mut Random, drift: u64) -> i64 {
    let drift = i64::try_from(drift).unwrap_or(0);
    match random.below(4) {
        0 => drift,
        1 => -drift,
        _ => i64::try_from(random.below(drift.unsigned_abs() * 2 + 1)).unwrap_or(0) - drift,
    }
}
