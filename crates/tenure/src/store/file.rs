//! The file store: locks between the processes of one host, kept by the kernel, without a daemon.
//!
//! Each key has a file, which lists its holders and waiters. Each holder and waiter has a *seat*, a file that its
//! process keeps locked. The kernel drops that lock when the process ends, however it ends, and notifies the processes
//! that watch the seat. So a dead holder's lock is free within milliseconds, waiters are woken in order of arrival, and
//! no process polls.
//!
//! ```text
//! locks/reports%2fnightly     the last fencing number, and a line per holder and waiter
//! semaphores/…                the same for semaphores
//! marks/…                     notes on a key that outlive processes
//! seats/8c1f0d6e5a7b9c21      locked by its owner as long as the owner lives; contains the owner's identity
//! ```

mod examine;
mod format;
#[cfg(target_os = "linux")]
mod inotify;
mod layout;
mod liveness;
mod locked_queue;
mod marks;
mod names;
mod notification;
#[cfg(not(target_os = "linux"))]
mod polling;
mod queue_file;
mod standing;
mod system;
mod wake;

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use rustix::io::Errno;
use tenure_core::{FencingToken, Key};

use self::format::{MAX_LINES, Mark, QueueLine};
use self::layout::{Folder, MAX_FILES_READ, Options};
use self::liveness::LivenessLock;
use self::locked_queue::{LockAttempt, LockedQueue};
use self::names::key_of_file;
use self::notification::{FileEvents, Hub, MAX_WATCHED, POLL_INTERVAL, Wake};
use self::queue_file::{QueueFile as Waiting, key_in};
use self::standing::{Standing, blockers};
use self::system::{names_in, system_error};
use super::{
    Answer, Capabilities, Claim, Contended, DurableNotes, Finding, Handle, Handoff, Hold,
    HolderState, Identity, KeySpace, KeyState, Liveness, Mode, QueueKind, Store, Version,
    WaiterState, unsupported,
};
use crate::{Clock, Error, ErrorKind, Result};

/// Time to keep trying to enter a queue, if the caller gives no limit.
const PATIENCE: Duration = Duration::from_secs(2);
/// First and longest pause before the next attempt to enter a queue.
const PAUSES: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(5));
/// Time that an evicted holder has to release by itself.
const GRACE: Duration = Duration::from_millis(250);
/// Largest number of unused seats that are kept for the next claims.
const SPARE: usize = 16;
/// Number of open key files from which unused ones are closed.
const OPEN: usize = 256;
/// Largest number of holders and waiters that are shown per key.
const SHOWN: usize = 1_000;
/// Largest number of keys that one call lists.
const LISTED: usize = 1_000;

/// Locks between the processes of this host, in a folder. A clone is the same store.
///
/// `file:` keeps them in `$TENURE_DIR`, else in `/var/lib/tenure` for root and `/var/tmp/tenure-UID` for other users.
/// `file:PATH` keeps them in that folder. A missing folder is created, for its user alone. `file:PATH?shared` admits
/// the other users that the folder's permissions admit. A network file system is refused, because file locks do not
/// exclude on many of them; `file:PATH?network` uses it anyway.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
/// # let folder = std::env::temp_dir().join(format!("tenure-doc-{}", std::process::id()));
/// let store = tenure::FileStore::open(&folder)?;
/// let client = tenure::Client::with_store(std::sync::Arc::new(store));
/// let guard = client.lock("reports/nightly").try_acquire().await?;
/// assert!(client.lock("reports/nightly").try_acquire().await.is_err());
/// guard.release().await?;
/// # std::fs::remove_dir_all(folder).ok();
/// # Ok(()) }
/// ```
///
/// A hold lasts until it is released or its process ends. The ttl only sets how often the store checks that the folder
/// was not removed or moved. A program that the process starts neither keeps nor releases the hold: descriptors are
/// closed on exec. A forked copy of the process cannot use or release the hold. But it shares the open files, so that
/// the lock of a killed parent stays held until the copy ends too.
#[derive(Clone)]
pub struct FileStore(Arc<FileShared>);

impl FileStore {
    /// Opens the store in a folder, for this user alone.
    ///
    /// # Errors
    ///
    /// `Denied` if the folder cannot be created, written to or trusted.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::build(path.as_ref(), Options::default())
    }

    /// Opens the store of a URL, given the part after `file:`.
    pub(crate) fn parse(rest: &str) -> Result<Self> {
        let (path, options) = Folder::parse(rest)?;
        Self::build(&path, options)
    }

    fn build(path: &Path, options: Options) -> Result<Self> {
        let folder = Folder::open(path, options)?;
        liveness::remove_dead(&folder)?;
        Ok(Self(Arc::new(FileShared {
            folder,
            hub: Hub::new(),
            clock: Clock::system(),
            pid: std::process::id(),
            spare: Mutex::default(),
            queues: Mutex::default(),
            claims: Mutex::default(),
        })))
    }
}

impl fmt::Display for FileStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Debug for FileStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

#[async_trait]
impl Store for FileStore {
    /// Only for the default folder: a user that names another folder knows where it is.
    fn creation_notice(&self) -> Option<String> {
        let folder = &self.0.folder;
        let said = format!("locks in {} hold for this host, this user", folder.path().display());
        (folder.is_new() && folder.path() == Folder::by_default()).then_some(said)
    }

    fn durable_notes(&self) -> Option<&dyn DurableNotes> {
        Some(self)
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            queue: QueueKind::Fifo,
            liveness: Liveness::Session,
            push: true,
            handoff: Handoff::Pushed,
            shared: true,
            semaphore: true,
            detached: false,
            list: true,
            identities: true,
            evict: true,
            ordered_tokens: true,
            min_ttl: Duration::from_millis(1),
        }
    }

    async fn claim(&self, claim: &Claim, limit: Duration) -> Result<Answer> {
        let at = |error: Error| error.on(&claim.key).at(self);
        self.0.check_process().map_err(at)?;
        if claim.detached {
            return Err(unsupported(self, "keep a hold without its process").on(&claim.key));
        }
        if let Some(answer) = self.0.again(claim) {
            return Ok(answer);
        }
        self.0.claim(claim, limit).await.map_err(at)
    }

    async fn resume(&self, key: &Key, _handle: &Handle) -> Result<Box<dyn Hold>> {
        Err(unsupported(self, "keep a hold without its process").on(key))
    }

    async fn changed(&self, key: &Key, space: KeySpace, since: Version) -> Result<()> {
        let FileShared { folder, hub, clock, .. } = &*self.0;
        let wake = Arc::<Wake>::default();
        loop {
            let read = hub.ensure_reader();
            let queue = self.0.queue(key, space)?;
            // Watched before it is read: a change in between wakes us.
            let mut watches = vec![hub.watch(queue.path(), FileEvents::ChangedOrWritten, &wake)];
            let lines =
                self.0.enter(&queue, PATIENCE, |inside| Ok(inside.lines().to_vec())).await?;
            for line in lines.iter().flatten().take(MAX_WATCHED) {
                watches.push(hub.watch(
                    &folder.liveness_file(line.owner),
                    FileEvents::Changed,
                    &wake,
                ));
            }
            if self.inspect(key, space).await?.version != since {
                return Ok(());
            }
            if read && watches.iter().all(Option::is_some) && !wake.take_closed() {
                wake.notified().await;
            } else {
                clock.sleep_until(clock.now() + POLL_INTERVAL).await;
            }
        }
    }

    async fn inspect(&self, key: &Key, space: KeySpace) -> Result<KeyState> {
        let shown = self.0.inspect(key, space).await;
        shown.map_err(|error| error.on(key).at(self))
    }

    async fn list(
        &self,
        space: KeySpace,
        prefix: &str,
        after: Option<&str>,
    ) -> Result<Vec<KeyState>> {
        let folder = self.0.folder.queues(space);
        let mut keys = BTreeSet::new();
        for name in names_in(&folder, MAX_FILES_READ).map_err(|error| error.at(self))? {
            let long = || key_in(&folder.join(std::str::from_utf8(&name).ok()?), space);
            let key = key_of_file(&name).or_else(long);
            keys.extend(key.filter(|key| {
                key.as_str().starts_with(prefix) && after.is_none_or(|after| key.as_str() > after)
            }));
        }
        let mut listed = Vec::new();
        for key in keys {
            let state = self.inspect(&key, space).await?;
            if !state.holders.is_empty() || !state.waiters.is_empty() {
                listed.push(state);
            }
            if listed.len() == LISTED {
                break;
            }
        }
        Ok(listed)
    }

    async fn evict(&self, key: &Key, token: FencingToken, reason: &str) -> Result<()> {
        let at = |error: Error| error.on(key).at(self);
        self.0.check_process().map_err(at)?;
        for space in [KeySpace::Lock, KeySpace::Semaphore] {
            if token.epoch() == 0 && self.0.evict(key, space, token.number()).await.map_err(at)? {
                tracing::info!(name: "tenure.evicted", %key, store = %self, %token, reason);
                return Ok(());
            }
        }
        let message =
            format!("no hold has the token {token}: see `tenure status` for the present holder");
        Err(at(Error::new(ErrorKind::NotHeld, message)))
    }

    async fn examine(&self, limit: Duration) -> Vec<Finding> {
        let mut findings = super::examine::basics(self, limit).await;
        findings.extend(examine::findings(&self.0.folder));
        findings
    }

    async fn close(&self) {
        self.0.forget_files();
    }
}

/// Outcome of adding a claim to a queue.
enum Joined {
    As {
        line: QueueLine,
        /// True if another claim waits.
        waiter: bool,
        /// Seats of the holders to notify of a hand-off request.
        tell: Vec<u64>,
    },
    Not(Contended),
}

#[derive(Debug)]
struct FileShared {
    folder: Folder,
    hub: Arc<Hub>,
    clock: Clock,
    /// Process that opened the store. A forked copy shares its open files, and so its locks.
    pid: u32,
    spare: Mutex<Vec<LivenessLock>>,
    queues: Mutex<HashMap<(KeySpace, Key), Arc<Waiting>>>,
    claims: Mutex<HashMap<u128, Weak<Standing>>>,
}

impl FileShared {
    fn now(&self) -> u64 {
        self.clock.now().as_nanos()
    }

    fn check_process(&self) -> Result<()> {
        if std::process::id() == self.pid {
            return Ok(());
        }
        let message = "this is a forked copy of the process that opened the store: open it again";
        Err(Error::new(ErrorKind::NotHeld, message).at(self))
    }

    /// Answer to a repeated claim: its hold or place, if it still has one.
    fn again(&self, claim: &Claim) -> Option<Answer> {
        let standing = lock(&self.claims).get(&claim.id)?.upgrade()?;
        standing.answer(false)
    }

    fn forget(&self, claim: u128) {
        if let Entry::Occupied(entry) = lock(&self.claims).entry(claim)
            && entry.get().strong_count() == 0
        {
            entry.remove();
        }
    }

    async fn claim(self: &Arc<Self>, claim: &Claim, limit: Duration) -> Result<Answer> {
        let space = claim.mode.space();
        loop {
            let seat = self.seat(&claim.by)?;
            let queue = self.queue(&claim.key, space)?;
            // No await between writing the line and creating its `Standing`: a future that is dropped in between would
            // leave a line that this process never removes.
            let joined =
                self.enter(&queue, limit, |inside| self.join(claim, seat.name, inside)).await;
            let (line, waiter, tell) = match joined {
                Ok(Some(Joined::As { line, waiter, tell })) => (line, waiter, tell),
                Ok(Some(Joined::Not(busy))) => {
                    self.keep(seat);
                    return Ok(Answer::Contended(busy));
                }
                Ok(None) => {
                    self.forget_files();
                    continue;
                }
                Err(error) => {
                    self.keep(seat);
                    return Err(error);
                }
            };
            let standing = Standing::new(self, &queue, claim.id, seat, line);
            lock(&self.claims).insert(claim.id, Arc::downgrade(&standing));
            for seat in tell {
                liveness::touch(&self.folder, seat);
            }
            return standing.answer(waiter).ok_or_else(|| {
                Error::new(ErrorKind::Unavailable, "the place was lost at once: try again")
            });
        }
    }

    /// Adds a claim to a queue, unless the key is held and the claim does not wait.
    fn join(&self, claim: &Claim, seat: u64, inside: &mut LockedQueue<'_>) -> Result<Joined> {
        self.fits(inside, claim.mode)?;
        for line in inside.cut_off().to_vec() {
            if !liveness::is_alive(&self.folder, line.owner) {
                inside.remove(line)?;
            }
        }
        let free = blockers(&self.folder, inside, u64::MAX, claim.mode, |_| {})?.is_empty();
        if !free && !claim.queue {
            return Ok(Joined::Not(self.busy(inside)));
        }
        let waiter = inside.lines().iter().any(|line| line.token == 0);
        // The first waiter notifies the holders. A holder that is granted later learns of waiters with its grant.
        let told = inside.lines().iter().filter(|_| !free && !waiter);
        let tell = told.map(|line| line.owner).take(MAX_WATCHED).collect();
        let line = inside.add(seat, claim.mode, free, self.now())?;
        Ok(Joined::As { line, waiter, tell })
    }

    /// Refuses a semaphore of another size than the one in use.
    fn fits(&self, inside: &mut LockedQueue<'_>, mode: Mode) -> Result<()> {
        let others: Vec<_> =
            inside.lines().iter().filter(|line| line.mode != mode).copied().collect();
        let Mode::Slot { limit } = mode else { return Ok(()) };
        for line in others {
            if liveness::is_alive(&self.folder, line.owner) {
                let Mode::Slot { limit: used } = line.mode else { continue };
                let message = format!(
                    "the semaphore is in use with {used} slots, not {limit}: use the same number, or wait until it \
                     is free"
                );
                return Err(Error::new(ErrorKind::Invalid, message));
            }
            inside.remove(line)?;
        }
        Ok(())
    }

    fn busy(&self, inside: &LockedQueue<'_>) -> Contended {
        let lines = inside.lines();
        let mut holders = lines.iter().filter(|line| line.token != 0);
        let holder = holders.find_map(|line| liveness::identity_of(&self.folder, line.owner));
        Contended { holder, version: seen(lines), retry_after: None, note: None }
    }

    async fn inspect(&self, key: &Key, space: KeySpace) -> Result<KeyState> {
        let mut state = KeyState {
            key: key.clone(),
            space,
            holders: vec![],
            waiters: vec![],
            version: seen(&[]),
        };
        let path = self.folder.queue(space, key);
        if !self.is_open(key, space) && !path.exists() {
            return Ok(state);
        }
        let now = self.now();
        let shown = self.enter_key(key, space, |inside| {
            let mut shown = Vec::new();
            for line in inside.lines().to_vec() {
                if shown.len() < SHOWN {
                    if liveness::is_alive(&self.folder, line.owner) {
                        shown.push((line, liveness::identity_of(&self.folder, line.owner)));
                    } else {
                        inside.remove(line)?;
                    }
                }
            }
            Ok((shown, seen(inside.lines())))
        });
        let (shown, seen) = shown.await?;
        state.version = seen;
        for (line, by) in shown {
            let since = Some(Duration::from_nanos(now.saturating_sub(line.since)));
            if line.token == 0 {
                state.waiters.push(WaiterState { by, waited_for: since });
            } else {
                let token = FencingToken::new(0, line.token);
                let holder =
                    HolderState { by, token, held_for: since, lease_left: None, revision: None };
                state.holders.push(holder);
            }
        }
        state.holders.sort_by_key(|holder| holder.token);
        Ok(state)
    }

    /// Breaks the hold with this token; false if no hold has it.
    async fn evict(&self, key: &Key, space: KeySpace, token: u64) -> Result<bool> {
        if token == 0 || (!self.is_open(key, space) && !self.folder.queue(space, key).exists()) {
            return Ok(false);
        }
        let queue = self.queue(key, space)?;
        let marked = self.enter(&queue, PATIENCE, |inside| {
            let line = inside.lines().iter().find(|line| line.token == token).copied();
            line.map_or(Ok(()), |line| inside.mark(line, Mark::Evicted))?;
            Ok(line)
        });
        let Some(line) = marked.await?.flatten() else { return Ok(false) };
        liveness::touch(&self.folder, line.owner);
        let end = self.clock.now() + GRACE;
        let mut pause = PAUSES.0;
        while self.clock.now() < end {
            let gone = !queue.read_lines()?.iter().any(|other| other.seq == line.seq);
            if gone {
                return Ok(true);
            }
            self.clock.sleep_until(self.clock.now() + pause).await;
            pause = (pause * 2).min(PAUSES.1);
        }
        let cut_off = self.enter(&queue, PATIENCE, |inside| {
            let still = inside.lines().iter().find(|other| other.seq == line.seq).copied();
            still.map_or(Ok(()), |line| inside.mark(line, Mark::CutOff))
        });
        cut_off.await?;
        liveness::touch(&self.folder, line.owner);
        Ok(true)
    }

    /// Provides a seat for a claim: an unused one, or a new one.
    fn seat(&self, by: &Identity) -> Result<LivenessLock> {
        let now = self.now();
        let spare = lock(&self.spare).pop();
        match spare {
            Some(mut seat) if seat.existed_recently(now) => {
                seat.replace_shared_notifier();
                seat.write_identity(by)?;
                Ok(seat)
            }
            _ => match LivenessLock::create(&self.folder, &self.hub, by, now) {
                // The folder was wiped.
                Err(_) if !self.folder.liveness_files().exists() => {
                    self.folder.prepare()?;
                    LivenessLock::create(&self.folder, &self.hub, by, now)
                }
                made => made,
            },
        }
    }

    /// Keeps an unused seat for the next claim.
    fn keep(&self, seat: LivenessLock) {
        if seat.is_duplicated() {
            return;
        }
        let mut spare = lock(&self.spare);
        if spare.len() < SPARE {
            spare.push(seat);
        }
    }

    fn is_open(&self, key: &Key, space: KeySpace) -> bool {
        lock(&self.queues).contains_key(&(space, key.clone()))
    }

    /// Opens the queue of a key, and creates its file if it is missing.
    fn queue(&self, key: &Key, space: KeySpace) -> Result<Arc<Waiting>> {
        let mut queues = lock(&self.queues);
        if let Some(queue) = queues.get(&(space, key.clone())) {
            return Ok(Arc::clone(queue));
        }
        if queues.len() >= OPEN {
            queues.retain(|_, queue| Arc::strong_count(queue) > 1);
        }
        let path = self.folder.queue(space, key);
        let open = || Waiting::open(key, space, path.clone(), self.folder.files());
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

    /// Runs `act` inside the queue of a key, which is created again if its file was removed.
    async fn enter_key<T>(
        &self,
        key: &Key,
        space: KeySpace,
        mut act: impl FnMut(&mut LockedQueue<'_>) -> Result<T>,
    ) -> Result<T> {
        loop {
            let queue = self.queue(key, space)?;
            let done = self.enter(&queue, PATIENCE, &mut act).await?;
            if let Some(done) = done {
                return Ok(done);
            }
            self.forget_files();
        }
    }

    /// Drops all cached files, after files were removed or moved.
    fn forget_files(&self) {
        lock(&self.queues).clear();
        let spare = std::mem::take(&mut *lock(&self.spare));
        drop(spare);
    }

    /// Runs `act` inside a queue; `None` if the queue's file was removed or moved.
    async fn enter<T>(
        &self,
        queue: &Waiting,
        limit: Duration,
        mut act: impl FnMut(&mut LockedQueue<'_>) -> Result<T>,
    ) -> Result<Option<T>> {
        let mut pause = Duration::ZERO;
        let mut end = None;
        loop {
            match LockedQueue::try_lock(queue, self.now())? {
                LockAttempt::Locked(mut inside) => return act(&mut inside).map(Some),
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
                pause = PAUSES.0;
            } else {
                self.clock.sleep_until(now + pause).await;
                pause = (pause * 2).min(PAUSES.1);
            }
        }
    }
}

impl fmt::Display for FileShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.folder, f)
    }
}

/// Version of the holders and waiters.
fn seen(lines: &[QueueLine]) -> Version {
    let lines: Vec<_> = lines.iter().take(MAX_LINES).map(|line| (line.seq, line.token)).collect();
    // Versions are compared within this process only: any hasher without a random seed will do.
    Version(BuildHasherDefault::<DefaultHasher>::default().hash_one(lines).into())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
