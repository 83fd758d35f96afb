//! The steps of a client: its user acquires, works, releases, and starts over.

use std::time::Duration;

use tenure_core::acquire::{Acquire, AcquireAnswer, AcquireInput, AcquireOptions};
use tenure_core::keeper::{self, Granted, Keeper};
use tenure_core::retry::FixedInterval;
use tenure_core::{FencingToken, Machine as _, Time};

use crate::client::Client;
use crate::clock::Clock;
use crate::contract::{Breach, Guard};
use crate::in_flight::{ClaimState, Operation, Outcome, ReplyEffect, StreamProcess, StreamTurn};
use crate::message::ReplyMessage;
use crate::setup::StoreKind;
use crate::task::{Command, Task, TaskMachine};
use crate::world::{Event, World, note};

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
        let stream = StreamProcess::new(self.keys, self.setup.rules);
        let incarnation = self.clients.len() as u64;
        self.clients.push(Client::new(clock, wall, idle_until, incarnation, stream));
        self.set_alarm(self.clients.len() - 1);
        self.clients.len() - 1
    }

    /// Handles the alarm of a client. The event of an alarm that was moved is ignored.
    pub(crate) fn alarm(&mut self, client: usize) {
        if self.clients[client].take_alarm(self.now) {
            self.wake(client);
        }
    }

    /// Handles everything that is due at a client.
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
        if let Some(at) = self.clients[client].set_alarm(self.now) {
            self.schedule(at, Event::Wake(client));
        }
    }

    pub(crate) fn deliver(&mut self, message: ReplyMessage) {
        let client = self.connections[message.connection].client;
        if self.clients[client].paused {
            self.clients[client].inbox.push(message);
        } else {
            self.route_reply(client, message);
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
        for message in std::mem::take(&mut self.clients[client].inbox) {
            self.route_reply(client, message);
        }
        self.remove_finished(client);
    }

    /// Releases every guard and cancels every acquire of a client.
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

    /// Reports to a client that the connection of a task is broken.
    pub(crate) fn disconnect_task(&mut self, client: usize, index: usize) {
        let now = self.local(client);
        self.with_task(client, index, |world, task| {
            world.connections[task.connection].broken = true;
            let waits = matches!(task.machine, TaskMachine::Keeper(_)) || task.in_flight.is_some();
            if waits {
                task.complete(Outcome::Broken, now);
            }
            if matches!(task.machine, TaskMachine::Acquire(_)) {
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
            fallback_interval: None,
            seed: self.random.bits(),
        };
        note!(self, "client {client} task {id}: acquires key {key}, until {until:?}");
        let connection = self.connect(client, id);
        self.clients[client].tasks.push(Task {
            id,
            key,
            machine: TaskMachine::Acquire(Acquire::new(terms, now)),
            claim_state: ClaimState::new(id, &self.setup),
            in_flight: None,
            connection,
            messages: 0,
            end_use_at: leave_at,
            answered: false,
            done: false,
            watching: false,
        });
        self.clients[client].busy = true;
        let index = self.clients[client].tasks.len() - 1;
        self.with_task(client, index, |world, task| world.drive(client, task));
        self.set_alarm(client);
    }

    /// Runs a function on a task. The task is taken out of its client meanwhile, so that both can be borrowed.
    pub(crate) fn with_task(
        &mut self,
        client: usize,
        index: usize,
        run: impl FnOnce(&mut Self, &mut Task),
    ) {
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

    pub(crate) fn remove_finished(&mut self, client: usize) {
        self.clients[client].tasks.retain(|task| !task.done);
        self.set_alarm(client);
    }

    fn on_time(&mut self, client: usize, task: &mut Task) {
        let now = self.local(client);
        task.handle_timeout(now);
        self.drive(client, task);
        if let Some(in_flight) = task.in_flight.filter(|in_flight| now >= in_flight.next_read_at) {
            if now >= in_flight.deadline {
                task.complete(Outcome::StillQueued, now);
                self.drive(client, task);
            } else {
                self.read_again(task, now);
            }
        } else if let Some(in_flight) = task.in_flight.filter(|in_flight| now >= in_flight.limit_at)
        {
            note!(self, "{}: stops waiting for #{}", self.name(task.connection), in_flight.number);
            let effect = task.claim_state.unanswered(&in_flight);
            self.apply(client, task, in_flight, effect);
        }
        if now >= task.end_use_at {
            self.end_use(client, task, true);
            self.drive(client, task);
        }
    }

    fn route_reply(&mut self, client: usize, message: ReplyMessage) {
        let connection = message.connection;
        let found = self.clients[client].tasks.iter().position(|task| {
            task.connection == connection
                && task.in_flight.is_some_and(|in_flight| in_flight.number == message.number)
        });
        if let Some(index) = found.filter(|_| !self.connections[connection].silent) {
            self.with_task(client, index, |world, task| world.handle_reply(client, task, message));
        }
    }

    fn handle_reply(&mut self, client: usize, task: &mut Task, message: ReplyMessage) {
        let Some(in_flight) = task.in_flight else { return };
        note!(
            self,
            "{}: receives {:?} to #{}",
            self.name(task.connection),
            message.reply,
            message.number
        );
        let now = self.local(client);
        let wall = self.wall(client);
        let process = &mut self.clients[client].stream;
        let mut at = StreamTurn { process, key: task.key, now, wall };
        let effect = task.claim_state.handle_reply(&in_flight, message.reply, &mut at);
        if in_flight.operation == Operation::Renew
            && matches!(effect, ReplyEffect::Done(Outcome::Renewed { .. }))
        {
            self.checker.renewed(task.id, message.number);
        }
        self.apply(client, task, in_flight, effect);
    }

    /// Executes the commands of a task's state machine until there are none.
    pub(crate) fn drive(&mut self, client: usize, task: &mut Task) {
        while let Some(command) = task.poll_command() {
            task.watching = false;
            note!(self, "{}: {command:?}", self.name(task.connection));
            match command {
                Command::Send(operation, limit) => self.begin(client, task, operation, limit),
                Command::Watch => {
                    self.cut_wait(task);
                    task.watching = self.setup.store == StoreKind::Stream;
                    self.check_watch(client, task);
                }
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
        if let TaskMachine::Keeper(keeper) = &task.machine {
            let deadline = keeper.deadline();
            let mut checker = std::mem::take(&mut self.checker);
            let verdict = checker.deadline_moved(task.id, deadline, self.condition());
            self.checker = checker;
            self.check_verdict(verdict, || {
                format!("client {client}, task {} was renewed", task.id)
            });
        }
    }

    fn answer(&mut self, client: usize, task: &mut Task, answer: AcquireAnswer) {
        self.stats.answers += 1;
        if task.answered {
            self.fail(Breach::AnsweredTwice, || format!("task {}: {answer:?}", task.id));
        }
        match answer {
            AcquireAnswer::Acquired { sent, deadline } => {
                return self.acquired(client, task, sent, deadline);
            }
            AcquireAnswer::Unknown { .. } => self.stats.unknown += 1,
            AcquireAnswer::Contended
            | AcquireAnswer::TimedOut
            | AcquireAnswer::GaveUp
            | AcquireAnswer::Failed => {
                self.checker.note_refusal(task.id);
                let lives = |connection: usize| !self.connections[connection].broken;
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
        let (id, key) = (task.id, task.key);
        let epoch = if self.setup.tokens_have_epochs { task.claim_state.epoch } else { 0 };
        let token = FencingToken::new(epoch, task.claim_state.token).as_u128();
        // A stream that lost writes is detected by a sequence that is not above those seen. If the write of the grant
        // was not acknowledged, it may be older than what was seen since, and proves nothing.
        let sees_losses = self.setup.store == StoreKind::Stream && task.claim_state.acknowledged();
        let process = sees_losses.then_some(self.clients[client].incarnation);
        let guard = Guard { task: id, client, key, token, deadline, process };
        let mut checker = std::mem::take(&mut self.checker);
        let verdict = checker.hand_out(guard, self.condition());
        self.checker = checker;
        self.check_verdict(verdict, || format!("client {client}, key {key}, token {token}"));
        self.stats.guards += 1;
        self.stats.probes += 1;
        let check_interval = match self.setup.store {
            StoreKind::Bucket => Some(self.setup.ttl / 8),
            StoreKind::ServerClock | StoreKind::Session | StoreKind::Stream => None,
        };
        let granted = Granted { sent, deadline, handoff_requested: false };
        task.machine = TaskMachine::Keeper(Keeper::new(self.lease, granted, check_interval, now));
        task.answered = true;
        let work = if self.healed { self.ttls(10.0) } else { self.random_span(3.0) };
        task.end_use_at = now + Duration::from_nanos(work);
    }

    /// Ends the use of a task: its user cancels, releases, detaches, or the process dies.
    fn end_use(&mut self, client: usize, task: &mut Task, may_die: bool) {
        let now = self.local(client);
        task.end_use_at = Time::MAX;
        match &mut task.machine {
            TaskMachine::Acquire(acquire) => {
                note!(self, "client {client} task {}: is cancelled", task.id);
                acquire.handle(AcquireInput::Cancel, now);
                if !std::mem::replace(&mut task.answered, true) {
                    self.schedule_next_use(client);
                }
            }
            TaskMachine::Keeper(keeper) => {
                let pick = if may_die { self.random.below(20) } else { 9 };
                note!(self, "client {client} task {}: ends its use ({pick})", task.id);
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

    /// Schedules the user's next acquire after a pause.
    fn schedule_next_use(&mut self, client: usize) {
        let pause = Duration::from_nanos(self.random_span(0.5));
        self.clients[client].busy = false;
        self.clients[client].idle_until =
            if self.healed { Time::MAX } else { self.local(client) + pause };
    }

    pub(crate) fn wall(&self, client: usize) -> i64 {
        self.clients[client].wall(self.now)
    }
}
