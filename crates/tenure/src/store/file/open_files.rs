//! The files that this process has open: liveness locks for the next claims, and the queues of keys.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use tenure_core::Key;

use super::layout::Folder;
use super::liveness::LivenessLock;
use super::locked_queue::{LockAttempt, LockedQueue};
use super::notification::Hub;
use super::queue_file::QueueFile;
use super::system::system_error;
use crate::mutex::Mutex;
use crate::store::{Identity, KeySpace};
use crate::{Clock, Error, ErrorKind, Result};

/// Time to keep trying to lock a queue, if the caller gives no limit.
pub(super) const LOCK_LIMIT: Duration = Duration::from_secs(2);
/// First and longest pause before the next attempt to lock a queue.
pub(super) const FIRST_PAUSE: Duration = Duration::from_micros(50);
pub(super) const LONGEST_PAUSE: Duration = Duration::from_millis(5);
/// Largest number of unused liveness locks that are kept for the next claims.
const MAX_SPARE_LOCKS: usize = 16;
/// Number of open queues from which unused ones are closed.
const MAX_OPEN_QUEUES: usize = 256;

/// Open files of one store.
#[derive(Debug)]
pub(super) struct OpenFiles {
    pub(super) folder: Folder,
    pub(super) hub: Arc<Hub>,
    pub(super) clock: Clock,
    /// Process that opened the store. A forked copy shares its open files, and so its locks.
    pid: u32,
    /// Liveness locks that no claim uses.
    spare: Mutex<Vec<LivenessLock>>,
    queues: Mutex<HashMap<(KeySpace, Key), Arc<QueueFile>>>,
}

impl OpenFiles {
    pub(super) fn new(folder: Folder) -> Self {
        Self {
            folder,
            hub: Hub::new(),
            clock: Clock::system(),
            pid: std::process::id(),
            spare: Mutex::default(),
            queues: Mutex::default(),
        }
    }

    /// Refuses a forked copy of the process that opened the store.
    pub(super) fn check_process(&self) -> Result<()> {
        if std::process::id() == self.pid {
            return Ok(());
        }
        let message = "this is a forked copy of the process that opened the store: open it again";
        Err(Error::new(ErrorKind::NotHeld, message).at(self))
    }

    pub(super) fn now(&self) -> u64 {
        self.clock.now().as_nanos()
    }

    /// Provides the two files of a new claim: its liveness lock, and the queue of its key.
    pub(super) fn for_claim(
        &self,
        by: &Identity,
        key: &Key,
        space: KeySpace,
    ) -> Result<(LivenessLock, Arc<QueueFile>)> {
        let liveness = self.liveness_lock(by)?;
        Ok((liveness, self.queue(key, space)?))
    }

    /// Provides an unused liveness lock, or a new one.
    fn liveness_lock(&self, by: &Identity) -> Result<LivenessLock> {
        let now = self.now();
        let spare = self.spare.lock().pop();
        match spare {
            Some(mut liveness) if liveness.existed_recently(now) => {
                liveness.replace_shared_notifier();
                liveness.write_identity(by)?;
                Ok(liveness)
            }
            _ => match LivenessLock::create(&self.folder, &self.hub, by, now) {
                // The folder was wiped.
                Err(_) if !self.folder.liveness_files().exists() => {
                    self.folder.prepare()?;
                    LivenessLock::create(&self.folder, &self.hub, by, now)
                }
                created => created,
            },
        }
    }

    /// Keeps an unused liveness lock for the next claim.
    pub(super) fn keep(&self, liveness: LivenessLock) {
        if liveness.is_duplicated() {
            return;
        }
        let mut spare = self.spare.lock();
        if spare.len() < MAX_SPARE_LOCKS {
            spare.push(liveness);
        }
    }

    /// True if the queue of a key is open or has a file.
    pub(super) fn has_queue(&self, key: &Key, space: KeySpace) -> bool {
        let is_open = self.queues.lock().contains_key(&(space, key.clone()));
        is_open || self.folder.queue(space, key).exists()
    }

    /// Opens the queue of a key, and creates its file if it is missing.
    pub(super) fn queue(&self, key: &Key, space: KeySpace) -> Result<Arc<QueueFile>> {
        let mut queues = self.queues.lock();
        if let Some(queue) = queues.get(&(space, key.clone())) {
            return Ok(Arc::clone(queue));
        }
        if queues.len() >= MAX_OPEN_QUEUES {
            queues.retain(|_, queue| Arc::strong_count(queue) > 1);
        }
        let path = self.folder.queue(space, key);
        let open = || QueueFile::open(key, space, path.clone(), self.folder.files());
        let opened = match open() {
            Err(Errno::NOENT) => {
                self.folder.prepare()?;
                open()
            }
            opened => opened,
        };
        let queue = Arc::new(opened.map_err(|errno| system_error("open", &path, errno))?);
        queues.insert((space, key.clone()), Arc::clone(&queue));
        Ok(queue)
    }

    /// Runs `act` under the lock of a queue; `None` if the queue's file was removed or moved.
    ///
    /// There is no await after `act`: whatever it wrote, the caller knows.
    pub(super) async fn with_locked<T>(
        &self,
        queue: &QueueFile,
        limit: Duration,
        mut act: impl FnMut(&mut LockedQueue<'_>) -> Result<T>,
    ) -> Result<Option<T>> {
        let mut pause = Duration::ZERO;
        let mut end = None;
        loop {
            match LockedQueue::try_lock(queue, self.now())? {
                LockAttempt::Locked(mut locked) => return act(&mut locked).map(Some),
                LockAttempt::Stale => return Ok(None),
                LockAttempt::Busy => {}
            }
            let now = self.clock.now();
            if now >= *end.get_or_insert(now + limit) && !pause.is_zero() {
                let message = format!(
                    "another process has kept {} locked for {limit:?}: continue or end it if it is stopped",
                    queue.path().display()
                );
                return Err(Error::new(ErrorKind::Unavailable, message).on(&queue.key).at(self));
            }
            if pause.is_zero() {
                tokio::task::yield_now().await;
                pause = FIRST_PAUSE;
            } else {
                self.clock.sleep_until(now + pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
    }

    /// Runs `act` under the lock of a key's queue, which is created again if its file was removed.
    pub(super) async fn with_locked_key<T>(
        &self,
        key: &Key,
        space: KeySpace,
        mut act: impl FnMut(&mut LockedQueue<'_>) -> Result<T>,
    ) -> Result<T> {
        loop {
            let queue = self.queue(key, space)?;
            let done = self.with_locked(&queue, LOCK_LIMIT, &mut act).await?;
            if let Some(done) = done {
                return Ok(done);
            }
            self.forget();
        }
    }

    /// Closes all unused files, after files were removed or moved.
    pub(super) fn forget(&self) {
        self.queues.lock().clear();
        let spare = std::mem::take(&mut *self.spare.lock());
        drop(spare);
    }
}

impl fmt::Display for OpenFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.folder, f)
    }
}
