//! `cargo xtask bench core`: the lock table alone, and what the library adds to it on the memory store.
//!
//! Every figure is the median of several rounds, and the rounds of what is compared are interleaved. One JSON object a
//! line goes to standard output, a table for people to standard error.

use std::hash::RandomState;
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tenure::{Client, Memory};
use tenure_core::table::{Asked, Config, Mode, Owner, Space, Want};
use tenure_core::{LockTable, LockToken, Random, Time};

const ROUNDS: usize = 5;
/// How many operations a round of the table takes.
const OPERATIONS: u64 = 1_000_000;
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
    at_each_size("keys in turn", |keys| Bench::new(keys, Hold::OneAtATime), Bench::round);
    at_each_size("held keys", |keys| Bench::new(keys, Hold::All), Bench::round);
    at_each_size("held keys, 32 a read", |keys| Bench::new(keys, Hold::All), Bench::round_ahead);
    at_each_size("renewals", |keys| Bench::new(keys, Hold::All), |b| b.renewals(1));
    at_each_size("renewals, 32 a read", |keys| Bench::new(keys, Hold::All), |b| b.renewals(32));

    let single = runtime(tokio::runtime::Builder::new_current_thread());
    let multi = runtime(tokio::runtime::Builder::new_multi_thread());
    let mut bare = Bench::new(1, Hold::All);
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

/// The rate of operations on random keys out of 1, 1k and 1M.
fn at_each_size(what: &str, bench: impl Fn(u64) -> Bench, round: impl Fn(&mut Bench) -> f64) {
    let sizes = [1, 1_000, MILLION];
    let mut benches = sizes.map(bench);
    let mut rates = sizes.map(|_| Vec::new());
    for _ in 0..ROUNDS {
        for (bench, rates) in benches.iter_mut().zip(&mut rates) {
            rates.push(round(bench));
        }
    }
    let [one, thousand, million] = rates.map(median);
    inform(&format!("{what}: operations at 1"), "per second", one);
    inform(&format!("{what}: operations at 1k"), "per second", thousand);
    inform(&format!("{what}: operations at 1M"), "per second", million);
    report(&format!("{what}: slower at 1M than at 1"), "times", one / million, 3.0);
}

type Table = LockTable<RandomState, fn() -> LockToken>;

fn table() -> Table {
    LockTable::new(Config::default(), RandomState::new(), mint)
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

/// What is held while the table is measured.
#[derive(Clone, Copy, PartialEq)]
enum Hold {
    /// A random key is asked for and released.
    OneAtATime,
    /// Every key is held by one of a thousand owners; a random one is released and asked for again.
    All,
}

struct Bench {
    table: Table,
    owners: Vec<Owner>,
    keys: u64,
    /// Of each held key.
    tokens: Vec<LockToken>,
    random: Random,
    now: Time,
}

impl Bench {
    fn new(keys: u64, hold: Hold) -> Self {
        let mut table = table();
        let owners: Vec<_> = (0..1_000).map(|_| table.connect()).collect();
        let now = Time::from_nanos(1);
        let taken = if hold == Hold::All { keys } else { 0 };
        let tokens = (0..taken).map(|n| ask(&mut table, n, owner_of(&owners, n), now)).collect();
        Self { table, owners, keys, tokens, random: Random::new(keys), now }
    }

    /// Operations per second.
    fn round(&mut self) -> f64 {
        let begun = Instant::now();
        for _ in 0..OPERATIONS / 2 {
            let n = self.random.below(self.keys);
            self.now = self.now + Duration::from_nanos(100);
            let owner = owner_of(&self.owners, n);
            match usize::try_from(n).ok().and_then(|n| self.tokens.get_mut(n)) {
                None => {
                    let token = ask(&mut self.table, n, owner, self.now);
                    release(&mut self.table, n, token, self.now);
                }
                Some(token) => {
                    release(&mut self.table, n, *token, self.now);
                    *token = ask(&mut self.table, n, owner, self.now);
                }
            }
        }
        rate(OPERATIONS, begun)
    }
}

impl Bench {
    fn round_ahead(&mut self) -> f64 {
        let begun = Instant::now();
        let mut read = Vec::new();
        for _ in 0..OPERATIONS / 32 {
            read.clear();
            for _ in 0..16 {
                let n = self.random.below(self.keys);
                black_box(self.tokens[n as usize]);
                read.push((n, key(n)));
            }
            self.table.look_ahead(read.iter().flat_map(|(_, key)| [(Space::Lock, &key[..]); 2]));
            for (n, key) in &read {
                self.now = self.now + Duration::from_nanos(100);
                let owner = owner_of(&self.owners, *n);
                let token = &mut self.tokens[*n as usize];
                let released = self.table.release(Space::Lock, key, *token, self.now);
                assert!(black_box(released).is_ok(), "the token is ours");
                let want = Want { owner, mode: Mode::Exclusive, lease: LEASE, queue: false };
                *token = match self.table.ask(key, want, self.now) {
                    Asked::Granted(grant) => grant.token,
                    other => panic!("not granted: {other:?}"),
                };
            }
        }
        rate(OPERATIONS, begun)
    }

    fn renewals(&mut self, group: u64) -> f64 {
        let begun = Instant::now();
        let mut read = Vec::new();
        for _ in 0..OPERATIONS / group {
            read.clear();
            for _ in 0..group {
                let n = self.random.below(self.keys);
                read.push((key(n), self.tokens[n as usize]));
            }
            if group > 1 {
                self.table.look_ahead(read.iter().map(|(key, _)| (Space::Lock, &key[..])));
            }
            for (key, token) in &read {
                self.now = self.now + Duration::from_nanos(100);
                let renewed = self.table.renew(Space::Lock, key, *token, LEASE, self.now);
                assert!(black_box(renewed).is_ok(), "the token is ours");
            }
        }
        rate(OPERATIONS, begun)
    }
}

fn owner_of(owners: &[Owner], n: u64) -> Owner {
    owners[usize::try_from(n).unwrap_or(0) % owners.len()]
}

fn release(table: &mut Table, n: u64, token: LockToken, now: Time) {
    let released = table.release(Space::Lock, &key(n), token, now);
    assert!(black_box(released).is_ok(), "the token is ours");
}

fn ask(table: &mut Table, n: u64, owner: Owner, now: Time) -> LockToken {
    let want = Want { owner, mode: Mode::Exclusive, lease: LEASE, queue: false };
    match table.ask(&key(n), want, now) {
        Asked::Granted(grant) => grant.token,
        other => panic!("not granted: {other:?}"),
    }
}

fn bytes_per_held_key() -> f64 {
    let before = resident();
    let mut table = table();
    let owner = table.connect();
    for n in 0..MILLION {
        ask(&mut table, n, owner, Time::from_nanos(1));
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
        ask(&mut table, n, holder, Time::from_nanos(1));
    }
    let owners: Vec<_> = (0..MILLION).map(|_| table.connect()).collect();
    let before = resident();
    for (n, owner) in (0..MILLION).zip(owners) {
        let want = Want { owner, mode: Mode::Exclusive, lease: LEASE, queue: true };
        let asked = table.ask(&key(n % 1_000), want, Time::from_nanos(1));
        assert!(matches!(asked, Asked::Queued(_)), "{asked:?}");
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
    let client = Client::with_store(Arc::new(Memory::new()));
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
fn rate(operations: u64, begun: Instant) -> f64 {
    operations as f64 / begun.elapsed().as_secs_f64()
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

/// Prints a figure with its limit.
fn report(what: &str, unit: &str, figure: f64, limit: f64) {
    let verdict = if figure <= limit { "within" } else { "ABOVE" };
    eprintln!("{what:<36} {figure:>14.2} {unit:<12} {verdict} {limit}");
    println!(
        r#"{{"bench":"core","what":"{what}","unit":"{unit}","figure":{figure:.3},"limit":{limit}}}"#
    );
}

/// Prints a figure that has no limit.
fn inform(what: &str, unit: &str, figure: f64) {
    eprintln!("{what:<36} {figure:>14.2} {unit}");
    println!(r#"{{"bench":"core","what":"{what}","unit":"{unit}","figure":{figure:.3}}}"#);
}
