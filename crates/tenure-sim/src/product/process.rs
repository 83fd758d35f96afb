//! A client process: a runtime of its own, and a drifting clock.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};

use tenure::simulation::SimulatedProcess;
use tenure::{Clock, ManualClock};
use tenure_core::Time;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::Notify;

use crate::clock::Clock as DriftingClock;

/// A client process.
pub(super) struct Process {
    pub(super) client: usize,
    /// Number of this process among those of its client.
    pub(super) life: u32,
    /// `None` once the process has ended.
    runtime: RefCell<Option<Runtime>>,
    idle: Arc<IdleSignal>,
    pub(super) clock: ManualClock,
    identity: SimulatedProcess,
    /// Clock of the process's machine.
    pub(super) drift: RefCell<DriftingClock>,
    pub(super) wall_offset: Cell<i64>,
    /// Real time until which the process is stopped.
    pub(super) paused_until: Cell<u64>,
    /// Number of readings of the clock after which the process is stopped, and for how long.
    pub(super) stop_after: Cell<Option<(u64, u64)>>,
    /// Time for which the present step was stopped.
    pub(super) stopped: Cell<u64>,
    /// Real time of the next step; `u64::MAX` if no step is scheduled.
    pub(super) scheduled: Cell<u64>,
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

    /// Starts a process, and returns its clock. `seed` decides its ids.
    pub(super) fn start(
        client: usize,
        life: u32,
        drift: DriftingClock,
        seed: u64,
        now: u64,
    ) -> (Self, Clock) {
        let (clock, manual) = Clock::manual();
        manual.advance(drift.read(now).since(Time::ZERO));
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
        (Self::build(client, life, Some(runtime), idle, manual, drift, seed), clock)
    }

    /// Adds a task, which the next step polls.
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.runtime.borrow().as_ref().expect("the process runs").spawn(task);
    }

    /// Notes that the process has a step at this time. Returns true if no earlier step is noted.
    pub(super) fn schedule_step(&self, at: u64) -> bool {
        let earlier = at < self.scheduled.get();
        if earlier {
            self.scheduled.set(at);
        }
        earlier
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
    pub(super) fn run_until_idle(&self) {
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
