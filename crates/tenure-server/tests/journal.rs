//! The data directory from outside: what comes back after every kind of end, and what is refused.
#![expect(clippy::unwrap_used, reason = "a test that fails says where")]

mod skip;

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasherDefault, DefaultHasher};
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;
use tenure_core::table::{
    ClaimAnswer, LockTable, Mode, OnDisconnect, TableClaim, TableConfig, TableEvent,
};
use tenure_core::{LockToken, Time};
use tenure_server::journal::{
    CrashCause, Journal, JournalError, JournalOptions, LastRun, OpenedJournal, RestoredHold,
};

const START: Time = Time::from_nanos(1_000_000_000_000);
const WALL: u64 = 1_700_000_000_000_000;

fn temporary() -> TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap()
}

fn small(dir: impl Into<PathBuf>) -> JournalOptions {
    JournalOptions { segment_bytes: 4096, ..JournalOptions::new(dir) }
}

fn open(options: &JournalOptions, boot: &str, now: Time) -> OpenedJournal {
    Journal::open(options, boot, now, WALL).unwrap_or_else(|error| panic!("{error}"))
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

#[test]
fn everything_about_a_hold_comes_back() {
    let folder = temporary();
    let options = small(folder.path().join("data"));
    let opened = open(&options, "boot", START);
    assert_eq!(
        (opened.last_run, opened.holds.len(), opened.embargo_until),
        (LastRun::Fresh, 0, None)
    );
    assert_eq!(opened.next_number, WALL, "the wall clock, where it is ahead");
    let (instance, first) = (opened.instance, opened.next_number);
    let mut journal = opened.journal;
    let keys: [&[u8]; 4] = [b"a", b"\0\xff", &[b'x'; 5000], b"s"];
    let modes = [Mode::Exclusive, Mode::Shared, Mode::Exclusive, Mode::Slot { limit: 1 << 20 }];
    let notes: [&[u8]; 4] = [b"", br#"{"holder":"ann"}"#, &[0; 3000], b"n"];
    let mut holds = Vec::new();
    for (at, number) in (0..4).zip(first..) {
        let token = LockToken::new(number, u64::MAX - number);
        let lease = seconds(30 + number - first);
        let ends = START + lease;
        journal.granted(keys[at], modes[at], token, lease, ends, notes[at]);
        let (key, note) = (keys[at].into(), notes[at].into());
        holds.push(RestoredHold { key, mode: modes[at], token, ends, note });
    }
    journal.commit().unwrap();
    journal.commit().expect("nothing to do");
    journal.renewed(first + 1, seconds(71), START + seconds(71));
    journal.ended(first + 3);
    // Late word of a hold that has ended changes nothing.
    journal.renewed(first + 3, seconds(71), START + seconds(71));
    journal.ended(first + 99);
    journal.commit().unwrap();
    holds[1].ends = START + seconds(71);
    holds.pop();
    drop(journal);

    let later = START + seconds(1);
    let opened = open(&options, "boot", later);
    assert_eq!((opened.last_run, &opened.holds), (LastRun::Killed, &holds));
    assert_eq!((opened.instance, opened.embargo_until, opened.repaired), (instance, None, None));
    assert!(opened.next_number > first + 3);
    opened.journal.close(later).unwrap();
    let opened = open(&options, "boot", later);
    assert_eq!((opened.last_run, &opened.holds), (LastRun::Clean, &holds));
    drop(opened.journal);
    // What is over by then does not come back.
    let opened = open(&options, "boot", START + seconds(32));
    assert_eq!(opened.holds, holds[1..2]);
    assert_eq!(opened.instance, instance);
}

#[test]
fn a_directory_has_one_server() {
    let folder = temporary();
    let options = small(folder.path().join("data"));
    let opened = open(&options, "boot", START);
    let error = Journal::open(&options, "boot", START, WALL).unwrap_err();
    let pid = std::process::id();
    assert!(matches!(error, JournalError::InUse { pid: Some(found), .. } if found == pid));
    assert!(error.to_string().contains(&format!("is in use by process {pid}: stop that process")));
    drop(opened);
    open(&options, "boot", START);
}

#[test]
fn foreign_or_unusable_data_directory_is_rejected() {
    let folder = temporary();
    let options = small(folder.path());
    std::fs::create_dir(folder.path().join("lost+found")).unwrap();
    std::fs::write(folder.path().join("thesis.tex"), "42").unwrap();
    let error = Journal::open(&options, "boot", START, WALL).unwrap_err();
    assert!(matches!(error, JournalError::NotOurs { .. }), "{error}");
    let accepting = JournalOptions { accept_loss: true, ..options.clone() };
    let error = Journal::open(&accepting, "boot", START, WALL).unwrap_err();
    assert!(error.to_string().contains("thesis.tex is not data of a lock server"), "{error}");
    std::fs::remove_file(folder.path().join("thesis.tex")).unwrap();
    assert_eq!(open(&options, "boot", START).last_run, LastRun::Fresh);
    // Beside the server's own files, foreign files are accepted.
    std::fs::write(folder.path().join("README"), "do not delete").unwrap();
    assert_eq!(open(&options, "boot", START).last_run, LastRun::Killed);

    let nowhere = small(folder.path().join("no/where"));
    let error = Journal::open(&nowhere, "boot", START, WALL).unwrap_err();
    assert!(error.to_string().contains("cannot make the data directory"), "{error}");
    let file = small(folder.path().join("README"));
    assert!(matches!(Journal::open(&file, "boot", START, WALL), Err(JournalError::Io { .. })));
    for boot in ["", "\n", &"x".repeat(64)] {
        let error = Journal::open(&options, boot, START, WALL).unwrap_err();
        assert!(matches!(error, JournalError::BootId), "{error}");
    }
}

#[test]
fn all_files_deleted_but_the_quarantine_is_no_fresh_start() {
    let folder = temporary();
    let options = small(folder.path());
    drop(open(&options, "boot", START));
    drop(open(&options, "another boot", START));
    for entry in std::fs::read_dir(folder.path()).unwrap().map(Result::unwrap) {
        if entry.path().is_file() {
            std::fs::remove_file(entry.path()).unwrap();
        }
    }
    let error = Journal::open(&options, "boot", START, WALL).unwrap_err();
    assert!(matches!(error, JournalError::Missing { .. }), "{error}");
}

#[test]
fn a_turn_may_be_longer_than_a_segment_and_than_a_frame() {
    let folder = temporary();
    let options = small(folder.path().join("data"));
    let opened = open(&options, "boot", START);
    let mut journal = opened.journal;
    let note = [7; 1000];
    let last = opened.next_number + 3000;
    for number in opened.next_number..last {
        let token = LockToken::new(number, 1);
        journal.granted(b"key", Mode::Shared, token, seconds(9), START + seconds(9), &note);
    }
    journal.commit().unwrap();
    journal.ended(opened.next_number);
    journal.commit().unwrap();
    drop(journal);
    let opened = open(&options, "boot", START);
    assert_eq!(opened.holds.len(), 2999);
    assert!(opened.holds.iter().all(|hold| *hold.note == note));
    assert!(opened.next_number >= last);
}

#[test]
fn a_commit_is_one_write_and_a_bound_is_raised_seldom() {
    let folder = temporary();
    let options =
        JournalOptions { max_lease: seconds(86_400), ..JournalOptions::new(folder.path()) };
    let options = JournalOptions { segment_bytes: 1 << 20, ..options };
    let opened = open(&options, "boot", START);
    let mut journal = opened.journal;
    let facts = || std::fs::read(folder.path().join("facts.a")).unwrap();
    let (mut last, mut raised) = (facts(), 0);
    for lease in 1..=86_400 / 4 {
        let lease = seconds(lease * 4);
        let token = LockToken::new(opened.next_number + lease.as_secs(), 1);
        journal.granted(b"k", Mode::Shared, token, lease, START + lease, b"");
        if lease.as_secs().is_multiple_of(64) {
            journal.commit().unwrap();
            let now = facts();
            raised += usize::from(now != last);
            last = now;
        }
    }
    assert!((8..=17).contains(&raised), "{raised}");
    drop(journal);
    // Rounded up, but to no more than the longest lease there is.
    let opened = open(&options, "other boot", START);
    assert_eq!(opened.embargo_until, Some(START + seconds(86_400)));
}

#[test]
fn a_directory_that_is_put_back_seconds_later_gives_out_no_number_twice() {
    let folder = temporary();
    let (options, backup) = (small(folder.path().join("data")), folder.path().join("backup"));
    let start = |wall_micros| Journal::open(&options, "boot", START, wall_micros).unwrap();
    drop(start(WALL));
    copy(&options.dir, &backup);
    // Started anew one second after its start, as after a kill: numbers go on behind those that were reserved.
    let opened = start(WALL + 1_000_000);
    let used = opened.next_number;
    let mut journal = opened.journal;
    let token = LockToken::new(used, 7);
    journal.granted(b"k", Mode::Exclusive, token, seconds(30), START + seconds(30), b"");
    journal.commit().unwrap();
    drop(journal);
    std::fs::remove_dir_all(&options.dir).unwrap();
    copy(&backup, &options.dir);
    let again = start(WALL + 3_000_000).next_number;
    assert!(
        again > used,
        "{used} was given out, and the directory that was put back begins at {again}"
    );
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

#[test]
fn the_bound_shrinks_when_it_is_told_to_and_at_a_restart() {
    let folder = temporary();
    let options = small(folder.path().join("data"));
    let after = |boot: &str| {
        let opened = open(&options, boot, START);
        (opened.embargo_until.map(|until| until.since(START)), opened.journal)
    };
    let opened = open(&options, "one", START);
    let mut journal = opened.journal;
    let lease = |journal: &mut Journal, number: u64, lease: Duration| {
        journal.granted(b"k", Mode::Shared, LockToken::new(number, 1), lease, START + lease, b"");
        journal.commit().unwrap();
    };
    lease(&mut journal, opened.next_number, seconds(40_000));
    lease(&mut journal, opened.next_number + 1, seconds(30));
    journal.ended(opened.next_number);
    journal.commit().unwrap();
    drop(journal);
    let (quiet, _) = after("two");
    assert_eq!(quiet, Some(seconds(65_536)));
    // The crash has no holds left, but their believers: the bound is theirs as long as it takes.
    let opened = open(&options, "two", START + seconds(65_000));
    assert_eq!(opened.embargo_until, Some(START + seconds(65_536)));
    let mut journal = opened.journal;
    journal.shrink_bound(START, START + seconds(65_500)).unwrap();
    lease(&mut journal, opened.next_number, seconds(3));
    drop(journal);
    let (quiet, mut journal) = after("three");
    assert_eq!(quiet, Some(seconds(64)), "what was left of the quiet time, rounded up");
    journal.shrink_bound(START, START + seconds(64)).unwrap();
    drop(journal);
    assert_eq!(after("four").0, None);
}

/// A server in miniature: the real table, and a journal told of all that it does.
#[test]
fn a_table_is_restored_as_it_was() {
    let folder = temporary();
    let options = small(folder.path().join("data"));
    let opened = open(&options, "boot", START);
    let mut journal = opened.journal;
    let mut number = opened.next_number;
    let mint = move || {
        number += 1;
        LockToken::new(number - 1, number.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    };
    let hasher = BuildHasherDefault::<DefaultHasher>::default();
    let mut table = LockTable::new(TableConfig::default(), hasher.clone(), mint);
    let (ann, bob) = (table.connect(), table.connect());
    let mut tokens = BTreeMap::new();
    for round in 0_u64..2000 {
        let now = START + Duration::from_millis(round * 20);
        let key = format!("key {}", round * 7 % 90).into_bytes();
        let mode = if round % 3 == 0 { Mode::Slot { limit: 3 } } else { Mode::Exclusive };
        let owner = if round % 2 == 0 { ann } else { bob };
        let want = TableClaim { owner, mode, lease: seconds(5 + round % 9), queue: round % 5 == 0 };
        if let ClaimAnswer::Granted(grant) = table.claim(&key, want, now) {
            tokens.insert(key.clone(), (mode.space(), grant.token));
        }
        if let Some((space, token)) = tokens.get(&key).copied() {
            // A hold that has expired meanwhile is refused.
            if round % 4 == 1 {
                table.renew(space, &key, token, seconds(8), now).ok();
            }
            if round % 4 == 2 {
                table.release(space, &key, token, now).ok();
            }
        }
        if round == 1500 {
            table.disconnect(bob, OnDisconnect::Release, now);
        }
        while let Some(event) = table.poll_event() {
            match event {
                TableEvent::Granted { key, mode, grant, .. } => {
                    journal.granted(&key, mode, grant.token, grant.lease, grant.ends, b"");
                }
                TableEvent::Ended { token, .. } => journal.ended(token.number()),
                TableEvent::Renewed { token, lease, ends, .. } => {
                    journal.renewed(token.number(), lease, ends);
                }
                _ => {}
            }
        }
        journal.commit().unwrap();
    }
    drop(journal);
    let now = START + Duration::from_millis(1999 * 20);
    let opened = open(&options, "boot", now);
    let mut held: Vec<_> = table.holds().map(|held| (held.token.number(), held.ends)).collect();
    held.sort_unstable();
    let ends = opened.holds.iter().map(|hold| (hold.token.number(), hold.ends));
    assert_eq!(ends.collect::<Vec<_>>(), held);
    assert!(held.len() > 20, "{}", held.len());
    let mut next = opened.next_number;
    let mint = move || {
        next += 1;
        LockToken::new(next, 0)
    };
    let mut table = LockTable::new(TableConfig::default(), hasher, mint);
    for RestoredHold { key, mode, token, ends, .. } in &opened.holds {
        table.restore(key, *mode, *token, *ends, now).unwrap();
    }
    for RestoredHold { key, mode, token, .. } in &opened.holds {
        table.renew(mode.space(), key, *token, seconds(1), now).expect("as before");
        table.release(mode.space(), key, *token, now).expect("as before");
    }
}

/// Randomness that is the same in every run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 20) % limit
    }
}

/// Model of the journal: the holds in a plain map, and the promises made to holders.
struct Model {
    dice: Dice,
    now: Time,
    boot: u64,
    holds: BTreeMap<u64, RestoredHold>,
    highest: u64,
    /// When the last believer in a lost lease is through.
    believed: Time,
}

impl Model {
    fn turn(&mut self, journal: &mut Journal, next_number: &mut u64) {
        self.now = self.now + Duration::from_millis(self.dice.below(3000));
        let over: Vec<_> = self.holds.values().filter(|hold| hold.ends <= self.now).collect();
        let over: Vec<_> = over.iter().map(|hold| hold.token.number()).collect();
        for number in over {
            journal.ended(number);
            self.holds.remove(&number);
        }
        for _ in 0..self.dice.below(6) {
            let lease = Duration::from_millis(1 + self.dice.below(60_000));
            let ends = self.now + lease;
            let at = self.dice.below(self.holds.len() as u64 + 3);
            let number = self.holds.keys().nth(usize::try_from(at).unwrap()).copied();
            match (number, self.dice.below(2)) {
                (Some(number), 0) => {
                    journal.ended(number);
                    self.holds.remove(&number);
                }
                (Some(number), _) => {
                    journal.renewed(number, lease, ends);
                    self.holds.get_mut(&number).unwrap().ends = ends;
                }
                (None, _) => {
                    let token = LockToken::new(*next_number, self.dice.0);
                    // Numbers may be left out, beyond a block too.
                    *next_number +=
                        1 + self.dice.below(3) * (self.dice.below(50) / 49) * 20_000_000;
                    let limit = u32::try_from(1 + self.dice.below(9)).unwrap();
                    let mode = [Mode::Exclusive, Mode::Shared, Mode::Slot { limit }];
                    let mode = mode[usize::try_from(self.dice.below(3)).unwrap()];
                    let key: Box<[u8]> = self.dice.0.to_le_bytes().into();
                    let note: Box<[u8]> = vec![1; usize::try_from(at).unwrap() * 5].into();
                    journal.granted(&key, mode, token, lease, ends, &note);
                    self.highest = token.number();
                    self.holds.insert(self.highest, RestoredHold { key, mode, token, ends, note });
                }
            }
        }
        journal.commit().unwrap();
    }

    /// The end of a run and the beginning of the next.
    fn restart(&mut self, options: &JournalOptions, journal: Journal) -> OpenedJournal {
        let clean = self.dice.below(2) == 0;
        if clean {
            journal.close(self.now).unwrap();
        } else {
            drop(journal);
        }
        let stopped = self.now;
        self.now = self.now + Duration::from_millis(self.dice.below(1000));
        let reboot = self.dice.below(3) == 0;
        if reboot {
            self.boot += 1;
            // Another clock: as if no time had passed meanwhile, for the worst.
            self.now = Time::from_nanos(1 + self.dice.below(1 << 40));
            let lost = self.holds.values().map(|hold| hold.ends).max().filter(|_| !clean);
            let believed = lost.unwrap_or(stopped).max(self.believed);
            self.believed = self.now + believed.since(stopped);
            for hold in self.holds.values_mut() {
                hold.ends = self.now + hold.ends.since(stopped);
            }
            if !clean {
                self.holds.clear();
            }
        }
        self.holds.retain(|_, hold| hold.ends > self.now);
        let opened = open(options, &format!("boot {}", self.boot), self.now);
        let holds = opened.holds.iter().map(|hold| (hold.token.number(), hold.clone()));
        assert_eq!(holds.collect::<BTreeMap<_, _>>(), self.holds);
        assert!(opened.next_number > self.highest, "the fence fell");
        match (clean, reboot) {
            (true, _) => assert!(matches!(opened.last_run, LastRun::Clean)),
            (false, false) => assert_eq!(opened.last_run, LastRun::Killed),
            (false, true) => {
                assert_eq!(opened.last_run, LastRun::Crashed(CrashCause::BootChanged));
                assert!(opened.embargo_until.unwrap_or(self.now) >= self.believed, "too short");
            }
        }
        opened
    }
}

#[test]
fn random_courses_with_restarts_come_back_as_a_plain_map_says() {
    for seed in 1..=300 {
        let folder = temporary();
        let options = JournalOptions { segment_bytes: 700 + seed * 10, ..small(folder.path()) };
        let mut model = Model {
            dice: Dice(seed * 0x9e37_79b9),
            now: START,
            boot: 0,
            holds: BTreeMap::new(),
            highest: 0,
            believed: START,
        };
        let OpenedJournal { mut journal, mut next_number, .. } = open(&options, "boot 0", START);
        for _ in 0..12 {
            for _ in 0..=model.dice.below(20) {
                model.turn(&mut journal, &mut next_number);
            }
            if model.dice.below(3) == 0 {
                let last = model.holds.values().map(|hold| hold.ends).max();
                journal.shrink_bound(last.unwrap_or(model.now), model.now).unwrap();
            }
            let opened = model.restart(&options, journal);
            (journal, next_number) = (opened.journal, opened.next_number);
            assert!(journal.take_background_error().is_none());
        }
    }
}

/// Set for the process that is to be killed.
const DOOMED: &str = "TENURE_TEST_DOOMED";

#[test]
fn a_process_that_is_killed_in_earnest_loses_nothing_that_it_told() {
    if let Some(dir) = std::env::var_os(DOOMED) {
        return grant_for_ever(Path::new(&dir));
    }
    let folder = temporary();
    let options = small(folder.path().join("data"));
    let mut told = BTreeSet::new();
    for round in 1..=6 {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "--nocapture"]);
        command.arg("a_process_that_is_killed_in_earnest_loses_nothing_that_it_told");
        let mut child = command.env(DOOMED, &options.dir).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut turns = 0;
        while let Some(Ok(line)) = lines.next() {
            let Some(range) = line.strip_prefix("told ") else { continue };
            let (first, last) = range.split_once(' ').unwrap();
            told.extend(first.parse::<u64>().unwrap()..last.parse().unwrap());
            turns += 1;
            if turns == round * 7 {
                child.kill().unwrap();
            }
        }
        child.wait().unwrap();
        let opened = open(&options, "boot", START);
        let torn = LastRun::Crashed(CrashCause::TornTail);
        assert!([LastRun::Killed, torn].contains(&opened.last_run), "{:?}", opened.last_run);
        let held: BTreeSet<_> = opened.holds.iter().map(|hold| hold.token.number()).collect();
        assert!(told.is_subset(&held), "round {round}: a hold was lost");
        assert!(opened.next_number > *held.last().unwrap(), "the fence fell");
    }
}

/// The worker's part: tells of each turn what it granted, once that is committed.
fn grant_for_ever(dir: &Path) {
    let options = JournalOptions { segment_bytes: 100_000, ..small(dir) };
    let OpenedJournal { mut journal, mut next_number, .. } = open(&options, "boot", START);
    let lease = seconds(3600);
    for _ in 0..100_000 {
        let first = next_number;
        while next_number < first + 100 {
            let token = LockToken::new(next_number, 1);
            journal.granted(b"key", Mode::Shared, token, lease, START + lease, &[7; 100]);
            next_number += 1;
        }
        journal.commit().unwrap();
        println!("\ntold {first} {next_number}");
    }
}

/// Set for the process that sees a small disk of its own.
const SMALL_DISK: &str = "TENURE_TEST_SMALL_DISK";

#[test]
fn a_full_disk_stops_the_journal_and_loses_nothing() {
    if let Some(dir) = std::env::var_os(SMALL_DISK) {
        return fill(Path::new(&dir));
    }
    let folder = temporary();
    // A disk that only the worker sees, and that goes with it.
    let script = r#"mount -t tmpfs -o size=256k,mode=700 tenure-test "$TENURE_TEST_SMALL_DISK" || exit 77; exec "$@""#;
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", script, "sh"]).arg(std::env::current_exe().unwrap());
    command.args(["--exact", "a_full_disk_stops_the_journal_and_loses_nothing", "--nocapture"]);
    let output = command.env(SMALL_DISK, folder.path()).output();
    let skipped = || skip::skip("no disk can be mounted here");
    match output {
        Ok(output) if output.status.success() => {}
        Ok(output) if output.status.code() == Some(77) => skipped(),
        Ok(output) if !rustix::process::geteuid().is_root() && output.status.code() == Some(1) => {
            skipped();
        }
        Err(_) => skipped(),
        Ok(output) => panic!("the worker failed: {}", String::from_utf8_lossy(&output.stderr)),
    }
}

/// The worker's part: what was committed before the disk was full is there when there is room again.
fn fill(disk: &Path) {
    let options =
        JournalOptions { segment_bytes: 32 << 10, ..JournalOptions::new(disk.join("data")) };
    let opened = open(&options, "boot", START);
    let mut journal = opened.journal;
    // The bound first, which needs a little room of its own.
    journal.renewed(0, seconds(9), START + seconds(9));
    journal.commit().unwrap();
    let filler = disk.join("filler");
    let mut file = std::fs::File::create(&filler).unwrap();
    while std::io::Write::write_all(&mut file, &[7; 4096]).is_ok() {}
    let mut committed = 0;
    let mut warned = None;
    let error = loop {
        let token = LockToken::new(opened.next_number + committed, 1);
        journal.granted(b"k", Mode::Shared, token, seconds(9), START + seconds(9), &[1; 99]);
        match journal.commit() {
            Ok(()) => committed += 1,
            Err(error) => break error,
        }
        if let Some(trouble) = journal.take_background_error() {
            assert!(trouble.to_string().contains("the disk is full"), "{trouble}");
            warned.get_or_insert(committed);
        }
    };
    assert!(error.to_string().contains("the disk is full: free some space"), "{error}");
    assert!(committed > 100, "what was allocated holds: {committed}");
    assert!(warned.is_some_and(|at| at < committed * 2 / 3), "told ahead: {warned:?}");
    assert!(matches!(journal.commit(), Err(JournalError::Stopped)));
    drop(journal);
    let error = Journal::open(&options, "boot", START, WALL).unwrap_err();
    assert!(error.to_string().contains("the disk is full: free some space"), "{error}");
    drop(file);
    std::fs::remove_file(&filler).unwrap();
    let opened = open(&options, "boot", START);
    assert_eq!((opened.last_run, opened.holds.len() as u64), (LastRun::Killed, committed));
    opened.journal.close(START).unwrap();
    assert_eq!(open(&options, "boot", START).holds.len() as u64, committed);
}
