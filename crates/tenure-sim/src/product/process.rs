//! A client process: a runtime of its own, a drifting clock, and streams to the server.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tenure::simulation::SimulatedProcess;
use tenure::{Clock, ManualClock};
use tenure_core::{Random, Time};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::Notify;

use super::host;
use super::network::{EndState, Side};
use super::plan::Fault;
use super::work;
use super::world::{self, ProductWorld, WorldEvent, nanos, note};
use crate::clock::Clock as DriftingClock;

/// A client process.
pub(super) struct Process {
    pub(super) client: usize,
    /// Number of this process among those of its client.
    pub(super) life: u32,
    /// `None` once the process has ended.
    runtime: RefCell<Option<Runtime>>,
    idle: Arc<IdleSignal>,
    clock: ManualClock,
    identity: SimulatedProcess,
    /// Clock of the process's machine.
    pub(super) drift: RefCell<DriftingClock>,
    pub(super) wall_offset: Cell<i64>,
    /// Real time until which the process is stopped.
    pub(super) paused_until: Cell<u64>,
    /// Number of readings of the clock after which the process is stopped, and for how long.
    pub(super) stop_after: Cell<Option<(u64, u64)>>,
    /// Time for which the present step was stopped.
    stopped: Cell<u64>,
    /// Real time of the next step; `u64::MAX` if no step is scheduled.
    scheduled: Cell<u64>,
    /// True once all users of the process have finished.
    pub(super) done: Cell<bool>,
    /// Wakes users when the faults end.
    pub(super) healed: Arc<Notify>,
    /// Present activity of each user.
    pub(super) activities: RefCell<Vec<String>>,
}

/// Tells when a runtime has no task left to poll.
#[derive(Default)]
struct IdleSignal {
    idle: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

impl Process {
    /// A process that does not run.
    pub(super) fn ended(client: usize) -> Self {
        let drift = DriftingClock::new(0, 0);
        Self::build(client, 0, None, IdleSignal::default().into(), Clock::manual().1, drift, 0)
    }

    fn build(
        client: usize,
        life: u32,
        runtime: Option<Runtime>,
        idle: Arc<IdleSignal>,
        clock: ManualClock,
        drift: DriftingClock,
        seed: u64,
    ) -> Self {
        Self {
            client,
            life,
            runtime: RefCell::new(runtime),
            idle,
            clock,
            identity: SimulatedProcess::new(&format!("client-{client}"), seed),
            drift: RefCell::new(drift),
            wall_offset: Cell::new(0),
            paused_until: Cell::new(0),
            stop_after: Cell::new(None),
            stopped: Cell::new(0),
            scheduled: Cell::new(u64::MAX),
            done: Cell::new(false),
            healed: Arc::new(Notify::new()),
            activities: RefCell::default(),
        }
    }

    pub(super) fn is_alive(&self) -> bool {
        self.runtime.borrow().is_some()
    }

    /// Ends the process. What its tasks do while they are dropped has no effect: its connections are closed before.
    pub(super) fn kill(&self) {
        let runtime = self.runtime.borrow_mut().take();
        self.identity.run(|| drop(runtime));
    }

    /// Polls all tasks until none is ready.
    fn run_until_idle(&self) {
        let runtime = self.runtime.borrow();
        let Some(runtime) = &*runtime else { return };
        let idle = &self.idle;
        idle.idle.store(false, Ordering::Relaxed);
        let until_idle = poll_fn(|cx| {
            if idle.idle.load(Ordering::Relaxed) {
                return Poll::Ready(());
            }
            *idle.waker.lock().unwrap_or_else(PoisonError::into_inner) = Some(cx.waker().clone());
            Poll::Pending
        });
        self.identity.run(|| runtime.block_on(until_idle));
    }

    /// Real time of the process: ahead of the world's while it is stopped within a step.
    pub(super) fn real_time(&self, now: u64) -> u64 {
        now + self.stopped.get()
    }

    pub(super) fn local_time(&self) -> Time {
        self.clock.peek()
    }

    pub(super) fn set_activity(&self, user: usize, activity: String) {
        let mut activities = self.activities.borrow_mut();
        if activities.len() <= user {
            activities.resize(user + 1, String::new());
        }
        activities[user] = activity;
    }

    pub(super) fn describe(&self) -> String {
        let state = match (self.is_alive(), self.done.get()) {
            (false, _) => "not running",
            (true, true) => "done",
            (true, false) => "at work",
        };
        format!("client {}: {state} [{}]", self.client, self.activities.borrow().join(", "))
    }
}

impl ProductWorld {
    pub(super) fn start_client(self: &Rc<Self>, client: usize) {
        let last = self.process(client);
        if last.is_alive() {
            return;
        }
        let life = last.life + 1;
        let (clock, manual) = Clock::manual();
        let drift = if life == 1 {
            let mut random = self.random.borrow_mut();
            let ppm = host::drift(self.plan.drift, &mut random);
            DriftingClock::new(1_000_000_000 + random.below(1 << 40), ppm)
        } else {
            last.drift.borrow().clone()
        };
        manual.advance(drift.read(self.now.get()).since(Time::ZERO));
        let idle = Arc::new(IdleSignal::default());
        let signal = Arc::clone(&idle);
        let runtime = Builder::new_current_thread()
            .on_thread_park(move || {
                signal.idle.store(true, Ordering::Relaxed);
                if let Some(waker) =
                    signal.waker.lock().unwrap_or_else(PoisonError::into_inner).take()
                {
                    waker.wake();
                }
            })
            .build()
            .expect("a runtime without drivers can be built");
        manual.stop_after_readings(move || world::with(|world| world.stop_after_reading(client)));
        let seed = self.plan.seed ^ (client as u64 + 1) << 40 ^ u64::from(life) << 48;
        runtime.spawn(work::run_client(client, life, clock, Random::new(seed).bits()));
        let process = Process::build(client, life, Some(runtime), idle, manual, drift, seed ^ 1);
        process.wall_offset.set(last.wall_offset.get());
        self.processes.borrow_mut()[client] = Rc::new(process);
        note!(self, &format!("client {client}"), "starts");
        self.schedule_step(client, self.now.get());
    }

    pub(super) fn schedule_step(&self, client: usize, at: u64) {
        let process = self.process(client);
        let at = at.max(self.now.get()).max(process.paused_until.get());
        if at < process.scheduled.get() {
            process.scheduled.set(at);
            self.schedule(at, WorldEvent::StepClient { client });
        }
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

/// A client's side of a connection.
#[derive(Debug)]
pub(super) struct ClientStream {
    client: usize,
    connection: usize,
}

/// Connects a client to the server.
pub(super) async fn connect(client: usize) -> io::Result<ClientStream> {
    let connection = world::with(|world| {
        let now = world.process(client).real_time(world.now.get());
        world.net.borrow_mut().connect(client, now)
    });
    let stream = ClientStream { client, connection };
    poll_fn(|cx| {
        world::with(|world| {
            let mut net = world.net.borrow_mut();
            let end = net.connections[connection].end_mut(Side::Client);
            match end.state {
                EndState::Connecting => {
                    end.reader = Some(cx.waker().clone());
                    Poll::Pending
                }
                EndState::Open => Poll::Ready(Ok(())),
                _ => Poll::Ready(Err(io::ErrorKind::ConnectionRefused.into())),
            }
        })
    })
    .await
    .map(|()| stream)
}

impl ClientStream {
    fn with<T>(&self, f: impl FnOnce(&mut super::network::Net, u64) -> T) -> T {
        world::with(|world| {
            let now = world.process(self.client).real_time(world.now.get());
            f(&mut world.net.borrow_mut(), now)
        })
    }
}

impl AsyncRead for ClientStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.with(|net, now| {
            let target = buffer.initialize_unfilled();
            match net.read(self.connection, Side::Client, target, now) {
                Some(Ok(read)) => {
                    buffer.advance(read);
                    Poll::Ready(Ok(()))
                }
                Some(Err(error)) => Poll::Ready(Err(error)),
                None => {
                    let end = net.connections[self.connection].end_mut(Side::Client);
                    end.reader = Some(cx.waker().clone());
                    Poll::Pending
                }
            }
        })
    }
}

impl AsyncWrite for ClientStream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.with(|net, now| {
            if let Some(result) = net.write(self.connection, Side::Client, bytes, now) {
                return Poll::Ready(result);
            }
            let end = net.connections[self.connection].end_mut(Side::Client);
            end.writer = Some(cx.waker().clone());
            Poll::Pending
        })
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.with(|net, now| net.finish(self.connection, Side::Client, now));
        Poll::Ready(Ok(()))
    }
}

impl Drop for ClientStream {
    fn drop(&mut self) {
        self.with(|net, now| net.close(self.connection, Side::Client, now));
    }
}
