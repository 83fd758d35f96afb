//! Simulates a range of seeds: `cargo run --release -p tenure-sim --example soak -- [first] [count] [threads]`.
//! Fails if a run breaks a promise.

use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    let mut numbers = std::env::args().skip(1).filter_map(|arg| arg.parse::<u64>().ok());
    let first = numbers.next().unwrap_or(0);
    let count = numbers.next().unwrap_or(20_000);
    let threads = numbers.next().and_then(|n| usize::try_from(n).ok()).unwrap_or(1);
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
