//! The journal on a storage in memory: nothing in it depends on a file system, on threads or on the order of names.

use std::io;
use std::sync::{Arc, Mutex};

use super::super::storage::{MergeTask, MergeWork, QUARANTINE_DIR, Storage, StorageFile};
use super::super::{CrashCause, LastRun};
use super::faulty::{FaultyStorage, Hook, Op};
use super::*;

type Bytes = Arc<Mutex<Vec<u8>>>;

/// A storage in memory. It merges at once, on the thread of the journal.
#[derive(Debug)]
struct MemoryStorage {
    dir: PathBuf,
    files: Mutex<BTreeMap<String, Bytes>>,
    /// Number of names by which the list of names is rotated: the journal must not rely on its order.
    rotation: usize,
}

#[derive(Debug)]
struct MemoryFile(Bytes);

#[derive(Debug)]
struct FinishedMerge(Result<u64, JournalError>);

impl MemoryStorage {
    fn new(dir: PathBuf, rotation: usize) -> Arc<Self> {
        Arc::new(Self { dir, files: Mutex::default(), rotation })
    }

    fn content(&self, name: &str) -> Vec<u8> {
        self.files.lock().unwrap()[name].lock().unwrap().clone()
    }

    /// Names with this prefix.
    fn only(&self, prefix: &str) -> Vec<String> {
        let files = self.files.lock().unwrap();
        files.keys().filter(|name| name.starts_with(prefix)).cloned().collect()
    }
}

impl Storage for MemoryStorage {
    fn dir(&self) -> &Path {
        &self.dir
    }

    fn names(&self) -> io::Result<Vec<String>> {
        let files = self.files.lock().unwrap();
        let names = files.keys().filter(|name| !name.contains('/'));
        let count = names.clone().count();
        Ok(names.cycle().skip(self.rotation).take(count).cloned().collect())
    }

    fn create(&self, name: &str, size: u64) -> io::Result<Box<dyn StorageFile>> {
        let bytes = Arc::new(Mutex::new(vec![0; usize::try_from(size).unwrap()]));
        self.files.lock().unwrap().insert(name.to_owned(), Arc::clone(&bytes));
        Ok(Box::new(MemoryFile(bytes)))
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn StorageFile>> {
        let files = self.files.lock().unwrap();
        let bytes = files.get(name).ok_or(io::ErrorKind::NotFound)?;
        Ok(Box::new(MemoryFile(Arc::clone(bytes))))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut files = self.files.lock().unwrap();
        let bytes = files.remove(from).ok_or(io::ErrorKind::NotFound)?;
        files.insert(to.to_owned(), bytes);
        Ok(())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.files.lock().unwrap().remove(name);
        Ok(())
    }

    fn sync_names(&self) -> io::Result<()> {
        Ok(())
    }

    fn empty_quarantine(&self) -> io::Result<()> {
        let mut files = self.files.lock().unwrap();
        files.retain(|name, _| !name.starts_with(QUARANTINE_DIR));
        files.insert(QUARANTINE_DIR.to_owned(), Bytes::default());
        Ok(())
    }

    fn spawn_merge(&self, merge: MergeWork) -> io::Result<Box<dyn MergeTask>> {
        Ok(Box::new(FinishedMerge(merge())))
    }
}

impl StorageFile for MemoryFile {
    fn size(&self) -> io::Result<u64> {
        Ok(self.0.lock().unwrap().len() as u64)
    }

    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        let content = self.0.lock().unwrap();
        let rest = content.get(usize::try_from(offset).unwrap()..).unwrap_or_default();
        let length = rest.len().min(bytes.len());
        bytes[..length].copy_from_slice(&rest[..length]);
        Ok(length)
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut content = self.0.lock().unwrap();
        let offset = usize::try_from(offset).unwrap();
        let length = content.len().max(offset + bytes.len());
        content.resize(length, 0);
        content[offset..offset + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

impl MergeTask for FinishedMerge {
    fn is_finished(&self) -> bool {
        true
    }

    fn join(self: Box<Self>) -> std::thread::Result<Result<u64, JournalError>> {
        Ok(self.0)
    }
}

/// Runs 60 turns, enough for several segments and merges. Returns the journal and the model.
fn run_turns(opened: OpenedJournal, now: Time, seed: u64) -> (Journal, ModelServer) {
    let mut server = ModelServer::new(&opened, now, seed);
    let mut journal = opened.journal;
    for _ in 0..60 {
        server.turn(&mut journal);
        journal.commit().unwrap();
        assert!(journal.take_background_error().is_none());
    }
    (journal, server)
}

#[test]
fn a_journal_needs_no_file_system() {
    let folder = temporary();
    let options = small(&folder.path().join("options"));
    let memory = MemoryStorage::new(folder.path().join("memory"), 1);
    let open = |boot, now| Journal::open_on(memory.clone(), &options, boot, now, 0);

    let opened = open(BOOT, START).unwrap();
    assert_eq!(opened.last_run, LastRun::Fresh);
    let (journal, ModelServer { holds, now, .. }) = run_turns(opened, START, 1);
    let [snapshot] = &memory.only("snapshot-")[..] else { panic!("{memory:?}") };
    assert!(**snapshot > *"snapshot-0000000000000005", "merged several times: {snapshot}");
    drop(journal);

    let opened = open(BOOT, now).unwrap();
    assert_eq!((&opened.last_run, by_number(&opened.holds)), (&LastRun::Killed, holds));
    let (journal, ModelServer { holds, now, .. }) = run_turns(opened, now, 2);
    journal.close(now).unwrap();
    assert_eq!((memory.only("journal-").len(), memory.only("snapshot-").len()), (0, 1));

    let opened = open(BOOT, now).unwrap();
    assert_eq!((&opened.last_run, by_number(&opened.holds)), (&LastRun::Clean, holds));
    let (journal, ModelServer { now, .. }) = run_turns(opened, now, 3);
    drop(journal);
    let files = [memory.only("journal-"), memory.only("snapshot-")].concat();
    let contents: Vec<_> = files.iter().map(|name| memory.content(name)).collect();

    let opened = open(OTHER_BOOT, now).unwrap();
    assert_eq!(opened.last_run, LastRun::Crashed(CrashCause::BootChanged));
    assert_eq!(opened.holds, []);
    assert!(opened.embargo_until > Some(now));
    for (name, content) in files.iter().zip(contents) {
        assert_eq!(memory.content(&format!("{QUARANTINE_DIR}/{name}")), content);
    }
    drop(opened.journal);

    // Facts that are lost beside a quarantine are not a fresh start. Messages name the storage, not the options.
    memory.files.lock().unwrap().retain(|name, _| name.starts_with(QUARANTINE_DIR));
    let error = open(OTHER_BOOT, now).unwrap_err();
    assert!(
        matches!(&error, JournalError::Missing { path } if *path == memory.dir.join("facts.a"))
    );
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "the file system was used");
}

/// All operations of four runs with a kill, a clean stop and a crash between them. The instance id is masked.
fn logged_runs(dir: &Path, rotation: usize) -> Vec<String> {
    let log = Arc::new(Mutex::new(Vec::new()));
    let entries = Arc::clone(&log);
    let hook = Hook::new(move |op| {
        let mut op = op;
        let mut masked = Vec::new();
        let masked_op;
        // The facts and all headers have the id at offset 16, and end with a checksum.
        if let Op::Write { file, bytes, offset: 0 } = *op {
            masked.extend_from_slice(bytes);
            masked[16..32].fill(0);
            masked[bytes.len() - 4..].fill(0);
            masked_op = Op::Write { file, bytes: &masked, offset: 0 };
            op = &masked_op;
        }
        entries.lock().unwrap().push(format!("{op:?}"));
        Ok(())
    });
    let memory = MemoryStorage::new(dir.join("memory"), rotation);
    let mut now = START;
    for (boot, seed) in [(BOOT, 1), (BOOT, 2), (BOOT, 3), (OTHER_BOOT, 4)] {
        // Left by a kill, to be removed by the start.
        for name in ["facts.c.tmp", "journal-00000000000000ff.tmp", "snapshot-00000000000000ff.tmp"]
        {
            memory.create(name, 0).unwrap();
        }
        let storage = Arc::new(FaultyStorage::new(memory.clone(), hook.clone()));
        let opened = Journal::open_on(storage, &small(dir), boot, now, 0).unwrap();
        let (journal, server) = run_turns(opened, now, seed);
        now = server.now;
        if seed == 2 {
            journal.close(now).unwrap();
        }
    }
    let entries = log.lock().unwrap();
    entries.clone()
}

#[test]
fn equal_inputs_give_equal_operations() {
    let folder = temporary();
    let first = logged_runs(folder.path(), 0);
    assert!(first.len() > 500, "too short a run to show anything: {}", first.len());
    for rotation in 0..5 {
        assert_eq!(logged_runs(folder.path(), rotation), first);
    }
}
