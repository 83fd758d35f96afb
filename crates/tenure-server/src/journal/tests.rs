//! Tests that need the journal's internals: a failure after every disk operation, and every damage to every file.

mod crashes;
mod damage;
mod faulty;
mod machine;
mod memory;
mod reserve;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;
use tenure_core::table::Mode;
use tenure_core::{LockToken, Time};

use self::faulty::{FaultyStorage, Hook};
use super::directory::DataDirectory;
use super::{Journal, JournalError, JournalOptions, OpenedJournal, RestoredHold};

const BOOT: &str = "boot one";
const OTHER_BOOT: &str = "boot two";
const START: Time = Time::from_nanos(1_000_000_000_000);

/// Temporary directory, in memory if possible: these tests sync thousands of times.
fn temporary() -> TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap()
}

fn small(dir: &Path) -> JournalOptions {
    JournalOptions { segment_bytes: 700, ..JournalOptions::new(dir) }
}

fn open_with(
    options: &JournalOptions,
    hook: Option<Hook>,
    boot: &str,
    now: Time,
) -> Result<OpenedJournal, JournalError> {
    let Some(hook) = hook else { return Journal::open(options, boot, now, 0) };
    let directory = Arc::new(DataDirectory::open(&options.dir)?);
    Journal::open_on(Arc::new(FaultyStorage::new(directory, hook)), options, boot, now, 0)
}

/// Holds by fencing number.
type Holds = BTreeMap<u64, RestoredHold>;

fn by_number(holds: &[RestoredHold]) -> Holds {
    holds.iter().map(|hold| (hold.token.number(), hold.clone())).collect()
}

/// Deterministic random numbers.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 33).unwrap() % limit
    }
}

/// A model of a server: makes random changes, and knows the expected holds.
struct ModelServer {
    dice: Dice,
    now: Time,
    next_number: u64,
    holds: Holds,
    /// True if some notes are longer than a segment.
    long_notes: bool,
}

impl ModelServer {
    fn new(opened: &OpenedJournal, now: Time, seed: u64) -> Self {
        let (next_number, holds) = (opened.next_number, by_number(&opened.holds));
        Self { dice: Dice(seed * 2 + 1), now, next_number, holds, long_notes: false }
    }

    /// Records the changes of one turn. The clock advances, but no lease expires.
    fn turn(&mut self, journal: &mut Journal) {
        self.now = self.now + Duration::from_millis(10);
        for _ in 0..=self.dice.below(4) {
            match self.dice.below(3) {
                0 if !self.holds.is_empty() => {
                    let number = self.any();
                    self.holds.remove(&number);
                    journal.ended(number);
                }
                1 if !self.holds.is_empty() => {
                    let number = self.any();
                    let (lease, ends) = self.lease();
                    self.holds.get_mut(&number).unwrap().ends = ends;
                    journal.renewed(number, lease, ends);
                }
                _ => self.grant(journal),
            }
        }
    }

    fn grant(&mut self, journal: &mut Journal) {
        let token = LockToken::new(self.next_number, self.dice.0);
        self.next_number += 1;
        let mode = [Mode::Exclusive, Mode::Shared, Mode::Slot { limit: 7 }][self.dice.below(3)];
        let (lease, ends) = self.lease();
        let key = vec![b'k'; self.dice.below(20) + 1];
        let long = self.long_notes && self.dice.below(5) == 0;
        let note = vec![b'n'; if long { 900 } else { self.dice.below(10) }];
        journal.granted(&key, mode, token, lease, ends, &note);
        let hold = RestoredHold { key: key.into(), mode, token, ends, note: note.into() };
        self.holds.insert(token.number(), hold);
    }

    fn any(&mut self) -> u64 {
        let at = self.dice.below(self.holds.len());
        *self.holds.keys().nth(at).unwrap()
    }

    /// Random lease, mostly short, so that a longer one raises the bound from time to time.
    fn lease(&mut self) -> (Duration, Time) {
        let lease = Duration::from_secs(20 << self.dice.below(3));
        (lease, self.now + lease)
    }
}

/// The files of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Image(BTreeMap<String, Vec<u8>>);

impl Image {
    fn of(dir: &Path) -> Self {
        let entries = std::fs::read_dir(dir).unwrap().map(Result::unwrap);
        let files = entries.filter(|entry| entry.path().is_file() && entry.file_name() != "pid");
        let name = |path: PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
        Self(files.map(|file| (name(file.path()), std::fs::read(file.path()).unwrap())).collect())
    }

    /// Restores the directory to this image.
    fn put(&self, dir: &Path) {
        let _ = std::fs::remove_dir_all(dir);
        std::fs::create_dir(dir).unwrap();
        for (name, bytes) in &self.0 {
            std::fs::write(dir.join(name), bytes).unwrap();
        }
    }

    fn only(&self, prefix: &str) -> Vec<String> {
        self.0.keys().filter(|name| name.starts_with(prefix)).cloned().collect()
    }
}
