//! The machine of the server: its process, its clocks, its disk, and the faults that strike between two operations.

use std::any::Any;
use std::error::Error;
use std::io::{self, ErrorKind};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tenure_core::Random;
use tenure_server::journal::{Journal, JournalError, JournalOptions};
use tenure_server::network::Network as _;
use tenure_server::{Engine, Handle, Server, Settings};

use super::disk::SimulatedDisk;
use super::network::Side;
use super::plan::{Fault, Plan, ServerPoint};
use super::referee::ProductBreach;
use super::server_network::SimulatedNetwork;
use super::world::{self, ProductWorld, WorldEvent, nanos, note};
use crate::clock::Clock;

/// Secret of the server: without one it does not break holds.
pub(super) const SECRET: &str = "simulated";
/// Longest lease of the server.
const MAX_LEASE: Duration = Duration::from_secs(60);
/// Wall clock at the start of a run.
pub(super) const WALL_EPOCH: u64 = 1_700_000_000_000_000_000;
/// Interval at which an idle server is woken while a fault waits for its next operation.
const POKE_INTERVAL: u64 = 300_000_000;

/// The machine of the server.
#[derive(Debug)]
pub(super) struct Host {
    /// The server, unless it is down or in the middle of a step.
    pub(super) server: Option<Server<SimulatedNetwork>>,
    handle: Option<Handle>,
    pub(super) clock: Clock,
    pub(super) wall_offset: i64,
    pub(super) disk: SimulatedDisk,
    boot: u32,
    /// Number of starts.
    pub(super) starts: u32,
    /// Faults that strike after some more operations.
    pub(super) armed: Vec<(ServerPoint, u64, Fault)>,
    /// A command waits for the server.
    pub(super) commands: bool,
    /// Real time of the next step; `u64::MAX` if no step is scheduled.
    scheduled: u64,
    /// True while the server's code runs.
    serving: bool,
    /// A step is due that came while the server was stopped.
    missed: bool,
    /// Time from the end of the process to its restart, once it was told to stop.
    restart_after: u64,
    /// Real time at which the disk has space again.
    pub(super) full_until: u64,
}

impl Host {
    pub(super) fn new(plan: &Plan, random: &mut Random) -> Self {
        Self {
            server: None,
            handle: None,
            clock: Clock::new(1_000_000_000 + random.below(1 << 40), drift(plan.drift, random)),
            wall_offset: 0,
            disk: SimulatedDisk::new(),
            boot: 0,
            starts: 0,
            armed: Vec::new(),
            commands: false,
            scheduled: u64::MAX,
            serving: false,
            missed: false,
            restart_after: 0,
            full_until: 0,
        }
    }
}

/// Draws the error of a clock's rate.
pub(super) fn drift(most: u64, random: &mut Random) -> i64 {
    let most = i64::try_from(most).unwrap_or(0);
    i64::try_from(random.below(2 * most.unsigned_abs() + 1)).unwrap_or(0) - most
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

/// Payload of the unwinding that ends a killed server in the middle of its step.
struct ServerEnded;

/// Marks the end of an operation of the server: faults strike here.
pub(super) fn server_operation(point: ServerPoint) {
    world::with(|world| {
        if let Some(fault) = world.next_server_fault(point) {
            world.strike(fault);
        }
    });
}

/// Marks a write of the server. Returns the number of bytes that reach the file if the server is killed meanwhile; the
/// caller then calls [`end_server`].
pub(super) fn server_write(length: usize) -> Option<usize> {
    world::with(|world| {
        let fault = world.next_server_fault(ServerPoint::Disk)?;
        if matches!(fault, Fault::KillServer { .. } | Fault::CrashMachine { .. }) {
            world.disturb_all();
            let written = world.random.borrow_mut().below(length as u64 + 1);
            world.host.borrow_mut().armed.insert(0, (ServerPoint::Any, 0, fault));
            return usize::try_from(written).ok();
        }
        world.strike(fault);
        None
    })
}

/// Ends the server in the middle of a write.
pub(super) fn end_server() {
    server_operation(ServerPoint::Disk);
}

impl ProductWorld {
    /// Takes the fault that strikes at this operation, if any.
    fn next_server_fault(&self, point: ServerPoint) -> Option<Fault> {
        let mut host = self.host.borrow_mut();
        if !host.serving || self.judging.get() {
            return None;
        }
        let counts = |counted: ServerPoint| counted == ServerPoint::Any || counted == point;
        let struck = host.armed.iter().position(|(at, left, _)| counts(*at) && *left == 0);
        for (at, left, _) in &mut host.armed {
            if counts(*at) {
                *left = left.saturating_sub(1);
            }
        }
        struck.map(|index| host.armed.remove(index).2)
    }

    /// From here on, requests of every client may fail or be late.
    fn disturb_all(&self) {
        self.disturbances.borrow_mut().strike(None);
    }

    /// Stops or ends the server in the middle of its step.
    fn strike(self: &Rc<Self>, fault: Fault) {
        self.disturb_all();
        match fault {
            Fault::StopServer { lasts, .. } => {
                note!(self, "server", "is stopped for {lasts:?}");
                self.count_fault(fault.kind());
                // Every other process goes on meanwhile.
                self.run_until(self.now.get() + nanos(lasts));
                note!(self, "server", "continues");
            }
            Fault::KillServer { .. } | Fault::CrashMachine { .. } => {
                self.host.borrow_mut().armed.insert(0, (ServerPoint::Any, 0, fault));
                resume_unwind(Box::new(ServerEnded));
            }
            _ => {}
        }
    }

    pub(super) fn begin_server_fault(self: &Rc<Self>, fault: Fault) {
        match fault {
            Fault::StopServer { point, operations, .. }
            | Fault::KillServer { point, operations, .. }
            | Fault::CrashMachine { point, operations, .. } => {
                self.host.borrow_mut().armed.push((point, operations, fault));
                self.schedule_server(self.now.get() + POKE_INTERVAL);
            }
            Fault::ShutDownServer { restart_after } => {
                self.disturb_all();
                let mut host = self.host.borrow_mut();
                host.restart_after = nanos(restart_after);
                if let Some(handle) = &host.handle {
                    let handle = handle.clone();
                    drop(host);
                    self.count_fault(fault.kind());
                    handle.stop();
                }
            }
            _ => {}
        }
    }

    pub(super) fn schedule_server(&self, at: u64) {
        let at = at.max(self.now.get());
        let mut host = self.host.borrow_mut();
        if host.server.is_none() {
            // Down, or in the middle of a step, after which it is scheduled again.
            host.missed |= host.serving;
        } else if at < host.scheduled {
            host.scheduled = at;
            drop(host);
            self.schedule(at, WorldEvent::StepServer);
        }
    }

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
            let opened = Journal::open_on(Arc::new(disk), &options, &boot, opened_at, wall)?;
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
            host.server = Some(server);
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
        let step = catch_unwind(AssertUnwindSafe(|| {
            server.wait_and_serve()?;
            Ok(server.is_done())
        }));
        match step {
            Err(payload) => self.server_ended(&*payload, Some(server)),
            Ok(Ok(false)) => {
                let timeout = {
                    self.judging.set(true);
                    let timeout = server.timeout();
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
                let finished = catch_unwind(AssertUnwindSafe(|| server.finish()));
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
    fn server_exited(&self, result: &io::Result<()>, server: Option<Server<SimulatedNetwork>>) {
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
    fn server_ended(&self, payload: &(dyn Any + Send), server: Option<Server<SimulatedNetwork>>) {
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
