//! Processes that create the same lock at the same moment.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use tenure::{Client, ErrorKind};

use crate::fake::Fake;
use crate::{Limit, ROLE, STORE, report};

const RACES: u32 = 200;
const RACERS: usize = 8;
/// When the first race is, in milliseconds since 1970.
const START: &str = "TENURE_BENCH_START";
/// How far apart two races are.
const APART: Duration = Duration::from_millis(25);

pub(super) fn measure() {
    let fake = Fake::quick();
    let start = (now() + Duration::from_secs(1)).as_millis().to_string();
    let racers = (0..RACERS).map(|_| {
        let mut racer = Command::new(std::env::current_exe().expect("this program"));
        racer.env(ROLE, "racer").env(STORE, fake.store("r")).env(START, &start);
        racer.stdout(Stdio::piped()).spawn().expect("it starts")
    });
    let mut winners = BTreeMap::<String, u32>::new();
    for racer in racers.collect::<Vec<_>>() {
        let ended = racer.wait_with_output().expect("a child of ours");
        assert!(ended.status.success(), "a racer failed");
        for race in String::from_utf8_lossy(&ended.stdout).lines() {
            *winners.entry(race.to_owned()).or_default() += 1;
        }
    }
    let once = winners.values().filter(|winners| **winners == 1).count();
    let close = fake.seen().iter().filter(|(.., status)| *status == 412).count();
    let what = format!("{RACES} creations by {RACERS} processes at once: with exactly one winner");
    report(&what, f64::from(u32::try_from(once).unwrap_or(0)), Limit::Exactly(RACES.into()));
    let close = f64::from(u32::try_from(close).unwrap_or(0));
    report("  writes among them that were refused at the last moment", close, Limit::None);
}

/// One process: tries every lock at its moment, and prints which it got.
pub(super) async fn race() {
    let told = |name| std::env::var(name).expect("told by the parent");
    let start = Duration::from_millis(told(START).parse().expect("a time"));
    let client = Client::connect(&told(STORE)).await.expect("a good URL");
    let mut kept = Vec::new();
    for race in 0..RACES {
        tokio::time::sleep((start + APART * race).saturating_sub(now())).await;
        let request = client.lock(format!("race-{race}")).ttl(Duration::from_secs(60));
        match request.try_acquire().await {
            Ok(guard) => {
                println!("{race}");
                kept.push(guard);
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::Contention, "{error}"),
        }
    }
    // Exits without a release: a late contender must find the lock held.
    std::process::exit(0);
}

fn now() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970")
}
