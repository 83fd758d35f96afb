//! Random clients against the engine, and random bytes against the parser. A seed tells the whole run.

mod model;
mod parsing;
mod reference;
mod requests;
mod world;

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// What clients were answered: the command, and the first word of the reply.
type Seen = BTreeSet<(String, String)>;

#[test]
fn the_parser_agrees_with_a_naive_reading_of_the_protocol() {
    let compared: u64 = (0..8).map(|seed| parsing::run(seed, 10_000)).sum();
    assert!(compared > 100_000, "{compared}");
}

#[test]
fn random_clients_find_nothing_wrong() {
    let mut seen = Seen::new();
    let mut requests = 0;
    for seed in 0.. {
        requests += world::episode(seed, &mut seen);
        if requests > 500_000 {
            break;
        }
    }
    // A fuzz that no longer gets anywhere would find nothing wrong either: every reply of the protocol must have been
    // seen. Except one: a lease that ends between the grant of `l` and its reply, which takes no time here. Renewals and
    // releases are also served while the server stops.
    let mut missing = Vec::new();
    for (commands, replies) in [
        ("l", "ok timeout error error_max_locks error_max_waiters error_draining error_auth"),
        (
            "e",
            "acquired queued error_already_enqueued error_max_locks error_max_waiters error_draining",
        ),
        ("w", "ok timeout error error_not_enqueued error_lease_expired error_draining"),
        ("n r xn", "ok error"),
        ("sl", "ok timeout error_max_locks error_max_waiters error_limit_mismatch"),
        ("se", "acquired queued error_already_enqueued error_max_locks error_limit_mismatch"),
        ("sw", "ok timeout error_not_enqueued error_lease_expired"),
        ("sn sr", "ok error"),
        ("stats ping", "ok error_draining error_auth"),
        ("auth", "ok error error_auth error_draining"),
        ("bad", "error error_auth error_draining"),
        ("hello ls watch unwatch hist shist", "ok error error_draining"),
        ("q", "ok error_draining error_auth"),
        (
            "x",
            "ok queued timeout error error_max_claims error_claimed_elsewhere error_limit_mismatch",
        ),
        ("xp xa", "ok error error_not_enqueued"),
        ("brk", "ok error error_auth"),
        ("push", "granted gone wanted ended changed"),
        ("end", "too_long read_timeout write_timeout parted"),
    ] {
        for command in commands.split(' ') {
            for reply in replies.split(' ') {
                let pair = (command.to_owned(), reply.to_owned());
                if !seen.contains(&pair) {
                    missing.push(pair);
                }
            }
        }
    }
    assert!(missing.is_empty(), "never seen in {requests} requests: {missing:?}");
}

/// `TENURE_SOAK` says how many requests, on how many threads, from which seed: "10000000 2 0".
#[test]
#[ignore = "long: cargo xtask soak server"]
fn soak() {
    let text = std::env::var("TENURE_SOAK").unwrap_or_default();
    let mut numbers = text.split_whitespace().map(|word| word.parse::<u64>().expect("a number"));
    let count = numbers.next().unwrap_or(10_000_000);
    let threads = numbers.next().unwrap_or(2);
    let (next, done) = (AtomicU64::new(numbers.next().unwrap_or(0)), AtomicU64::new(0));
    let all = Mutex::new(Seen::new());
    let began = Instant::now();
    let work = || {
        let mut seen = Seen::new();
        while done.load(Ordering::Relaxed) < count {
            let course = next.fetch_add(1, Ordering::Relaxed);
            let requests = world::episode(course, &mut seen) + parsing::run(course, 20);
            done.fetch_add(requests, Ordering::Relaxed);
        }
        all.lock().expect("no thread panics while it adds up").extend(seen);
    };
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(work);
        }
    });
    let (done, seconds) = (done.into_inner(), began.elapsed().as_secs_f64());
    let kinds = all.into_inner().expect("no thread panics while it adds up").len();
    println!("{done} requests, courses up to {}, in {seconds:.0} s", next.into_inner());
    println!("{kinds} kinds of answers, nothing wrong");
}
