//! Model checking of a small world: the whole state space of two or three clients, one key, and a few ticks.
//!
//! The simulator samples long histories; the model explores every order of events of short ones. The
//! [`Keeper`](tenure_core::keeper::Keeper) of each holder is the real one and part of the state. So is the
//! [`LockTable`](tenure_core::LockTable), which is rebuilt for each step from a snapshot of its key, through its own
//! `restore` and `claim`. The steps before a guard (claim, wait, confirm) are modelled here in a few lines, because the
//! real acquisition has a retry strategy, which cannot be compared.
//!
//! A tick is a sixth of the ttl, which is the margin. A client's clock may fall one tick behind the store's, once, at
//! any time. The client then counts one tick less than the store in one lease, which the margin has to cover.
//!
//! Messages arrive in any order, at any time, or never: a lost message is one that is not delivered before the end.

mod client;
mod protocol;
mod snapshot;

use stateright::{Checker, HasDiscoveries, Model, Property};
use tenure_core::lease::{Lease, LeaseTerms};
use tenure_core::{Rules, Time};

use client::ModelClient;
use protocol::{Body, StepEffects, TICK};
use snapshot::{Claim, Snapshot};

/// First tick. Not 0, so that a clock can be behind.
const START: u64 = 10;

/// A small world.
#[derive(Clone, Copy, Debug)]
pub struct SmallWorld {
    /// Number of clients.
    pub clients: usize,
    /// Number of ticks.
    pub ticks: u64,
    /// Number of acquires per client.
    pub wants: u8,
    /// Number of pauses, over all clients.
    pub pauses: u8,
    /// Rules of the clients.
    pub rules: Rules,
}

/// State of the world at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Moment {
    now: u64,
    table: Snapshot,
    clients: Vec<ModelClient>,
    /// Messages in flight, sorted: the order in which they were sent does not matter.
    messages: Vec<Message>,
    last_token: u64,
    pauses: u8,
    failures: PropertyFailures,
}

/// Breaches so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct PropertyFailures {
    token_fell: bool,
    late_lost: bool,
}

/// A message in flight between a client and the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Message {
    client: usize,
    /// True for the client's latest request and its reply: the client still expects it.
    current: bool,
    body: Body,
}

/// A step of the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Time advances. The clocks of the clients in this bit set are then one tick behind.
    Tick(u8),
    /// The message with this index arrives.
    Deliver(usize),
    /// A client begins to acquire the lock.
    Want(usize),
    /// The user of a guard releases.
    Release(usize),
    /// A process is paused.
    Pause(usize),
    /// A process continues.
    Resume(usize),
}

impl SmallWorld {
    /// Two clients under all rules: small enough for every test run.
    pub const SMALL: Self = Self { clients: 2, ticks: 7, wants: 1, pauses: 1, rules: Rules::ALL };
    /// World for long runs: large enough for a hold to be renewed, lost and taken over.
    pub const LARGE: Self = Self { ticks: 9, ..Self::SMALL };

    /// Explores the whole state space. Returns the number of states, the names of the `always` properties that fail,
    /// and the names of the `sometimes` properties that hold.
    pub fn explore(self, threads: usize) -> (usize, Vec<&'static str>) {
        found(&self.checker().threads(threads).spawn_bfs().join())
    }

    /// Explores until a property fails.
    pub fn explore_until_failure(self, threads: usize) -> (usize, Vec<&'static str>) {
        let stop = HasDiscoveries::AnyFailures;
        found(&self.checker().threads(threads).finish_when(stop).spawn_bfs().join())
    }

    fn lease(&self) -> Lease {
        let lease = Lease::new(LeaseTerms::new(TICK * 6)).expect("six ticks are a lease");
        lease.with_rules(self.rules)
    }
}

impl Model for SmallWorld {
    type State = Moment;
    type Action = Step;

    fn init_states(&self) -> Vec<Moment> {
        vec![Moment {
            now: START,
            table: Snapshot::default(),
            clients: vec![ModelClient::new(self.wants); self.clients],
            messages: Vec::new(),
            last_token: 0,
            pauses: self.pauses,
            failures: PropertyFailures::default(),
        }]
    }

    fn actions(&self, moment: &Moment, steps: &mut Vec<Step>) {
        if moment.now < START + self.ticks {
            // Reduces the state space. The clock of an idle client does not matter. A clock that fell behind stays
            // behind. One such clock is enough, since the store's clock decides about the other clients.
            let bits = |is: fn(&ModelClient) -> bool| {
                let clients = moment.clients.iter().enumerate();
                clients.fold(0, |bits, (index, client)| bits | u8::from(is(client)) << index)
            };
            let (behind, idle) = (bits(|client| client.behind), bits(ModelClient::is_idle));
            let next = (0..1 << self.clients)
                .filter(|new: &u8| new.count_ones() <= 1 && new & behind == behind)
                .filter(|new| new & !behind & idle == 0);
            steps.extend(next.map(Step::Tick));
        }
        for (index, message) in moment.messages.iter().enumerate() {
            if message.body.is_request() || !moment.clients[message.client].paused {
                steps.push(Step::Deliver(index));
            }
        }
        for (index, client) in moment.clients.iter().enumerate() {
            if client.paused {
                steps.push(Step::Resume(index));
                continue;
            }
            // The clients are interchangeable: it is enough to explore histories in which they begin in order.
            let in_turn = index == 0 || moment.clients[index - 1].wants < self.wants;
            if client.is_idle() && client.wants > 0 && in_turn {
                steps.push(Step::Want(index));
            }
            if client.has_guard() {
                steps.push(Step::Release(index));
            }
            if moment.pauses > 0 && client.has_guard() {
                steps.push(Step::Pause(index));
            }
        }
    }

    fn next_state(&self, moment: &Moment, step: Step) -> Option<Moment> {
        let mut next = moment.clone();
        match step {
            Step::Tick(behind) => next.tick(self, behind),
            Step::Deliver(index) => {
                let message = next.messages.remove(index);
                if message.body.is_request() {
                    next.at_store(message);
                } else {
                    next.at_client(self, message);
                }
            }
            Step::Want(client) => next.with_client(self, client, ModelClient::want),
            Step::Release(client) => next.with_client(self, client, ModelClient::release),
            Step::Pause(client) => {
                next.clients[client].paused = true;
                next.pauses -= 1;
            }
            Step::Resume(client) => {
                next.clients[client].paused = false;
                next.with_client(self, client, ModelClient::on_time);
            }
        }
        next.drop_stale_messages();
        next.messages.sort_unstable();
        next.messages.dedup();
        (next != *moment).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("one holder", |_, moment: &Moment| moment.valid_guards() <= 1),
            Property::always("tokens grow", |_, moment: &Moment| !moment.failures.token_fell),
            Property::always("lost before the next", |_, moment: &Moment| {
                !moment.failures.late_lost
            }),
            Property::sometimes("acquired", |_, moment: &Moment| moment.valid_guards() == 1),
            Property::sometimes("lost", |_, moment: &Moment| {
                moment.clients.iter().any(ModelClient::has_lost)
            }),
            Property::sometimes("handed over", |_, moment: &Moment| {
                moment.clients.iter().any(ModelClient::is_releasing) && moment.valid_guards() == 1
            }),
        ]
    }
}

impl Moment {
    fn tick(&mut self, world: &SmallWorld, behind: u8) {
        self.now += 1;
        for (index, client) in self.clients.iter_mut().enumerate() {
            client.behind = behind >> index & 1 == 1;
        }
        if let Some((claim, token)) = self.table.expire(time(self.now)) {
            self.push(claim, token);
        }
        for index in 0..self.clients.len() {
            if !self.clients[index].paused {
                self.with_client(world, index, ModelClient::on_time);
            }
        }
    }

    fn at_store(&mut self, message: Message) {
        let Message { client, body, .. } = message;
        let (answer, passed) = self.table.handle(client, body, time(self.now));
        self.messages.push(Message { body: answer, ..message });
        if let Some((claim, token)) = passed {
            self.push(claim, token);
        }
    }

    /// Sends a grant to a waiter.
    fn push(&mut self, (client, want): Claim, token: u64) {
        let current = self.clients[client].waits_for(want);
        self.messages.push(Message { client, current, body: Body::Granted { token } });
    }

    /// Drops messages without a possible effect: replies that no client expects, and old requests about a hold that has
    /// ended.
    fn drop_stale_messages(&mut self) {
        let Self { messages, clients, table, .. } = self;
        messages.retain(|message| match message.body {
            Body::Claim { .. } => true,
            Body::Renew { token } | Body::Release { token } => {
                message.current || table.is_held_by(token)
            }
            _ => message.current && !clients[message.client].is_idle(),
        });
    }

    fn at_client(&mut self, world: &SmallWorld, message: Message) {
        self.with_client(world, message.client, |client, lease, now, effects| {
            client.handle_reply(message.body, lease, now, effects);
        });
    }

    fn with_client(
        &mut self,
        world: &SmallWorld,
        index: usize,
        act: impl FnOnce(&mut ModelClient, Lease, Time, &mut StepEffects),
    ) {
        let now = self.local(index);
        let mut effects = StepEffects::default();
        act(&mut self.clients[index], world.lease(), now, &mut effects);
        for body in effects.sent {
            for earlier in self.messages.iter_mut().filter(|message| message.client == index) {
                earlier.current = false;
            }
            self.messages.push(Message { client: index, current: true, body });
        }
        if let Some(token) = effects.handed_out {
            let others = self.clients.iter().enumerate().filter(|(other, _)| *other != index);
            for (_, other) in others {
                self.failures.late_lost |= other.has_guard() && !other.paused;
            }
            self.failures.token_fell |= token <= self.last_token;
            self.last_token = token;
        }
    }

    fn local(&self, index: usize) -> Time {
        time(self.now - u64::from(self.clients[index].behind))
    }

    fn valid_guards(&self) -> usize {
        let clients = self.clients.iter().enumerate();
        clients.filter(|(index, client)| client.is_valid(self.local(*index))).count()
    }
}

fn found(checker: &impl Checker<SmallWorld>) -> (usize, Vec<&'static str>) {
    let mut found: Vec<_> = checker.discoveries().into_keys().collect();
    found.sort_unstable();
    (checker.unique_state_count(), found)
}

fn time(ticks: u64) -> Time {
    Time::ZERO + TICK * u32::try_from(ticks).unwrap_or(u32::MAX)
}
