//! Simulates the product for a range of seeds: `cargo run --release -p tenure-sim --example product -- FIRST COUNT THREADS`.

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use tenure_sim::product::{ProductStats, simulate_product};

fn main() -> ExitCode {
    let [first, count, threads] = arguments([0, 1_000, 2]);
    let (next, failed, begun) = (AtomicU64::new(0), AtomicBool::new(false), Instant::now());
    let work = || {
        let mut total = ProductStats::default();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= count || failed.load(Ordering::Relaxed) {
                return total;
            }
            match simulate_product(first + index) {
                Ok(stats) => total += stats,
                Err(violation) => {
                    failed.store(true, Ordering::Relaxed);
                    println!("{violation}");
                }
            }
        }
    };
    let mut total = ProductStats::default();
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        for thread in running {
            total += thread.join().expect("a simulation does not panic");
        }
    });
    let (took, done) = (begun.elapsed(), next.into_inner().min(count));
    #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
    let rate = done as f64 / took.as_secs_f64();
    println!("{done} seeds from {first} in {took:.1?}, {rate:.0} per second: {total:?}");
    if failed.into_inner() { ExitCode::FAILURE } else { ExitCode::SUCCESS }
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
