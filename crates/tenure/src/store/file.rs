//! The file store: locks between the processes of one host, kept by the kernel, without a daemon.
//!
//! Each key has a file, which lists its holders and waiters. Each holder and waiter has a *liveness lock*, on a file that
//! its process keeps locked. The kernel drops that lock when the process ends, however it ends, and notifies the
//! processes that watch the file. So a dead holder's lock is free within milliseconds, waiters are woken in order of
//! arrival, and no process polls.
//!
//! ```text
//! locks/reports%2fnightly     the last fencing number, and a line per holder and waiter
//! semaphores/…                the same for semaphores
//! marks/…                     notes on a key that outlive processes
//! seats/8c1f0d6e5a7b9c21      locked by its owner as long as the owner lives; contains the owner's identity
//! ```
//!
//! The modules are layers. Each imports only modules of the lines below it, or further right in its own line:
//!
//! ```text
//! file                                          the store
//! join, evict, examine, notes                   its operations
//! place, inspect                                the wait of a claim; views
//! hold                                          the hold of a claim
//! claim                                         the state of a claim: waits, holds, has left
//! open_files                                    the files that this process has open
//! locked_queue, queue_file                      the queue of a key, with its order of turns
//! liveness                                      the liveness lock
//! notification, inotify or polling, wake        notifications of the kernel
//! layout, format, names, system                 paths, bytes, names, system calls
//! ```

mod claim;
mod evict;
mod examine;
mod format;
mod hold;
#[cfg(target_os = "linux")]
mod inotify;
mod inspect;
mod join;
mod layout;
mod liveness;
mod locked_queue;
mod names;
mod notes;
mod notification;
mod open_files;
mod place;
#[cfg(not(target_os = "linux"))]
mod polling;
mod queue_file;
mod system;
mod wake;

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::{FencingToken, Key};

use self::claim::KnownClaims;
use self::layout::{Folder, Options};
use self::open_files::OpenFiles;
use super::{
    Answer, Capabilities, Claim, DurableNotes, Finding, Handle, Handoff, Hold, KeySpace, KeyState,
    Liveness, QueueKind, Store, Version, unsupported,
};
use crate::{Error, ErrorKind, Result};

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
pub struct FileStore {
    files: Arc<OpenFiles>,
    claims: Arc<KnownClaims>,
}

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
        Ok(Self { files: Arc::new(OpenFiles::new(folder)), claims: Arc::default() })
    }
}

impl fmt::Display for FileStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.files, f)
    }
}

impl fmt::Debug for FileStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.files, f)
    }
}

#[async_trait]
impl Store for FileStore {
    /// Only for the default folder: a user that names another folder knows where it is.
    fn creation_notice(&self) -> Option<String> {
        let folder = &self.files.folder;
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
        self.files.check_process().map_err(at)?;
        if claim.detached {
            return Err(unsupported(self, "keep a hold without its process").on(&claim.key));
        }
        join::join(&self.files, &self.claims, claim, limit).await.map_err(at)
    }

    async fn resume(&self, key: &Key, _handle: &Handle) -> Result<Box<dyn Hold>> {
        Err(unsupported(self, "keep a hold without its process").on(key))
    }

    async fn changed(&self, key: &Key, space: KeySpace, since: Version) -> Result<()> {
        inspect::changed(&self.files, key, space, since).await
    }

    async fn inspect(&self, key: &Key, space: KeySpace) -> Result<KeyState> {
        inspect::inspect(&self.files, key, space).await
    }

    async fn list(
        &self,
        space: KeySpace,
        prefix: &str,
        after: Option<&str>,
    ) -> Result<Vec<KeyState>> {
        inspect::list(&self.files, space, prefix, after).await
    }

    async fn evict(&self, key: &Key, token: FencingToken, reason: &str) -> Result<()> {
        let at = |error: Error| error.on(key).at(self);
        self.files.check_process().map_err(at)?;
        for space in [KeySpace::Lock, KeySpace::Semaphore] {
            if token.epoch() == 0
                && evict::evict(&self.files, key, space, token.number()).await.map_err(at)?
            {
                tracing::info!(name: "tenure.evicted", %key, store = %self, %token, reason);
                return Ok(());
            }
        }
        let message =
            format!("no hold has the token {token}: see `tenure status` for the present holder");
        Err(at(Error::new(ErrorKind::NotHeld, message)))
    }

    async fn examine(&self, _limit: Duration) -> Vec<Finding> {
        examine::findings(&self.files.folder)
    }

    async fn close(&self) {
        self.files.forget();
    }
}

#[async_trait]
impl DurableNotes for FileStore {
    async fn read(&self, key: &Key) -> Result<Option<String>> {
        notes::read(&self.files.folder, key).map_err(|error| error.on(key).at(self))
    }

    async fn write(&self, key: &Key, text: &str) -> Result<()> {
        notes::write(&self.files.folder, key, text).map_err(|error| error.on(key).at(self))
    }

    async fn list(&self, prefix: &str) -> Result<Vec<String>> {
        notes::list(&self.files.folder, prefix).map_err(|error| error.at(self))
    }
}
