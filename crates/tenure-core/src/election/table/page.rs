//! The table as a page for operators.

use std::fmt::Write as _;

use super::{Action, Case, ElectionState, InputKind, Outcome, Row, TABLE};

/// Prints the whole table as a Markdown page: an introduction, the states, the inputs, and the effect of every input in
/// each state.
pub fn markdown() -> String {
    let mut page = String::from(INTRODUCTION);
    page.push_str("\n## States\n\n| state | meaning |\n|---|---|\n");
    for state in ElectionState::ALL {
        line(&mut page, &[&format!("`{state}`"), meaning_of_state(state)]);
    }
    page.push_str("\n## Inputs\n\n| input | source |\n|---|---|\n");
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

A participant of an election is always in one of six states and can receive fourteen kinds of input. This page lists
the effect of each of the 84 pairs and its reason, including pairs that should never occur. It is generated from the
data that the machine itself runs on, so it always matches the code.

The state alone does not decide whether a participant leads. A participant leads until its deadline, and at that instant
the machine receives `HealthFailed`.
";

const HOW_TO_READ: &str = "
## How to read the tables

The lines of one input are tried from top to bottom, and the first line whose condition is met applies. A line that
begins with `…` continues the input above it. If the state changes, a `StateChange` event precedes the other events.
*Release that grant* and *abort the session* ensure that no hold is left behind: an answer can always arrive after its
request was abandoned. Besides the deadline, three timers become inputs. The end of the pause before a claim is
`AcquireAttempt`, the end of the grace window is `GraceExpired`, and a release that exceeds its time limit is
`ReleaseFailed`. The periodic health check of a leader is not an input; its answer is.
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
    let (events, effects): (Vec<Action>, Vec<Action>) =
        case.actions.iter().partition(|action| action.is_event());
    let does = if case.actions.is_empty() {
        String::from("nothing")
    } else {
        join(effects.iter().map(|action| String::from(action.text())), ", ")
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
            "does not take part: not started yet, or stopped; it can be started, also again after a stop"
        }
        ElectionState::Follower => {
            "takes part and waits for the end of a pause or for a notification from the store"
        }
        ElectionState::Acquiring => "has claimed the key and waits for the answer",
        ElectionState::Leader => "was granted the key and confirms the hold at an interval",
        ElectionState::Reconnecting => {
            "has lost the hold and does not lead, but tries to acquire it again during the grace window before it \
             reports a loss"
        }
        ElectionState::Releasing => {
            "no longer leads and is releasing the hold, after a step-down or for a stop"
        }
    }
}

const fn meaning_of_input(input: InputKind) -> &'static str {
    match input {
        InputKind::Start => "the program starts the election",
        InputKind::StopRequested => {
            "the program shuts the election down, or received a signal to do so"
        }
        InputKind::AcquireAttempt => {
            "the pause is over, or the store reports that the key may be free"
        }
        InputKind::AcquireSucceeded => "the store grants a claim",
        InputKind::AcquireFailed => "the store answers a claim: another participant holds the key",
        InputKind::StoreError => {
            "a request to the store fails, or its connection breaks; permanent if waiting cannot help (credentials, \
             an invalid key, a missing database), unclear if the hold may still exist"
        }
        InputKind::HealthOk => "the store confirms the hold, which extends the deadline",
        InputKind::HealthFailed => {
            "the hold has ended: its session ended, the store reports so, or the deadline passed"
        }
        InputKind::ReacquireSucceeded => "the store grants the key again within the grace window",
        InputKind::ReacquireFailed => {
            "an attempt within the grace window fails: another participant holds the key, or there is no connection"
        }
        InputKind::GraceExpired => "the grace window has closed",
        InputKind::ReleaseRequested => "the program steps down",
        InputKind::ReleaseSucceeded => "the store has released the hold",
        InputKind::ReleaseFailed => {
            "the release was refused, was interrupted, exceeded its time limit, or found nothing to release"
        }
    }
}
