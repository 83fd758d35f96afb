//! Writes that were cut short: a frame without its end mark, and facts of which only one copy was replaced.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

use std::time::Duration;

use tenure_core::table::Mode;
use tenure_core::{LockToken, Time};
use tenure_server::journal::{CrashCause, Journal, JournalError, JournalOptions, LastRun};

const START: Time = Time::from_nanos(1_000_000_000_000);
const WALL: u64 = 1_700_000_000_000_000;
const LEASE: Duration = Duration::from_secs(30);

/// Offsets of the last bytes of the frames of a segment, which mark the end of their writes.
fn frame_ends(segment: &[u8]) -> Vec<usize> {
    const HEADER: usize = 128;
    const HEAD: usize = 20;
    let mut ends = Vec::new();
    let mut start = HEADER;
    while let Some(length) = segment.get(start..start + 4) {
        let length = u32::from_le_bytes(length.try_into().unwrap()) as usize;
        if length == 0 {
            break;
        }
        start += HEAD + length + 1;
        ends.push(start - 1);
    }
    ends
}

#[test]
fn a_frame_that_lost_its_mark_is_torn_only_at_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let mut options = JournalOptions::new(folder.path().join("data"));
    options.segment_bytes = 4096;
    let opened = Journal::open(&options, "boot", START, WALL).unwrap();
    let (first, mut journal) = (opened.next_number, opened.journal);
    for number in first..first + 3 {
        let token = LockToken::new(number, 7);
        journal.granted(b"k", Mode::Shared, token, LEASE, START + LEASE, b"");
        journal.commit().unwrap();
    }
    drop(journal);
    let names = std::fs::read_dir(&options.dir).unwrap().map(|entry| entry.unwrap().path());
    let mut segments = names.filter(|path| path.to_str().unwrap().contains("journal-"));
    let segment = segments.next().unwrap();
    let whole = std::fs::read(&segment).unwrap();
    let ends = frame_ends(&whole);
    assert_eq!((ends.len(), whole[ends[0]]), (3, 0xa5));
    let without_mark = |frame: usize| {
        let mut bytes = whole.clone();
        bytes[ends[frame]] = 0;
        std::fs::write(&segment, bytes).unwrap();
        Journal::open(&options, "boot", START, WALL)
    };
    // Frames after it were written and answered: they must not be dropped without an error.
    for frame in [0, 1] {
        let refused = without_mark(frame).unwrap_err();
        assert!(matches!(refused, JournalError::Damaged { .. }), "{frame}: {refused}");
    }
    let torn = without_mark(2).unwrap();
    assert_eq!((torn.last_run, torn.holds.len()), (LastRun::Crashed(CrashCause::TornTail), 2));
}

/// Stops a server cleanly, and leaves the directory as a crash leaves it after the first of the two renames of the
/// facts: the copy `stale` is the old one, and no file of the last run is removed.
fn stop_cut_before_the_rename_of(stale: &str, options: &JournalOptions) {
    let mut journal = Journal::open(options, "boot", START, WALL).unwrap().journal;
    journal.granted(b"k", Mode::Exclusive, LockToken::new(WALL, 7), LEASE, START + LEASE, b"");
    journal.commit().unwrap();
    let names = std::fs::read_dir(&options.dir).unwrap().map(|entry| entry.unwrap().path());
    let before: Vec<_> = names.map(|path| (std::fs::read(&path).unwrap(), path)).collect();
    journal.close(START).unwrap();
    for (bytes, path) in before {
        if !path.exists() || path.ends_with(stale) {
            std::fs::write(path, bytes).unwrap();
        }
    }
}

#[test]
fn the_newer_of_two_copies_of_the_facts_counts() {
    for stale in ["facts.a", "facts.b"] {
        let folder = tempfile::tempdir().unwrap();
        let mut options = JournalOptions::new(folder.path().join("data"));
        options.segment_bytes = 4096;
        stop_cut_before_the_rename_of(stale, &options);
        // The newer copy reports a clean stop. By the older copy the run had not ended: after a reboot its hold would
        // be lost, and nothing would be granted for the length of a lease.
        let opened = Journal::open(&options, "next boot", START, WALL).unwrap();
        assert_eq!(
            (opened.last_run, opened.holds.len(), opened.embargo_until),
            (LastRun::Clean, 1, None),
            "{stale} is the older copy"
        );
    }
}
