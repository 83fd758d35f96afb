//! The storage under the server's journal: the simulated disk, with faults between two operations.

use std::io;
use std::path::Path;
use std::thread;

use tenure_server::journal::JournalError;
use tenure_server::journal::storage::{MergeTask, MergeWork, QUARANTINE_DIR, Storage, StorageFile};

use super::disk::SimulatedDisk;
use super::plan::ServerPoint;
use super::server_faults::{end_server, server_operation, server_write};

/// Storage of the server.
#[derive(Debug)]
pub(super) struct ServerDisk(pub(super) SimulatedDisk);

impl ServerDisk {
    fn file(&self, number: usize) -> Box<dyn StorageFile> {
        Box::new(ServerFile { disk: self.0.clone(), number })
    }
}

impl Storage for ServerDisk {
    fn dir(&self) -> &Path {
        Path::new("data")
    }

    fn names(&self) -> io::Result<Vec<String>> {
        let mut names = self.0.names();
        names.retain(|name| !name.contains('/'));
        Ok(names)
    }

    fn create(&self, name: &str, size: u64) -> io::Result<Box<dyn StorageFile>> {
        server_operation(ServerPoint::Disk);
        let size = usize::try_from(size).map_err(io::Error::other)?;
        let number = self.0.create(name)?;
        // A kill in the middle leaves an empty file.
        server_operation(ServerPoint::Disk);
        self.0.reserve(number, size);
        Ok(self.file(number))
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn StorageFile>> {
        Ok(self.file(self.0.find(name)?))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        server_operation(ServerPoint::Disk);
        self.0.rename(from, to)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        server_operation(ServerPoint::Disk);
        self.0.remove(name);
        Ok(())
    }

    fn sync_names(&self) -> io::Result<()> {
        server_operation(ServerPoint::Disk);
        self.0.sync_names();
        Ok(())
    }

    fn empty_quarantine(&self) -> io::Result<()> {
        server_operation(ServerPoint::Disk);
        let names = self.0.names().into_iter();
        for name in names.filter(|name| name.starts_with(QUARANTINE_DIR)) {
            self.0.remove(&name);
            // A kill in the middle leaves the other files.
            server_operation(ServerPoint::Disk);
        }
        Ok(())
    }

    fn spawn_merge(&self, merge: MergeWork) -> io::Result<Box<dyn MergeTask>> {
        // At once, so that the run is repeatable. The merge is interrupted by kills like any other operation.
        Ok(Box::new(FinishedMerge(merge())))
    }
}

#[derive(Debug)]
struct ServerFile {
    disk: SimulatedDisk,
    number: usize,
}

impl StorageFile for ServerFile {
    fn size(&self) -> io::Result<u64> {
        Ok(self.disk.size(self.number) as u64)
    }

    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        let offset = usize::try_from(offset).map_err(io::Error::other)?;
        Ok(self.disk.read_at(self.number, bytes, offset))
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let offset = usize::try_from(offset).map_err(io::Error::other)?;
        // A kill in the middle of a write leaves its first bytes.
        let before = server_write(bytes.len());
        self.disk.write_at(self.number, bytes, before.unwrap_or(bytes.len()), offset)?;
        if before.is_some() {
            end_server();
        }
        server_operation(ServerPoint::Disk);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        server_operation(ServerPoint::Disk);
        self.disk.sync(self.number);
        Ok(())
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
