//! The world of a run: real time, the queue of events, and the state of everything that is simulated.
//!
//! The shipped code reaches the world through a thread-local: its clocks, streams and files must be `Send`, and the
//! world is not. One thread runs one world at a time.

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::rc::Rc;
use std::time::Duration;

use tenure_core::{FencingToken, Random, Time};

use super::disturbance::Disturbances;
use super::host::Host;
use super::network::{Arrival, Net, Side};
use super::panics;
use super::plan::Plan;
use super::process::Process;
use super::referee::{Eyes, ProductBreach, Referee};
use super::stats::KindCounts;
use super::timeline::Timeline;
use super::wire_tap::WireTap;

thread_local! {
    static CURRENT: RefCell<Option<Rc<ProductWorld>>> = const { RefCell::new(None) };
}

/// The world of this thread, while it runs.
pub(super) fn current() -> Option<Rc<ProductWorld>> {
    CURRENT.with_borrow(Clone::clone)
}

/// Runs `f` with the world of this thread.
pub(super) fn with<T>(f: impl FnOnce(&Rc<ProductWorld>) -> T) -> T {
    f(&current().expect("a run is in progress"))
}

/// Adds a line to the timeline, if one is recorded.
macro_rules! note {
    ($world:expr, $actor:expr, $($text:tt)*) => {
        if $world.timeline.borrow().is_recorded() {
            let at = $world.now.get();
            $world.timeline.borrow_mut().add(at, $actor, &format!($($text)*));
        }
    };
}
pub(super) use note;

/// Something that happens at a time.
#[derive(Clone, Copy, Debug)]
pub(super) enum WorldEvent {
    Arrival(Arrival),
    StepClient {
        client: usize,
    },
    StartClient {
        client: usize,
    },
    StepServer,
    StartServer,
    /// A fault of the plan begins.
    Fault(usize),
    /// One side of a connection is told of its end.
    Told {
        connection: usize,
        side: Side,
        finish: bool,
    },
    ReadAgain {
        client: usize,
    },
    PauseEnds {
        client: usize,
    },
    DiskFreed,
    /// Checks a hold that begins now.
    Check {
        belief: usize,
    },
    Heal,
}

/// Handler of the events of a world. The handler knows the programs that run in the world; the world does not.
pub(super) type EventHandler = fn(&Rc<ProductWorld>, WorldEvent);

/// A world.
pub(super) struct ProductWorld {
    pub(super) plan: Plan,
    pub(super) now: Cell<u64>,
    handler: EventHandler,
    queue: RefCell<BinaryHeap<Reverse<QueuedEvent>>>,
    next_event: Cell<u64>,
    pub(super) random: RefCell<Random>,
    pub(super) net: RefCell<Net>,
    pub(super) host: RefCell<Host>,
    pub(super) processes: RefCell<Vec<Rc<Process>>>,
    pub(super) referee: RefCell<Referee>,
    pub(super) tap: RefCell<WireTap>,
    pub(super) disturbances: RefCell<Disturbances>,
    pub(super) counts: RefCell<KindCounts>,
    pub(super) timeline: RefCell<Timeline>,
    pub(super) healed: Cell<bool>,
    /// The probes at the end of the run have succeeded.
    pub(super) finished: Cell<bool>,
    /// True while the referee reads clocks: no fault strikes then.
    pub(super) judging: Cell<bool>,
    pub(super) events: Cell<u64>,
    /// Client whose step runs at present.
    pub(super) running: Cell<Option<usize>>,
}

#[derive(Clone, Copy, Debug)]
struct QueuedEvent {
    at: u64,
    number: u64,
    event: WorldEvent,
}

impl PartialEq for QueuedEvent {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.number) == (other.at, other.number)
    }
}

impl Eq for QueuedEvent {}

impl PartialOrd for QueuedEvent {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for QueuedEvent {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

pub(super) fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

impl ProductWorld {
    pub(super) fn new(plan: Plan, timeline: Timeline, handler: EventHandler) -> Rc<Self> {
        let mut random = Random::new(plan.seed);
        let net = Net::new(random.bits(), plan.link, plan.clients);
        let host = Host::new(&plan, &mut random);
        Rc::new(Self {
            net: RefCell::new(net),
            host: RefCell::new(host),
            disturbances: RefCell::new(Disturbances::new(&plan)),
            counts: RefCell::default(),
            plan,
            now: Cell::new(0),
            handler,
            queue: RefCell::default(),
            next_event: Cell::new(0),
            random: RefCell::new(random),
            processes: RefCell::default(),
            referee: RefCell::default(),
            tap: RefCell::default(),
            timeline: RefCell::new(timeline),
            healed: Cell::new(false),
            finished: Cell::new(false),
            judging: Cell::new(false),
            events: Cell::new(0),
            running: Cell::new(None),
        })
    }

    /// Runs the world to its end.
    pub(super) fn run(self: &Rc<Self>) {
        CURRENT.set(Some(Rc::clone(self)));
        self.run_all();
        // Processes are dropped while the world is current: their streams close.
        let processes = self.processes.borrow().clone();
        for process in processes {
            process.kill();
        }
        let server = self.host.borrow_mut().server.take();
        drop(server);
        CURRENT.set(None);
    }

    /// Leaves a world that has panicked as it is: its streams must not be closed in an unknown state.
    pub(super) fn abandon(self: &Rc<Self>) {
        std::mem::forget((CURRENT.take(), Rc::clone(self)));
    }

    fn run_all(self: &Rc<Self>) {
        self.schedule(0, WorldEvent::StartServer);
        for client in 0..self.plan.clients {
            self.processes.borrow_mut().push(Rc::new(Process::ended(client)));
            self.schedule(1_000 * client as u64, WorldEvent::StartClient { client });
        }
        for (index, fault) in self.plan.faults.iter().enumerate() {
            self.schedule(nanos(fault.at), WorldEvent::Fault(index));
        }
        let heal = nanos(self.plan.faults_end());
        self.schedule(heal, WorldEvent::Heal);
        // Everything that is in the way after the faults ends with a lease, or with the embargo of the server.
        let bound = heal + nanos(self.plan.max_ttl() * 12 + Duration::from_secs(120));
        self.run_until(bound);
        if !self.finished.get() && !self.is_over() {
            let waiting: Vec<String> =
                self.processes.borrow().iter().map(|process| process.describe()).collect();
            let held = self.judged(|referee, eyes| referee.valid(eyes));
            self.breach(
                ProductBreach::NotServed,
                format!("{}; held: [{}]", waiting.join("; "), held.join(", ")),
            );
        }
    }

    pub(super) fn schedule(&self, at: u64, event: WorldEvent) {
        let number = self.next_event.get();
        self.next_event.set(number + 1);
        let at = at.max(self.now.get());
        self.queue.borrow_mut().push(Reverse(QueuedEvent { at, number, event }));
    }

    /// Handles all events up to a real time. Called again, from within the server's step, while the server is stopped.
    pub(super) fn run_until(self: &Rc<Self>, limit: u64) {
        loop {
            self.drain_network();
            if self.is_over() {
                return;
            }
            let next = {
                let mut queue = self.queue.borrow_mut();
                match queue.peek() {
                    Some(Reverse(next)) if next.at <= limit => queue.pop(),
                    _ => None,
                }
            };
            let Some(Reverse(QueuedEvent { at, event, .. })) = next else { break };
            self.now.set(at);
            self.events.set(self.events.get() + 1);
            (self.handler)(self, event);
            if let Some(message) = panics::take() {
                self.breach(ProductBreach::Panicked, message);
            }
        }
        self.now.set(limit);
    }

    pub(super) fn is_over(&self) -> bool {
        self.finished.get() || self.referee.borrow().breach.is_some()
    }

    pub(super) fn breach(&self, breach: ProductBreach, what: String) {
        note!(self, "referee", "{breach}: {what}");
        self.referee.borrow_mut().breach(breach, what);
    }

    /// Schedules the arrivals of segments, and wakes the programs that have received something.
    fn drain_network(self: &Rc<Self>) {
        let (arrivals, (wakers, touched), server) = {
            let mut net = self.net.borrow_mut();
            (net.take_arrivals(), net.take_wakers(), net.has_server_events())
        };
        for (at, arrival) in arrivals {
            self.schedule(at, WorldEvent::Arrival(arrival));
        }
        for waker in wakers {
            waker.wake();
        }
        for client in touched {
            self.schedule_step(client, self.now.get());
        }
        if server {
            self.schedule_server(self.now.get());
        }
    }

    pub(super) fn process(&self, client: usize) -> Rc<Process> {
        Rc::clone(&self.processes.borrow()[client])
    }

    /// Time of a client's clock at present. `life` is the number of the process, or `u32::MAX` for any.
    pub(super) fn local_time(&self, client: usize, life: u32) -> Option<Time> {
        let process = self.process(client);
        let same = life == u32::MAX || (process.life == life && process.is_alive());
        same.then(|| process.drift.borrow().read(self.now.get()))
    }

    /// Calls the referee with what it sees now.
    pub(super) fn judged<T>(&self, judge: impl FnOnce(&mut Referee, &Eyes<'_>) -> T) -> T {
        let now = self.now.get();
        let local = |client, life| self.local_time(client, life);
        let half_closed = |token: FencingToken| {
            let bound = self.tap.borrow().bound_to(token.number());
            bound.is_some_and(|connection| {
                let client = self.net.borrow().half_closed(connection);
                // At the end of a pause, one task of the client knows of the end and another does not yet.
                client.is_some_and(|(client, unaware)| {
                    unaware || now <= self.process(client).paused_until.get()
                })
            })
        };
        let eyes = Eyes { now, local: &local, half_closed: &half_closed };
        // Guards read the clock of their process: no fault strikes then.
        let outer = self.judging.replace(true);
        let judged = judge(&mut self.referee.borrow_mut(), &eyes);
        self.judging.set(outer);
        judged
    }

    pub(super) fn schedule_step(&self, client: usize, at: u64) {
        let process = self.process(client);
        let at = at.max(self.now.get()).max(process.paused_until.get());
        if process.schedule_step(at) {
            self.schedule(at, WorldEvent::StepClient { client });
        }
    }

    pub(super) fn schedule_server(&self, at: u64) {
        let at = at.max(self.now.get());
        let is_earlier = self.host.borrow_mut().schedule_step(at);
        if is_earlier {
            self.schedule(at, WorldEvent::StepServer);
        }
    }

    pub(super) fn count_fault(&self, kind: usize) {
        self.counts.borrow_mut().faults[kind] += 1;
    }

    /// From here on, requests of this client may fail or be late.
    pub(super) fn disturb(&self, client: usize) {
        self.disturbances.borrow_mut().strike(Some(client));
    }

    /// From here on, requests of every client may fail or be late.
    pub(super) fn disturb_all(&self) {
        self.disturbances.borrow_mut().strike(None);
    }
}
