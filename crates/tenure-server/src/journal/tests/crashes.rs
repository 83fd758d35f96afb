//! `kill -9` after every operation, with every kind of cut through a write, and again during the recovery.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::super::disk::Op;
use super::super::{CrashCause, LastRun};
use super::*;

/// How much of the write lands that the process is killed in.
#[derive(Clone, Copy, Debug)]
enum Cut {
    Nothing,
    OneByte,
    HalfAFrameHead,
    Half,
    AllButOne,
    All,
}

const CUTS: [Cut; 6] =
    [Cut::Nothing, Cut::OneByte, Cut::HalfAFrameHead, Cut::Half, Cut::AllButOne, Cut::All];

/// Lets `steps` operations pass, and none after.
fn killer(steps: usize, cut: Cut) -> (Hook, Arc<AtomicUsize>) {
    let seen = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&seen);
    let hook = move |op: &Op<'_>| {
        let before = counter.fetch_add(1, Ordering::Relaxed);
        let lands = match (op, cut) {
            (Op::Write(_, bytes, _), _) if before == steps => match cut {
                Cut::Nothing => 0,
                Cut::OneByte => 1,
                Cut::HalfAFrameHead => 10,
                Cut::Half => bytes.len() / 2,
                Cut::AllButOne => bytes.len() - 1,
                Cut::All => bytes.len(),
            },
            _ => 0,
        };
        if before < steps { Ok(()) } else { Err(i32::try_from(lands).unwrap()) }
    };
    (Hook(Arc::new(hook)), seen)
}

/// What a run had told its clients when it was killed, and what it was about to.
#[derive(Debug, Default)]
struct Acknowledged {
    committed: Holds,
    /// With the turn, or the stop, that was under way.
    pending: Option<Holds>,
    highest: u64,
    now: Option<Time>,
    finished: bool,
}

/// Two runs with a clean stop between them.
fn run(options: &JournalOptions, hook: &Hook) -> Acknowledged {
    let mut told = Acknowledged::default();
    let mut now = START;
    for seed in 1..=2 {
        let Ok(opened) = open_with(options, Some(hook.clone()), BOOT, now) else { return told };
        assert_eq!(by_number(&opened.holds), told.committed, "after a clean stop");
        assert!(opened.next_number > told.highest, "the fence fell");
        let mut server = ModelServer::new(&opened, now, seed);
        server.long_notes = true;
        let mut journal = opened.journal;
        for _ in 0..25 {
            server.turn(&mut journal);
            told.now = Some(server.now);
            told.pending = Some(server.holds.clone());
            if journal.commit().is_err() {
                assert!(matches!(journal.commit(), Err(JournalError::Stopped)));
                return told;
            }
            journal.wait_for_snapshot();
            told.committed = server.holds.clone();
            told.pending = None;
            told.highest = server.next_number - 1;
        }
        now = server.now;
        if journal.close(now).is_err() {
            return told;
        }
    }
    told.finished = true;
    told
}

/// The next start finds all that was told, or with the turn that was under way.
fn check(options: &JournalOptions, told: &Acknowledged, context: &str) -> LastRun {
    let now = told.now.unwrap_or(START);
    let opened = open_with(options, None, BOOT, now).unwrap_or_else(|error| {
        panic!("{context}: {error}");
    });
    let holds = by_number(&opened.holds);
    let expected = holds == told.committed || Some(&holds) == told.pending.as_ref();
    assert!(expected, "{context}: {holds:?}\ninstead of {told:?}");
    assert!(opened.next_number > told.highest, "{context}: the fence fell");
    let torn = opened.last_run == LastRun::Crashed(CrashCause::TornTail);
    assert_eq!(opened.embargo_until.is_some(), torn, "{context}: {:?}", opened.last_run);
    if let Some(quiet_until) = opened.embargo_until {
        let last = told.committed.values().map(|hold| hold.ends).max().unwrap_or(now);
        assert!(quiet_until >= last, "{context}: quiet for too short a time");
    }
    // What was recovered is also what the next run leaves.
    drop(opened.journal);
    let again = open_with(options, None, BOOT, now).unwrap();
    assert_eq!(by_number(&again.holds), holds, "{context}: again");
    assert_eq!(
        again.embargo_until, opened.embargo_until,
        "{context}: the quiet time was forgotten"
    );
    opened.last_run
}

#[test]
fn a_kill_after_any_operation_loses_nothing_that_was_told() {
    let folder = temporary();
    let options = small(&folder.path().join("data"));
    let mut stories = [0; 3];
    for cut in CUTS {
        for steps in 0.. {
            let _ = std::fs::remove_dir_all(&options.dir);
            let told = run(&options, &killer(steps, cut).0);
            match check(&options, &told, &format!("killed after {steps} steps, {cut:?}")) {
                LastRun::Killed => stories[0] += 1,
                LastRun::Crashed(CrashCause::TornTail) => stories[1] += 1,
                _ => stories[2] += 1,
            }
            if told.finished {
                assert!(steps > 150, "too short a run to show anything: {steps}");
                break;
            }
        }
    }
    assert!(stories.iter().all(|count| *count > 20), "a kind of end was not met: {stories:?}");
}

#[test]
fn a_kill_after_any_operation_of_the_recovery_loses_nothing_either() {
    let folder = temporary();
    let options = small(&folder.path().join("data"));
    for (round, steps) in (3..).step_by(11).enumerate() {
        let _ = std::fs::remove_dir_all(&options.dir);
        let told = run(&options, &killer(steps, CUTS[round % CUTS.len()]).0);
        let image = Image::of(&options.dir);
        let now = told.now.unwrap_or(START);
        let torn = match open_with(&options, None, BOOT, now) {
            Ok(opened) => opened.embargo_until,
            Err(error) => panic!("after {steps} steps: {error}"),
        };
        for again in 0.. {
            image.put(&options.dir);
            let (hook, seen) = killer(again, CUTS[again % CUTS.len()]);
            drop(open_with(&options, Some(hook), BOOT, now));
            let context = format!("killed after {steps} steps, then after {again} of the start");
            let opened = open_with(&options, None, BOOT, now)
                .unwrap_or_else(|error| panic!("{context}: {error}"));
            let holds = by_number(&opened.holds);
            assert!(
                holds == told.committed || Some(&holds) == told.pending.as_ref(),
                "{context}: {holds:?}\ninstead of {told:?}"
            );
            assert!(opened.next_number > told.highest, "{context}: the fence fell");
            assert_eq!(opened.embargo_until, torn, "{context}: the quiet time was forgotten");
            if seen.load(Ordering::Relaxed) <= again {
                break;
            }
        }
        if told.finished {
            break;
        }
    }
}
