//! A claim in a queue: it waits there, then holds, then leaves.
//!
//! An exclusive waiter is *promised* its fencing number when it joins, unless a claim before it has yet to get one. That
//! is the fast path of a hand-over: the next holder neither locks the queue nor writes to it before it runs.
//!
//! ```text
//!                     joins, under the queue's lock
//!                  key free |               | key held
//!                           |               v
//!                           |   +-----------------------+
//!                           |   | WAITING               |  token 0
//!                           |   | promised N, or 0      |
//!                           |   +-----------------------+
//!                           |               | the last claim before it has left
//!                           |               v
//!                           |   +-----------------------+  With a promise, every process reads the line as a hold
//!                           |   | FIRST                 |  with token N from here on, and can evict that hold. Its
//!                           |   | not noticed yet       |  owner does not know yet.
//!                           |   +-----------------------+
//!                           |     |                   |
//!                           |     | `step`: under the | `take_promise`: without the lock, only if a departure woke
//!                           |     | lock, writes the  | it, its own liveness file is watched, and no line before its
//!                           |     | token             | own is in the file
//!                           |     |                   v
//!                           |     |   +-----------------------+
//!                           |     |   | HOLDING, UNSETTLED    |  token N in memory; in the file it is still a promise
//!                           |     |   +-----------------------+
//!                           |     |                   | `settle`: once the paths were seen to name its files, the
//!                           v     v                   v owner writes token and start to its line
//!                     +-----------------------------------+
//!                     | HOLDING                           |  token in the file
//!                     +-----------------------------------+
//!
//!    every state --- `leave`: the owner blanks its line ---> LEFT
//! ```
//!
//! `take_promise` is safe without the lock. No claim can come before one that is in the queue, and a line that is absent
//! is gone for good. So once no line is before ours, none will be.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard, Weak};
use std::time::Duration;

use super::format::{Mark, QueueLine};
use super::liveness::LivenessLock;
use super::locked_queue::LockedQueue;
use super::notification::{FileEvents, Wake, Watch};
use super::open_files::OpenFiles;
use super::queue_file::{AfterLeaving, QueueFile};
use crate::mutex::Mutex;
use crate::store::{KeepOpen, Mode, ReleaseInline};
use crate::{Error, ErrorKind, Result};

/// Claims that last less than this usually have no waiter: the queue is then read first, to spare a needless wake-up.
const BRIEF_CLAIM: Duration = Duration::from_micros(50);

/// A claim in a queue. When the last reference is dropped, the claim leaves the queue, as if its process had ended.
#[derive(Debug)]
pub(super) struct ClaimState {
    pub(super) files: Arc<OpenFiles>,
    pub(super) queue: Arc<QueueFile>,
    claims: Arc<KnownClaims>,
    id: u128,
    /// Our line, as it was when we joined.
    line: QueueLine,
    pub(super) wake: Arc<Wake>,
    /// True if a waiter was seen behind us.
    awaited: AtomicBool,
    progress: Mutex<ClaimProgress>,
}

#[derive(Debug)]
struct ClaimProgress {
    /// `None` once the claim has left the queue.
    liveness: Option<LivenessLock>,
    /// Zero while it waits.
    token: u64,
    /// Time at which it took its promised token, until that is written to the file.
    unsettled: Option<u64>,
    /// Owners of the claims that have to leave first, and their watches.
    watching: Vec<(u64, Option<Watch>)>,
}

/// Result of reading the queue.
pub(super) enum Turn {
    Granted {
        token: u64,
        /// True if another claim waits.
        waiter: bool,
    },
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

impl ClaimState {
    /// Registers a claim whose line was written.
    pub(super) fn new(
        files: &Arc<OpenFiles>,
        claims: &Arc<KnownClaims>,
        queue: Arc<QueueFile>,
        id: u128,
        liveness: LivenessLock,
        line: QueueLine,
    ) -> Arc<Self> {
        let wake = Arc::clone(&liveness.wake);
        let progress = ClaimProgress {
            liveness: Some(liveness),
            token: line.token,
            unsettled: None,
            watching: Vec::new(),
        };
        let state = Arc::new(Self {
            files: Arc::clone(files),
            queue,
            claims: Arc::clone(claims),
            id,
            line,
            wake,
            awaited: AtomicBool::new(false),
            progress: Mutex::new(progress),
        });
        claims.insert(id, &state);
        state
    }

    /// Token of the hold, zero while the claim waits; `None` if it has left the queue.
    pub(super) fn token(&self) -> Option<u64> {
        let progress = self.lock();
        progress.liveness.as_ref().map(|_| progress.token)
    }

    /// Records that a waiter was seen behind us, or that none was.
    pub(super) fn set_awaited(&self, awaited: bool) {
        self.awaited.store(awaited, Ordering::Relaxed);
    }

    /// Our line among these.
    pub(super) fn find(&self, lines: &[QueueLine]) -> Option<QueueLine> {
        let ours = |line: &&QueueLine| line.seq == self.line.seq && line.owner == self.line.owner;
        lines.iter().find(ours).copied()
    }

    /// Checks whether it is our turn, and takes the lock. `called`: only a predecessor's departure woke us.
    pub(super) async fn take_turn(&self, limit: Duration, called: bool) -> Result<Turn> {
        if called && let Some(turn) = self.take_promise() {
            return Ok(turn);
        }
        let turn =
            self.files.with_locked(&self.queue, limit, |queue| self.step(queue, called)).await?;
        let turn = turn.unwrap_or(Turn::Gone);
        if let Turn::Gone = turn {
            self.leave();
        }
        if let (Mode::Slot { .. }, Turn::Granted { waiter: true, .. }) = (self.line.mode, &turn) {
            // The next waiter watches our liveness file while we wait before it. From now on it has to watch the
            // holders: wake it.
            self.wake_waiters();
        }
        Ok(turn)
    }

    /// Takes the promised token if it is our turn. The check that the paths still name our files is left to the first
    /// `look_around` of the hold, which follows at once.
    fn take_promise(&self) -> Option<Turn> {
        let mut progress = self.lock();
        let waiter = match progress.liveness.as_ref() {
            Some(liveness)
                if liveness.is_watched() && progress.token == 0 && self.line.promised != 0 =>
            {
                self.queue.is_first(self.line)?
            }
            _ => return None,
        };
        progress.token = self.line.promised;
        progress.unsettled = Some(self.files.now());
        Some(Turn::Granted { token: progress.token, waiter })
    }

    /// Checks under the queue's lock whether it is our turn, and takes the lock. `called`: only a predecessor's departure
    /// woke us. Then our own liveness file need not be checked, because its removal would have been notified too.
    fn step(&self, queue: &mut LockedQueue<'_>, called: bool) -> Result<Turn> {
        let Some(line) = self.find(queue.lines()) else { return Ok(Turn::Gone) };
        let behind =
            |queue: &LockedQueue<'_>| queue.lines().iter().any(|other| other.seq > self.line.seq);
        let mut progress = self.lock();
        if progress.token != 0 {
            return Ok(Turn::Granted { token: progress.token, waiter: behind(queue) });
        }
        // By its promise it held before it noticed, and was evicted from that hold.
        if line.mark != Mark::None {
            return Ok(Turn::Gone);
        }
        let now = self.files.now();
        let sure =
            |liveness: &LivenessLock| (called && liveness.is_watched()) || liveness.exists(now);
        if !progress.liveness.as_ref().is_some_and(sure) {
            return Ok(Turn::Gone);
        }
        let OpenFiles { folder, hub, .. } = &*self.files;
        let mut added = Vec::new();
        let by = queue.blockers(folder, self.line.seq, self.line.mode, |owner| {
            // Watched before the owner is checked: an owner that dies in between wakes us.
            if progress.watching.iter().all(|(watched, _)| *watched != owner) {
                let path = folder.liveness_file(owner);
                let watch = hub.watch(&path, FileEvents::ChangedOrRead, &self.wake);
                progress.watching.push((owner, watch));
                added.push(owner);
            }
        })?;
        if by.is_empty() {
            // The watches are dropped later, when the claim leaves the queue: that would only delay the grant.
            let line = queue.grant(line, now)?;
            progress.token = line.token;
            return Ok(Turn::Granted { token: line.token, waiter: behind(queue) });
        }
        let ahead = queue.lines().iter().filter(|other| other.seq < self.line.seq).count();
        progress.watching.retain(|(watched, _)| by.contains(watched));
        let watched = progress.watching.iter().all(|(_, watch)| watch.is_some());
        let unseen = added.iter().any(|owner| by.contains(owner));
        Ok(Turn::Blocked { by, ahead, watched, unseen })
    }

    /// True if the start of the hold is not yet in the file.
    pub(super) fn is_unsettled(&self) -> bool {
        self.lock().unsettled.is_some()
    }

    /// Writes the start of a promised hold to the file. To be called only after a check that the files are in place.
    pub(super) fn settle(&self) {
        let mut progress = self.lock();
        let (Some(since), Some(_)) = (progress.unsettled.take(), &progress.liveness) else {
            return;
        };
        let line = QueueLine { token: progress.token, since, ..self.line };
        if let Err(error) = self.queue.rewrite(line) {
            tracing::debug!(name: "tenure.settle_failed", key = %self.queue.key, %error);
        }
    }

    /// True if notifications about our own liveness file arrive.
    pub(super) fn is_watched(&self) -> bool {
        self.lock().liveness.as_ref().is_some_and(LivenessLock::is_watched)
    }

    /// True if our liveness file exists; `None` if the claim has left the queue.
    pub(super) fn is_alive(&self, now: u64) -> Option<bool> {
        self.lock().liveness.as_ref().map(|liveness| liveness.exists(now))
    }

    /// Leaves the queue, once, without blocking. True if the hold or place was still ours.
    pub(super) fn leave(&self) -> bool {
        let (liveness, watching) = {
            let mut progress = self.lock();
            (progress.liveness.take(), std::mem::take(&mut progress.watching))
        };
        let Some(liveness) = liveness else { return false };
        let now = self.files.now();
        let current = self.queue.was_current_recently(now) || self.queue.is_current(now);
        // Without its liveness file a claim counts as dead, and its line may belong to another by now.
        if !current || !liveness.existed_recently(now) {
            return false;
        }
        // A claim that was there for a while probably has a waiter.
        let awaited = self.awaited.load(Ordering::Relaxed)
            || Duration::from_nanos(now.saturating_sub(self.line.since)) > BRIEF_CLAIM;
        let index = self.line.index;
        let left = self.queue.blank(index).and_then(|()| {
            // The waiter is woken before anything else is done.
            if awaited {
                liveness.wake_waiters();
                return self.queue.was_evicted(index);
            }
            let AfterLeaving { evicted, others } = self.queue.read_after_leaving(index)?;
            if others {
                liveness.wake_waiters();
            }
            Ok(evicted)
        });
        // After the wake-up, which this would only delay.
        drop(watching);
        match left {
            Ok(evicted) => {
                self.files.keep(liveness);
                !evicted
            }
            Err(error) => {
                // The liveness file is dropped and so removed instead, by which other processes see that we have left.
                tracing::debug!(name: "tenure.seat_removed", key = %self.queue.key, %error);
                true
            }
        }
    }

    /// Wakes the waiters behind us.
    fn wake_waiters(&self) {
        if let Some(liveness) = &self.lock().liveness {
            liveness.wake_waiters();
        }
    }

    pub(super) fn not_held(&self) -> Error {
        Error::new(ErrorKind::NotHeld, "the hold has ended").on(&self.queue.key).at(&self.files)
    }

    fn lock(&self) -> MutexGuard<'_, ClaimProgress> {
        self.progress.lock()
    }
}

impl Drop for ClaimState {
    fn drop(&mut self) {
        self.claims.forget(self.id);
        // A forked copy of the process has no claim: what it inherited is its parent's.
        if self.lock().liveness.is_some() && self.files.check_process().is_ok() {
            self.leave();
        }
    }
}

impl ReleaseInline for ClaimState {
    fn release_now(&self) -> bool {
        self.leave()
    }
}

impl KeepOpen for ClaimState {
    fn keep_open(&self) -> std::io::Result<OwnedFd> {
        match &mut self.lock().liveness {
            Some(liveness) => liveness.duplicate(),
            None => Err(std::io::Error::other("the hold has ended")),
        }
    }
}

/// Claims of this process by their ids, so that a repeated claim finds its hold or place.
#[derive(Debug, Default)]
pub(super) struct KnownClaims(Mutex<HashMap<u128, Weak<ClaimState>>>);

impl KnownClaims {
    pub(super) fn find(&self, id: u128) -> Option<Arc<ClaimState>> {
        self.lock().get(&id)?.upgrade()
    }

    fn insert(&self, id: u128, state: &Arc<ClaimState>) {
        self.lock().insert(id, Arc::downgrade(state));
    }

    /// Removes a claim without references. A repeated claim may have taken its id by now.
    fn forget(&self, id: u128) {
        if let Entry::Occupied(entry) = self.lock().entry(id)
            && entry.get().strong_count() == 0
        {
            entry.remove();
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u128, Weak<ClaimState>>> {
        self.0.lock()
    }
}
