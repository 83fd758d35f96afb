//! Reduction of a failing case: smaller cases are tried as long as one of them fails.

use std::fmt;

use crate::{FaultKind, Setup, Violation, simulate};

/// The smallest failing case that was found.
#[derive(Clone, Debug)]
pub struct Shrunk<C, F> {
    /// The case.
    pub case: C,
    /// Its failure.
    pub failure: F,
    /// Reductions that were applied, in order.
    pub steps: Vec<String>,
    /// Number of cases that were tried.
    pub tries: u32,
}

/// Reduces a failing case.
///
/// `reductions` lists smaller cases with a description of each, the boldest first. `fails` runs a case and returns its
/// failure. The first smaller case that fails replaces the case, until none fails or `max_tries` cases were tried.
pub fn shrink<C, F>(
    case: C,
    failure: F,
    reductions: impl Fn(&C) -> Vec<(String, C)>,
    mut fails: impl FnMut(&mut C) -> Option<F>,
    max_tries: u32,
) -> Shrunk<C, F> {
    let mut best = Shrunk { case, failure, steps: Vec::new(), tries: 0 };
    'reduced: loop {
        for (step, mut smaller) in reductions(&best.case) {
            if best.tries == max_tries {
                return best;
            }
            best.tries += 1;
            if let Some(failure) = fails(&mut smaller) {
                (best.case, best.failure) = (smaller, failure);
                best.steps.push(step);
                continue 'reduced;
            }
        }
        return best;
    }
}

/// A seed and its setup.
#[derive(Clone, Copy, Debug)]
pub struct SeededSetup {
    /// Seed of the run.
    pub seed: u64,
    /// Its setup.
    pub setup: Setup,
}

/// Number of further seeds for which a smaller setup is tried. A smaller setup is another run, in which the breach may
/// need another seed.
const OTHER_SEEDS: u64 = 40;
/// Largest number of setups that are tried.
const MAX_SETUPS: u32 = 400;
/// Shortest run, in ttls.
const MIN_LENGTH: f64 = 3.0;

/// Reduces a setup in which a run of this seed breaks the contract: fewer clients and keys, a shorter run, fewer kinds
/// of faults. `None` if the run breaks nothing.
pub fn shrink_run(seed: u64, setup: &Setup) -> Option<Shrunk<SeededSetup, Box<Violation>>> {
    let failure = simulate(seed, setup).err()?;
    let breach = failure.breach;
    // The same kind of breach only: a reduction must not turn one problem into another.
    let fails = |case: &mut SeededSetup| {
        let seeds = std::iter::once(case.seed).chain(0..OTHER_SEEDS);
        seeds.into_iter().find_map(|seed| {
            let violation = simulate(seed, &case.setup).err()?;
            case.seed = seed;
            (violation.breach == breach).then_some(violation)
        })
    };
    let case = SeededSetup { seed, setup: *setup };
    Some(shrink(case, failure, reductions, fails, MAX_SETUPS))
}

fn reductions(case: &SeededSetup) -> Vec<(String, SeededSetup)> {
    let Setup { clients, keys, length, faults, .. } = case.setup;
    let mut smaller = Vec::new();
    let mut push = |step: String, setup: Setup| {
        smaller.push((step, SeededSetup { setup, ..*case }));
    };
    if clients > 2 {
        push("2 clients".into(), Setup { clients: 2, ..case.setup });
        push(format!("{} clients", clients - 1), Setup { clients: clients - 1, ..case.setup });
    }
    if keys > 1 {
        push("1 key".into(), Setup { keys: 1, ..case.setup });
    }
    for kind in FaultKind::ALL {
        if let Some(faults) = faults.without(kind) {
            push(format!("without {kind:?}"), Setup { faults, ..case.setup });
        }
    }
    if length > MIN_LENGTH {
        let length = (length / 2.0).max(MIN_LENGTH);
        push(format!("{length} ttls"), Setup { length, ..case.setup });
    }
    smaller
}

impl fmt::Display for Shrunk<SeededSetup, Box<Violation>> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { case: SeededSetup { seed, setup }, failure, steps, tries } = self;
        let Setup { clients, keys, length, .. } = setup;
        let faults: Vec<_> = FaultKind::ALL
            .into_iter()
            .filter(|kind| setup.faults.without(*kind).is_some())
            .collect();
        writeln!(f, "after {tries} tries ({}):", steps.join(", "))?;
        writeln!(
            f,
            "{:?}, seed {seed}, up to {clients} clients, {keys} keys, {length} ttls, faults {faults:?}",
            setup.store
        )?;
        failure.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A case is a list of numbers, and fails if it contains 3 and 5.
    fn fails(case: &[u32]) -> Option<usize> {
        (case.contains(&3) && case.contains(&5)).then_some(case.len())
    }

    fn without_one(case: &[u32]) -> Vec<(String, Vec<u32>)> {
        let smaller = case.iter().map(|out| {
            let rest = case.iter().copied().filter(|number| number != out).collect();
            (format!("without {out}"), rest)
        });
        smaller.collect()
    }

    fn numbers() -> Vec<u32> {
        (0..9).collect()
    }

    #[test]
    fn only_what_the_failure_needs_is_left() {
        let shrunk = shrink(numbers(), 9, |case| without_one(case), |case| fails(case), 1_000);
        assert_eq!((shrunk.case, shrunk.failure), (vec![3, 5], 2));
        assert_eq!(shrunk.steps.len(), 7);
    }

    #[test]
    fn the_number_of_tries_is_limited() {
        let shrunk = shrink(numbers(), 9, |case| without_one(case), |case| fails(case), 3);
        assert_eq!((shrunk.tries, shrunk.failure), (3, 6));
    }
}
