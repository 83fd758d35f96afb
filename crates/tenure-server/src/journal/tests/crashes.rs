//! `kill -9` after every disk operation, with every kind of partial write, and again during the recovery.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::super::{CrashCause, LastRun};
use super::faulty::Op;
use super::*;

/// Part of the last write that reaches the file when the process is killed.
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

/// Hook that lets `steps` operations succeed and fails all later ones.
fn killer(steps: usize, cut: Cut) -> (Hook, Arc<AtomicUsize>) {
    let seen = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&seen);
    let hook = move |op: &Op<'_>| {
        // A kill before a read is a kill before the next change.
        if let Op::Open { .. } = op {
            return Ok(());
        }
        let before = counter.fetch_add(1, Ordering::Relaxed);
        let lands = match op {
            Op::Write { bytes, .. } if before == steps => match cut {
                Cut::Nothing => 0,
                Cut::OneByte => 1,
                Cut::HalfAFrameHead => 10,
                Cut::Half => bytes.len() / 2,
                Cut::AllButOne => bytes.len() - 1,
                Cut::All => bytes.len(),
            },
            _ => 0,
        };
        if before < steps { Ok(()) } else { Err(lands) }
    };
    (Hook::new(hook), seen)
}

/// State that a run had acknowledged to its clients when it was killed.
#[derive(Debug, Default)]
struct Acknowledged {
    committed: Holds,
    /// State with the turn that was in progress, which was not acknowledged.
    pending: Option<Holds>,
    highest: u64,
    now: Option<Time>,
    finished: bool,
}

/// Two runs with a clean stop between them.
fn run(options: &JournalOptions, hook: &Hook) -> Acknowledged {
    let mut acked = Acknowledged::default();
    let mut now = START;
    for seed in 1..=2 {
        let Ok(opened) = open_with(options, Some(hook.clone()), BOOT, now) else { return acked };
        assert_eq!(by_number(&opened.holds), acked.committed, "after a clean stop");
        assert!(opened.next_number > acked.highest, "fencing numbers went back");
        let mut server = ModelServer::new(&opened, now, seed);
        server.long_notes = true;
        let mut journal = opened.journal;
        for _ in 0..25 {
            server.turn(&mut journal);
            acked.now = Some(server.now);
            acked.pending = Some(server.holds.clone());
            if journal.commit().is_err() {
                assert!(matches!(journal.commit(), Err(JournalError::Stopped)));
                return acked;
            }
            journal.wait_for_snapshot();
            acked.committed = server.holds.clone();
            acked.pending = None;
            acked.highest = server.next_number - 1;
        }
        now = server.now;
        if journal.close(now).is_err() {
            return acked;
        }
    }
    acked.finished = true;
    acked
}

/// Checks that the next start restores the acknowledged state, or the state with the turn that was in progress.
fn check(options: &JournalOptions, acked: &Acknowledged, context: &str) -> LastRun {
    let now = acked.now.unwrap_or(START);
    let opened = open_with(options, None, BOOT, now).unwrap_or_else(|error| {
        panic!("{context}: {error}");
    });
    let holds = by_number(&opened.holds);
    let expected = holds == acked.committed || Some(&holds) == acked.pending.as_ref();
    assert!(expected, "{context}: {holds:?}\ninstead of {acked:?}");
    assert!(opened.next_number > acked.highest, "{context}: fencing numbers went back");
    let torn = opened.last_run == LastRun::Crashed(CrashCause::TornTail);
    assert_eq!(opened.embargo_until.is_some(), torn, "{context}: {:?}", opened.last_run);
    if let Some(embargo_until) = opened.embargo_until {
        let last = acked.committed.values().map(|hold| hold.ends).max().unwrap_or(now);
        assert!(embargo_until >= last, "{context}: the embargo is too short");
    }
    // A further start restores the same.
    drop(opened.journal);
    let again = open_with(options, None, BOOT, now).unwrap();
    assert_eq!(by_number(&again.holds), holds, "{context}: again");
    assert_eq!(again.embargo_until, opened.embargo_until, "{context}: the embargo was lost");
    opened.last_run
}

#[test]
fn a_kill_after_any_operation_loses_nothing_acknowledged() {
    let folder = temporary();
    let options = small(&folder.path().join("data"));
    let mut outcomes = [0; 3];
    for cut in CUTS {
        for steps in 0.. {
            let _ = std::fs::remove_dir_all(&options.dir);
            let acked = run(&options, &killer(steps, cut).0);
            match check(&options, &acked, &format!("killed after {steps} steps, {cut:?}")) {
                LastRun::Killed => outcomes[0] += 1,
                LastRun::Crashed(CrashCause::TornTail) => outcomes[1] += 1,
                _ => outcomes[2] += 1,
            }
            if acked.finished {
                assert!(steps > 150, "too short a run to show anything: {steps}");
                break;
            }
        }
    }
    assert!(outcomes.iter().all(|count| *count > 20), "a kind of end did not occur: {outcomes:?}");
}

#[test]
fn a_kill_after_any_operation_of_the_recovery_loses_nothing_either() {
    let folder = temporary();
    let options = small(&folder.path().join("data"));
    for (round, steps) in (3..).step_by(11).enumerate() {
        let _ = std::fs::remove_dir_all(&options.dir);
        let acked = run(&options, &killer(steps, CUTS[round % CUTS.len()]).0);
        let image = Image::of(&options.dir);
        let now = acked.now.unwrap_or(START);
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
                holds == acked.committed || Some(&holds) == acked.pending.as_ref(),
                "{context}: {holds:?}\ninstead of {acked:?}"
            );
            assert!(opened.next_number > acked.highest, "{context}: fencing numbers went back");
            assert_eq!(opened.embargo_until, torn, "{context}: the embargo was lost");
            if seen.load(Ordering::Relaxed) <= again {
                break;
            }
        }
        if acked.finished {
            break;
        }
    }
}
