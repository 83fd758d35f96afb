//! Faults: how they begin, and how they end.

use std::time::Duration;

use tenure_core::FencingToken;

use crate::contract::Breach;
use crate::in_flight::StreamProcess;
use crate::setup::StoreKind;
use crate::store::{Store, StreamLoss};
use crate::world::{Event, World, note};

impl World {
    pub(crate) fn schedule_faults(&mut self) {
        for client in 0..self.clients.len() {
            let at = self.random_span(2.0 * self.setup.faults.mean_fault_interval);
            self.schedule(at, Event::Fault(client));
        }
        let at = self.random_span(4.0);
        self.schedule(at, Event::StoreSlew);
        let restarts = self.setup.faults.restart > 0.0;
        if self.setup.store == StoreKind::ServerClock && restarts {
            let at = self.random_span(2.0 * self.setup.faults.restart);
            self.schedule(at, Event::StoreDown);
        }
        if self.setup.store == StoreKind::Stream && restarts {
            self.change_leader();
        }
        self.schedule_loss();
        let end = self.ttls(self.setup.length);
        self.schedule(end, Event::Heal);
        // After its answer, an acquire cleans up for at most 1.5 ttl. A message in flight arrives within that time, and
        // a lease that begins with it lasts another ttl. On the slowest clock all of this takes less than 4 ttl.
        self.schedule(end + self.ttls(4.0), Event::Probe);
        self.schedule(end + self.ttls(6.0), Event::Finish);
    }

    pub(crate) fn inject_fault(&mut self, client: usize) {
        if self.healed {
            return;
        }
        let faults = self.setup.faults;
        let lasts = self.random_span(faults.max_fault_duration);
        let end = self.now + lasts;
        if self.clients[client].awake() {
            let weights = [
                faults.pause,
                faults.suspend,
                faults.partition,
                faults.crash,
                faults.disconnect,
                faults.slew,
            ];
            let mut pick = self.random.below(weights.iter().sum());
            let kind = weights.iter().position(|weight| {
                let here = pick < *weight;
                pick = pick.saturating_sub(*weight);
                here
            });
            match kind {
                Some(0) => self.pause(client, false, end),
                Some(1) => self.pause(client, true, end),
                Some(2) => {
                    note!(self, "client {client}: is partitioned");
                    self.clients[client].partitioned = true;
                    self.schedule(end, Event::PartitionEnd(client));
                }
                Some(3) => self.crash(client),
                Some(4) => self.break_connection(client),
                _ => {
                    let drift = self.drift();
                    let now = self.now;
                    self.clients[client].clock.slew(drift, now);
                    self.set_alarm(client);
                }
            }
        }
        let next = self.now + self.random_span(2.0 * faults.mean_fault_interval);
        self.schedule(next, Event::Fault(client));
    }

    fn pause(&mut self, client: usize, suspend: bool, end: u64) {
        note!(self, "client {client}: {}", if suspend { "is suspended" } else { "is paused" });
        let stands_still = suspend && !self.setup.rules.count_suspended_time;
        let now = self.now;
        let target = &mut self.clients[client];
        target.paused = true;
        if stands_still {
            target.clock.freeze(now);
        }
        self.schedule(end, Event::Resume(client));
    }

    /// Breaks the connection of one task. A client that is awake is notified before the store grants its holds to
    /// waiters. In the other case the connection falls silent, and the idle timeout has to end it.
    fn break_connection(&mut self, client: usize) {
        let count = self.clients[client].tasks.len() as u64;
        if self.setup.store != StoreKind::Session || count == 0 {
            return;
        }
        let index = usize::try_from(self.random.below(count)).unwrap_or(0);
        let connection = self.clients[client].tasks[index].connection;
        if self.random.chance(0.3) {
            note!(self, "client {client}: connection {connection} falls silent");
            self.connections[connection].silent = true;
            return;
        }
        note!(self, "client {client}: connection {connection} breaks");
        self.disconnect_task(client, index);
        let at = self.now + self.random_span(0.1);
        self.schedule(at, Event::Disconnect(connection));
    }

    pub(crate) fn end_partition(&mut self, client: usize) {
        if self.clients[client].partitioned {
            note!(self, "client {client}: is no longer partitioned");
            self.clients[client].partitioned = false;
        }
    }

    /// Kills the process. A session store usually notices the closed connections; elsewhere the lease has to expire.
    pub(crate) fn crash(&mut self, client: usize) {
        note!(self, "client {client}: dies");
        self.stats.crashes += 1;
        for task in std::mem::take(&mut self.clients[client].tasks) {
            self.checker.guard_ended(task.id);
            self.connections[task.connection].broken = true;
            if self.setup.store == StoreKind::Session && self.random.chance(0.7) {
                let at = self.now + self.random_span(0.1);
                self.schedule(at, Event::Disconnect(task.connection));
            }
        }
        self.clients[client].dead = true;
        self.clients[client].inbox.clear();
        let at = self.now + self.random_span(0.5);
        self.schedule(at, Event::ClientRestart(client));
    }

    pub(crate) fn restart_client(&mut self, client: usize) {
        if self.clients[client].dead {
            note!(self, "client {client}: restarts");
            self.clients[client].dead = false;
            self.clients[client].busy = false;
            self.clients[client].idle_until = self.local(client);
            self.clients[client].incarnation += 1_000;
            self.clients[client].stream = StreamProcess::new(self.keys, self.setup.rules);
            self.set_alarm(client);
        }
    }

    pub(crate) fn slew_store(&mut self) {
        let drift = self.drift();
        self.store_clock.slew(drift, self.now);
        self.after_store();
        if !self.healed {
            let at = self.now + self.random_span(8.0);
            self.schedule(at, Event::StoreSlew);
        }
    }

    /// Changes the leading server: its timestamps are by its own clock.
    pub(crate) fn change_leader(&mut self) {
        let apart = u64::try_from(self.setup.faults.max_server_skew.as_nanos()).unwrap_or(u64::MAX);
        let ahead = Duration::from_nanos(self.random.below(apart.max(1)));
        note!(self, "store: another server leads, its clock is {ahead:?} ahead");
        self.store.set_leader_skew(ahead);
        if !self.healed {
            let at = self.now + self.random_span(2.0 * self.setup.faults.restart);
            self.schedule(at, Event::LeaderChange);
        }
    }

    fn schedule_loss(&mut self) {
        let interval = self.setup.faults.lose_writes;
        if interval > 0.0 {
            let at = self.now + self.random_span(2.0 * interval);
            self.schedule(at, Event::StoreLoss);
        }
    }

    /// Lets the store lose acknowledged writes, and tells the checker which holds and tokens may have gone with them.
    pub(crate) fn lose_writes(&mut self) {
        if self.healed {
            return;
        }
        let now = self.store_clock.read(self.now);
        let key = usize::try_from(self.random.below(self.keys as u64)).unwrap_or(0);
        let pick = self.random.below(8);
        match &mut self.store {
            Store::Stream { stream, .. } => {
                let loss = match pick {
                    0 if stream.may_be_created_again(now) => StreamLoss::Created,
                    1 => StreamLoss::Key(key),
                    _ => StreamLoss::Tail(1 + usize::try_from(self.random.below(6)).unwrap_or(0)),
                };
                let claims = stream.lose(loss, now);
                let kept = FencingToken::new(stream.created(), stream.last_sequence()).as_u128();
                let survivors: Vec<_> =
                    (0..self.keys).filter_map(|key| stream.holder(key)).collect();
                if let StreamLoss::Tail(_) = loss {
                    self.stream_connection += 1;
                    for key in 0..self.keys {
                        self.checker.tokens_lost(key, kept);
                    }
                }
                self.note_loss(claims, survivors, matches!(loss, StreamLoss::Tail(_)));
                note!(self, "store: loses {loss:?}");
            }
            Store::Register { register, .. } => {
                let gone = pick < 3;
                let before = register.record(key).claim;
                if !register.lose(key, gone, now) {
                    return self.schedule_loss();
                }
                let after = register.record(key);
                if gone {
                    self.last_gone = register.first_number(self.date_clock.read(self.now));
                }
                if !gone {
                    self.checker.tokens_lost(key, u128::from(after.fence));
                }
                self.note_loss(vec![before], vec![after.claim], !gone);
                note!(self, "store: key {key} is {}", if gone { "gone" } else { "as before" });
            }
            Store::Server(_) => return,
        }
        self.schedule_loss();
    }

    fn note_loss(&mut self, lost: Vec<u64>, survivors: Vec<u64>, tokens_repeat: bool) {
        self.stats.lost_writes += 1;
        for claim in lost {
            self.checker.record_lost(claim, tokens_repeat);
        }
        // The release of a hold that is back was lost.
        for claim in survivors {
            self.checker.excuse(claim);
        }
    }

    pub(crate) fn stop_store(&mut self) {
        if !self.healed {
            note!(self, "store: stops");
            self.store_down = true;
            let at = self.now + self.random_span(0.5);
            self.schedule(at, Event::StoreUp);
        }
    }

    pub(crate) fn start_store(&mut self) {
        if self.store_down {
            note!(self, "store: restarts with its durable holds");
            self.store_down = false;
            self.store.restart(self.store_clock.read(self.now));
            self.after_store();
            let at = self.now + self.random_span(2.0 * self.setup.faults.restart);
            self.schedule(at, Event::StoreDown);
        }
    }

    /// Ends all faults, and all uses of locks.
    pub(crate) fn heal(&mut self) {
        note!(self, "the faults are over");
        self.start_store();
        self.healed = true;
        for client in 0..self.clients.len() {
            self.end_partition(client);
            self.resume(client);
            self.restart_client(client);
            self.end_all_uses(client);
        }
    }

    /// Checks that all tasks have ended, and starts a client that must be able to acquire every key.
    pub(crate) fn probe(&mut self) {
        for client in 0..self.clients.len() {
            if let Some(task) = self.clients[client].tasks.first() {
                let detail = format!("client {client}, task {}: {:?}", task.id, task.machine);
                self.fail(Breach::NoEnd, || detail);
            }
        }
        self.stats.probes = 0;
        let probe = self.add_client();
        for key in 0..self.keys {
            self.start(probe, key);
        }
    }

    pub(crate) fn check_probes(&mut self) {
        if self.stats.probes < self.keys as u64 {
            let got = self.stats.probes;
            self.fail(Breach::NotFreed, || format!("only {got} keys could be acquired"));
        }
    }
}
