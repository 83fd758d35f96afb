//! The simulated disk of the server: files in memory, of which a machine crash keeps only what was synced, and a random
//! part of the rest.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenure_core::Random;

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

    /// Names of all files.
    pub(super) fn names(&self) -> Vec<String> {
        self.lock().names.keys().cloned().collect()
    }

    /// Creates an empty file, in place of a file that has the name already. Returns the number of the file.
    pub(super) fn create(&self, name: &str) -> io::Result<usize> {
        let mut state = self.lock();
        if state.full {
            state.was_full = true;
            return Err(ErrorKind::StorageFull.into());
        }
        state.files.push(FileState::default());
        let number = state.files.len() - 1;
        state.change_names(vec![(name.to_owned(), Some(number))]);
        Ok(number)
    }

    /// Fills a new file with zero bytes.
    pub(super) fn reserve(&self, number: usize, size: usize) {
        self.lock().files[number].content = vec![0; size];
    }

    /// Number of the file with this name.
    pub(super) fn find(&self, name: &str) -> io::Result<usize> {
        Ok(*self.lock().names.get(name).ok_or(ErrorKind::NotFound)?)
    }

    pub(super) fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut state = self.lock();
        let number = *state.names.get(from).ok_or(ErrorKind::NotFound)?;
        state.change_names(vec![(to.to_owned(), Some(number)), (from.to_owned(), None)]);
        Ok(())
    }

    pub(super) fn remove(&self, name: &str) {
        self.lock().change_names(vec![(name.to_owned(), None)]);
    }

    pub(super) fn sync_names(&self) {
        let mut state = self.lock();
        state.synced_names = state.names.clone();
        state.changed_names.clear();
    }

    pub(super) fn size(&self, number: usize) -> usize {
        self.lock().files[number].content.len()
    }

    pub(super) fn read_at(&self, number: usize, bytes: &mut [u8], offset: usize) -> usize {
        let state = self.lock();
        let content = &state.files[number].content;
        let offset = offset.min(content.len());
        let count = bytes.len().min(content.len() - offset);
        bytes[..count].copy_from_slice(&content[offset..offset + count]);
        count
    }

    /// Writes the first `written` bytes. The disk must have space for all of them.
    pub(super) fn write_at(
        &self,
        number: usize,
        bytes: &[u8],
        written: usize,
        offset: usize,
    ) -> io::Result<()> {
        let mut state = self.lock();
        let DiskState { files, full, was_full, .. } = &mut *state;
        let file = &mut files[number];
        if *full && offset + bytes.len() > file.content.len() {
            *was_full = true;
            return Err(ErrorKind::StorageFull.into());
        }
        file.content.resize(file.content.len().max(offset + written), 0);
        file.content[offset..offset + written].copy_from_slice(&bytes[..written]);
        file.unsynced.push((offset, written));
        Ok(())
    }

    pub(super) fn sync(&self, number: usize) {
        let mut state = self.lock();
        let file = &mut state.files[number];
        file.synced.clone_from(&file.content);
        file.unsynced.clear();
    }

    fn lock(&self) -> MutexGuard<'_, DiskState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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
