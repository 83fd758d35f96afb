//! Machine crashes: everything that was not synced may be lost.

use std::sync::Mutex;

use super::super::{CrashCause, LastRun};
use super::faulty::Op;
use super::*;

/// Recorded steps, in order: disk operations, and states that were acknowledged to clients.
#[derive(Clone, Debug)]
enum Step {
    Create { file: usize, name: String, size: u64 },
    Open { file: usize, name: String },
    Write { file: usize, bytes: Vec<u8>, offset: u64 },
    Sync { file: usize },
    SyncNames,
    Rename(String, String),
    Remove(String),
    Acknowledged { holds: Holds, highest: u64, now: Time },
}

/// Contents of a file in the page cache and on the disk.
#[derive(Clone, Debug, Default)]
struct Contents {
    written: Vec<u8>,
    synced: Vec<u8>,
}

/// Model of a disk that tracks which names and contents are durable.
#[derive(Debug, Default)]
struct DiskModel {
    contents: Vec<Contents>,
    /// Contents of each open file.
    open: BTreeMap<usize, usize>,
    names: BTreeMap<String, usize>,
    synced_names: BTreeMap<String, usize>,
}

impl DiskModel {
    fn apply(&mut self, step: &Step) {
        match step {
            Step::Create { file, name, size } => {
                let written = vec![0; usize::try_from(*size).unwrap()];
                self.contents.push(Contents { written, synced: Vec::new() });
                self.open.insert(*file, self.contents.len() - 1);
                self.names.insert(name.clone(), self.contents.len() - 1);
            }
            Step::Open { file, name } => {
                self.names.get(name).map(|at| self.open.insert(*file, *at));
            }
            Step::Write { file, bytes, offset } => {
                let written = &mut self.contents[self.open[file]].written;
                let offset = usize::try_from(*offset).unwrap();
                written.resize(written.len().max(offset + bytes.len()), 0);
                written[offset..offset + bytes.len()].copy_from_slice(bytes);
            }
            Step::Sync { file } => {
                let contents = &mut self.contents[self.open[file]];
                contents.synced = contents.written.clone();
            }
            Step::SyncNames => self.synced_names = self.names.clone(),
            Step::Rename(from, to) => {
                let at = self.names.remove(from).unwrap();
                self.names.insert(to.clone(), at);
            }
            Step::Remove(name) => {
                self.names.remove(name);
            }
            Step::Acknowledged { .. } => {}
        }
    }

    /// Directory after a crash, with the synced or the written names, and with the synced or the written contents.
    fn after(&self, names_synced: bool, contents_synced: bool) -> Image {
        let names = if names_synced { &self.synced_names } else { &self.names };
        let files = names.iter().filter(|(name, _)| !name.contains('/')).map(|(name, at)| {
            let Contents { written, synced } = &self.contents[*at];
            (name.clone(), if contents_synced { synced } else { written }.clone())
        });
        Image(files.collect())
    }
}

/// Records three runs: the first stops cleanly, the others are killed.
fn record() -> Vec<Step> {
    let folder = temporary();
    let options = small(&folder.path().join("data"));
    let steps = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&steps);
    let hook = Hook::new(move |op| {
        let step = match *op {
            Op::Create { file, name, size } => Step::Create { file, name: name.into(), size },
            Op::Open { file, name } => Step::Open { file, name: name.into() },
            Op::Write { file, bytes, offset } => Step::Write { file, bytes: bytes.into(), offset },
            Op::Sync { file, .. } => Step::Sync { file },
            Op::SyncNames => Step::SyncNames,
            Op::Rename(from, to) => Step::Rename(from.into(), to.into()),
            Op::Remove(name) => Step::Remove(name.into()),
            Op::EmptyQuarantine => return Ok(()),
        };
        log.lock().unwrap().push(step);
        Ok(())
    });
    let mut now = START;
    for seed in 1..=3 {
        let opened = open_with(&options, Some(hook.clone()), BOOT, now).unwrap();
        let mut server = ModelServer::new(&opened, now, seed);
        let mut journal = opened.journal;
        for _ in 0..25 {
            server.turn(&mut journal);
            journal.commit().unwrap();
            journal.wait_for_snapshot();
            let ModelServer { holds, next_number, now, .. } = &server;
            let (holds, highest, now) = (holds.clone(), *next_number - 1, *now);
            steps.lock().unwrap().push(Step::Acknowledged { holds, highest, now });
        }
        now = server.now;
        if seed == 1 {
            journal.close(now).unwrap();
        }
    }
    Arc::try_unwrap(steps)
        .map_or_else(|steps| steps.lock().unwrap().clone(), |steps| steps.into_inner().unwrap())
}

#[test]
fn after_a_machine_crash_no_hold_is_granted_while_an_old_one_may_be_live() {
    let steps = record();
    let folder = temporary();
    let options = small(&folder.path().join("data"));
    let restart = Time::from_nanos(7_000_000_000);
    let mut model = DiskModel::default();
    let mut acked = (Holds::new(), 0, START);
    let mut outcomes = [0; 3];
    for (index, step) in steps.iter().enumerate() {
        model.apply(step);
        // It changes nothing on the disk.
        if matches!(step, Step::Open { .. }) {
            continue;
        }
        if let Step::Acknowledged { holds, highest, now } = step {
            acked = (holds.clone(), *highest, *now);
        }
        for (names_synced, contents_synced) in [(true, true), (false, true), (false, false)] {
            let image = model.after(names_synced, contents_synced);
            image.put(&options.dir);
            let context = format!("after {index} steps: {names_synced} {contents_synced}");
            let opened = open_with(&options, None, OTHER_BOOT, restart)
                .unwrap_or_else(|error| panic!("{context}: {error}"));
            let (holds, highest, now) = &acked;
            assert!(opened.next_number > *highest, "{context}: fencing numbers went back");
            match opened.last_run {
                LastRun::Fresh => {
                    outcomes[0] += 1;
                    assert_eq!(*highest, 0, "{context}: a silent fresh start");
                }
                LastRun::Clean => {
                    outcomes[1] += 1;
                    // Each hold has the time that its lease had left at the stop.
                    let moved = holds.iter().map(|(number, hold)| {
                        let ends = restart + hold.ends.since(*now);
                        (*number, RestoredHold { ends, ..hold.clone() })
                    });
                    assert_eq!(by_number(&opened.holds), moved.collect(), "{context}");
                }
                LastRun::Crashed(CrashCause::BootChanged) => {
                    outcomes[2] += 1;
                    assert_eq!(opened.holds, [], "{context}");
                    let left = holds.values().map(|hold| hold.ends.since(*now)).max();
                    let until = opened.embargo_until.unwrap_or(restart);
                    assert!(until >= restart + left.unwrap_or_default(), "{context}: too short");
                }
                other => panic!("{context}: {other:?}"),
            }
        }
    }
    assert!(outcomes.iter().all(|count| *count > 3), "a kind of end did not occur: {outcomes:?}");
}

#[test]
fn the_embargo_survives_kills_and_restarts_after_crashes() {
    let folder = temporary();
    let options = small(&folder.path().join("data"));
    let opened = open_with(&options, None, BOOT, START).unwrap();
    let mut journal = opened.journal;
    let lease = Duration::from_secs(100);
    let token = LockToken::new(opened.next_number, 1);
    journal.granted(b"k", Mode::Exclusive, token, lease, START + lease, b"");
    journal.commit().unwrap();
    drop(journal);

    let crashed = Time::from_nanos(50);
    let until = crashed + Duration::from_secs(128);
    let opened = open_with(&options, None, OTHER_BOOT, crashed).unwrap();
    assert_eq!(opened.last_run, LastRun::Crashed(CrashCause::BootChanged));
    assert_eq!(opened.embargo_until, Some(until));
    drop(opened);
    let killed = crashed + Duration::from_secs(28);
    let opened = open_with(&options, None, OTHER_BOOT, killed).unwrap();
    assert_eq!((opened.last_run, opened.embargo_until), (LastRun::Killed, Some(until)));
    opened.journal.close(killed).unwrap();
    let opened = open_with(&options, None, OTHER_BOOT, killed).unwrap();
    assert_eq!((opened.last_run, opened.embargo_until), (LastRun::Clean, Some(until)));
    opened.journal.close(killed).unwrap();

    // A clean stop and a reboot: 100 s of the embargo are left. Then a crash: 100 s, rounded up, from then on.
    let opened = open_with(&options, None, BOOT, Time::from_nanos(3)).unwrap();
    let until = Time::from_nanos(3) + Duration::from_secs(100);
    assert_eq!((opened.last_run, opened.embargo_until), (LastRun::Clean, Some(until)));
    drop(opened.journal);
    let opened = open_with(&options, None, OTHER_BOOT, Time::from_nanos(9)).unwrap();
    let until = Time::from_nanos(9) + Duration::from_secs(128);
    assert_eq!(opened.embargo_until, Some(until));
    drop(opened.journal);
    let opened = open_with(&options, None, OTHER_BOOT, until).unwrap();
    assert_eq!((opened.last_run, opened.embargo_until), (LastRun::Killed, None));
}

#[test]
fn a_clock_behind_the_journal_is_another_clock() {
    let folder = temporary();
    let options = small(&folder.path().join("data"));
    let opened = open_with(&options, None, BOOT, START).unwrap();
    let mut server = ModelServer::new(&opened, START, 1);
    let mut journal = opened.journal;
    server.now = START + Duration::from_secs(5);
    server.grant(&mut journal);
    journal.commit().unwrap();
    drop(journal);
    for now in [START + Duration::from_secs(4), Time::from_nanos(5)] {
        let opened = open_with(&options, None, BOOT, now).unwrap();
        assert_eq!(opened.last_run, LastRun::Crashed(CrashCause::ClockWentBack));
        assert_eq!(opened.holds, []);
        assert!(opened.embargo_until >= Some(now + Duration::from_secs(20)));
    }
}

#[test]
fn a_disk_that_failed_to_store_the_journal_is_treated_as_a_crash() {
    let folder = temporary();
    let options = small(&folder.path().join("data"));
    for prefix in ["journal-", "snapshot-"] {
        let opened = open_with(&options, None, BOOT, START).unwrap();
        let mut server = ModelServer::new(&opened, START, 1);
        let mut journal = opened.journal;
        server.grant(&mut journal);
        journal.commit().unwrap();
        drop(journal);
        let hook = move |op: &Op<'_>| match op {
            Op::Sync { name, .. } if name.starts_with(prefix) && !name.contains("tmp") => Err(0),
            _ => Ok(()),
        };
        let opened = open_with(&options, Some(Hook::new(hook)), BOOT, server.now).unwrap();
        assert_eq!(opened.last_run, LastRun::Crashed(CrashCause::DiskFailed));
        assert_eq!(opened.holds, []);
        let until = opened.embargo_until.unwrap();
        assert!(until >= server.holds.values().map(|hold| hold.ends).max().unwrap());
        drop(opened.journal);
        // The kernel reports the failure only once.
        let opened = open_with(&options, None, BOOT, server.now).unwrap();
        assert_eq!((opened.holds.len(), opened.embargo_until), (0, Some(until)));
    }
}
