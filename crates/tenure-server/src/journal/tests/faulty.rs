//! A storage that reports every operation to a hook, which can fail it.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use super::super::storage::{MergeTask, MergeWork, Storage, StorageFile};

/// An operation that is about to be executed. `file` numbers the open files of a storage.
#[derive(Debug)]
pub(super) enum Op<'a> {
    Create { file: usize, name: &'a str, size: u64 },
    Open { file: usize, name: &'a str },
    Write { file: usize, bytes: &'a [u8], offset: u64 },
    Sync { file: usize, name: &'a str },
    SyncNames,
    Rename(&'a str, &'a str),
    Remove(&'a str),
    EmptyQuarantine,
}

/// Function that is called before every operation. An error fails the operation; its value is the number of bytes of a
/// write that are written nevertheless.
#[derive(Clone)]
pub(super) struct Hook(Arc<HookFn>);

type HookFn = dyn Fn(&Op<'_>) -> Result<(), usize> + Send + Sync;

impl Hook {
    pub(super) fn new(hook: impl Fn(&Op<'_>) -> Result<(), usize> + Send + Sync + 'static) -> Self {
        Self(Arc::new(hook))
    }

    fn run(&self, op: &Op<'_>) -> io::Result<()> {
        (self.0)(op).map_err(|_| failure())
    }
}

impl fmt::Debug for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hook")
    }
}

fn failure() -> io::Error {
    io::Error::other("failed by the test")
}

/// A storage whose operations go through a [`Hook`].
#[derive(Debug)]
pub(super) struct FaultyStorage {
    inner: Arc<dyn Storage>,
    hook: Hook,
    files: AtomicUsize,
}

impl FaultyStorage {
    pub(super) fn new(inner: Arc<dyn Storage>, hook: Hook) -> Self {
        Self { inner, hook, files: AtomicUsize::new(0) }
    }

    fn wrap(&self, inner: Box<dyn StorageFile>, number: usize, name: &str) -> Box<dyn StorageFile> {
        Box::new(FaultyFile { inner, number, name: name.to_owned(), hook: self.hook.clone() })
    }
}

impl Storage for FaultyStorage {
    fn dir(&self) -> &Path {
        self.inner.dir()
    }

    fn names(&self) -> io::Result<Vec<String>> {
        self.inner.names()
    }

    fn create(&self, name: &str, size: u64) -> io::Result<Box<dyn StorageFile>> {
        let file = self.files.fetch_add(1, Relaxed);
        self.hook.run(&Op::Create { file, name, size })?;
        Ok(self.wrap(self.inner.create(name, size)?, file, name))
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn StorageFile>> {
        let file = self.files.fetch_add(1, Relaxed);
        self.hook.run(&Op::Open { file, name })?;
        Ok(self.wrap(self.inner.open(name)?, file, name))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.hook.run(&Op::Rename(from, to))?;
        self.inner.rename(from, to)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.hook.run(&Op::Remove(name))?;
        self.inner.remove(name)
    }

    fn sync_names(&self) -> io::Result<()> {
        self.hook.run(&Op::SyncNames)?;
        self.inner.sync_names()
    }

    fn empty_quarantine(&self) -> io::Result<()> {
        self.hook.run(&Op::EmptyQuarantine)?;
        self.inner.empty_quarantine()
    }

    fn spawn_merge(&self, merge: MergeWork) -> io::Result<Box<dyn MergeTask>> {
        self.inner.spawn_merge(merge)
    }
}

/// A file of a [`FaultyStorage`].
#[derive(Debug)]
struct FaultyFile {
    inner: Box<dyn StorageFile>,
    number: usize,
    /// Name by which it was created or opened.
    name: String,
    hook: Hook,
}

impl StorageFile for FaultyFile {
    fn size(&self) -> io::Result<u64> {
        self.inner.size()
    }

    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        self.inner.read_at(bytes, offset)
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        match (self.hook.0)(&Op::Write { file: self.number, bytes, offset }) {
            Ok(()) => self.inner.write_all_at(bytes, offset),
            // Like a real write that was cut short, the failed write leaves its first bytes.
            Err(cut) => {
                self.inner.write_all_at(&bytes[..cut.min(bytes.len())], offset)?;
                Err(failure())
            }
        }
    }

    fn sync(&self) -> io::Result<()> {
        self.hook.run(&Op::Sync { file: self.number, name: &self.name })?;
        self.inner.sync()
    }
}
