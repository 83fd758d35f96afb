//! Properties of the table alone, without running the machine.

use super::*;

/// True for a state in which `Acquired` was reported and its end was not.
fn led(state: ElectionState) -> bool {
    matches!(state, ElectionState::Leader | ElectionState::Reconnecting | ElectionState::Releasing)
}

fn every_case() -> impl Iterator<Item = (&'static Row, &'static Case)> {
    TABLE.iter().flatten().flat_map(|row| row.outcome.cases().iter().map(move |case| (row, case)))
}

fn count(case: &Case, actions: &[Action]) -> usize {
    case.actions.iter().filter(|action| actions.contains(action)).count()
}

#[test]
fn every_pair_stands_in_its_place() {
    for from in ElectionState::ALL {
        for input in InputKind::ALL {
            let row = row(from, input);
            assert_eq!((row.from, row.input), (from, input));
        }
    }
}

#[test]
fn only_the_last_case_of_a_row_is_unconditional() {
    for row in TABLE.iter().flatten() {
        let Outcome::Cases(cases) = row.outcome else { continue };
        let (last, others) = cases.split_last().unwrap();
        assert!(last.when.is_empty(), "{row:?}");
        assert!(others.iter().all(|case| !case.when.is_empty()), "{row:?}");
    }
}

#[test]
fn every_row_gives_a_reason() {
    for row in TABLE.iter().flatten() {
        if let Outcome::Ignore(why) = row.outcome {
            assert!(why.len() > 10, "{row:?}");
        }
    }
    assert!(every_case().all(|(_, case)| case.why.len() > 10));
}

#[test]
fn acquired_alternates_with_lost_or_released() {
    for (row, case) in every_case() {
        let begins = count(case, &[Action::Acquired]);
        let ends = count(case, &[Action::Lost, Action::Released]);
        let expected = match (led(row.from), led(case.to)) {
            (false, false) => (0, 0),
            (false, true) => (1, 0),
            (true, false) => (0, 1),
            // Another participant led in between: one term ends and the next begins.
            (true, true) => (begins, begins),
        };
        assert_eq!((begins, ends), expected, "{row:?} {case:?}");
    }
}

#[test]
fn a_run_ends_with_stopped_as_its_last_word() {
    for (row, case) in every_case() {
        let stops = row.from != ElectionState::Stopped && case.to == ElectionState::Stopped;
        assert_eq!(count(case, &[Action::Stopped]), usize::from(stops), "{row:?} {case:?}");
        assert_eq!(case.actions.last() == Some(&Action::Stopped), stops, "{row:?} {case:?}");
    }
}

#[test]
fn the_cause_is_told_before_the_loss() {
    for (row, case) in every_case() {
        let position = |wanted| case.actions.iter().position(|action| *action == wanted);
        if let (Some(error), Some(lost)) = (position(Action::Error), position(Action::Lost)) {
            assert!(error < lost, "{row:?} {case:?}");
        }
    }
}

#[test]
fn a_pause_is_drawn_before_it_is_slept() {
    for row in TABLE.iter().flatten() {
        for (n, case) in row.outcome.cases().iter().enumerate() {
            if case.actions.contains(&Action::Pause) {
                let before = &row.outcome.cases()[n - 1];
                assert_eq!(before.when.last(), Some(&When::GaveUp), "{row:?}");
                assert_eq!(before.when[..before.when.len() - 1], *case.when, "{row:?}");
            }
        }
    }
}

#[test]
fn waiting_happens_as_a_follower_or_within_the_window() {
    for (row, case) in every_case() {
        let waits = count(case, &[Action::Pause, Action::CoolDown, Action::Begin]);
        match case.to {
            ElectionState::Follower if row.from != ElectionState::Follower => {
                assert_eq!(waits, 1, "{row:?}");
            }
            ElectionState::Follower | ElectionState::Reconnecting => assert!(waits <= 1, "{row:?}"),
            _ => assert_eq!(waits, 0, "{row:?}"),
        }
    }
}

#[test]
fn no_session_is_left_behind() {
    use Action::{Abort, Close, ReleaseUnused};
    for (row, case) in every_case() {
        let rest = matches!(case.to, ElectionState::Stopped | ElectionState::Follower)
            && row.from != case.to;
        // A refused or released hold leaves nothing behind.
        let answered = matches!(
            row.input,
            InputKind::AcquireFailed | InputKind::ReacquireFailed | InputKind::ReleaseSucceeded
        );
        let settled = answered || row.from == ElectionState::Stopped;
        if rest && !settled {
            assert!(count(case, &[Abort, Close, ReleaseUnused]) > 0, "{row:?} {case:?}");
        }
        if case.to == ElectionState::Stopped && row.from != ElectionState::Stopped {
            assert_eq!(count(case, &[Abort, Close]), 1, "{row:?} {case:?}");
        }
    }
}

#[test]
fn every_grant_is_taken_given_back_or_known() {
    for (row, case) in every_case() {
        let grant =
            matches!(row.input, InputKind::AcquireSucceeded | InputKind::ReacquireSucceeded);
        if grant && !case.when.contains(&When::Ours) {
            assert_eq!(count(case, &[Action::Hold, Action::ReleaseUnused]), 1, "{row:?} {case:?}");
        }
    }
    for row in TABLE.iter().flatten() {
        let ignored = matches!(row.outcome, Outcome::Ignore(_));
        let grant =
            matches!(row.input, InputKind::AcquireSucceeded | InputKind::ReacquireSucceeded);
        assert!(!(ignored && grant), "{row:?}");
    }
}

#[test]
fn only_the_grant_of_a_claim_makes_a_leader() {
    for (row, case) in every_case() {
        if case.to == ElectionState::Leader && row.from != ElectionState::Leader {
            let pair = (row.from, row.input);
            let claimed = (ElectionState::Acquiring, InputKind::AcquireSucceeded);
            let recovered = (ElectionState::Reconnecting, InputKind::ReacquireSucceeded);
            assert!(pair == claimed || pair == recovered, "{row:?}");
            assert!(case.actions.contains(&Action::Hold), "{row:?}");
        }
    }
}

#[test]
fn the_page_shows_every_pair_once() {
    let page = markdown();
    let (_, tables) = page.split_once("## When `stopped`").unwrap();
    let mut seen = Vec::new();
    for (state, section) in ElectionState::ALL.iter().zip(tables.split("## When `")) {
        for line in section.lines().filter(|line| line.starts_with("| `")) {
            seen.push((*state, line.split('`').nth(1).unwrap().to_owned()));
        }
    }
    let expected: Vec<_> = TABLE.iter().flatten().map(|r| (r.from, r.input.to_string())).collect();
    assert_eq!(seen.len(), 84);
    assert_eq!(seen, expected);
}

#[test]
fn the_page_is_well_formed() {
    let page = markdown();
    let (head, tables) = page.split_once("## When `stopped`").unwrap();
    for line in tables.lines().filter(|line| line.starts_with('|')) {
        assert_eq!(line.matches('|').count(), 7, "{line}");
    }
    for state in ElectionState::ALL {
        assert!(head.contains(&format!("| `{state}` |")), "{state}");
        assert!(page.contains(&format!("\n## When `{state}`\n")), "{state}");
    }
    for input in InputKind::ALL {
        assert!(head.contains(&format!("| `{input}` |")), "{input}");
    }
    let cases: usize = TABLE.iter().flatten().map(|row| row.outcome.cases().len().max(1)).sum();
    // Besides the cases, each of the six tables has a header line and a rule.
    assert_eq!(tables.lines().filter(|line| line.starts_with('|')).count(), cases + 12);
    assert!(page.ends_with("|\n"));
}
