//! Finds violations in a list of turns. Pure: no I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::log::{Turn, Version};

/// A completion of a job that its worker reported: the worker, the job's name, the attempt.
pub(super) type Completion = (String, String, u32);

/// A broken guarantee.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Violation {
    /// More commands than the name's limit ran at once; these two overlapped for `nanos`.
    Overlap { earlier: Turn, later: Turn, nanos: u64 },
    /// The later turn's token is not larger than the earlier turn's; for a semaphore: the tokens are equal.
    Falling { earlier: Turn, later: Turn },
    /// The command received no token.
    NoToken { turn: Turn },
    /// The job ran again after its worker had reported it as completed.
    RanAgain { completed: Turn, later: Turn },
    /// A violation that was found outside the log.
    Other(String),
}

/// Category under which a violation is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ViolationKind {
    Overlap,
    Falling,
    Other,
}

impl ViolationKind {
    pub(super) const ALL: [Self; 3] = [Self::Overlap, Self::Falling, Self::Other];
}

impl Violation {
    pub(super) fn kind(&self) -> ViolationKind {
        match self {
            Self::Overlap { .. } => ViolationKind::Overlap,
            Self::Falling { .. } => ViolationKind::Falling,
            Self::NoToken { .. } | Self::RanAgain { .. } | Self::Other(_) => ViolationKind::Other,
        }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Overlap { earlier, later, nanos } => {
                write!(f, "overlap of {} ms on {}: ", nanos / 1_000_000, later.name)?;
                write!(f, "{}; {}", TurnSummary(earlier), TurnSummary(later))
            }
            Self::Falling { earlier, later } => {
                write!(f, "falling token on {}: ", later.name)?;
                write!(f, "{}; {}", TurnSummary(earlier), TurnSummary(later))
            }
            Self::NoToken { turn } => write!(f, "no token on {}: {}", turn.name, TurnSummary(turn)),
            Self::RanAgain { completed, later } => {
                write!(f, "{} ran again after its completion: ", later.name)?;
                write!(f, "{}; {}", TurnSummary(completed), TurnSummary(later))
            }
            Self::Other(text) => f.write_str(text),
        }
    }
}

struct TurnSummary<'a>(&'a Turn);

impl fmt::Display for TurnSummary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Turn { version, by, token, begin, last, pause, .. } = self.0;
        let token = token.map_or_else(
            || "none".to_owned(),
            |token| format!("{}:{}", token >> 64, token & u128::from(u64::MAX)),
        );
        let ms = |nanos: &u64| nanos / 1_000_000;
        write!(f, "{version} {by} token {token} from {} to {} ms", ms(begin), ms(last))?;
        write!(f, ", silent for {} ms at most", ms(pause))
    }
}

/// All violations in these turns. `limit` is the maximum number of commands that may run at once under a name.
pub(super) fn violations<'a>(
    turns: impl IntoIterator<Item = &'a Turn>,
    completions: &[Completion],
    limit: impl Fn(&str) -> usize,
) -> Vec<Violation> {
    let mut found = Vec::new();
    for (name, turns) in by_name(turns) {
        let limit = limit(name);
        overlaps(&turns, limit, &mut found);
        tokens(&turns, limit, &mut found);
        repetitions(&turns, completions, &mut found);
    }
    found
}

/// Consecutive turns of one name by different versions, each as the later turn.
pub(super) fn hand_overs<'a>(turns: impl IntoIterator<Item = &'a Turn>) -> Vec<&'a Turn> {
    let names = by_name(turns).into_values();
    let changed = names.flat_map(|turns| {
        let pairs: Vec<_> = turns.windows(2).map(|pair| (pair[0], pair[1])).collect();
        pairs.into_iter().filter(|(one, next)| one.version != next.version).map(|(_, next)| next)
    });
    changed.collect()
}

/// The longest time, in nanoseconds, in which no command ran under a name that was used before and after.
pub(super) fn longest_gap<'a>(turns: impl IntoIterator<Item = &'a Turn>) -> u64 {
    let mut longest = 0;
    for turns in by_name(turns).into_values() {
        let mut until = turns[0].last;
        for turn in turns {
            longest = longest.max(turn.begin.saturating_sub(until));
            until = until.max(turn.last);
        }
    }
    longest
}

/// The number of turns of a version.
pub(super) fn count<'a>(turns: impl IntoIterator<Item = &'a Turn>, version: Version) -> usize {
    turns.into_iter().filter(|turn| turn.version == version).count()
}

/// The turns of each name, by their begin.
fn by_name<'a>(turns: impl IntoIterator<Item = &'a Turn>) -> BTreeMap<&'a str, Vec<&'a Turn>> {
    let mut names: BTreeMap<&str, Vec<&Turn>> = BTreeMap::new();
    for turn in turns {
        names.entry(&turn.name).or_default().push(turn);
    }
    for turns in names.values_mut() {
        turns.sort_by_key(|turn| (turn.begin, turn.pid));
    }
    names
}

fn overlaps(turns: &[&Turn], limit: usize, found: &mut Vec<Violation>) {
    let mut running: Vec<&Turn> = Vec::new();
    for &turn in turns {
        // A turn whose last log line is at this instant may have ended at it: that is no overlap.
        running.retain(|earlier| earlier.last > turn.begin);
        if running.len() >= limit {
            let overlap = |earlier: &&Turn| earlier.last.min(turn.last) - turn.begin;
            let earlier = running.iter().copied().max_by_key(overlap);
            if let Some(earlier) = earlier {
                let (earlier, nanos) = (earlier.clone(), overlap(&earlier));
                found.push(Violation::Overlap { earlier, later: turn.clone(), nanos });
            }
        }
        running.push(turn);
    }
}

/// Checks the tokens. Under a lock they grow from turn to turn. Holders of a semaphore hold it at the same time, and
/// their commands may begin in another order than their grants: there only a repeated token is a violation.
fn tokens(turns: &[&Turn], limit: usize, found: &mut Vec<Violation>) {
    let mut largest: Option<&Turn> = None;
    let mut seen: BTreeMap<u128, &Turn> = BTreeMap::new();
    for &turn in turns {
        let Some(token) = turn.token else {
            found.push(Violation::NoToken { turn: turn.clone() });
            continue;
        };
        let same = seen.insert(token, turn);
        let smaller = largest.filter(|largest| limit == 1 && largest.token >= Some(token));
        if let Some(earlier) = smaller.or(same) {
            found.push(Violation::Falling { earlier: earlier.clone(), later: turn.clone() });
        }
        if largest.is_none_or(|largest| largest.token < Some(token)) {
            largest = Some(turn);
        }
    }
}

fn repetitions(turns: &[&Turn], completions: &[Completion], found: &mut Vec<Violation>) {
    if turns.iter().all(|turn| turn.attempt == 0) {
        return;
    }
    let reported: BTreeSet<_> =
        completions.iter().map(|(by, name, attempt)| (&**by, &**name, *attempt)).collect();
    let is_completed = |turn: &Turn| reported.contains(&(&*turn.by, &*turn.name, turn.attempt));
    let Some(at) = turns.iter().position(|turn| is_completed(turn)) else { return };
    for later in &turns[at + 1..] {
        let (completed, later) = (turns[at].clone(), (*later).clone());
        found.push(Violation::RanAgain { completed, later });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(name: &str, version: Version, token: u128, begin: u64, last: u64) -> Turn {
        Turn {
            name: name.to_owned(),
            by: format!("{begin}.0"),
            version,
            token: Some(token),
            attempt: 0,
            begin,
            last,
            pause: 0,
            ended: true,
            pid: 1,
        }
    }

    fn judged(turns: &[Turn], limit: usize) -> Vec<Violation> {
        violations(turns, &[], |_| limit)
    }

    use Version::{New, Old};

    #[test]
    fn turns_one_after_the_other_with_growing_tokens_are_fine() {
        let turns =
            [turn("a", Old, 1, 0, 10), turn("a", New, 2, 10, 20), turn("a", Old, 9, 25, 30)];
        assert_eq!(judged(&turns, 1), []);
        assert_eq!(hand_overs(&turns).len(), 2);
        assert_eq!(longest_gap(&turns), 5);
    }

    #[test]
    fn an_overlap_is_found_whatever_the_order_of_the_list() {
        let mut turns = [turn("a", Old, 1, 0, 10), turn("a", New, 2, 9, 20)];
        let [earlier, later] = turns.clone();
        let overlap = [Violation::Overlap { earlier, later, nanos: 1 }];
        assert_eq!(judged(&turns, 1), overlap);
        turns.reverse();
        assert_eq!(judged(&turns, 1), overlap);
    }

    #[test]
    fn an_overlap_with_a_turn_before_the_last_is_found() {
        let turns =
            [turn("a", Old, 1, 0, 100), turn("a", New, 2, 10, 20), turn("a", New, 3, 50, 60)];
        let found = judged(&turns, 1);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(matches!(&found[1], Violation::Overlap { nanos: 10, .. }), "{found:?}");
    }

    #[test]
    fn names_do_not_concern_each_other() {
        let turns = [turn("a", Old, 5, 0, 10), turn("b", New, 2, 5, 20)];
        assert_eq!(judged(&turns, 1), []);
        assert_eq!(hand_overs(&turns).len(), 0);
    }

    #[test]
    fn a_token_that_falls_or_repeats_is_found() {
        for token in [6, 7] {
            let turns = [turn("a", Old, 7, 0, 10), turn("a", New, token, 11, 20)];
            let [Violation::Falling { earlier, later }] = &judged(&turns, 1)[..] else {
                panic!("{token}")
            };
            assert_eq!((earlier, later), (&turns[0], &turns[1]));
        }
    }

    #[test]
    fn a_token_below_an_earlier_one_than_the_last_is_found() {
        let turns = [turn("a", Old, 7, 0, 1), turn("a", New, 3, 2, 3), turn("a", New, 5, 4, 5)];
        assert_eq!(judged(&turns, 1).len(), 2);
    }

    #[test]
    fn a_turn_without_a_token_is_found() {
        let without = Turn { token: None, ..turn("a", Old, 0, 0, 1) };
        let found = judged(std::slice::from_ref(&without), 1);
        assert_eq!(found, [Violation::NoToken { turn: without }]);
    }

    #[test]
    fn a_semaphore_allows_its_limit_in_any_order_and_no_token_twice() {
        let two = [turn("s", Old, 8, 0, 10), turn("s", New, 7, 1, 10)];
        assert_eq!(judged(&two, 2), []);
        let three = [&two[..], &[turn("s", New, 9, 2, 5)]].concat();
        assert!(matches!(&judged(&three, 2)[..], [Violation::Overlap { .. }]));
        let same = [turn("s", Old, 8, 0, 10), turn("s", New, 8, 1, 10)];
        assert!(matches!(&judged(&same, 2)[..], [Violation::Falling { .. }]));
    }

    #[test]
    fn a_job_that_runs_after_its_completion_is_found() {
        let job = |attempt, begin: u64| Turn {
            attempt,
            ..turn("job-1", Old, u128::from(begin), begin, begin + 1)
        };
        let turns = [job(1, 10), job(2, 20), job(3, 30)];
        let completed = |attempt: u32, by: &str| (by.to_owned(), "job-1".to_owned(), attempt);
        assert_eq!(violations(&turns, &[completed(3, "30.0")], |_| 1), []);
        let found = violations(&turns, &[completed(2, "20.0")], |_| 1);
        assert!(matches!(&found[..], [Violation::RanAgain { later, .. }] if later.attempt == 3));
        // The same attempt number of another worker is another attempt: a released job reuses the number.
        assert_eq!(violations(&turns, &[completed(2, "99.0")], |_| 1), []);
    }
}
