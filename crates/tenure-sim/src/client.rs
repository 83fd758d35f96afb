//! A client: a process with its own clock that acquires, works, lets go, and starts over.

use std::time::Duration;

use tenure_core::Time;
use tenure_core::acquire::{Acquire, AcquireInput, AcquireOptions, Answer};
use tenure_core::keeper::{self, Granted, Keeper};
use tenure_core::retry::FixedInterval;

use crate::clock::Clock;
use crate::contract::{Breach, Guard};
use crate::in_flight::{ClaimState, InFlight, Operation, Outcome, ReplyEffect};
use crate::message::{ReplyMessage, Request, RequestMessage};
use crate::setup::StoreKind;
use crate::task::{Command, Machine, Task};
use crate::world::{Event, World, note};

#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "what befalls it comes and goes independently")]
pub(crate) struct Client {
    pub(crate) clock: Clock,
    /// How far its wall clock is off, in nanoseconds.
    wall: i64,
    pub(crate) paused: bool,
    pub(crate) dead: bool,
    pub(crate) partitioned: bool,
    /// What came while it was paused.
    pub(crate) inbox: Vec<ReplyMessage>,
    pub(crate) tasks: Vec<Task>,
    /// Its user waits for an answer, or works under a guard.
    pub(crate) busy: bool,
    /// When its user wants the next lock.
    pub(crate) idle_until: Time,
    alarm: Option<u64>,
}

impl Client {
    /// Whether it runs, so that news reach it.
    pub(crate) fn awake(&self) -> bool {
        !self.paused && !self.dead
    }
}

const MINUTE: u64 = 60_000_000_000;

impl World {
    pub(crate) fn add_client(&mut self) -> usize {
        let origin = self.random.below(MINUTE);
        let mut clock = Clock::new(origin, 0);
        let drift = self.drift();
        clock.slew(drift, self.now);
        let wall = i64::try_from(self.random.below(10 * MINUTE)).unwrap_or(0);
        let wait = Duration::from_nanos(self.random_span(1.0));
        let idle_until = if self.healed { Time::MAX } else { clock.read(self.now) + wait };
        self.clients.push(Client {
            clock,
            wall,
            paused: false,
            dead: false,
            partitioned: false,
            inbox: Vec::new(),
            tasks: Vec::new(),
            busy: false,
            idle_until,
            alarm: None,
        });
        self.set_alarm(self.clients.len() - 1);
        self.clients.len() - 1
    }

    /// An alarm of a client goes off, unless it was moved: then its first event is left behind.
    pub(crate) fn alarm(&mut self, client: usize) {
        if self.clients[client].alarm == Some(self.now) {
            self.clients[client].alarm = None;
            self.wake(client);
        }
    }

    /// Does whatever is due at a client.
    fn wake(&mut self, client: usize) {
        if !self.clients[client].awake() {
            return;
        }
        let now = self.local(client);
        let mut index = 0;
        while index < self.clients[client].tasks.len() {
            if self.clients[client].tasks[index].poll_timeout() <= now {
                self.with_task(client, index, |world, task| world.on_time(client, task));
            }
            if !self.clients[client].awake() {
                return;
            }
            index += 1;
        }
        if !self.healed && !self.clients[client].busy && now >= self.clients[client].idle_until {
            let key = usize::try_from(self.random.below(self.keys as u64)).unwrap_or(0);
            self.start(client, key);
        }
        self.remove_finished(client);
    }

    pub(crate) fn set_alarm(&mut self, client: usize) {
        let it = &self.clients[client];
        let user = if it.busy { Time::MAX } else { it.idle_until };
        let next = it.tasks.iter().map(Task::poll_timeout).fold(user, Time::min);
        let due = it.clock.when(next, self.now).filter(|_| it.awake());
        if let Some(at) = due
            && self.clients[client].alarm.is_none_or(|set| at < set)
        {
            self.clients[client].alarm = Some(at);
            self.schedule(at, Event::Wake(client));
        }
    }

    pub(crate) fn deliver(&mut self, letter: ReplyMessage) {
        let client = self.connections[letter.connection].client;
        if self.clients[client].paused {
            self.clients[client].inbox.push(letter);
        } else {
            self.route_reply(client, letter);
            self.remove_finished(client);
        }
    }

    pub(crate) fn resume(&mut self, client: usize) {
        if !self.clients[client].paused {
            return;
        }
        note!(self, "client {client}: runs again");
        let now = self.now;
        self.clients[client].paused = false;
        self.clients[client].clock.thaw(now);
        // Whether timers or letters are seen first is chance, as it is in a runtime that polls both.
        if self.random.chance(0.5) {
            self.wake(client);
        }
        for letter in std::mem::take(&mut self.clients[client].inbox) {
            self.route_reply(client, letter);
        }
        self.remove_finished(client);
    }

    /// The user of every guard lets go, and the caller of every acquire goes away.
    pub(crate) fn end_all_uses(&mut self, client: usize) {
        self.clients[client].idle_until = Time::MAX;
        for index in 0..self.clients[client].tasks.len() {
            self.with_task(client, index, |world, task| {
                world.end_use(client, task, false);
                world.drive(client, task);
            });
        }
        self.remove_finished(client);
    }

    /// The client learns that the connection of a task is gone.
    pub(crate) fn disconnect_task(&mut self, client: usize, index: usize) {
        let now = self.local(client);
        self.with_task(client, index, |world, task| {
            world.connections[task.connection].broken = true;
            let waits = matches!(task.machine, Machine::Keeper(_)) || task.in_flight.is_some();
            if waits {
                task.complete(Outcome::Broken, now);
            }
            if matches!(task.machine, Machine::Acquire(_)) {
                task.connection = world.connect(client, task.id);
            }
            world.drive(client, task);
        });
        self.remove_finished(client);
    }

    /// Starts an acquire.
    pub(crate) fn start(&mut self, client: usize, key: usize) {
        let now = self.local(client);
        let id = self.next_task;
        self.next_task += 1;
        let pick = if self.healed { 9 } else { self.random.below(10) };
        let until =
            (2..6).contains(&pick).then(|| now + Duration::from_nanos(self.random_span(3.0)));
        let leaves = !self.healed && self.random.chance(0.15);
        let leave_at =
            if leaves { now + Duration::from_nanos(self.random_span(1.0)) } else { Time::MAX };
        let terms = AcquireOptions {
            lease: self.lease,
            try_once: pick < 2,
            until,
            retry: Box::new(FixedInterval { interval: self.setup.ttl / 10 }),
            backstop: None,
            seed: self.random.bits(),
        };
        note!(self, "client {client} task {id}: acquires key {key}, until {until:?}");
        let link = self.connect(client, id);
        self.clients[client].tasks.push(Task {
            id,
            key,
            machine: Machine::Acquire(Acquire::new(terms, now)),
            claim_state: ClaimState::new(id, self.setup.ttl, self.setup.rules, self.setup.store),
            in_flight: None,
            connection: link,
            messages: 0,
            end_use_at: leave_at,
            answered: false,
            done: false,
        });
        self.clients[client].busy = true;
        let index = self.clients[client].tasks.len() - 1;
        self.with_task(client, index, |world, task| world.drive(client, task));
        self.set_alarm(client);
    }

    /// Lends a task out of its client, so that it can be driven by the world.
    fn with_task(&mut self, client: usize, index: usize, run: impl FnOnce(&mut Self, &mut Task)) {
        let last = self.clients[client].tasks.len() - 1;
        self.clients[client].tasks.swap(index, last);
        let Some(mut task) = self.clients[client].tasks.pop() else { return };
        run(self, &mut task);
        if self.clients[client].dead {
            self.checker.guard_ended(task.id);
            self.connections[task.connection].broken = true;
            return;
        }
        self.clients[client].tasks.push(task);
        self.clients[client].tasks.swap(index, last);
    }

    fn remove_finished(&mut self, client: usize) {
        self.clients[client].tasks.retain(|task| !task.done);
        self.set_alarm(client);
    }

    fn on_time(&mut self, client: usize, task: &mut Task) {
        let now = self.local(client);
        task.handle_timeout(now);
        self.drive(client, task);
        if let Some(errand) = task.in_flight.filter(|errand| now >= errand.next_read_at) {
            if now >= errand.deadline {
                task.complete(Outcome::StillQueued, now);
                self.drive(client, task);
            } else {
                self.read_again(task, now);
            }
        } else if let Some(errand) = task.in_flight.filter(|errand| now >= errand.limit_at) {
            note!(self, "{}: stops waiting for #{}", self.name(task.connection), errand.number);
            task.complete(errand.unanswered(), now);
            self.drive(client, task);
        }
        if now >= task.end_use_at {
            self.end_use(client, task, true);
            self.drive(client, task);
        }
    }

    fn route_reply(&mut self, client: usize, letter: ReplyMessage) {
        let link = letter.connection;
        let found = self.clients[client].tasks.iter().position(|task| {
            task.connection == link
                && task.in_flight.is_some_and(|errand| errand.number == letter.number)
        });
        if let Some(index) = found.filter(|_| !self.connections[link].silent) {
            self.with_task(client, index, |world, task| world.handle_reply(client, task, letter));
        }
    }

    fn handle_reply(&mut self, client: usize, task: &mut Task, letter: ReplyMessage) {
        let Some(errand) = task.in_flight else { return };
        note!(
            self,
            "{}: hears {:?} to #{}",
            self.name(task.connection),
            letter.reply,
            letter.number
        );
        let now = self.local(client);
        match task.claim_state.handle_reply(&errand, letter.reply, now, self.wall(client)) {
            ReplyEffect::Send(request) => {
                task.in_flight = Some(InFlight { sent: now, ..errand });
                self.send_request(task, request);
            }
            ReplyEffect::Pause => {
                let again = (now + self.setup.ttl / 10).min(errand.deadline);
                task.in_flight = Some(InFlight {
                    next_read_at: again,
                    limit_at: Time::MAX,
                    number: 0,
                    ..errand
                });
            }
            ReplyEffect::Done(outcome) => {
                task.complete(outcome, now);
                if let Outcome::Broken = outcome {
                    self.connections[task.connection].broken = true;
                    task.connection = self.connect(client, task.id);
                }
                self.drive(client, task);
            }
        }
    }

    /// Does what the machine of a task asks for, until it has nothing more to ask.
    fn drive(&mut self, client: usize, task: &mut Task) {
        while let Some(command) = task.poll_command() {
            note!(self, "{}: {command:?}", self.name(task.connection));
            match command {
                Command::Send(what, limit) => self.begin(client, task, what, limit),
                Command::Watch => self.cut_wait(task),
                Command::Answer(answer) => self.answer(client, task, answer),
                Command::Lost => {
                    self.stats.losses += 1;
                    self.guard_over(client, task);
                }
                Command::HandoffRequested => {
                    if self.random.chance(0.5) {
                        let soon = Duration::from_nanos(self.random_span(0.2));
                        task.end_use_at = task.end_use_at.min(self.local(client) + soon);
                    }
                }
                Command::Finish if task.answered => task.done = true,
                Command::Finish => {}
            }
            if self.clients[client].dead {
                return;
            }
        }
        if let Machine::Keeper(keeper) = &task.machine {
            let deadline = keeper.deadline();
            let mut referee = std::mem::take(&mut self.checker);
            let verdict = referee.deadline_moved(task.id, deadline, self.condition());
            self.checker = referee;
            self.check_verdict(verdict, || {
                format!("client {client}, task {} was renewed", task.id)
            });
        }
    }

    /// A wait may be cut short by the next command; every other request must have ended.
    fn cut_wait(&mut self, task: &mut Task) {
        if let Some(errand) = task.in_flight.take()
            && errand.operation != Operation::Wait
        {
            self.fail(Breach::TwoRequests, || format!("task {} while {errand:?}", task.id));
        }
    }

    fn begin(&mut self, client: usize, task: &mut Task, what: Operation, limit: Duration) {
        self.cut_wait(task);
        let now = self.local(client);
        let faults = self.setup.faults;
        if self.connections[task.connection].broken {
            // The keeper of a broken connection has nowhere to turn; an acquire has connected again.
            task.in_flight = Some(in_flight(what, now, now + Duration::from_micros(1)));
            return;
        }
        let mut limit_at = now + limit;
        if !self.healed && self.random.chance(faults.refuse) {
            let hopeless = self.random.chance(0.2);
            let soon = now + Duration::from_micros(1);
            task.in_flight =
                Some(InFlight { permanent_failure: hopeless, ..in_flight(what, now, soon) });
            return;
        }
        if !self.healed && what != Operation::Wait && self.random.chance(faults.hang) {
            limit_at = limit_at + Duration::from_nanos(self.random_span(2.0));
        }
        task.in_flight = Some(InFlight { deadline: now + limit, ..in_flight(what, now, limit_at) });
        if what == Operation::Wait && self.setup.store == StoreKind::Bucket {
            if let Some(errand) = &mut task.in_flight {
                errand.polls = true;
            }
            return self.read_again(task, now);
        }
        let request = task.claim_state.begin(what, self.wall(client));
        self.send_request(task, request);
    }

    /// Sends the next look of a wait. No look takes as long as the wait may.
    fn read_again(&mut self, task: &mut Task, now: Time) {
        let limit_at = now + self.lease.request_limit();
        if let Some(errand) = &mut task.in_flight {
            (errand.sent, errand.next_read_at, errand.limit_at) = (now, Time::MAX, limit_at);
        }
        self.send_request(task, Request::Read);
    }

    /// Sends a message of the errand under way.
    fn send_request(&mut self, task: &mut Task, request: Request) {
        let Some(errand) = &mut task.in_flight else { return };
        task.messages += 1;
        errand.number = task.messages;
        errand.wrote |= request != Request::Read;
        let (link, number, key, due) = (task.connection, task.messages, task.key, errand.deadline);
        self.send(RequestMessage {
            connection: link,
            number,
            key,
            request,
            deadline: due,
            stale: false,
        });
    }

    fn answer(&mut self, client: usize, task: &mut Task, answer: Answer) {
        self.stats.answers += 1;
        if task.answered {
            self.fail(Breach::AnsweredTwice, || format!("task {}: {answer:?}", task.id));
        }
        match answer {
            Answer::Acquired { sent, deadline } => {
                return self.acquired(client, task, sent, deadline);
            }
            Answer::Unknown { .. } => self.stats.unknown += 1,
            Answer::Contended | Answer::TimedOut | Answer::GaveUp | Answer::Failed => {
                self.checker.note_refusal(task.id);
                let lives = |link: usize| !self.connections[link].broken;
                let store_now = self.store_clock.read(self.now);
                if self.checker.must_not_hold(task.id)
                    && self.store.may_hold(task.id, task.key, lives, store_now)
                {
                    self.fail(Breach::HeldAfterNo, || format!("task {}: {answer:?}", task.id));
                }
            }
        }
        task.answered = true;
        task.end_use_at = Time::MAX;
        self.schedule_next_use(client);
    }

    fn acquired(&mut self, client: usize, task: &mut Task, sent: Time, deadline: Time) {
        let now = self.local(client);
        let (id, key, token) = (task.id, task.key, task.claim_state.token);
        let guard = Guard { task: id, client, key, token, deadline };
        let mut referee = std::mem::take(&mut self.checker);
        let verdict = referee.hand_out(guard, self.condition());
        self.checker = referee;
        self.check_verdict(verdict, || format!("client {client}, key {key}, token {token}"));
        self.stats.guards += 1;
        self.stats.probes += 1;
        let look = match self.setup.store {
            StoreKind::Observation => Some(self.setup.ttl / 2),
            StoreKind::Bucket => Some(self.setup.ttl / 8),
            StoreKind::ServerClock | StoreKind::Session => None,
        };
        let granted = Granted { sent, deadline, handoff_requested: false };
        task.machine = Machine::Keeper(Keeper::new(self.lease, granted, look, now));
        task.answered = true;
        let work = if self.healed { self.ttls(10.0) } else { self.random_span(3.0) };
        task.end_use_at = now + Duration::from_nanos(work);
    }

    /// The user of a task goes away: cancels, lets go, leaves the hold to its ttl, or dies.
    fn end_use(&mut self, client: usize, task: &mut Task, may_die: bool) {
        let now = self.local(client);
        task.end_use_at = Time::MAX;
        match &mut task.machine {
            Machine::Acquire(acquire) => {
                note!(self, "client {client} task {}: is cancelled", task.id);
                acquire.handle(AcquireInput::Cancel, now);
                if !std::mem::replace(&mut task.answered, true) {
                    self.schedule_next_use(client);
                }
            }
            Machine::Keeper(keeper) => {
                let pick = if may_die { self.random.below(20) } else { 9 };
                note!(self, "client {client} task {}: lets go ({pick})", task.id);
                match pick {
                    0 => return self.crash(client),
                    1 => keeper.handle(keeper::KeeperInput::Detach, now),
                    _ => keeper.handle(keeper::KeeperInput::Release, now),
                }
                self.guard_over(client, task);
            }
        }
    }

    fn guard_over(&mut self, client: usize, task: &mut Task) {
        task.end_use_at = Time::MAX;
        self.checker.guard_ended(task.id);
        self.schedule_next_use(client);
    }

    /// The user rests before the next lock.
    fn schedule_next_use(&mut self, client: usize) {
        let pause = Duration::from_nanos(self.random_span(0.5));
        self.clients[client].busy = false;
        self.clients[client].idle_until =
            if self.healed { Time::MAX } else { self.local(client) + pause };
    }

    fn wall(&self, client: usize) -> i64 {
        let client = &self.clients[client];
        client.wall + i64::try_from(client.clock.read(self.now).as_nanos()).unwrap_or(i64::MAX)
    }
}

fn in_flight(what: Operation, sent: Time, limit_at: Time) -> InFlight {
    let (wrote, hopeless, looks) = (false, false, false);
    InFlight {
        operation: what,
        number: 0,
        sent,
        deadline: limit_at,
        limit_at,
        wrote,
        permanent_failure: hopeless,
        next_read_at: Time::MAX,
        polls: looks,
    }
}
