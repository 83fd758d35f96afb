//! What goes wrong, and how it ends.

use std::time::Duration;

use crate::referee::Breach;
use crate::setup::StoreKind;
use crate::world::{Event, World, note};

impl World {
    pub(crate) fn schedule_faults(&mut self) {
        for client in 0..self.clients.len() {
            let at = self.up_to(2.0 * self.setup.faults.every);
            self.schedule(at, Event::Mischief(client));
        }
        let at = self.up_to(4.0);
        self.schedule(at, Event::StoreSlew);
        if self.setup.store == StoreKind::ServerClock {
            let at = self.up_to(2.0 * self.setup.faults.restart);
            self.schedule(at, Event::StoreDown);
        }
        if self.setup.store == StoreKind::Observation {
            self.change_leader();
        }
        let end = self.ttls(self.setup.length);
        self.schedule(end, Event::Heal);
        // Who was answered settles what may be left for 1.5 ttl, a message that is under way lands before, and a lease
        // that began with it lasts another ttl: on the slowest clock all that is over in 4.
        self.schedule(end + self.ttls(4.0), Event::Probe);
        self.schedule(end + self.ttls(6.0), Event::Judge);
    }

    pub(crate) fn mischief(&mut self, client: usize) {
        if self.healed {
            return;
        }
        let faults = self.setup.faults;
        let lasts = self.up_to(faults.lasts);
        let end = self.now + lasts;
        if self.clients[client].awake() {
            let weights =
                [faults.pause, faults.suspend, faults.cut, faults.crash, faults.snap, faults.slew];
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
                    note!(self, "client {client}: is cut off");
                    self.clients[client].cut = true;
                    self.schedule(end, Event::Rejoin(client));
                }
                Some(3) => self.crash(client),
                Some(4) => self.snap(client),
                _ => {
                    let drift = self.drift();
                    let now = self.now;
                    self.clients[client].clock.slew(drift, now);
                    self.set_alarm(client);
                }
            }
        }
        let next = self.now + self.up_to(2.0 * faults.every);
        self.schedule(next, Event::Mischief(client));
    }

    fn pause(&mut self, client: usize, suspend: bool, end: u64) {
        note!(self, "client {client}: {}", if suspend { "falls asleep" } else { "is paused" });
        let stands_still = suspend && !self.setup.rules.count_suspended_time;
        let now = self.now;
        let it = &mut self.clients[client];
        it.paused = true;
        if stands_still {
            it.clock.freeze(now);
        }
        self.schedule(end, Event::Resume(client));
    }

    /// The connection of one task breaks. A client that is awake hears of it before the store passes its holds on;
    /// the other case, a link that falls silent, is what the idle time-out is for.
    fn snap(&mut self, client: usize) {
        let count = self.clients[client].tasks.len() as u64;
        if self.setup.store != StoreKind::Session || count == 0 {
            return;
        }
        let index = usize::try_from(self.random.below(count)).unwrap_or(0);
        let link = self.clients[client].tasks[index].link;
        if self.random.chance(0.3) {
            note!(self, "client {client}: connection {link} falls silent");
            self.links[link].silent = true;
            return;
        }
        note!(self, "client {client}: connection {link} breaks");
        self.hang_up(client, index);
        let at = self.now + self.up_to(0.1);
        self.schedule(at, Event::Disconnect(link));
    }

    pub(crate) fn rejoin(&mut self, client: usize) {
        if self.clients[client].cut {
            note!(self, "client {client}: is no longer cut off");
            self.clients[client].cut = false;
        }
    }

    /// The process dies. Where connections hold, the store hears of it; elsewhere the lease has to end.
    pub(crate) fn crash(&mut self, client: usize) {
        note!(self, "client {client}: dies");
        self.stats.crashes += 1;
        for task in std::mem::take(&mut self.clients[client].tasks) {
            self.referee.over(task.id);
            self.links[task.link].broken = true;
            if self.setup.store == StoreKind::Session && self.random.chance(0.7) {
                let at = self.now + self.up_to(0.1);
                self.schedule(at, Event::Disconnect(task.link));
            }
        }
        self.clients[client].dead = true;
        self.clients[client].inbox.clear();
        let at = self.now + self.up_to(0.5);
        self.schedule(at, Event::Reborn(client));
    }

    pub(crate) fn reborn(&mut self, client: usize) {
        if self.clients[client].dead {
            note!(self, "client {client}: starts anew");
            self.clients[client].dead = false;
            self.clients[client].busy = false;
            self.clients[client].idle_until = self.local(client);
            self.set_alarm(client);
        }
    }

    pub(crate) fn slew_store(&mut self) {
        let drift = self.drift();
        self.store_clock.slew(drift, self.now);
        self.after_store();
        if !self.healed {
            let at = self.now + self.up_to(8.0);
            self.schedule(at, Event::StoreSlew);
        }
    }

    /// Another server leads: what it stamps is told by its own clock.
    pub(crate) fn change_leader(&mut self) {
        let apart = u64::try_from(self.setup.faults.apart.as_nanos()).unwrap_or(u64::MAX);
        let ahead = Duration::from_nanos(self.random.below(apart.max(1)));
        note!(self, "store: another leads, whose clock is {ahead:?} ahead");
        self.store.lead_by(ahead);
        if !self.healed {
            let at = self.now + self.up_to(2.0 * self.setup.faults.restart);
            self.schedule(at, Event::Leader);
        }
    }

    pub(crate) fn store_goes(&mut self) {
        if !self.healed {
            note!(self, "store: stops");
            self.store_down = true;
            let at = self.now + self.up_to(0.5);
            self.schedule(at, Event::StoreUp);
        }
    }

    pub(crate) fn store_comes(&mut self) {
        if self.store_down {
            note!(self, "store: starts again, with the holds it wrote down");
            self.store_down = false;
            self.store.restart(self.store_clock.read(self.now));
            self.after_store();
            let at = self.now + self.up_to(2.0 * self.setup.faults.restart);
            self.schedule(at, Event::StoreDown);
        }
    }

    /// The faults end, and everybody goes home.
    pub(crate) fn heal(&mut self) {
        note!(self, "the faults are over");
        self.store_comes();
        self.healed = true;
        for client in 0..self.clients.len() {
            self.rejoin(client);
            self.resume(client);
            self.reborn(client);
            self.go_home(client);
        }
    }

    /// Everything must have ended; whoever comes now must find every key free soon.
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

    pub(crate) fn judge(&mut self) {
        if self.stats.probes < self.keys as u64 {
            let got = self.stats.probes;
            self.fail(Breach::NotFreed, || format!("{got} keys could be had"));
        }
    }
}
