//! Simulates a range of seeds: `cargo run --release -p tenure-sim --example soak -- [first] [count] [threads]`.
//! Fails if a run breaks a promise.

use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    let [first, count, threads] = arguments([0, 20_000, 1]);
    let threads = usize::try_from(threads).expect("a number of threads");
    let start = Instant::now();
    let summary = tenure_sim::soak(first..first + count, threads, |done| {
        if done % 10_000 == 0 {
            println!("{done} seeds");
        }
    });
    for (setup, violation) in &summary.violations {
        println!("{:?}: {violation}", setup.store);
        if let Some(shrunk) = tenure_sim::shrink_run(violation.seed, setup) {
            println!("{shrunk}");
        }
    }
    println!("{} runs in {:?}: {:?}", summary.runs, start.elapsed(), summary.stats);
    if summary.violations.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Numbers of the command line, with defaults for those that are not given.
fn arguments(mut numbers: [u64; 3]) -> [u64; 3] {
    let given: Vec<String> = std::env::args().skip(1).collect();
    assert!(given.len() <= numbers.len(), "too many arguments: give FIRST COUNT THREADS");
    for (number, text) in numbers.iter_mut().zip(&given) {
        *number = text.parse().unwrap_or_else(|error| panic!("{text:?} is no number: {error}"));
    }
    numbers
}
