//! The journal's access to its [`Storage`]: every operation names its file in the error.

use std::io::{self, Read as _};
use std::path::PathBuf;
use std::sync::Arc;

use super::error::JournalError;
use super::storage::{MergeTask, MergeWork, Storage, StorageFile};

/// Storage of a journal. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct Disk(Arc<dyn Storage>);

impl Disk {
    pub(super) fn new(storage: Arc<dyn Storage>) -> Self {
        Self(storage)
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.0.dir().join(name)
    }

    /// Names in the storage, sorted: recovery must not depend on the order in which a file system lists them.
    pub(super) fn names(&self) -> Result<Vec<String>, JournalError> {
        let mut names = self.0.names().map_err(JournalError::io("list", self.0.dir()))?;
        names.sort_unstable();
        Ok(names)
    }

    /// Creates a file of `size` zero bytes.
    pub(super) fn create(
        &self,
        name: &str,
        size: u64,
    ) -> Result<Box<dyn StorageFile>, JournalError> {
        self.0.create(name, size).map_err(|error| JournalError::io("make", &self.path(name))(error))
    }

    /// Opens a file for reading and syncing.
    pub(super) fn open(&self, name: &str) -> Result<Box<dyn StorageFile>, JournalError> {
        self.0.open(name).map_err(|error| JournalError::io("open", &self.path(name))(error))
    }

    /// Content of a file.
    pub(super) fn read(&self, name: &str) -> Result<Vec<u8>, JournalError> {
        let mut bytes = Vec::new();
        let read = self.0.open(name).and_then(|file| FileReader::new(file).read_to_end(&mut bytes));
        read.map_err(|error| JournalError::io("read", &self.path(name))(error))?;
        Ok(bytes)
    }

    #[inline]
    pub(super) fn write(
        &self,
        file: &dyn StorageFile,
        name: &str,
        bytes: &[u8],
        offset: u64,
    ) -> Result<(), JournalError> {
        file.write_all_at(bytes, offset)
            .map_err(|error| JournalError::io("write", &self.path(name))(error))
    }

    /// Makes the content of a file durable.
    pub(super) fn sync(&self, file: &dyn StorageFile, name: &str) -> Result<(), JournalError> {
        file.sync().map_err(|error| JournalError::io("sync", &self.path(name))(error))
    }

    /// Makes created, renamed and removed names durable.
    pub(super) fn sync_names(&self) -> Result<(), JournalError> {
        self.0.sync_names().map_err(JournalError::io("sync", self.0.dir()))
    }

    pub(super) fn rename(&self, from: &str, to: &str) -> Result<(), JournalError> {
        self.0.rename(from, to).map_err(|error| JournalError::io("rename", &self.path(from))(error))
    }

    pub(super) fn remove(&self, name: &str) -> Result<(), JournalError> {
        self.0.remove(name).map_err(|error| JournalError::io("remove", &self.path(name))(error))
    }

    /// Creates an empty quarantine. The files of an earlier crash are removed.
    pub(super) fn empty_quarantine(&self) -> Result<(), JournalError> {
        let path = self.path(super::storage::QUARANTINE_DIR);
        self.0.empty_quarantine().map_err(JournalError::io("empty", &path))
    }

    /// Starts a merge in the background. `name` is that of the new snapshot.
    pub(super) fn spawn_merge(
        &self,
        name: &str,
        merge: MergeWork,
    ) -> Result<Box<dyn MergeTask>, JournalError> {
        let doing = "start a thread to write";
        self.0.spawn_merge(merge).map_err(|error| JournalError::io(doing, &self.path(name))(error))
    }
}

/// Reads a file from its beginning to its end.
#[derive(Debug)]
pub(super) struct FileReader {
    file: Box<dyn StorageFile>,
    offset: u64,
}

impl FileReader {
    pub(super) fn new(file: Box<dyn StorageFile>) -> Self {
        Self { file, offset: 0 }
    }
}

impl io::Read for FileReader {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(bytes, self.offset)?;
        self.offset += read as u64;
        Ok(read)
    }
}
