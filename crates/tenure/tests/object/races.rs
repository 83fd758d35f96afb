//! Many processes that create the same lock at the same moment: one of them has it.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use tenure::{Client, ErrorKind};

use crate::fake::Fake;

const RACES: u32 = 200;
const RACERS: usize = 8;
const URL: &str = "TENURE_TEST_RACE_URL";
const START: &str = "TENURE_TEST_RACE_START";
/// How far apart two races are.
const APART: Duration = Duration::from_millis(25);

fn now() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970")
}

/// One process: tries every lock at its moment, and prints which it got.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn racer() {
    let (Ok(url), Ok(start)) = (std::env::var(URL), std::env::var(START)) else { return };
    let start = Duration::from_millis(start.parse().expect("a time"));
    let client = Client::connect(&url).await.expect("a good URL");
    let mut kept = Vec::new();
    for race in 0..RACES {
        tokio::time::sleep((start + APART * race).saturating_sub(now())).await;
        let request = client.lock(format!("race-{race}")).ttl(Duration::from_secs(60));
        match request.try_acquire().await {
            Ok(guard) => {
                println!("won {race} {}", guard.fencing_token());
                kept.push(guard);
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::Held, "{error}"),
        }
    }
    // Ended without a release: the locks stay held until the parent has counted.
    std::process::exit(0);
}

#[test]
fn of_eight_processes_that_create_a_lock_one_has_it() {
    let fake = Fake::quick();
    let start = (now() + Duration::from_secs(1)).as_millis().to_string();
    let racers: Vec<_> = (0..RACERS)
        .map(|_| {
            let mut racer = Command::new(std::env::current_exe().expect("this program"));
            racer.args(["--exact", "races::racer", "--nocapture"]);
            racer.env(URL, fake.store("r")).env(START, &start).stdout(Stdio::piped());
            racer.spawn().expect("it starts")
        })
        .collect();
    let mut winners = BTreeMap::<u32, usize>::new();
    for running in racers {
        let ended = running.wait_with_output().expect("a child of ours");
        assert!(ended.status.success());
        let said = String::from_utf8_lossy(&ended.stdout).into_owned();
        for line in said.lines().filter_map(|line| line.split_once("won ")) {
            let race = line.1.split(' ').next().expect("a number");
            *winners.entry(race.parse().expect("a number")).or_default() += 1;
        }
    }
    let won: Vec<_> = (0..RACES).map(|race| winners.get(&race).copied().unwrap_or(0)).collect();
    assert!(won.iter().all(|winners| *winners == 1), "{won:?}");
    let refused = fake.seen().iter().filter(|(.., status)| *status == 412).count();
    assert!(refused > 50, "they did not race: {refused} were refused at the last moment");
}
