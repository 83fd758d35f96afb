//! `cargo xtask bench core`: the lock table alone, and what the library adds to it on the memory store.
//!
//! The rates of the table are given twice: for operations that come one by one, and for operations that come 32 at a time,
//! as the requests of one read do, with `LockTable::look_ahead` before each such group.
//!
//! Every figure is the median of several rounds, and the rounds of what is compared are interleaved. One JSON object a
//! line goes to standard output, a table for people to standard error.

use std::hash::RandomState;
use std::hint::black_box;
use std::iter::repeat_n;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tenure::{Client, MemoryStore};
use tenure_core::table::{ClaimAnswer, KeySpace, Mode, Owner, TableClaim, TableConfig, UpcomingOp};
use tenure_core::{LockTable, LockToken, Random, Time};

const ROUNDS: usize = 9;
/// How many operations a round of the table takes.
const OPERATIONS: usize = 1_000_000;
/// How many acquisitions a round of the library takes.
const ACQUISITIONS: u32 = 50_000;
const MILLION: u64 = 1_000_000;
const LEASE: Duration = Duration::from_secs(33);

fn main() {
    // Memory first: what is measured later would leave pages behind.
    let key = bytes_per_held_key();
    let waiter = bytes_per_waiter();
    report("bytes per held key at 1M keys", "bytes", key, 300.0);
    report("bytes per waiter at 1M waiters", "bytes", waiter, 200.0);

    // Keys that come and go, and keys that are all held at once and lie all over memory.
    at_each_size("keys in turn, no look-ahead", Some(3.0), Work::AskRelease, 1);
    at_each_size("held keys, no look-ahead", None, Work::ReleaseAsk, 1);
    at_each_size("held keys, look-ahead of 32", Some(3.0), Work::ReleaseAsk, 32);
    at_each_size("renewals, no look-ahead", None, Work::Renew, 1);
    at_each_size("renewals, look-ahead of 32", Some(3.0), Work::Renew, 32);

    let single = runtime(tokio::runtime::Builder::new_current_thread());
    let multi = runtime(tokio::runtime::Builder::new_multi_thread());
    let mut bare = Bench::new(1, Work::ReleaseAsk, 1);
    let (mut pair, mut on_one, mut on_many) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        pair.push(2e6 / bare.round());
        on_one.push(single.block_on(library_round()));
        on_many.push(
            multi.block_on(async { tokio::spawn(library_round()).await.unwrap_or(f64::NAN) }),
        );
    }
    let (pair, on_one, on_many) = (median(pair), median(on_one), median(on_many));
    inform("acquire + release, bare table", "µs", pair);
    report("the library adds, one thread", "µs", on_one - pair, 5.0);
    inform("the library adds, many threads", "µs", on_many - pair);
}

/// The rate of operations at 1, 1k and 1M keys, `ahead` of which are known beforehand at every size alike.
///
/// Without look-ahead there is no limit to be within: one wait for memory alone takes longer than three operations on a
/// key that is in the cache.
fn at_each_size(what: &str, limit: Option<f64>, work: Work, ahead: usize) {
    let sizes = [1, 1_000, MILLION];
    let mut benches = sizes.map(|keys| Bench::new(keys, work, ahead));
    let mut rates = sizes.map(|_| Vec::new());
    for _ in 0..ROUNDS {
        for (bench, rates) in benches.iter_mut().zip(&mut rates) {
            rates.push(bench.round());
        }
    }
    let [one, thousand, million] = rates.map(median);
    inform(&format!("{what}: 1 key"), "per second", one);
    inform(&format!("{what}: 1k keys"), "per second", thousand);
    inform(&format!("{what}: 1M keys"), "per second", million);
    let slower = format!("{what}: 1M slower than 1");
    match limit {
        Some(limit) => report(&slower, "times", one / million, limit),
        None => inform(&slower, "times", one / million),
    }
}

type Table = LockTable<RandomState, fn() -> LockToken>;

fn table() -> Table {
    LockTable::new(TableConfig::default(), RandomState::new(), mint)
}

fn mint() -> LockToken {
    use std::sync::atomic::{AtomicU64, Ordering};
    static LAST: AtomicU64 = AtomicU64::new(0);
    let number = LAST.fetch_add(1, Ordering::Relaxed);
    LockToken::new(number, number.wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// A key as people write them: 20 bytes.
fn key(n: u64) -> [u8; 20] {
    let mut key = *b"reports/000000000000";
    let mut rest = n;
    for digit in key[8..].iter_mut().rev() {
        *digit = b'0' + u8::try_from(rest % 10).unwrap_or(0);
        rest /= 10;
    }
    key
}

/// What is done with each key.
#[derive(Clone, Copy, PartialEq)]
enum Work {
    /// It is free; it is asked for and released.
    AskRelease,
    /// It is held, as all the others are; it is released and asked for again.
    ReleaseAsk,
    /// It is held, as all the others are, and renewed.
    Renew,
}

impl Work {
    const fn operations(self) -> usize {
        match self {
            Self::AskRelease | Self::ReleaseAsk => 2,
            Self::Renew => 1,
        }
    }
}

/// A key, and what its client knows of it.
struct Known {
    key: [u8; 20],
    owner: Owner,
    token: LockToken,
}

struct Bench {
    table: Table,
    work: Work,
    /// How many operations are known beforehand, as when that many requests came in one read. Where it is more than one,
    /// the table looks ahead.
    ahead: usize,
    /// In random order, and used one after the other as requests come out of a buffer: it is the table that has to find
    /// its way in memory, not the bench.
    known: Vec<Known>,
    next: usize,
    now: Time,
}

impl Bench {
    fn new(keys: u64, work: Work, ahead: usize) -> Self {
        let mut table = table();
        let owners: Vec<_> = (0..1_000).map(|_| table.connect()).collect();
        let now = Time::from_nanos(1);
        let mut known: Vec<_> = (0..keys)
            .zip(owners.into_iter().cycle())
            .map(|(n, owner)| {
                let key = key(n);
                let token = match work {
                    Work::AskRelease => LockToken::new(0, 0),
                    Work::ReleaseAsk | Work::Renew => ask(&mut table, &key, owner, now),
                };
                Known { key, owner, token }
            })
            .collect();
        let mut random = Random::new(keys);
        for (last, bound) in (1..known.len()).zip(2..) {
            known.swap(last, usize::try_from(random.below(bound)).unwrap_or(0));
        }
        Self { table, work, ahead, known, next: 0, now }
    }

    /// Operations per second.
    fn round(&mut self) -> f64 {
        let keys = (self.ahead / self.work.operations()).max(1);
        let reads = OPERATIONS / (keys * self.work.operations());
        let begun = Instant::now();
        for _ in 0..reads {
            if self.ahead > 1 {
                self.look_ahead(keys);
            }
            for _ in 0..keys {
                self.now = self.now + Duration::from_nanos(100);
                work(&mut self.table, self.work, &mut self.known[self.next], self.now);
                self.next += 1;
                if self.next == self.known.len() {
                    self.next = 0;
                }
            }
        }
        rate(reads * keys * self.work.operations(), begun)
    }

    fn look_ahead(&mut self, keys: usize) {
        let (before, after) = self.known.split_at(self.next);
        let coming = after.iter().chain(before.iter().chain(after).cycle()).take(keys);
        let (operations, renews) = (self.work.operations(), self.work == Work::Renew);
        self.table.prefetch(coming.flat_map(|known| {
            repeat_n(
                UpcomingOp { space: KeySpace::Lock, key: &known.key, is_renewal: renews },
                operations,
            )
        }));
    }
}

fn work(table: &mut Table, work: Work, known: &mut Known, now: Time) {
    let Known { key, owner, token } = known;
    match work {
        Work::AskRelease => {
            *token = ask(table, key, *owner, now);
            release(table, key, *token, now);
        }
        Work::ReleaseAsk => {
            release(table, key, *token, now);
            *token = ask(table, key, *owner, now);
        }
        Work::Renew => {
            let renewed = table.renew(KeySpace::Lock, key, *token, LEASE, now);
            assert!(black_box(renewed).is_ok(), "the token is ours");
        }
    }
}

fn release(table: &mut Table, key: &[u8], token: LockToken, now: Time) {
    let released = table.release(KeySpace::Lock, key, token, now);
    assert!(black_box(released).is_ok(), "the token is ours");
}

fn ask(table: &mut Table, key: &[u8], owner: Owner, now: Time) -> LockToken {
    let want = TableClaim { owner, mode: Mode::Exclusive, lease: LEASE, queue: false };
    match table.claim(key, want, now) {
        ClaimAnswer::Granted(grant) => grant.token,
        other => panic!("not granted: {other:?}"),
    }
}

fn bytes_per_held_key() -> f64 {
    let before = resident();
    let mut table = table();
    let owner = table.connect();
    for n in 0..MILLION {
        ask(&mut table, &key(n), owner, Time::from_nanos(1));
    }
    let used = resident() - before;
    black_box(&table);
    used / 1e6
}

/// A thousand keys with a thousand waiters each, on top of what each waiter's connection costs.
fn bytes_per_waiter() -> f64 {
    let mut table = table();
    let holder = table.connect();
    for n in 0..1_000 {
        ask(&mut table, &key(n), holder, Time::from_nanos(1));
    }
    let owners: Vec<_> = (0..MILLION).map(|_| table.connect()).collect();
    let before = resident();
    for (n, owner) in (0..MILLION).zip(owners) {
        let want = TableClaim { owner, mode: Mode::Exclusive, lease: LEASE, queue: true };
        let asked = table.claim(&key(n % 1_000), want, Time::from_nanos(1));
        assert!(matches!(asked, ClaimAnswer::Queued(_)), "{asked:?}");
    }
    let used = resident() - before;
    black_box(&table);
    used / 1e6
}

/// The resident memory of this process in bytes.
fn resident() -> f64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split(' ').nth(1).and_then(|pages| pages.parse::<f64>().ok());
    pages.unwrap_or(f64::NAN) * 4096.0
}

/// Microseconds per acquire and release through the library.
async fn library_round() -> f64 {
    let client = Client::with_store(Arc::new(MemoryStore::new()));
    let begun = Instant::now();
    for _ in 0..ACQUISITIONS {
        let guard = client.lock("reports/nightly").acquire().await.expect("it is free");
        guard.release().await.expect("it is ours");
    }
    begun.elapsed().as_secs_f64() * 1e6 / f64::from(ACQUISITIONS)
}

fn runtime(mut builder: tokio::runtime::Builder) -> tokio::runtime::Runtime {
    builder.enable_all().build().expect("a runtime can be built")
}

#[expect(clippy::cast_precision_loss, reason = "small numbers")]
fn rate(operations: usize, begun: Instant) -> f64 {
    operations as f64 / begun.elapsed().as_secs_f64()
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

/// Prints a figure with its limit.
fn report(what: &str, unit: &str, figure: f64, limit: f64) {
    let verdict = if figure <= limit { "within" } else { "ABOVE" };
    eprintln!("{what:<44} {figure:>14.2} {unit:<12} {verdict} {limit}");
    println!(
        r#"{{"bench":"core","what":"{what}","unit":"{unit}","figure":{figure:.3},"limit":{limit}}}"#
    );
}

/// Prints a figure that has no limit.
fn inform(what: &str, unit: &str, figure: f64) {
    eprintln!("{what:<44} {figure:>14.2} {unit}");
    println!(r#"{{"bench":"core","what":"{what}","unit":"{unit}","figure":{figure:.3}}}"#);
}
