//! A claim in a queue: first its place, then its hold.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::FencingToken;

use super::super::{
    Grant, Handle, Hold, HoldEvent, KeepOpen, LeaseStart, Loss, Mode, Place, ReleaseInline,
    Renewed, Waited,
};
use super::format::{Mark, QueueLine};
use super::layout::Folder;
use super::liveness::{self, LivenessLock};
use super::locked_queue::LockedQueue;
use super::notification::{FileEvents, POLL_INTERVAL, Wake, Watch};
use super::queue_file::{AfterLeaving, QueueFile};
use super::{FileShared, PATIENCE};
use crate::{Error, ErrorKind, Result};

/// First pause after the kernel's notification that a seat is being closed; each later pause is twice as long.
const CLOSING: Duration = Duration::from_micros(50);
/// Longest of these pauses.
const SLOWEST: Duration = Duration::from_secs(1);
/// Claims that last less than this usually have no waiter: the queue is then read first, to spare a needless wake-up.
const BRIEF: Duration = Duration::from_micros(50);
/// Time for which a waiter relies on notifications before it reads the queue by itself.
const BACKSTOP: Duration = Duration::from_secs(1);

/// A claim in a queue. When the last reference is dropped, the claim leaves the queue, as if its process had ended.
#[derive(Debug)]
pub(super) struct Standing {
    store: Arc<FileShared>,
    queue: Arc<QueueFile>,
    claim: u128,
    /// Our line, as it was when we joined.
    line: QueueLine,
    wake: Arc<Wake>,
    /// True if a waiter was seen behind us.
    awaited: AtomicBool,
    state: Mutex<StandingState>,
}

#[derive(Debug)]
struct StandingState {
    /// `None` once the claim has left the queue.
    seat: Option<LivenessLock>,
    /// Zero while it waits.
    token: u64,
    /// Time at which it took its promised token, until that is written to the file.
    unsettled: Option<u64>,
    /// Seats of the claims that have to leave first, and their watches.
    watching: Vec<(u64, Option<Watch>)>,
}

/// Result of reading the queue.
enum Turn {
    Granted(Grant),
    /// Claims before us hold or wait.
    Blocked {
        by: Vec<u64>,
        ahead: usize,
        /// True if a change will wake us.
        watched: bool,
        /// True if a watch was added: the queue was read before the watch existed.
        unseen: bool,
    },
    Gone,
}

impl Standing {
    pub(super) fn new(
        store: &Arc<FileShared>,
        queue: &Arc<QueueFile>,
        claim: u128,
        seat: LivenessLock,
        line: QueueLine,
    ) -> Arc<Self> {
        let wake = Arc::clone(&seat.wake);
        let state = StandingState {
            seat: Some(seat),
            token: line.token,
            unsettled: None,
            watching: Vec::new(),
        };
        Arc::new(Self {
            store: Arc::clone(store),
            queue: Arc::clone(queue),
            claim,
            line,
            wake,
            awaited: AtomicBool::new(false),
            state: Mutex::new(state),
        })
    }

    /// Answer with the claim's hold or place; `None` if it has left the queue.
    pub(super) fn answer(self: &Arc<Self>, waiter: bool) -> Option<super::Answer> {
        let token = {
            let state = self.lock();
            state.seat.as_ref()?;
            state.token
        };
        Some(match token {
            0 => super::Answer::Queued(Box::new(FilePlace(Arc::clone(self)))),
            _ => super::Answer::Granted(self.grant(token, waiter)),
        })
    }

    fn grant(self: &Arc<Self>, token: u64, waiter: bool) -> Grant {
        let token = FencingToken::new(0, token);
        self.awaited.store(waiter, Ordering::Relaxed);
        let hold = FileHold { standing: Arc::clone(self), unread: false, told: false };
        Grant {
            token,
            lease_start: LeaseStart::NoLease,
            handoff_requested: waiter,
            grants: None,
            hold: Box::new(hold),
        }
    }

    /// True if one of these lines waits.
    fn is_awaited(&self, lines: &[QueueLine]) -> bool {
        let awaited = lines.iter().any(|line| line.token == 0);
        self.awaited.store(awaited, Ordering::Relaxed);
        awaited
    }

    /// Our line among these.
    fn find(&self, lines: &[QueueLine]) -> Option<QueueLine> {
        let ours = |line: &&QueueLine| line.seq == self.line.seq && line.owner == self.line.owner;
        lines.iter().find(ours).copied()
    }

    /// Checks whether it is our turn, and takes the lock. `called`: only a predecessor's departure woke us. Then our
    /// own seat need not be checked, because its removal would have been notified too.
    fn step(self: &Arc<Self>, inside: &mut LockedQueue<'_>, called: bool) -> Result<Turn> {
        let Some(line) = self.find(inside.lines()) else { return Ok(Turn::Gone) };
        let behind =
            |inside: &LockedQueue<'_>| inside.lines().iter().any(|other| other.seq > self.line.seq);
        let mut state = self.lock();
        if state.token != 0 {
            return Ok(Turn::Granted(self.grant(state.token, behind(inside))));
        }
        // By its promise it held before it noticed, and was evicted from that hold.
        if line.mark != Mark::None {
            return Ok(Turn::Gone);
        }
        let now = self.store.now();
        let sure = |seat: &LivenessLock| (called && seat.is_watched()) || seat.exists(now);
        if !state.seat.as_ref().is_some_and(sure) {
            return Ok(Turn::Gone);
        }
        let FileShared { folder, hub, .. } = &*self.store;
        let mut added = Vec::new();
        let by = blockers(folder, inside, self.line.seq, self.line.mode, |seat| {
            // Watched before the seat is checked: an owner that dies in between wakes us.
            if state.watching.iter().all(|(watched, _)| *watched != seat) {
                let watch =
                    hub.watch(&folder.liveness_file(seat), FileEvents::ChangedOrRead, &self.wake);
                state.watching.push((seat, watch));
                added.push(seat);
            }
        })?;
        if by.is_empty() {
            // The watches are dropped later, when the claim leaves the queue: that would only delay the grant.
            let line = inside.grant(line, now)?;
            state.token = line.token;
            drop(state);
            return Ok(Turn::Granted(self.grant(line.token, behind(inside))));
        }
        let ahead = inside.lines().iter().filter(|other| other.seq < self.line.seq).count();
        state.watching.retain(|(watched, _)| by.contains(watched));
        let watched = state.watching.iter().all(|(_, watch)| watch.is_some());
        let unseen = added.iter().any(|seat| by.contains(seat));
        Ok(Turn::Blocked { by, ahead, watched, unseen })
    }

    /// Takes the promised token if it is our turn. The check that the paths still name our files is left to the first
    /// `look_around` of the hold, which follows at once.
    fn promised(self: &Arc<Self>) -> Option<Grant> {
        let mut state = self.lock();
        let others = match state.seat.as_ref() {
            Some(seat) if seat.is_watched() && state.token == 0 && self.line.promised != 0 => {
                self.queue.is_first(self.line)?
            }
            _ => return None,
        };
        state.token = self.line.promised;
        state.unsettled = Some(self.store.now());
        Some(self.grant(state.token, others))
    }

    /// Writes the start of a promised hold to the file. To be called only after a check that the files are in place.
    fn settle(&self) {
        let mut state = self.lock();
        let (Some(since), Some(_)) = (state.unsettled.take(), &state.seat) else { return };
        let line = QueueLine { token: state.token, since, ..self.line };
        if let Err(error) = self.queue.rewrite(line) {
            tracing::debug!(name: "tenure.settle_failed", key = %self.queue.key, %error);
        }
    }

    async fn turn(self: &Arc<Self>, limit: Duration, called: bool) -> Result<Turn> {
        if called && let Some(grant) = self.promised() {
            return Ok(Turn::Granted(grant));
        }
        let turn = self.store.enter(&self.queue, limit, |inside| self.step(inside, called)).await?;
        let turn = turn.unwrap_or(Turn::Gone);
        if let Turn::Gone = turn {
            self.leave();
        }
        if let (Mode::Slot { .. }, Turn::Granted(Grant { handoff_requested: true, .. })) =
            (self.line.mode, &turn)
        {
            // The next waiter watches our seat while we wait before it. From now on it has to watch the holders: wake
            // it.
            self.call();
        }
        Ok(turn)
    }

    /// Leaves the queue, once, without blocking. True if the hold or place was still ours.
    fn leave(&self) -> bool {
        let (seat, watching) = {
            let mut state = self.lock();
            (state.seat.take(), std::mem::take(&mut state.watching))
        };
        let Some(seat) = seat else { return false };
        let now = self.store.now();
        let current = self.queue.was_current_recently(now) || self.queue.is_current(now);
        // Without its seat a claim counts as dead, and its line may belong to another by now.
        if !current || !seat.existed_recently(now) {
            return false;
        }
        // A claim that was there for a while probably has a waiter.
        let awaited = self.awaited.load(Ordering::Relaxed)
            || Duration::from_nanos(now.saturating_sub(self.line.since)) > BRIEF;
        let index = self.line.index;
        let left = self.queue.blank(index).and_then(|()| {
            // The waiter is woken before anything else is done.
            if awaited {
                seat.wake_waiters();
                return self.queue.was_evicted(index);
            }
            let AfterLeaving { evicted, others } = self.queue.read_after_leaving(index)?;
            if others {
                seat.wake_waiters();
            }
            Ok(evicted)
        });
        // After the wake-up, which this would only delay.
        drop(watching);
        match left {
            Ok(evicted) => {
                self.store.keep(seat);
                !evicted
            }
            Err(error) => {
                // The seat is dropped and so removed instead, by which other processes see that we have left.
                tracing::debug!(name: "tenure.seat_removed", key = %self.queue.key, %error);
                true
            }
        }
    }

    /// Wakes the waiters behind us.
    fn call(&self) {
        if let Some(seat) = &self.lock().seat {
            seat.wake_waiters();
        }
    }

    fn not_held(&self) -> Error {
        Error::new(ErrorKind::NotHeld, "the hold has ended").on(&self.queue.key).at(&self.store)
    }

    fn lock(&self) -> MutexGuard<'_, StandingState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Standing {
    fn drop(&mut self) {
        self.store.forget(self.claim);
        // A forked copy of the process has no claim: what it inherited is its parent's.
        if self.lock().seat.is_some() && self.store.check_process().is_ok() {
            self.leave();
        }
    }
}

impl ReleaseInline for Standing {
    fn release_now(&self) -> bool {
        self.leave()
    }
}

impl KeepOpen for Standing {
    fn keep_open(&self) -> std::io::Result<OwnedFd> {
        match &mut self.lock().seat {
            Some(seat) => seat.duplicate(),
            None => Err(std::io::Error::other("the hold has ended")),
        }
    }
}

/// Seats of the claims that have to leave before a claim of this mode has its turn; empty if it has come. Only those
/// that must be watched are returned, and dead ones are removed.
pub(super) fn blockers(
    folder: &Folder,
    inside: &mut LockedQueue<'_>,
    seq: u64,
    mode: Mode,
    mut watch: impl FnMut(u64),
) -> Result<Vec<u64>> {
    loop {
        let lines = inside.lines();
        let ahead = &lines[..lines.partition_point(|line| line.seq < seq)];
        let last = ahead.len().saturating_sub(1);
        let candidates: Vec<QueueLine> = match mode {
            // As long as the claim directly before us is there, it is not our turn, whatever the others do.
            Mode::Exclusive => ahead[last..].to_vec(),
            Mode::Shared => {
                let exclusive = |line: &&QueueLine| line.mode == Mode::Exclusive;
                ahead.iter().rev().find(exclusive).copied().into_iter().collect()
            }
            Mode::Slot { limit } => {
                let limit = usize::try_from(limit.max(1)).unwrap_or(usize::MAX);
                match ahead.len() {
                    fewer if fewer < limit => Vec::new(),
                    full if full == limit => ahead.to_vec(),
                    // The claim directly before us waits too, and wakes us when it no longer does.
                    _ => ahead[last..].to_vec(),
                }
            }
        };
        let before = inside.lines().len();
        for line in &candidates {
            watch(line.owner);
            if !liveness::is_alive(folder, line.owner) {
                inside.remove(*line)?;
            }
        }
        if inside.lines().len() == before {
            return Ok(candidates.iter().map(|line| line.owner).collect());
        }
    }
}

#[derive(Debug)]
struct FilePlace(Arc<Standing>);

#[async_trait]
impl Place for FilePlace {
    async fn wait(&mut self, limit: Duration) -> Result<Waited> {
        let Self(standing) = self;
        let FileShared { clock, hub, .. } = &*standing.store;
        standing.store.check_process()?;
        let end = clock.now() + limit;
        let (mut blocked, mut pause, mut called) = (Vec::new(), None, false);
        loop {
            // If a predecessor woke us, notifications are being read.
            let read = called || hub.ensure_reader();
            let (by, ahead, watched) = match standing.turn(limit.min(PATIENCE), called).await? {
                Turn::Granted(grant) => return Ok(Waited::Granted(grant)),
                Turn::Gone => return Ok(Waited::Gone),
                // The queue was read before the watch existed: a claim that left in between did not wake us.
                Turn::Blocked { unseen: true, .. } => continue,
                Turn::Blocked { by, ahead, watched, .. } => (by, ahead, watched),
            };
            let now = clock.now();
            if now >= end {
                return Ok(Waited::StillQueued { ahead: Some(ahead) });
            }
            if by != blocked {
                (blocked, pause) = (by, None);
            }
            if standing.wake.take_closed() {
                pause = Some(CLOSING);
            }
            let look = match pause {
                Some(pause) => now + pause,
                None if !watched || !read => now + POLL_INTERVAL,
                None => now + BACKSTOP,
            };
            tokio::select! {
                biased;
                () = standing.wake.notified() => called = !standing.wake.take_changed(),
                () = clock.sleep_until(look.min(end)) => {
                    called = false;
                    pause = pause.map(|pause| (pause * 2).min(SLOWEST));
                }
            }
        }
    }

    async fn abandon(&mut self, _limit: Duration) -> Result<()> {
        self.0.store.check_process()?;
        self.0.leave();
        Ok(())
    }
}

#[derive(Debug)]
struct FileHold {
    standing: Arc<Standing>,
    /// True if a notification has arrived whose cause was not examined yet.
    unread: bool,
    /// True once a hand-off request was reported.
    told: bool,
}

impl FileHold {
    /// Finds the cause of a notification.
    fn look_around(&self) -> Result<Option<HoldEvent>> {
        let Standing { queue, store, .. } = &*self.standing;
        store.check_process()?;
        let now = store.now();
        match self.standing.lock().seat.as_ref().map(|seat| seat.exists(now)) {
            Some(true) if queue.is_current(now) => {}
            Some(_) => return Ok(Some(HoldEvent::Lost(Loss::Taken))),
            // Released by ourselves, or reported already.
            None => return Ok(None),
        }
        let lines = queue.read_lines()?;
        // A claim that was cut off is not listed.
        if self.standing.find(&lines).is_none_or(|line| line.mark != Mark::None) {
            self.standing.leave();
            return Ok(Some(HoldEvent::Lost(Loss::Evicted)));
        }
        self.standing.settle();
        Ok(self.standing.is_awaited(&lines).then_some(HoldEvent::HandoffRequested))
    }
}

#[async_trait]
impl Hold for FileHold {
    async fn renew(&mut self, _ttl: Duration, _limit: Duration) -> Result<Renewed> {
        let Standing { store, queue, .. } = &*self.standing;
        store.check_process()?;
        let now = store.now();
        let there = self.standing.lock().seat.as_ref().is_some_and(|seat| seat.exists(now));
        if !there || !queue.is_current(now) {
            return Err(self.standing.not_held());
        }
        let lines = queue.read_lines()?;
        match self.standing.find(&lines) {
            Some(_) => Ok(Renewed { handoff_requested: self.standing.is_awaited(&lines) }),
            None => Err(self.standing.not_held()),
        }
    }

    async fn check_handoff(&mut self, _limit: Duration) -> Result<bool> {
        Ok(self.standing.is_awaited(&self.standing.queue.read_lines()?))
    }

    async fn event(&mut self) -> HoldEvent {
        let FileShared { clock, hub, .. } = &*Arc::clone(&self.standing.store);
        // Checks that were left out when the promise was taken, so that the grant did not wait for them.
        self.unread |= self.standing.lock().unsettled.is_some();
        loop {
            let watched = self.standing.lock().seat.as_ref().is_some_and(LivenessLock::is_watched);
            let read = hub.ensure_reader() && watched;
            if self.unread {
                match self.look_around() {
                    Ok(Some(HoldEvent::HandoffRequested)) if self.told => {}
                    Ok(Some(event)) => {
                        self.unread = false;
                        self.told = true;
                        return event;
                    }
                    Ok(None) => {}
                    Err(error) => {
                        let key = &self.standing.queue.key;
                        tracing::debug!(name: "tenure.watch_failed", %key, %error);
                        clock.sleep_until(clock.now() + POLL_INTERVAL).await;
                        continue;
                    }
                }
                self.unread = false;
            }
            if read {
                self.standing.wake.notified().await;
            } else {
                clock.sleep_until(clock.now() + POLL_INTERVAL).await;
            }
            self.unread = true;
        }
    }

    async fn release(&mut self, _limit: Duration) -> Result<()> {
        self.standing.store.check_process()?;
        if self.standing.leave() { Ok(()) } else { Err(self.standing.not_held()) }
    }

    fn handle(&self) -> Option<Handle> {
        None
    }

    async fn detach(&mut self, _limit: Duration) -> Result<()> {
        Ok(())
    }

    fn release_inline(&self) -> Option<Weak<dyn ReleaseInline>> {
        let standing: Arc<dyn ReleaseInline> = Arc::clone(&self.standing) as _;
        Some(Arc::downgrade(&standing))
    }

    fn keep_open(&self) -> Option<Weak<dyn KeepOpen>> {
        let standing: Arc<dyn KeepOpen> = Arc::clone(&self.standing) as _;
        Some(Arc::downgrade(&standing))
    }
}
