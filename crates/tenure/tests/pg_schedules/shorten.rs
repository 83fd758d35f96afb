//! Shortening of a failed run: it is repeated with fewer steps, as long as it breaks the same promise.

use std::fmt;
use std::time::{Duration, Instant};

use crate::pair::ServerPair;
use crate::run::{RunFailure, run};
use crate::steps::Step;

/// Largest number of repetitions.
const MAX_TRIES: usize = 40;
/// Time after which no further repetition begins.
const MAX_TIME: Duration = Duration::from_secs(120);

/// The shortest failure that was found.
pub(crate) struct ShortenedFailure {
    failure: RunFailure,
    steps_before: usize,
    tries: usize,
    begun: Instant,
}

/// Repeats a failed run without one client, then without parts of its steps, halved until single steps are left out.
pub(crate) async fn shorten(pair: &mut ServerPair, failure: RunFailure) -> ShortenedFailure {
    let steps_before = failure.steps.len();
    let mut shortest = ShortenedFailure { failure, steps_before, tries: 0, begun: Instant::now() };
    for client in (0..shortest.failure.plan.clients).rev() {
        let of_others = |step: &Step| step.client() != Some(client);
        let steps = shortest.failure.steps.iter().copied().filter(of_others).collect();
        shortest.try_steps(pair, steps).await;
    }
    let mut length = shortest.failure.steps.len() / 2;
    while length > 0 && shortest.may_try() {
        // From the end: the first steps only open connections, and most later steps need those.
        let mut end = shortest.failure.steps.len();
        while end > 0 && shortest.may_try() {
            let begin = end.saturating_sub(length);
            let mut steps = shortest.failure.steps.clone();
            steps.drain(begin..end);
            shortest.try_steps(pair, steps).await;
            end = begin.min(shortest.failure.steps.len());
        }
        length /= 2;
    }
    shortest
}

impl ShortenedFailure {
    fn may_try(&self) -> bool {
        self.tries < MAX_TRIES && self.begun.elapsed() < MAX_TIME
    }

    /// Keeps these steps if they break the same promise.
    async fn try_steps(&mut self, pair: &mut ServerPair, steps: Vec<Step>) {
        if steps.len() >= self.failure.steps.len() || !self.may_try() {
            return;
        }
        self.tries += 1;
        let mut plan = self.failure.plan.clone();
        if !steps.iter().any(|step| matches!(step, Step::CutOffStandby | Step::Promote)) {
            plan.promotion = None;
        }
        if let Err(shorter) = run(pair, plan, Some(steps)).await
            && promise(&shorter) == promise(&self.failure)
            && shorter.steps.len() < self.failure.steps.len()
        {
            self.failure = shorter;
        }
    }
}

/// The broken promise, without the numbers of clients, jobs and tokens.
fn promise(failure: &RunFailure) -> String {
    let first = failure.violations.first().map_or("", String::as_str);
    first.chars().filter(|character| !character.is_ascii_digit()).collect()
}

impl fmt::Display for ShortenedFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { failure, steps_before, tries, .. } = self;
        let RunFailure { plan, steps, violations, timeline } = failure;
        let (seed, steps) = (plan.seed, steps.len());
        writeln!(f, "seed {seed}: {plan:?}\n{timeline}\n{}", violations.join("\n"))?;
        writeln!(f, "shortened from {steps_before} steps to {steps} by {tries} repetitions")?;
        write!(f, "all steps: cargo xtask soak postgres -- {seed} 1")
    }
}
