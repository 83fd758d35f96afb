//! The processes of clients: start, steps, stops, and ends.

use std::rc::Rc;
use std::time::Duration;

use tenure_core::Random;

use super::host;
use super::network::Side;
use super::plan::Fault;
use super::process::Process;
use super::work;
use super::world::{self, ProductWorld, WorldEvent, nanos, note};
use crate::clock::Clock as DriftingClock;

impl ProductWorld {
    pub(super) fn start_client(self: &Rc<Self>, client: usize) {
        let last = self.process(client);
        if last.is_alive() {
            return;
        }
        let life = last.life + 1;
        let drift = if life == 1 {
            let mut random = self.random.borrow_mut();
            let ppm = host::drift(self.plan.drift, &mut random);
            DriftingClock::new(1_000_000_000 + random.below(1 << 40), ppm)
        } else {
            last.drift.borrow().clone()
        };
        let seed = self.plan.seed ^ (client as u64 + 1) << 40 ^ u64::from(life) << 48;
        let (process, clock) = Process::start(client, life, drift, seed ^ 1, self.now.get());
        process
            .clock
            .stop_after_readings(move || world::with(|world| world.stop_after_reading(client)));
        process.spawn(work::run_client(client, life, clock, Random::new(seed).bits()));
        process.wall_offset.set(last.wall_offset.get());
        self.processes.borrow_mut()[client] = Rc::new(process);
        note!(self, &format!("client {client}"), "starts");
        self.schedule_step(client, self.now.get());
    }

    pub(super) fn step_client(self: &Rc<Self>, client: usize) {
        let (process, now) = (self.process(client), self.now.get());
        if process.scheduled.get() != now || !process.is_alive() {
            return;
        }
        process.scheduled.set(u64::MAX);
        if now < process.paused_until.get() {
            return self.schedule_step(client, now);
        }
        let local = process.drift.borrow().read(now);
        process.clock.advance(local.since(process.clock.peek()));
        let outer = self.running.replace(Some(client));
        process.run_until_idle();
        self.running.set(outer);
        self.refresh(&process);
        let stopped = process.stopped.take();
        process.paused_until.set(process.paused_until.get().max(now + stopped));
        if let Some(timer) = process.clock.next_timer()
            && let Some(at) = process.drift.borrow().when(timer, now)
        {
            self.schedule_step(client, at.max(now + 1_000));
        }
    }

    /// Called after every reading of a client's clock. Returns the local time for which the process is stopped.
    fn stop_after_reading(&self, client: usize) -> Duration {
        let process = self.process(client);
        if self.judging.get() {
            return Duration::ZERO;
        }
        match process.stop_after.get() {
            None => Duration::ZERO,
            Some((0, lasts)) => {
                process.stop_after.set(None);
                self.disturb(client);
                let lasts_for = Duration::from_nanos(lasts);
                let stop = Fault::StopClient { client, readings: 0, lasts: lasts_for };
                self.count_fault(stop.kind());
                // The referee notes what the process knew when it was stopped.
                self.refresh(&process);
                note!(
                    self,
                    &format!("client {client}"),
                    "is stopped for {:?} after it has read its clock",
                    lasts_for
                );
                let drift = process.drift.borrow();
                let begun = process.real_time(self.now.get());
                process.stopped.set(process.stopped.get() + lasts);
                drift.read(begun + lasts).since(drift.read(begun))
            }
            Some((left, lasts)) => {
                process.stop_after.set(Some((left - 1, lasts)));
                Duration::ZERO
            }
        }
    }

    /// Lets the referee read the holds of a process.
    fn refresh(&self, process: &Process) {
        self.judging.set(true);
        let at = process.real_time(self.now.get());
        let back = self.referee.borrow_mut().refresh(
            process.client,
            process.life,
            at,
            process.clock.peek(),
        );
        self.judging.set(false);
        for belief in back {
            self.schedule(at, WorldEvent::Check { belief });
        }
    }

    pub(super) fn kill_client(self: &Rc<Self>, client: usize, restart_after: Duration) {
        let (process, now) = (self.process(client), self.now.get());
        if !process.is_alive() {
            return;
        }
        {
            let mut net = self.net.borrow_mut();
            for connection in net.of_client(client) {
                net.close(connection, Side::Client, now);
            }
        }
        process.kill();
        self.referee.borrow_mut().process_ended(client, process.life, now);
        self.schedule(now + nanos(restart_after), WorldEvent::StartClient { client });
    }
}
