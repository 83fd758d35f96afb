//! The product in simulation: a slice of seeds that begins at a random one.

use std::env::VarError;
use std::io::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use tenure_sim::product::{Fault, Plan, ProductStats, Work, run, simulate_product};

/// Time after which no further seed is started.
const SLICE: Duration = Duration::from_secs(40);
/// Number of seeds that a slice has at least, however slow the machine is.
const MIN_SEEDS: u64 = 200;

/// Number of seeds that meet every kind of work and of fault.
const COVERING_SEEDS: u64 = 300;
/// Number of times that these seeds meet each kind at least.
const MIN_COUNT: u64 = 10;

/// First seed: `TENURE_SEED`, or a random one.
fn first_seed() -> u64 {
    match std::env::var("TENURE_SEED") {
        Ok(seed) => seed.parse().unwrap_or_else(|_| panic!("TENURE_SEED={seed} is no number")),
        Err(VarError::NotPresent) => {
            let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
            u64::from(since.map_or(0, |since| since.subsec_nanos()))
        }
        Err(error) => panic!("TENURE_SEED: {error}"),
    }
}

#[test]
fn random_seeds_keep_every_promise() {
    let (first, begun, next) = (first_seed(), Instant::now(), AtomicU64::new(0));
    // Not captured by the test runner: the seed is shown even if the test passes.
    let _ = writeln!(std::io::stderr(), "simulating the product from TENURE_SEED={first} on");
    let work = || {
        let mut total = ProductStats::default();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= MIN_SEEDS && begun.elapsed() > SLICE {
                return total;
            }
            match simulate_product(first + index) {
                Ok(stats) => total += stats,
                Err(violation) => panic!("{violation}"),
            }
        }
    };
    let mut total = ProductStats::default();
    std::thread::scope(|scope| {
        let threads = [scope.spawn(work), scope.spawn(work)];
        for thread in threads {
            total += thread.join().expect("no promise is broken");
        }
    });
    let seeds = next.into_inner();
    println!("{seeds} seeds from {first}: {total:?}");
    let ProductStats { holds, losses, waits, server_starts, .. } = total;
    assert!(holds > seeds * 4 && losses > seeds / 2, "too little happens: {total:?}");
    assert!(waits > seeds && server_starts > seeds, "too little happens: {total:?}");
}

#[test]
fn the_same_seed_gives_the_same_run() {
    for seed in 0..60 {
        let first = run(Plan::draw(seed), false).expect("no promise is broken");
        assert_eq!(run(Plan::draw(seed), false).expect("the same"), first, "seed {seed}");
    }
}

/// In this run the rate of a client's clock changes while the client is stopped within a step. The clock must not stand
/// still afterwards: the server would end a hold before its holder's deadline.
#[test]
fn a_clock_whose_rate_changes_during_a_stop_goes_on() {
    if let Err(violation) = simulate_product(1_222_200) {
        panic!("{violation}");
    }
}

/// Always the same seeds: this test cannot fail by chance.
#[test]
fn every_kind_of_work_is_done_and_every_kind_of_fault_strikes() {
    let mut total = ProductStats::default();
    for seed in 0..COVERING_SEEDS {
        match simulate_product(seed) {
            Ok(stats) => total += stats,
            Err(violation) => panic!("{violation}"),
        }
    }
    for (work, count) in Work::ALL.iter().zip(total.kinds.work) {
        assert!(count >= MIN_COUNT, "{work:?} was done {count} times");
    }
    for (fault, count) in Fault::KINDS.iter().zip(total.kinds.faults) {
        assert!(count >= MIN_COUNT, "{fault} struck {count} times");
    }
}
