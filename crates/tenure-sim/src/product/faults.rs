//! Faults of the plan: their begin, their end, and the end of all faults.

use std::rc::Rc;
use std::time::Duration;

use super::network::Side;
use super::plan::Fault;
use super::world::{ProductWorld, WorldEvent, nanos, note};

impl ProductWorld {
    /// Begins the fault with this number of the plan.
    ///
    /// A change of a clock's rate waits until its process continues. A stop within a step has read the clock of its own
    /// end in advance, at the old rate: with another rate the clock would go back.
    pub(super) fn strike_or_defer(self: &Rc<Self>, index: usize) {
        let fault = self.plan.faults[index].fault;
        if let Fault::SlewClient { client, .. } = fault {
            let continues = self.process(client).paused_until.get();
            if self.now.get() < continues {
                return self.schedule(continues, WorldEvent::Fault(index));
            }
        }
        self.begin_fault(fault);
    }

    fn begin_fault(self: &Rc<Self>, fault: Fault) {
        note!(self, "fault", "{fault:?}");
        let now = self.now.get();
        if self.strikes_at_once(fault) {
            self.count_fault(fault.kind());
        }
        match fault {
            Fault::Partition { client, up, down, lasts } => {
                self.disturb(client);
                let until = now + nanos(lasts);
                let path = &mut self.net.borrow_mut().paths[client];
                for (blocked, hit) in path.blocked_until.iter_mut().zip([up, down]) {
                    if hit {
                        *blocked = (*blocked).max(until);
                    }
                }
            }
            Fault::Slow { client, extra, lasts } => {
                self.disturb(client);
                let path = &mut self.net.borrow_mut().paths[client];
                path.slow_until = path.slow_until.max(now + nanos(lasts));
                path.extra = nanos(extra);
            }
            Fault::Reset { client, client_after, server_after } => {
                self.cut(client, client_after, server_after, false);
            }
            Fault::ProxyClose { client, client_after, server_after } => {
                self.cut(client, client_after, server_after, true);
            }
            Fault::SlowReader { client, lasts } => {
                self.disturb(client);
                let until = now + nanos(lasts);
                let mut net = self.net.borrow_mut();
                let until = net.paths[client].reads_from.max(until);
                net.paths[client].reads_from = until;
                for connection in net.of_client(client) {
                    net.connections[connection].end_mut(Side::Client).reads_from = until;
                }
                self.schedule(until, WorldEvent::ReadAgain { client });
            }
            Fault::PauseClient { client, lasts } => {
                self.disturb(client);
                let process = self.process(client);
                let until = process.paused_until.get().max(now + nanos(lasts));
                process.paused_until.set(until);
                self.schedule(until, WorldEvent::PauseEnds { client });
            }
            Fault::StopClient { client, readings, lasts } => {
                self.process(client).stop_after.set(Some((readings, nanos(lasts))));
            }
            Fault::KillClient { client, restart_after } => self.kill_client(client, restart_after),
            Fault::SlewClient { client, ppm } => {
                self.process(client).drift.borrow_mut().slew(ppm, now);
                self.schedule_step(client, now);
            }
            Fault::SlewServer { ppm } => {
                self.host.borrow_mut().clock.slew(ppm, now);
                self.schedule_server(now);
            }
            Fault::StepWallClock { client, by, back } => {
                self.disturbances.borrow_mut().wall_clocks = true;
                let by = i64::try_from(by.as_nanos()).unwrap_or(i64::MAX);
                let by = if back { -by } else { by };
                match client {
                    Some(client) => {
                        let process = self.process(client);
                        process.wall_offset.set(process.wall_offset.get() + by);
                    }
                    None => self.host.borrow_mut().wall_offset += by,
                }
            }
            Fault::StopServer { .. }
            | Fault::KillServer { .. }
            | Fault::CrashMachine { .. }
            | Fault::ShutDownServer { .. } => self.begin_server_fault(fault),
            Fault::FillDisk { lasts } => {
                let mut host = self.host.borrow_mut();
                host.disk.set_full(true);
                host.full_until = host.full_until.max(now + nanos(lasts));
                self.schedule(host.full_until, WorldEvent::DiskFreed);
            }
        }
    }

    /// True if the fault has its effect now. Others are counted when they strike.
    fn strikes_at_once(&self, fault: Fault) -> bool {
        match fault {
            Fault::Reset { client, .. } | Fault::ProxyClose { client, .. } => {
                !self.net.borrow().of_client(client).is_empty()
            }
            Fault::PauseClient { client, .. } | Fault::KillClient { client, .. } => {
                self.process(client).is_alive()
            }
            Fault::Partition { .. }
            | Fault::Slow { .. }
            | Fault::SlowReader { .. }
            | Fault::SlewClient { .. }
            | Fault::SlewServer { .. }
            | Fault::StepWallClock { .. } => true,
            Fault::StopClient { .. }
            | Fault::StopServer { .. }
            | Fault::KillServer { .. }
            | Fault::CrashMachine { .. }
            | Fault::ShutDownServer { .. }
            | Fault::FillDisk { .. } => false,
        }
    }

    /// Cuts all connections of a client, and tells each side after a time.
    fn cut(
        &self,
        client: usize,
        client_after: Option<Duration>,
        server_after: Option<Duration>,
        finish: bool,
    ) {
        self.disturb(client);
        let now = self.now.get();
        let connections = self.net.borrow().of_client(client);
        for connection in connections {
            self.net.borrow_mut().cut(connection, now);
            for (side, after) in [(Side::Client, client_after), (Side::Server, server_after)] {
                if let Some(after) = after {
                    self.schedule(
                        now + nanos(after),
                        WorldEvent::Told { connection, side, finish },
                    );
                }
            }
        }
    }

    pub(super) fn tell(&self, connection: usize, side: Side, finish: bool) {
        let mut net = self.net.borrow_mut();
        let client = net.connections[connection].client;
        note!(self, "network", "connection {connection} of client {client} ends at the {side:?}");
        if !finish {
            return net.break_end(connection, side);
        }
        net.finish_end(connection, side);
    }

    pub(super) fn read_again(&self, client: usize) {
        let mut net = self.net.borrow_mut();
        let now = self.now.get();
        let mut wakers = Vec::new();
        for connection in net.connections.iter_mut().filter(|c| c.client == client) {
            let end = connection.end_mut(Side::Client);
            if end.reads_from <= now {
                wakers.extend(end.reader.take());
            }
        }
        drop(net);
        for waker in wakers {
            waker.wake();
        }
        self.schedule_step(client, now);
    }

    pub(super) fn heal(self: &Rc<Self>) {
        note!(self, "world", "all faults end");
        self.healed.set(true);
        self.net.borrow_mut().heal(self.now.get());
        {
            let mut host = self.host.borrow_mut();
            host.armed.clear();
            host.disk.set_full(false);
        }
        for client in 0..self.plan.clients {
            self.read_again(client);
            self.process(client).stop_after.set(None);
            self.process(client).healed.notify_waiters();
            self.schedule_step(client, self.now.get());
        }
    }
}
