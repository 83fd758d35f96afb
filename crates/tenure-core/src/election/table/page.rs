//! The table as a page for whoever is on call.

use std::fmt::Write as _;

use super::{Action, Case, ElectionState, InputKind, Outcome, Row, TABLE};

/// The whole table as a page of Markdown: an introduction, the states, the inputs, and for each state what every input
/// does there.
pub fn markdown() -> String {
    let mut page = String::from(INTRODUCTION);
    page.push_str("\n## States\n\n| state | what it means |\n|---|---|\n");
    for state in ElectionState::ALL {
        line(&mut page, &[&format!("`{state}`"), meaning_of_state(state)]);
    }
    page.push_str("\n## Inputs\n\n| input | where it comes from |\n|---|---|\n");
    for input in InputKind::ALL {
        line(&mut page, &[&format!("`{input}`"), meaning_of_input(input)]);
    }
    page.push_str(HOW_TO_READ);
    for rows in &TABLE {
        state_section(&mut page, rows);
    }
    page
}

const INTRODUCTION: &str = "\
# The election, input by input

A participant of an election is always in one of six states, and fourteen kinds of input can reach it. This page says for
each of the 84 pairs what follows and why, also for those that should never happen. It is printed from the data that the
machine itself runs on, so it cannot fall behind the code.

Whether a participant leads is not read off its state: it leads while its deadline lies ahead, and the passing of the
deadline reaches the machine as `HealthFailed` at that very instant.
";

const HOW_TO_READ: &str = "
## How to read the tables

Lines that belong to one input are tried from top to bottom, and the first whose condition is met is taken; a line that
begins with `…` continues the input above it. Each change of state is announced by a `StateChange` event before the
events in the line. *Give that grant back* and *cut the session off* are how no hold is left behind: an answer
can always arrive after the question was withdrawn. Besides the deadline, three timers become inputs: the pause before a
claim ends as `AcquireAttempt`, the grace window as `GraceExpired`, and a release that exceeds its bound as
`ReleaseFailed`. The health check that a leader sends at its interval is no input; its answer is.
";

fn state_section(page: &mut String, rows: &[Row]) {
    let Some(first) = rows.first() else { return };
    let _ = write!(page, "\n## When `{}`\n\n", first.from);
    page.push_str("| input | when | then | does | emits | why |\n|---|---|---|---|---|---|\n");
    for row in rows {
        let input = format!("`{}`", row.input);
        match row.outcome {
            Outcome::Ignore(why) => line(page, &[&input, "", "stays", "nothing", "", why]),
            Outcome::Cases(cases) => {
                for (n, case) in cases.iter().enumerate() {
                    case_line(page, if n == 0 { &input } else { "…" }, row.from, n, case);
                }
            }
        }
    }
}

fn case_line(page: &mut String, input: &str, from: ElectionState, n: usize, case: &Case) {
    let when = match case.when {
        [] if n > 0 => String::from("otherwise"),
        conditions => join(conditions.iter().map(|when| String::from(when.text())), " and "),
    };
    let then = if case.to == from { String::from("stays") } else { format!("**{}**", case.to) };
    let (events, deeds): (Vec<Action>, Vec<Action>) =
        case.actions.iter().partition(|action| action.is_event());
    let does = if case.actions.is_empty() {
        String::from("nothing")
    } else {
        join(deeds.iter().map(|action| String::from(action.text())), ", ")
    };
    let emits = join(events.iter().map(|action| format!("`{}`", action.text())), ", ");
    line(page, &[input, &when, &then, &does, &emits, case.why]);
}

fn join(parts: impl Iterator<Item = String>, by: &str) -> String {
    parts.collect::<Vec<_>>().join(by)
}

fn line(page: &mut String, cells: &[&str]) {
    for cell in cells {
        page.push_str("| ");
        page.push_str(cell);
        page.push_str(if cell.is_empty() { "" } else { " " });
    }
    page.push_str("|\n");
}

const fn meaning_of_state(state: ElectionState) -> &'static str {
    match state {
        ElectionState::Stopped => {
            "takes no part: not started yet, or done; it can be started, also again after a stop"
        }
        ElectionState::Follower => {
            "takes part and waits: for the end of a pause, or for word from the store"
        }
        ElectionState::Acquiring => "has asked for the key and waits for the answer",
        ElectionState::Leader => "was granted the key and confirms it at an interval",
        ElectionState::Reconnecting => {
            "has lost the hold and does not lead, but tries for the length of the grace window to get it back before \
             telling anybody"
        }
        ElectionState::Releasing => {
            "no longer leads and is giving the hold back, after a step-down or for a stop"
        }
    }
}

const fn meaning_of_input(input: InputKind) -> &'static str {
    match input {
        InputKind::Start => "the program starts the election",
        InputKind::StopRequested => "the program shuts it down, or was told to by a signal",
        InputKind::AcquireAttempt => {
            "the pause is over, or the store says that the key may be free"
        }
        InputKind::AcquireSucceeded => "the store grants a claim",
        InputKind::AcquireFailed => "the store answers a claim with: another holds it",
        InputKind::StoreError => {
            "a request to the store fails, or its connection breaks; permanent where waiting cannot help (credentials, \
             a bad key, a missing database), unclear where the hold may well stand"
        }
        InputKind::HealthOk => "the store confirms the hold, which moves the deadline out",
        InputKind::HealthFailed => {
            "the hold is over: its session ended, the store denies it, or the deadline passed"
        }
        InputKind::ReacquireSucceeded => "within the grace window the store grants the key again",
        InputKind::ReacquireFailed => {
            "an attempt within the grace window fails: another holds the key, or there is no connection"
        }
        InputKind::GraceExpired => "the grace window has closed",
        InputKind::ReleaseRequested => "the program steps down",
        InputKind::ReleaseSucceeded => "the store has taken the hold back",
        InputKind::ReleaseFailed => {
            "the release was refused, broke off or exceeded its bound, or found nothing to release"
        }
    }
}
