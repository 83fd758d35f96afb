//! Cost of the journal: nanoseconds per append, microseconds per commit, the pause of a rotation, the time of a start.
//!
//! `cargo run --release -p tenure-server --example journal_cost [DIRECTORY]`

use std::time::{Duration, Instant};

use tenure_core::table::Mode;
use tenure_core::{LockToken, Time};
use tenure_server::journal::{Journal, JournalError, JournalOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = match std::env::args_os().nth(1) {
        Some(parent) => tempfile::tempdir_in(parent)?,
        None => tempfile::tempdir()?,
    };
    let options = JournalOptions::new(folder.path().join("data"));
    let now = Time::from_nanos(1 << 40);
    let opened = Journal::open(&options, "boot", now, 0)?;
    let (mut journal, mut number) = (opened.journal, opened.next_number);
    for pairs in [1, 10, 100] {
        turns(&mut journal, &mut number, pairs, now)?;
    }
    live(&mut journal, &mut number, now)?;
    let began = Instant::now();
    journal.wait_for_snapshot();
    drop(journal);
    println!("last snapshot waited for: {:?}", began.elapsed());
    let began = Instant::now();
    let opened = Journal::open(&options, "boot", now, 0)?;
    println!("start with {} holds: {:?}", opened.holds.len(), began.elapsed());
    let began = Instant::now();
    opened.journal.close(now)?;
    println!("clean stop: {:?}", began.elapsed());
    Ok(())
}

/// Runs turns with the given number of grants and releases each.
fn turns(
    journal: &mut Journal,
    number: &mut u64,
    pairs: u32,
    now: Time,
) -> Result<(), JournalError> {
    let lease = Duration::from_secs(30);
    let rounds = 200_000 / pairs;
    let (mut appending, mut committing, mut longest) =
        (Duration::ZERO, Duration::ZERO, Duration::ZERO);
    for _ in 0..rounds {
        let began = Instant::now();
        for _ in 0..pairs {
            let token = LockToken::new(*number, *number);
            journal.granted(
                b"a key of some length",
                Mode::Exclusive,
                token,
                lease,
                now + lease,
                b"",
            );
            journal.ended(*number);
            *number += 1;
        }
        let appended = Instant::now();
        journal.commit()?;
        let commit = appended.elapsed();
        appending += appended - began;
        committing += commit;
        longest = longest.max(commit);
    }
    println!(
        "turns of {pairs} pairs: {:?} per record, {:?} per commit, longest commit {longest:?}",
        appending / (rounds * pairs * 2),
        committing / rounds,
    );
    Ok(())
}

/// A million holds, then renewals of all of them, so that snapshots are written at the same time.
fn live(journal: &mut Journal, number: &mut u64, now: Time) -> Result<(), JournalError> {
    let lease = Duration::from_secs(30);
    let first = *number;
    let note = br#"{"holder":"host-17/4711","pid":4711}"#;
    let mut longest = Duration::ZERO;
    let began = Instant::now();
    let mut commits = 0;
    for round in 0..10_000 {
        for _ in 0..100 {
            let token = LockToken::new(*number, *number);
            journal.granted(b"a key of some length", Mode::Shared, token, lease, now + lease, note);
            *number += 1;
        }
        for renewed in 0..900 {
            journal.renewed(
                first + (round * 900 + renewed) % (*number - first),
                lease,
                now + lease,
            );
        }
        let commit = Instant::now();
        journal.commit()?;
        longest = longest.max(commit.elapsed());
        commits += 1;
    }
    println!(
        "a million holds, nine million renewals, {commits} commits: {:?}, the longest commit {longest:?}",
        began.elapsed()
    );
    if let Some(trouble) = journal.take_background_error() {
        println!("background error: {trouble}");
    }
    Ok(())
}
