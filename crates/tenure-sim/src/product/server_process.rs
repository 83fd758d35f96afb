//! The process of the server: starts, steps, and ends.

use std::any::Any;
use std::error::Error;
use std::io::{self, ErrorKind};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tenure_server::journal::{Journal, JournalError, JournalOptions};
use tenure_server::network::Network as _;
use tenure_server::{Engine, Server, Settings};

use super::host::{POKE_INTERVAL, SECRET, ServerProgram, WALL_EPOCH, drift};
use super::network::Side;
use super::plan::Fault;
use super::referee::ProductBreach;
use super::server_disk::ServerDisk;
use super::server_faults::ServerEnded;
use super::server_network::SimulatedNetwork;
use super::world::{self, ProductWorld, WorldEvent, nanos, note};
use crate::clock::Clock;

/// Longest lease of the server.
const MAX_LEASE: Duration = Duration::from_secs(60);

impl ServerProgram for Server<SimulatedNetwork> {
    fn step(&mut self) -> io::Result<bool> {
        self.wait_and_serve()?;
        Ok(self.is_done())
    }

    fn next_timeout(&self) -> Option<Duration> {
        self.timeout()
    }

    fn shut_down(self: Box<Self>) -> io::Result<()> {
        self.finish()
    }
}

impl ProductWorld {
    pub(super) fn start_server(self: &Rc<Self>) {
        let now = self.now.get();
        let (disk, boot, wall, instance) = {
            let mut host = self.host.borrow_mut();
            if host.server.is_some() || host.serving {
                return;
            }
            host.starts += 1;
            host.scheduled = u64::MAX;
            host.serving = true;
            let wall = (WALL_EPOCH + now).saturating_add_signed(host.wall_offset) / 1_000;
            (host.disk.clone(), format!("boot {}", host.boot), wall, u128::from(host.starts))
        };
        self.net.borrow_mut().machine_up = true;
        let plan = &self.plan.server;
        let settings = Settings {
            max_lease: MAX_LEASE,
            write_timeout: Some(plan.write_timeout),
            ..Settings::default()
        };
        let clock = SimulatedNetwork;
        let started = catch_unwind(AssertUnwindSafe(|| {
            if !plan.durable {
                return Ok(Ok(Engine::new(settings, Some(SECRET.as_bytes()), instance, wall)));
            }
            let options = JournalOptions {
                max_lease: MAX_LEASE,
                segment_bytes: plan.segment_bytes,
                ..JournalOptions::new("data")
            };
            let opened_at = clock.now();
            let opened =
                Journal::open_on(Arc::new(ServerDisk(disk)), &options, &boot, opened_at, wall)?;
            let embargo = opened.embargo_until.map(|until| until.since(opened_at));
            let held = opened.holds.len();
            self.disturbances.borrow_mut().holds_discarded |= embargo.is_some();
            let holds = opened.holds.iter().map(|hold| {
                let (mode, key) = (hold.mode.into(), String::from_utf8_lossy(&hold.key));
                ((hold.mode.space(), key.into_owned()), mode, hold.token.number(), hold.ends)
            });
            self.tap.borrow_mut().server_started(holds, opened.embargo_until, opened_at);
            note!(self, "server", "starts: {:?}, {held} holds, {embargo:?}", opened.last_run);
            Ok(Engine::restore(settings, Some(SECRET.as_bytes()), opened, opened_at))
        }));
        let engine = match started {
            Err(payload) => return self.server_ended(&*payload, None),
            Ok(Ok(Ok(engine))) => engine,
            Ok(Ok(Err(key))) => {
                let key = String::from_utf8_lossy(&key).into_owned();
                let what = format!("two holds of {key} in one directory");
                return self.breach(ProductBreach::ServerFailed, what);
            }
            Ok(Err(error)) => return self.start_failed(&error),
        };
        let wake = || {
            world::with(|world| {
                world.host.borrow_mut().commands = true;
                world.schedule_server(world.now.get());
            });
            Ok(())
        };
        let (server, handle) =
            Server::on_network(SimulatedNetwork, wake, None, engine, self.plan.ttl / 2);
        self.net.borrow_mut().listening = true;
        {
            let mut host = self.host.borrow_mut();
            host.server = Some(Box::new(server));
            host.handle = Some(handle);
            host.serving = false;
        }
        self.schedule_server(now);
    }

    fn start_failed(&self, error: &JournalError) {
        self.host.borrow_mut().serving = false;
        if self.has_full_disk(error) {
            note!(self, "server", "cannot start: {error}");
            self.schedule(self.now.get() + 500_000_000, WorldEvent::StartServer);
            return;
        }
        self.breach(ProductBreach::ServerFailed, format!("it refuses to start: {error}"));
    }

    pub(super) fn step_server(self: &Rc<Self>) {
        let now = self.now.get();
        let mut server = {
            let mut host = self.host.borrow_mut();
            if host.scheduled != now {
                return;
            }
            host.scheduled = u64::MAX;
            if host.serving {
                host.missed = true;
                return;
            }
            let Some(server) = host.server.take() else { return };
            host.serving = true;
            server
        };
        let step = catch_unwind(AssertUnwindSafe(|| server.step()));
        match step {
            Err(payload) => self.server_ended(&*payload, Some(server)),
            Ok(Ok(false)) => {
                let timeout = {
                    self.judging.set(true);
                    let timeout = server.next_timeout();
                    self.judging.set(false);
                    timeout
                };
                let (missed, armed) = {
                    let mut host = self.host.borrow_mut();
                    host.server = Some(server);
                    host.serving = false;
                    (std::mem::take(&mut host.missed), !host.armed.is_empty())
                };
                if missed {
                    self.schedule_server(self.now.get());
                }
                self.schedule_timeout(timeout, armed);
            }
            Ok(Ok(true)) => {
                note!(self, "server", "has stopped");
                let finished = catch_unwind(AssertUnwindSafe(|| server.shut_down()));
                match finished {
                    Err(payload) => self.server_ended(&*payload, None),
                    Ok(result) => self.server_exited(&result, None),
                }
            }
            Ok(Err(error)) => self.server_exited(&Err(error), Some(server)),
        }
    }

    fn schedule_timeout(&self, timeout: Option<Duration>, armed: bool) {
        let now = self.now.get();
        let due = timeout.map(|timeout| {
            let host = self.host.borrow();
            let local = host.clock.read(now) + timeout;
            host.clock.when(local, now).unwrap_or(now)
        });
        let poke = armed.then_some(now + POKE_INTERVAL);
        if let Some(at) = due.into_iter().chain(poke).min() {
            // A step takes some time, so that a server with unfinished work does not stop the world's clock.
            self.schedule_server(at.max(now + 1_000));
        }
    }

    /// True if a fault explains this error of the server: its disk was full.
    fn has_full_disk(&self, error: &(dyn Error + 'static)) -> bool {
        let full = self.host.borrow().disk.was_full() && is_storage_full(error);
        if full {
            self.count_fault(Fault::FillDisk { lasts: Duration::ZERO }.kind());
        }
        full
    }

    /// The process has exited by itself.
    fn server_exited(&self, result: &io::Result<()>, server: Option<Box<dyn ServerProgram>>) {
        if let Err(error) = result {
            note!(self, "server", "exits: {error}");
            if !self.has_full_disk(error) {
                drop(server);
                let what = format!("it exits, and no full disk explains it: {error}");
                return self.breach(ProductBreach::ServerFailed, what);
            }
        }
        self.disturb_all();
        drop(server);
        let restart_after = {
            let mut host = self.host.borrow_mut();
            host.serving = false;
            host.handle = None;
            std::mem::take(&mut host.restart_after).max(1_000_000)
        };
        self.process_is_gone();
        self.schedule(self.now.get() + restart_after, WorldEvent::StartServer);
    }

    /// The process was killed, its machine crashed, or it panicked.
    fn server_ended(&self, payload: &(dyn Any + Send), server: Option<Box<dyn ServerProgram>>) {
        if !payload.is::<ServerEnded>() {
            let text = payload.downcast_ref::<String>().cloned();
            let text =
                text.or_else(|| payload.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            std::mem::forget(server);
            return self.breach(
                ProductBreach::ServerFailed,
                format!("it panicked: {}", text.unwrap_or_default()),
            );
        }
        let (_, _, fault) = self.host.borrow_mut().armed.remove(0);
        self.count_fault(fault.kind());
        let restart_after = match fault {
            Fault::CrashMachine { restart_after, .. } => {
                note!(self, "server", "its machine crashes");
                {
                    let mut net = self.net.borrow_mut();
                    net.vanish(self.now.get());
                    net.machine_up = false;
                }
                let mut host = self.host.borrow_mut();
                host.boot += 1;
                let mut random = self.random.borrow_mut();
                host.disk.crash(&mut random);
                let ppm = drift(self.plan.drift, &mut random);
                host.clock = Clock::new(random.below(1 << 36), ppm);
                host.clock.slew(ppm, self.now.get());
                restart_after
            }
            Fault::KillServer { restart_after, .. } => {
                note!(self, "server", "is killed");
                restart_after
            }
            _ => Duration::ZERO,
        };
        // The kernel closes the sockets of the process; those of a crashed machine have vanished.
        drop(server);
        {
            let mut host = self.host.borrow_mut();
            host.restart_after = 0;
            host.serving = false;
            host.handle = None;
        }
        self.process_is_gone();
        self.schedule(self.now.get() + nanos(restart_after), WorldEvent::StartServer);
    }

    fn process_is_gone(&self) {
        let now = self.now.get();
        let mut net = self.net.borrow_mut();
        net.listening = false;
        while let Some(connection) = net.backlog.pop_front() {
            net.close(connection, Side::Server, now);
        }
        drop(net);
        self.tap.borrow_mut().server_ended();
    }
}

/// True if this error, or one of its causes, is a full disk.
fn is_storage_full(error: &(dyn Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        let io = error.downcast_ref::<io::Error>();
        if io.is_some_and(|io| io.kind() == ErrorKind::StorageFull) {
            return true;
        }
        // The cause of an `io::Error` that wraps another error is not its `source`, but that error's.
        let inner = io.and_then(io::Error::get_ref).map(|inner| inner as &(dyn Error + 'static));
        next = inner.or_else(|| error.source());
    }
    false
}
