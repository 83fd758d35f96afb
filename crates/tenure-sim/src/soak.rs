//! Long runs over many seeds, on several threads.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use crate::{Setup, Stats, StoreKind, Violation, simulate};

/// Results of a long run.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Number of runs; each seed is run on every store.
    pub runs: u64,
    /// Event counts of all runs.
    pub stats: Stats,
    /// Violations found. A thread stops at its first one.
    pub violations: Vec<(Setup, Violation)>,
}

/// Leases that the seeds use in turn: one whose margin is more than a sixth, one whose grace is cut, one that is longer
/// than a wait.
const TTLS: [Duration; 3] =
    [Duration::from_millis(200), Duration::from_secs(3), Duration::from_secs(40)];
/// Number of seeds that a thread takes at once.
const BATCH: u64 = 200;

/// Simulates every seed on every store with all rules. `progress` is called from time to time, on the worker threads,
/// with the number of seeds done.
///
/// The first violation ends the run.
pub fn soak(seeds: Range<u64>, threads: usize, progress: impl Fn(u64) + Sync) -> Summary {
    let next = AtomicU64::new(seeds.start);
    let done = AtomicU64::new(0);
    let stop = AtomicBool::new(false);
    let total = Mutex::new(Summary::default());
    let work = || {
        let mut own = Summary::default();
        while !stop.load(Ordering::Relaxed) {
            let from = next.fetch_add(BATCH, Ordering::Relaxed);
            if from >= seeds.end {
                break;
            }
            let batch = from..seeds.end.min(from + BATCH);
            let count = batch.end - batch.start;
            own.run(batch);
            if !own.violations.is_empty() {
                stop.store(true, Ordering::Relaxed);
            }
            progress(done.fetch_add(count, Ordering::Relaxed) + count);
        }
        // A thread that panicked has failed the whole run already.
        total.lock().expect("no thread panics while it adds up").add(own);
    };
    thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(work);
        }
    });
    total.into_inner().expect("no thread panics while it adds up")
}

impl Summary {
    fn run(&mut self, seeds: Range<u64>) {
        for (seed, ttl) in seeds.map(|seed| (seed, TTLS[(seed % 3) as usize])) {
            for store in StoreKind::ALL {
                self.runs += 1;
                let setup = Setup { ttl, ..setup(store, seed) };
                match simulate(seed, &setup) {
                    Ok(stats) => self.stats += stats,
                    Err(violation) => return self.violations.push((setup, *violation)),
                }
            }
        }
    }

    fn add(&mut self, other: Self) {
        self.runs += other.runs;
        self.stats += other.stats;
        self.violations.extend(other.violations);
    }
}

/// Setup of a seed. On stores of records, most seeds draw their faults. The other models are for a mix of faults only:
/// their server keeps the place of a client that is killed, so that kills alone would fill its queue.
fn setup(store: StoreKind, seed: u64) -> Setup {
    let drawn = matches!(store, StoreKind::Stream | StoreKind::Bucket) && !seed.is_multiple_of(4);
    if drawn { Setup::drawn(store, seed) } else { Setup::new(store) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_seed_is_run_once_on_every_store_however_many_threads_there_are() {
        let one = soak(5..455, 1, |_| {});
        let seen = AtomicU64::new(0);
        let three = soak(5..455, 3, |done| {
            seen.fetch_max(done, Ordering::Relaxed);
        });
        assert_eq!((one.runs, one.stats), (three.runs, three.stats));
        assert_eq!((one.runs, seen.into_inner()), (4 * 450, 450));
        assert!(one.violations.is_empty());
    }
}
