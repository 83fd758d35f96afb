//! Real statements on a real PostgreSQL, in an order that a seed draws, with crashes and fail-overs between any two.
//!
//! Clients connect through a relay that holds back every request and every reply. The scheduler releases them one by
//! one, and injects faults. So a seed chooses the order of statements, and repeats it as far as the server allows.
#![cfg(feature = "jobs")]
#![expect(clippy::unwrap_used, reason = "helpers of tests are tests, which clippy cannot see")]

mod advisory;
mod beats;
mod jobs;
mod locks;
mod pair;
mod plan;
mod protocol;
mod referee;
mod run;
mod schedule;
#[allow(dead_code, reason = "shared with the tests of locks")]
#[path = "../pg_lease/server.rs"]
mod server;
#[path = "../services/mod.rs"]
mod services;
mod sessions;
mod shorten;
mod steps;
mod turnstile;

use std::collections::BTreeMap;
use std::io::Write as _;
use std::time::{Duration, Instant};

use pair::ServerPair;
use plan::{Plan, Work};

/// Time after which no further seed is started, if no number of seeds is given.
const SLICE: Duration = Duration::from_secs(25);

/// First seed and number of seeds: `TENURE_SOAK_POSTGRES="FIRST COUNT"`. By default a random seed, and as many as fit
/// into [`SLICE`]. A third word prints the timeline of every seed.
fn seeds() -> (u64, Option<u64>, bool) {
    let text = std::env::var("TENURE_SOAK_POSTGRES").unwrap_or_default();
    let mut words = text.split_whitespace();
    let mut number = || words.next().map(|word| word.parse::<u64>().unwrap());
    let first = number().unwrap_or_else(|| getrandom::u64().unwrap() >> 32);
    (first, number(), words.next().is_some())
}

#[test]
fn seeded_schedules_keep_the_promises() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let Some(mut pair) = ServerPair::start().await else { return };
        let (first, count, timelines) = seeds();
        say(&format!("seeds from {first}"));
        let begun = Instant::now();
        let (mut done, mut steps, mut statements) = (0, 0, 0);
        let mut grants: BTreeMap<Work, usize> = BTreeMap::new();
        while count.map_or(begun.elapsed() < SLICE, |count| done < count) {
            let plan = Plan::draw(first + done);
            let work = plan.work;
            match run::run(&mut pair, plan, None).await {
                Ok(report) => {
                    *grants.entry(work).or_default() += report.grants;
                    steps += report.steps;
                    statements += report.statements;
                    if timelines {
                        say(&format!("seed {}\n{}", first + done, report.timeline));
                    }
                }
                Err(failure) => {
                    let shortest = shorten::shorten(&mut pair, failure).await;
                    panic!("after {done} seeds\n{shortest}");
                }
            }
            done += 1;
            if done % 500 == 0 {
                say(&format!("{done} seeds after {:.0} s", begun.elapsed().as_secs_f64()));
            }
        }
        say(&format!(
            "{done} seeds from {first} in {:.1} s: {steps} steps, {statements} statements, grants {grants:?}, \
             {} crashes, {} promotions, 0 violations",
            begun.elapsed().as_secs_f64(),
            pair.crashes,
            pair.promotions
        ));
        assert!(done > 0);
        // A run without grants and faults would prove nothing.
        if done >= 200 {
            let kinds = [Work::Locks, Work::Jobs, Work::Sessions];
            assert!(kinds.iter().all(|work| grants.get(work).is_some_and(|grants| *grants > 100)));
            assert!(pair.crashes > 0 && pair.promotions > 0);
        }
    });
}

/// Prints even if the test passes.
fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}
