//! The clock for deadlines: it cannot be set, and it counts the time that the machine was suspended.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, MutexGuard, Once};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tenure_core::Time;

use crate::mutex::Mutex;
use crate::process::PerProcess;

/// Monotonic clock with timers. Cloning is cheap.
///
/// On Linux, [`Clock::system`] reads `CLOCK_BOOTTIME`, and its timers are kernel timers on that clock: when a suspended
/// machine resumes, timers that have become due fire at once. One thread per process serves all timers. It starts with
/// the first timer and sleeps until a timer is due. A forked copy of the process has its own thread and its own kernel
/// timer, even if its clock was created before the fork.
///
/// ```
/// # use std::time::Duration;
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// let clock = tenure::Clock::system();
/// let begun = clock.now();
/// clock.sleep_until(begun + Duration::from_millis(5)).await;
/// assert!(clock.now().since(begun) >= Duration::from_millis(5));
/// # }
/// ```
#[derive(Clone)]
pub struct Clock(ClockSource);

#[derive(Clone)]
enum ClockSource {
    System,
    Manual(Arc<Timers<ManualAlarm>>),
}

impl Clock {
    /// Returns the clock of this machine.
    pub fn system() -> Self {
        Self(ClockSource::System)
    }

    /// Creates a clock for tests. It stands at its origin until [`ManualClock::advance`] moves it.
    pub fn manual() -> (Self, ManualClock) {
        let timers = Arc::new(Timers::new(ManualAlarm::default()));
        (Self(ClockSource::Manual(Arc::clone(&timers))), ManualClock(timers))
    }

    /// Returns the present instant.
    pub fn now(&self) -> Time {
        match &self.0 {
            ClockSource::System => system::now(),
            ClockSource::Manual(timers) => timers.read(),
        }
    }

    /// Waits until `until`; forever if that is [`Time::MAX`]. Time that the machine is suspended counts.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future removes the timer.
    pub fn sleep_until(&self, until: Time) -> Sleep {
        Sleep { clock: self.clone(), until, id: None }
    }

    fn register(&self, until: Time, id: Option<u64>, waker: &Waker) -> u64 {
        match &self.0 {
            ClockSource::System => {
                let served = process_timers();
                let id = served.timers.register(until, id, waker);
                served.thread.call_once(|| system::serve(&served.timers));
                id
            }
            ClockSource::Manual(timers) => timers.register(until, id, waker),
        }
    }

    fn deregister(&self, until: Time, id: u64) {
        let removed = match &self.0 {
            ClockSource::System => process_timers().timers.lock().waiting.remove(&(until, id)),
            ClockSource::Manual(timers) => timers.lock().waiting.remove(&(until, id)),
        };
        drop(removed);
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.0 {
            ClockSource::System => "Clock::system",
            ClockSource::Manual(_) => "Clock::manual",
        })
    }
}

/// Control of a manual clock. See [`Clock::manual`].
#[derive(Clone)]
pub struct ManualClock(Arc<Timers<ManualAlarm>>);

impl ManualClock {
    /// Advances the clock and fires the timers that become due.
    pub fn advance(&self, span: Duration) {
        self.0.advance(span);
    }

    /// Returns the present instant, without a call of the function that
    /// [`stop_after_readings`](Self::stop_after_readings) was given.
    #[cfg(feature = "simulation")]
    pub fn peek(&self) -> Time {
        self.0.lock().alarm.now
    }

    /// Calls `stop` after every reading of the clock, and then advances the clock by its result: as if the process had
    /// been stopped for that long right after it had read its clock.
    #[cfg(feature = "simulation")]
    pub fn stop_after_readings(&self, stop: impl Fn() -> Duration + Send + Sync + 'static) {
        self.0.lock().alarm.stop = Some(Arc::new(stop));
    }

    /// Returns the instant at which the next timer is due.
    pub fn next_timer(&self) -> Option<Time> {
        self.0.lock().waiting.first_key_value().map(|((until, _), _)| *until)
    }
}

impl fmt::Debug for ManualClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ManualClock({:?})", self.0.lock().alarm.now)
    }
}

/// Future that resolves at an instant. See [`Clock::sleep_until`].
#[derive(Debug)]
#[must_use = "a sleep does nothing unless it is awaited"]
pub struct Sleep {
    clock: Clock,
    until: Time,
    id: Option<u64>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.until == Time::MAX {
            return Poll::Pending;
        }
        // Register first, read the clock second: a timer that becomes due in between wakes this task. In the other
        // order the task could find the instant in the future, and register only after the timer thread had passed it.
        let id = self.clock.register(self.until, self.id, cx.waker());
        self.id = Some(id);
        if self.clock.now() >= self.until { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.clock.deregister(self.until, id);
        }
    }
}

/// Timers of this process, and the start of their thread.
struct ProcessTimers {
    timers: Timers<system::SystemAlarm>,
    thread: Once,
}

/// Returns the timers of this process.
///
/// Looked up at every use and never stored in a [`Clock`]: a clock may have been created before a fork. A forked copy
/// must not set the kernel timer of its parent, which it shares: that would delay the timers of the parent.
fn process_timers() -> &'static ProcessTimers {
    static PROCESS_TIMERS: PerProcess<ProcessTimers> = PerProcess::new();
    PROCESS_TIMERS.get_or_init(|| ProcessTimers {
        timers: Timers::new(system::SystemAlarm::new()),
        thread: Once::new(),
    })
}

/// Registered timers: the waker for each instant.
struct Timers<A> {
    state: Mutex<TimerState<A>>,
}

struct TimerState<A> {
    alarm: A,
    waiting: BTreeMap<(Time, u64), Waker>,
    next_id: u64,
}

/// Wake-up source of the timers.
trait Alarm {
    /// Requests a wake-up at `earliest`, unless an earlier wake-up is set.
    fn set(&mut self, earliest: Time);
}

/// Alarm of a manual clock. It does nothing: [`ManualClock::advance`] fires the timers.
#[derive(Default)]
struct ManualAlarm {
    now: Time,
    /// Called after every reading. Returns the time for which the process is then stopped.
    #[cfg(feature = "simulation")]
    stop: Option<Arc<StopFn>>,
}

#[cfg(feature = "simulation")]
type StopFn = dyn Fn() -> Duration + Send + Sync;

impl Alarm for ManualAlarm {
    fn set(&mut self, _earliest: Time) {}
}

impl Timers<ManualAlarm> {
    fn read(&self) -> Time {
        let state = self.lock();
        let now = state.alarm.now;
        #[cfg(feature = "simulation")]
        if let Some(stop) = state.alarm.stop.clone() {
            // Called without the lock: the function may read this clock, or wake tasks that do.
            drop(state);
            self.advance(stop());
        }
        now
    }

    fn advance(&self, span: Duration) {
        if span.is_zero() {
            return;
        }
        let due = {
            let mut state = self.lock();
            state.alarm.now = state.alarm.now + span;
            let now = state.alarm.now;
            state.due(now)
        };
        due.into_iter().for_each(Waker::wake);
    }
}

impl<A: Alarm> Timers<A> {
    fn new(alarm: A) -> Self {
        // Ids differ between processes. A forked copy may drop a `Sleep` that its parent registered: if its own timers
        // had the same ids, that could remove one of them.
        let next_id = u64::from(std::process::id()) << 32;
        Self { state: Mutex::new(TimerState { alarm, waiting: BTreeMap::new(), next_id }) }
    }

    fn lock(&self) -> MutexGuard<'_, TimerState<A>> {
        self.state.lock()
    }

    fn register(&self, until: Time, id: Option<u64>, waker: &Waker) -> u64 {
        let mut state = self.lock();
        let id = id.unwrap_or_else(|| {
            state.next_id += 1;
            state.next_id
        });
        let known = state.waiting.get(&(until, id)).is_some_and(|known| known.will_wake(waker));
        if !known {
            let replaced = state.waiting.insert((until, id), waker.clone());
            state.alarm.set(until);
            // Unlock before the old waker is dropped. It may be the last reference to a task that owns timers, and
            // dropping those takes this lock again: a deadlock.
            drop(state);
            drop(replaced);
        }
        id
    }
}

impl<A> TimerState<A> {
    fn due(&mut self, now: Time) -> Vec<Waker> {
        let mut due = Vec::new();
        while let Some(first) = self.waiting.first_entry() {
            if first.key().0 > now {
                break;
            }
            due.push(first.remove());
        }
        due
    }
}

/// Wakes all tasks, and continues after a waker that panics: this thread serves every timer of the process.
fn wake_each(due: Vec<Waker>) {
    for waker in due {
        let woken = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| waker.wake()));
        if woken.is_err() {
            tracing::error!("a waker panicked; the other timers continue");
        }
    }
}

#[cfg(target_os = "linux")]
mod system {
    //! One timerfd on `CLOCK_BOOTTIME` per process, and a thread that reads it.

    use rustix::fd::OwnedFd;
    use rustix::time::{
        ClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec,
        clock_gettime, timerfd_create, timerfd_settime,
    };
    use tenure_core::Time;

    use super::Timers;

    pub(super) fn now() -> Time {
        let now = clock_gettime(ClockId::Boottime);
        let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
        let nanos = u64::try_from(now.tv_nsec).unwrap_or(0);
        Time::from_nanos(seconds.saturating_mul(NANOS_PER_SECOND).saturating_add(nanos))
    }

    const NANOS_PER_SECOND: u64 = 1_000_000_000;

    /// Kernel timer. Dropping a [`Sleep`](super::Sleep) does not reset it: the thread may then wake once without a due
    /// timer.
    pub(super) struct SystemAlarm {
        fd: std::io::Result<OwnedFd>,
        set_to: Time,
    }

    impl SystemAlarm {
        pub(super) fn new() -> Self {
            let fd = timerfd_create(TimerfdClockId::Boottime, TimerfdFlags::CLOEXEC);
            Self { fd: fd.map_err(Into::into), set_to: Time::MAX }
        }
    }

    impl super::Alarm for SystemAlarm {
        fn set(&mut self, earliest: Time) {
            if earliest >= self.set_to {
                return;
            }
            self.set_to = earliest;
            let Ok(fd) = &self.fd else { return };
            let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
            // A value of 0 would disarm the timer.
            let at = earliest.as_nanos().max(1);
            let it_value = Timespec {
                tv_sec: (at / NANOS_PER_SECOND).try_into().unwrap_or(i64::MAX),
                tv_nsec: (at % NANOS_PER_SECOND).try_into().unwrap_or(0),
            };
            let timer = Itimerspec { it_interval: zero, it_value };
            let set = timerfd_settime(fd, TimerfdTimerFlags::ABSTIME, &timer);
            debug_assert!(set.is_ok(), "cannot set the timer of the clock: {set:?}");
        }
    }

    /// Starts the thread that serves the timers.
    pub(super) fn serve(timers: &'static Timers<SystemAlarm>) {
        let thread = std::thread::Builder::new().name("tenure-clock".to_owned());
        if let Err(error) = thread.spawn(move || run(timers)) {
            tracing::error!(%error, "cannot start the clock thread: lost holds will not be reported");
        }
    }

    fn run(timers: &'static Timers<SystemAlarm>) {
        // A duplicate of the descriptor, which is behind the lock: this thread must not hold the lock while it reads.
        let fd = match &timers.lock().alarm.fd {
            Ok(fd) => fd.try_clone(),
            Err(error) => Err(std::io::Error::new(error.kind(), error.to_string())),
        };
        loop {
            if !wait(fd.as_ref().ok()) {
                // Without a kernel timer, poll the clock.
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            let due = {
                let mut state = timers.lock();
                let due = state.due(now());
                state.alarm.set_to = Time::MAX;
                if let Some((&(next, _), _)) = state.waiting.first_key_value() {
                    super::Alarm::set(&mut state.alarm, next);
                }
                due
            };
            super::wake_each(due);
        }
    }

    fn wait(fd: Option<&OwnedFd>) -> bool {
        let mut expirations = [0; 8];
        fd.is_some_and(|fd| {
            rustix::io::retry_on_intr(|| rustix::io::read(fd, &mut expirations)).is_ok()
        })
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    //! A thread that reads the clock at least once per second, because no kernel timer counts suspended time.

    use std::sync::{Arc, Condvar, PoisonError};
    use std::time::Duration;

    use tenure_core::Time;

    use super::Timers;
    use crate::mutex::Mutex;

    const POLL_INTERVAL: Duration = Duration::from_secs(1);

    #[cfg(unix)]
    pub(super) fn now() -> Time {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
        let nanos = u64::try_from(now.tv_nsec).unwrap_or(0);
        Time::from_nanos(seconds.saturating_mul(1_000_000_000).saturating_add(nanos))
    }

    #[cfg(not(unix))]
    pub(super) fn now() -> Time {
        static ORIGIN: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
        Time::ZERO + ORIGIN.get_or_init(std::time::Instant::now).elapsed()
    }

    pub(super) struct SystemAlarm(Arc<AlarmSignal>);

    struct AlarmSignal {
        earliest: Mutex<Time>,
        changed: Condvar,
    }

    impl SystemAlarm {
        pub(super) fn new() -> Self {
            let (earliest, changed) = (Mutex::new(Time::MAX), Condvar::new());
            Self(Arc::new(AlarmSignal { earliest, changed }))
        }
    }

    impl super::Alarm for SystemAlarm {
        fn set(&mut self, earliest: Time) {
            let mut known = self.0.earliest.lock();
            if earliest < *known {
                *known = earliest;
                self.0.changed.notify_one();
            }
        }
    }

    pub(super) fn serve(timers: &'static Timers<SystemAlarm>) {
        let thread = std::thread::Builder::new().name("tenure-clock".to_owned());
        if let Err(error) = thread.spawn(move || run(timers)) {
            tracing::error!(%error, "cannot start the clock thread: lost holds will not be reported");
        }
    }

    fn run(timers: &'static Timers<SystemAlarm>) {
        let signal = Arc::clone(&timers.lock().alarm.0);
        loop {
            let (due, next) = {
                let mut state = timers.lock();
                let due = state.due(now());
                (due, state.waiting.first_key_value().map_or(Time::MAX, |(&(next, _), _)| next))
            };
            super::wake_each(due);
            let mut earliest = signal.earliest.lock();
            *earliest = (*earliest).min(next);
            let pause = earliest.since(now()).min(POLL_INTERVAL);
            let waited = signal.changed.wait_timeout(earliest, pause);
            *waited.unwrap_or_else(PoisonError::into_inner).0 = Time::MAX;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::Wake;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[tokio::test]
    async fn timers_do_not_fire_early() {
        let clock = Clock::system();
        let begun = clock.now();
        let late = clock.sleep_until(begun + 30 * MS);
        let early = clock.sleep_until(begun + 10 * MS);
        let (late, early) = tokio::join!(
            async {
                late.await;
                clock.now()
            },
            async {
                early.await;
                clock.now()
            }
        );
        assert!(early >= begun + 10 * MS && late >= begun + 30 * MS);
    }

    #[tokio::test]
    async fn a_dropped_timer_is_forgotten_and_later_ones_still_fire() {
        let clock = Clock::system();
        for _ in 0..100 {
            let now = clock.now();
            tokio::select! {
                biased;
                // On a loaded machine, the timer may be due first.
                () = clock.sleep_until(now + 2 * MS) => {}
                () = std::future::ready(()) => {}
            }
        }
        let end = clock.now() + 20 * MS;
        clock.sleep_until(end).await;
        assert!(clock.now() >= end);
    }

    #[tokio::test]
    async fn an_instant_in_the_past_is_due_at_once() {
        Clock::system().sleep_until(Time::ZERO).await;
    }

    struct Panics;

    impl Wake for Panics {
        fn wake(self: Arc<Self>) {
            panic!("on purpose");
        }
    }

    /// A panicking waker of any executor must not stop the `lost` timers of all holds of the process.
    #[tokio::test]
    async fn a_waker_that_panics_stops_no_other_timer() {
        let clock = Clock::system();
        let (fired, woken) = std::sync::mpsc::channel();
        let (bad, good) = (Waker::from(Arc::new(Panics)), Waker::from(Arc::new(Sends(fired))));
        let begun = clock.now();
        let mut first = pin!(clock.sleep_until(begun + 100 * MS));
        let mut second = pin!(clock.sleep_until(begun + 200 * MS));
        assert!(second.as_mut().poll(&mut Context::from_waker(&good)).is_pending());
        assert!(first.as_mut().poll(&mut Context::from_waker(&bad)).is_pending());
        woken.recv_timeout(Duration::from_secs(10)).expect("woken");
    }

    struct Sends(std::sync::mpsc::Sender<()>);

    impl Wake for Sends {
        fn wake(self: Arc<Self>) {
            let _ = self.0.send(());
        }
    }

    /// A waker may be the last reference to a task, and the task may own timers.
    #[test]
    fn a_waker_that_owns_a_timer_can_be_replaced() {
        struct Owns(#[expect(dead_code, reason = "owned to be dropped")] Sleep);
        impl Wake for Owns {
            fn wake(self: Arc<Self>) {}
        }
        let (done, finished) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let (clock, _hand) = Clock::manual();
            let sleep = || clock.sleep_until(Time::ZERO + MS);
            let poll = |sleep: &mut Sleep, waker: &Waker| {
                assert!(Pin::new(sleep).poll(&mut Context::from_waker(waker)).is_pending());
            };
            let (mut owned, mut kept) = (sleep(), sleep());
            poll(&mut owned, Waker::noop());
            poll(&mut kept, &Waker::from(Arc::new(Owns(owned))));
            poll(&mut kept, Waker::noop());
            done.send(()).expect("the test waits");
        });
        finished.recv_timeout(Duration::from_secs(10)).expect("no deadlock");
    }

    #[tokio::test]
    async fn a_manual_clock_moves_only_by_hand() {
        let (clock, hand) = Clock::manual();
        let task = tokio::spawn({
            let clock = clock.clone();
            async move { clock.sleep_until(Time::ZERO + 5 * MS).await }
        });
        tokio::task::yield_now().await;
        assert_eq!(hand.next_timer(), Some(Time::ZERO + 5 * MS));
        hand.advance(4 * MS);
        tokio::task::yield_now().await;
        assert!(!task.is_finished());
        hand.advance(MS);
        task.await.unwrap();
        assert_eq!(clock.now(), Time::ZERO + 5 * MS);
        assert_eq!(hand.next_timer(), None);
    }
}
