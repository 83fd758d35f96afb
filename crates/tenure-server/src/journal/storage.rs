//! Storage of a journal: the operations that [`Journal`](super::Journal) needs of a directory of files.
//!
//! [`Journal::open`](super::Journal::open) uses a directory of the file system. A simulator or a test implements
//! [`Storage`] itself, and opens the journal with [`Journal::open_on`](super::Journal::open_on).
//!
//! # Durability
//!
//! The guarantees of the journal hold on every storage that keeps these rules:
//!
//! - **Killed process.** Every operation that has returned survives, synced or not, and the next journal reads its
//!   effect. An operation that was interrupted has happened or has not, with three exceptions. Of a write, the first
//!   bytes may be stored without the rest, never a later byte without the earlier ones. [`Storage::create`] may leave
//!   an empty file. [`Storage::empty_quarantine`] may leave a part of the old files, or no quarantine.
//! - **Crashed machine.** The content of a file is durable if it was written before a [`StorageFile::sync`] that
//!   succeeded. A name, and the removal of a name, is durable if [`Storage::sync_names`] succeeded after it. All other
//!   writes and names may be lost, independently of each other: a name may survive without the content of its file.
//! - **Rename.** At every time, also after a crash, the new name means the whole old file or the whole new file.
//! - **Failed sync.** The content may be lost, although it can still be read. The next sync may succeed nevertheless:
//!   a file system reports such a loss only once.
//! - **Single user.** At most one journal uses the storage at a time. The journal does not check that.
//!
//! Names are relative to the storage. The only ones with a slash are those of files in the [`QUARANTINE_DIR`].

use std::fmt;
use std::io;
use std::path::Path;
use std::thread;

use super::error::JournalError;

/// Name of the directory for files that are no longer trusted, kept for examination.
pub const QUARANTINE_DIR: &str = "quarantine";

/// A directory of files. The [module](self) documents the durability rules.
pub trait Storage: fmt::Debug + Send + Sync {
    /// Path of the storage, for messages only.
    fn dir(&self) -> &Path;

    /// Names of all files outside the quarantine, and of the quarantine itself if it exists, in any order.
    ///
    /// # Errors
    ///
    /// The names cannot be listed.
    fn names(&self) -> io::Result<Vec<String>>;

    /// Creates a file of `size` zero bytes, in place of a file that has the name already. Its space is reserved if the
    /// storage can do that, so that later writes within `size` do not fail for lack of space.
    ///
    /// # Errors
    ///
    /// The file cannot be created. [`io::ErrorKind::StorageFull`] if its space cannot be reserved. An incomplete file
    /// may be left.
    fn create(&self, name: &str, size: u64) -> io::Result<Box<dyn StorageFile>>;

    /// Opens a file for [`size`](StorageFile::size), [`read_at`](StorageFile::read_at) and
    /// [`sync`](StorageFile::sync).
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::NotFound`] if no file has the name.
    fn open(&self, name: &str) -> io::Result<Box<dyn StorageFile>>;

    /// Renames a file. It replaces a file that has the new name already. Open files stay open.
    ///
    /// # Errors
    ///
    /// The file cannot be renamed, and keeps its name.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Removes a file. A file that does not exist is no error.
    ///
    /// # Errors
    ///
    /// The file cannot be removed.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Makes all created, renamed and removed names outside the quarantine durable.
    ///
    /// # Errors
    ///
    /// The names may be lost in a machine crash.
    fn sync_names(&self) -> io::Result<()>;

    /// Creates an empty quarantine. The files of an earlier quarantine are removed.
    ///
    /// # Errors
    ///
    /// The quarantine cannot be created, or some of its files cannot be removed.
    fn empty_quarantine(&self) -> io::Result<()>;

    /// Starts a merge in the background of the journal. It calls the other methods of this storage.
    ///
    /// The merge may run at any time until it is joined: on a thread, at once on the calling thread, or as late as in
    /// [`MergeTask::join`]. The time decides which snapshots and segments a later kill leaves. So a simulator that is
    /// to repeat a run must not leave the time to a thread.
    ///
    /// # Errors
    ///
    /// The merge cannot be started, and is dropped. The journal tries again when its next segment is full.
    fn spawn_merge(&self, merge: MergeWork) -> io::Result<Box<dyn MergeTask>>;
}

/// An open file of a [`Storage`]. It stays usable after a rename, and after its removal.
pub trait StorageFile: fmt::Debug + Send + Sync {
    /// Size of the file in bytes.
    ///
    /// # Errors
    ///
    /// The size cannot be read.
    fn size(&self) -> io::Result<u64>;

    /// Reads bytes at `offset`, and returns their number: 0 only at the end of the file, or if `bytes` is empty.
    ///
    /// # Errors
    ///
    /// The file cannot be read.
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Writes all bytes at `offset`. A write beyond the end lengthens the file.
    ///
    /// # Errors
    ///
    /// Some of the first bytes may have been written.
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Makes the content of the file durable, whichever handle it was written through. Its name is not affected.
    ///
    /// # Errors
    ///
    /// The writes since the last sync may be lost, for good.
    fn sync(&self) -> io::Result<()>;
}

/// Merge of segments into a snapshot. Returns the size of the snapshot.
pub type MergeWork = Box<dyn FnOnce() -> Result<u64, JournalError> + Send>;

/// A merge that [`Storage::spawn_merge`] started. The journal always joins it, at the latest when it is dropped.
pub trait MergeTask: fmt::Debug + Send + Sync {
    /// True if [`join`](Self::join) returns without waiting. A false answer only postpones the next merge.
    fn is_finished(&self) -> bool;

    /// Waits for the merge and returns its result.
    ///
    /// # Errors
    ///
    /// The payload of the panic, if the merge panicked.
    fn join(self: Box<Self>) -> thread::Result<Result<u64, JournalError>>;
}
