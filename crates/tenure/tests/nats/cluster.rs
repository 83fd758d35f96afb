//! Three servers under load, while they are killed and stopped: never two holders, and back soon.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tenure::{Client, FencingToken};

use crate::raw::Raw;
use crate::services;
use crate::support::{Cluster, connect, unique, until};

const CLIENTS: usize = 5;
/// Shorter than an election: every fault of a leader ends a hold.
const TTL: Duration = Duration::from_millis(1_200);
/// How long each turn is kept.
const TURN: Duration = Duration::from_millis(20);

/// A period in which a client held the lock.
#[derive(Debug)]
struct Turn {
    token: FencingToken,
    begun: Instant,
    /// The last instant at which the guard was valid, as far as was looked.
    held: Instant,
}

/// What happens to the servers.
#[derive(Clone, Copy, Debug)]
enum Fault {
    KillLeader,
    StopLeader,
    KillFollower,
    StopFollower,
    /// One after the other, each back before the next.
    KillEach,
    /// The same, stopped.
    StopEach,
    /// All at once.
    KillAll,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_take_turns_while_a_leader_is_killed_and_the_next_stopped() {
    let Some(program) = services::nats_server() else { return };
    let faults = [Fault::KillLeader, Fault::StopLeader];
    // Elections take their time on a busy machine.
    run(&program, &faults, Duration::from_secs(14), Duration::from_secs(60)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "some minutes: cargo xtask soak nats"]
async fn soak_clients_take_turns_while_servers_are_killed_and_stopped() {
    let Some(program) = services::nats_server() else { return };
    let back_within = Duration::from_secs(10);
    let every = Duration::from_secs(30);
    let faults = [Fault::KillLeader, Fault::StopLeader, Fault::KillFollower, Fault::StopFollower];
    run(&program, &faults, every, back_within).await;
    // One election after the other, and no service at all without a majority.
    run(
        &program,
        &[Fault::KillEach, Fault::StopEach, Fault::KillAll],
        every * 2,
        back_within + every,
    )
    .await;
}

/// Lets clients take turns while one fault after the other happens, each healed after half its time.
async fn run(program: &str, faults: &[Fault], every: Duration, back_within: Duration) {
    let mut cluster = Cluster::start(program);
    let url = format!("{}/{}?replicas=3", cluster.url(), unique("cluster"));
    let client = first_client(&url).await;
    let raw = Raw::connect(&url).await;
    let long = client.lock("long").ttl(Duration::from_secs(60)).acquire().await.expect("free");
    let stop = Arc::new(AtomicBool::new(false));
    let served: [Arc<AtomicBool>; CLIENTS] = Default::default();
    let mut clients = tokio::task::JoinSet::new();
    for name in 0..CLIENTS {
        let served = Arc::clone(&served[name]);
        clients.spawn(take_turns(connect(&url).await, name, Arc::clone(&stop), served));
    }
    until("a turn of each client", async || served.iter().all(|turn| turn.load(Ordering::SeqCst)))
        .await;
    let mut windows = Vec::new();
    for fault in faults {
        let begun = Instant::now();
        cluster.suffer(*fault, &raw, every / 2).await;
        tokio::time::sleep(every.saturating_sub(begun.elapsed())).await;
        windows.push((*fault, begun, Instant::now()));
    }
    stop.store(true, Ordering::SeqCst);
    let mut turns = Vec::new();
    while let Some(done) = clients.join_next().await {
        turns.extend(done.expect("no client panics"));
    }
    check(&mut turns);
    for (fault, from, to) in windows {
        let gap = longest_gap(&turns, from, to);
        let served = turns.iter().filter(|turn| (from..to).contains(&turn.begun)).count();
        eprintln!("{fault:?}: {served} turns, at most {gap:.1?} without one");
        assert!(gap < back_within, "{fault:?}: nobody was served for {gap:?}");
    }
    eprintln!("{} turns of {CLIENTS} clients: no overlap, no token went back", turns.len());
    assert!(long.is_held(), "a lease longer than an election outlives it");
    long.release().await.expect("held all the time");
}

/// A cluster that has just started has no leader for a while.
async fn first_client(url: &str) -> Client {
    let begun = Instant::now();
    loop {
        match Client::connect(url).await {
            Ok(client) => return client,
            Err(error) => assert!(begun.elapsed() < Duration::from_secs(60), "{error}"),
        }
    }
}

/// Acquires and releases the lock repeatedly.
async fn take_turns(
    client: Client,
    name: usize,
    stop: Arc<AtomicBool>,
    served: Arc<AtomicBool>,
) -> Vec<Turn> {
    let mut turns = Vec::new();
    while !stop.load(Ordering::SeqCst) {
        let request = client.lock("contended").ttl(TTL).id(format!("client-{name}"));
        let Ok(guard) = request.timeout(Duration::from_secs(1)).acquire().await else { continue };
        let mut turn: Option<Turn> = None;
        loop {
            // The time first: if it is valid after that, it was valid then.
            let now = Instant::now();
            if !guard.is_held() {
                break;
            }
            let token = guard.fencing_token();
            let turn = turn.get_or_insert(Turn { token, begun: now, held: now });
            turn.held = now;
            if now >= turn.begun + TURN {
                break;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        turns.extend(turn);
        let _ = guard.release().await;
        served.store(true, Ordering::SeqCst);
    }
    turns
}

/// Checks that no two clients held the lock at once, and that later holders had larger tokens.
fn check(turns: &mut [Turn]) {
    turns.sort_by_key(|turn| turn.begun);
    for pair in turns.windows(2) {
        let [one, next] = pair else { unreachable!("two") };
        assert!(one.held <= next.begun, "two were inside at once: {pair:?}");
        assert!(one.token < next.token, "tokens went back: {pair:?}");
    }
}

/// The longest time without a holder.
fn longest_gap(turns: &[Turn], from: Instant, to: Instant) -> Duration {
    let inside = turns.iter().filter(|turn| turn.held > from && turn.begun < to);
    let (mut longest, mut last) = (Duration::ZERO, from);
    for turn in inside {
        longest = longest.max(turn.begun.saturating_duration_since(last));
        last = last.max(turn.held);
    }
    longest.max(to.saturating_duration_since(last))
}

impl Cluster {
    /// Makes the fault, and heals it after about `span`.
    async fn suffer(&mut self, fault: Fault, raw: &Raw, span: Duration) {
        let leader = self.leader(raw).await;
        let follower = (leader + 1) % self.0.len();
        match fault {
            Fault::KillLeader => self.kill_for(&[leader], span).await,
            Fault::KillFollower => self.kill_for(&[follower], span).await,
            Fault::KillAll => self.kill_for(&[0, 1, 2], span / 4).await,
            Fault::KillEach => {
                for node in 0..self.0.len() {
                    self.kill_for(&[node], span / 6).await;
                    tokio::time::sleep(span / 6).await;
                }
            }
            Fault::StopEach => {
                for node in 0..self.0.len() {
                    self.stop_for(node, span / 6).await;
                    tokio::time::sleep(span / 6).await;
                }
            }
            Fault::StopLeader => self.stop_for(leader, span).await,
            Fault::StopFollower => self.stop_for(follower, span).await,
        }
    }

    async fn stop_for(&self, node: usize, span: Duration) {
        self.0[node].pause();
        tokio::time::sleep(span).await;
        self.0[node].go_on();
    }

    async fn kill_for(&mut self, nodes: &[usize], span: Duration) {
        for node in nodes {
            self.0[*node].kill();
        }
        tokio::time::sleep(span).await;
        for node in nodes {
            tokio::task::block_in_place(|| self.0[*node].resume_after_kill());
        }
    }
}

#[test]
fn the_longest_gap_counts_from_the_fault_to_the_end() {
    let start = Instant::now();
    let at = |ms| start + Duration::from_millis(ms);
    let turn =
        |begun, held| Turn { token: FencingToken::default(), begun: at(begun), held: at(held) };
    let turns = [turn(0, 10), turn(12, 20), turn(70, 80)];
    assert_eq!(longest_gap(&turns, at(5), at(100)), Duration::from_millis(50));
    assert_eq!(longest_gap(&turns, at(75), at(200)), Duration::from_millis(120));
    assert_eq!(longest_gap(&[], at(0), at(7)), Duration::from_millis(7));
}
