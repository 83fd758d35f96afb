//! The simulated disk of the server: files in memory, of which a machine crash keeps only what was synced, and a random
//! part of the rest.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use tenure_core::Random;
use tenure_server::journal::JournalError;
use tenure_server::journal::storage::{MergeTask, MergeWork, QUARANTINE_DIR, Storage, StorageFile};

use super::host;
use super::plan::ServerPoint;

/// A disk. Clones are the same disk.
#[derive(Clone, Debug)]
pub(super) struct SimulatedDisk(Arc<Mutex<DiskState>>);

#[derive(Debug, Default)]
struct DiskState {
    files: Vec<FileState>,
    names: BTreeMap<String, usize>,
    synced_names: BTreeMap<String, usize>,
    /// Changes of names since the last sync, in order.
    changed_names: Vec<NameChange>,
    full: bool,
    /// The disk was full when a program wrote to it.
    was_full: bool,
}

/// Change of one name, or of two by a rename: the new file of a name, or `None` if it was removed.
type NameChange = Vec<(String, Option<usize>)>;

/// A file: its content as programs see it, and the changes that are not durable.
#[derive(Clone, Debug, Default)]
struct FileState {
    content: Vec<u8>,
    synced: Vec<u8>,
    /// Writes since the last sync: offset and length.
    unsynced: Vec<(usize, usize)>,
}

impl SimulatedDisk {
    pub(super) fn new() -> Self {
        Self(Arc::default())
    }

    pub(super) fn set_full(&self, full: bool) {
        self.lock().full = full;
    }

    /// Takes the note that a program was told of a full disk.
    pub(super) fn was_full(&self) -> bool {
        std::mem::take(&mut self.lock().was_full)
    }

    /// Loses what was not synced, except for a random part of it.
    pub(super) fn crash(&self, random: &mut Random) {
        let mut state = self.lock();
        let DiskState { files, names, synced_names, changed_names, .. } = &mut *state;
        *names = std::mem::take(synced_names);
        for (name, file) in changed_names.drain(..).filter(|_| random.chance(0.5)).flatten() {
            match file {
                Some(file) => names.insert(name, file),
                None => names.remove(&name),
            };
        }
        *synced_names = names.clone();
        for file in files {
            let mut content = std::mem::take(&mut file.synced);
            // Pages are written back in any order, each write as a whole or in part.
            for (offset, length) in file.unsynced.drain(..) {
                let length = match random.below(3) {
                    0 => continue,
                    1 => length,
                    _ => usize::try_from(random.below(length as u64 + 1)).unwrap_or(0),
                };
                content.resize(content.len().max(offset + length), 0);
                content[offset..offset + length]
                    .copy_from_slice(&file.content[offset..offset + length]);
            }
            file.content.clone_from(&content);
            file.synced = content;
        }
    }

    fn lock(&self) -> MutexGuard<'_, DiskState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Storage for SimulatedDisk {
    fn dir(&self) -> &Path {
        Path::new("data")
    }

    fn names(&self) -> io::Result<Vec<String>> {
        let state = self.lock();
        let outside = state.names.keys().filter(|name| !name.contains('/'));
        Ok(outside.cloned().collect())
    }

    fn create(&self, name: &str, size: u64) -> io::Result<Box<dyn StorageFile>> {
        host::server_operation(ServerPoint::Disk);
        let mut state = self.lock();
        if state.full {
            state.was_full = true;
            return Err(ErrorKind::StorageFull.into());
        }
        let size = usize::try_from(size).map_err(io::Error::other)?;
        state.files.push(FileState::default());
        let number = state.files.len() - 1;
        state.change_names(vec![(name.to_owned(), Some(number))]);
        drop(state);
        // A kill in the middle leaves an empty file.
        host::server_operation(ServerPoint::Disk);
        self.lock().files[number].content = vec![0; size];
        Ok(Box::new(SimulatedFile { disk: self.clone(), number }))
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn StorageFile>> {
        let number = *self.lock().names.get(name).ok_or(ErrorKind::NotFound)?;
        Ok(Box::new(SimulatedFile { disk: self.clone(), number }))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        host::server_operation(ServerPoint::Disk);
        let mut state = self.lock();
        let number = *state.names.get(from).ok_or(ErrorKind::NotFound)?;
        state.change_names(vec![(to.to_owned(), Some(number)), (from.to_owned(), None)]);
        Ok(())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        host::server_operation(ServerPoint::Disk);
        self.lock().change_names(vec![(name.to_owned(), None)]);
        Ok(())
    }

    fn sync_names(&self) -> io::Result<()> {
        host::server_operation(ServerPoint::Disk);
        let mut state = self.lock();
        state.synced_names = state.names.clone();
        state.changed_names.clear();
        Ok(())
    }

    fn empty_quarantine(&self) -> io::Result<()> {
        host::server_operation(ServerPoint::Disk);
        let inside: Vec<String> = {
            let state = self.lock();
            let names = state.names.keys();
            names.filter(|name| name.starts_with(QUARANTINE_DIR)).cloned().collect()
        };
        for name in inside {
            self.lock().change_names(vec![(name, None)]);
            // A kill in the middle leaves the other files.
            host::server_operation(ServerPoint::Disk);
        }
        Ok(())
    }

    fn spawn_merge(&self, merge: MergeWork) -> io::Result<Box<dyn MergeTask>> {
        // At once, so that the run is repeatable. The merge is interrupted by kills like any other operation.
        Ok(Box::new(FinishedMerge(merge())))
    }
}

impl DiskState {
    fn change_names(&mut self, change: NameChange) {
        for (name, file) in &change {
            match file {
                Some(file) => self.names.insert(name.clone(), *file),
                None => self.names.remove(name),
            };
        }
        self.changed_names.push(change);
    }
}

#[derive(Debug)]
struct FinishedMerge(Result<u64, JournalError>);

impl MergeTask for FinishedMerge {
    fn is_finished(&self) -> bool {
        true
    }

    fn join(self: Box<Self>) -> thread::Result<Result<u64, JournalError>> {
        Ok(self.0)
    }
}

#[derive(Debug)]
struct SimulatedFile {
    disk: SimulatedDisk,
    number: usize,
}

impl StorageFile for SimulatedFile {
    fn size(&self) -> io::Result<u64> {
        Ok(self.disk.lock().files[self.number].content.len() as u64)
    }

    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        let state = self.disk.lock();
        let content = &state.files[self.number].content;
        let offset = usize::try_from(offset).map_err(io::Error::other)?.min(content.len());
        let count = bytes.len().min(content.len() - offset);
        bytes[..count].copy_from_slice(&content[offset..offset + count]);
        Ok(count)
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let offset = usize::try_from(offset).map_err(io::Error::other)?;
        // A kill in the middle of a write leaves its first bytes.
        let before = host::server_write(bytes.len());
        let mut state = self.disk.lock();
        let DiskState { files, full, was_full, .. } = &mut *state;
        let file = &mut files[self.number];
        if *full && offset + bytes.len() > file.content.len() {
            *was_full = true;
            return Err(ErrorKind::StorageFull.into());
        }
        let written = before.unwrap_or(bytes.len());
        file.content.resize(file.content.len().max(offset + written), 0);
        file.content[offset..offset + written].copy_from_slice(&bytes[..written]);
        file.unsynced.push((offset, written));
        drop(state);
        if before.is_some() {
            host::end_server();
        }
        host::server_operation(ServerPoint::Disk);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        host::server_operation(ServerPoint::Disk);
        let mut state = self.disk.lock();
        let file = &mut state.files[self.number];
        file.synced.clone_from(&file.content);
        file.unsynced.clear();
        Ok(())
    }
}
