//! What goes wrong in the field: leaders that are killed and frozen, sessions that are ended, links that fall silent.

use std::time::{Duration, Instant};

use tenure::election::{Election, Event};
use tenure::{ErrorKind, FencingToken, Loss};

use crate::link::{Link, Mode};
use crate::network::Network;
use crate::server::{Server, send};
use crate::services;
use crate::support::{TTL, Worker, client, pair, stranger, until};

/// A follower behind a worker that leads.
async fn follower(url: &str, key: &str) -> Election {
    let client = client(url);
    let election = client.election(key).ttl(TTL).start().await.unwrap();
    until("a follower in the queue", async || {
        client.inspect(key).await.unwrap().waiters.len() == 1
    })
    .await;
    assert!(!election.is_leader());
    election
}

/// How long it takes until the follower leads.
async fn leads(election: &Election) -> Duration {
    let begun = Instant::now();
    assert!(election.wait_for_leadership(TTL * 10).await.unwrap(), "nobody leads");
    begun.elapsed()
}

fn token(worker: &Worker) -> FencingToken {
    let told = worker.told();
    let token = told.lines().rev().find_map(|line| line.strip_prefix("leads "));
    token.unwrap().parse().unwrap()
}

/// The session that holds the lock.
async fn backend(db: &tokio_postgres::Client, first: i32, second: i32) -> i32 {
    let sql = format!(
        "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 2 \
         AND classid::int8 = {} AND objid::int8 = {}",
        first.cast_unsigned(),
        second.cast_unsigned()
    );
    db.query_one(&sql, &[]).await.unwrap().get(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_leader_is_followed_at_once() {
    let Some(url) = services::postgres() else { return };
    let (key, ..) = pair();
    let mut worker = Worker::start(&url, "lead", &key);
    worker.tells("leads").await;
    let next = follower(&url, &key).await;
    worker.kill();
    let took = leads(&next).await;
    assert!(took < TTL / 2, "that was the ttl, not the end of the session: {took:?}");
    assert!(next.fencing_token().unwrap() > token(&worker));
    next.shutdown(None).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_leader_is_followed_when_its_ttl_ends_and_knows_when_it_wakes() {
    let Some(url) = services::postgres() else { return };
    let (key, ..) = pair();
    let worker = Worker::start(&url, "lead", &key);
    worker.tells("leads").await;
    let next = follower(&url, &key).await;
    worker.signal("STOP");
    let took = leads(&next).await;
    assert!(took < TTL + Duration::from_secs(3), "{took:?}");
    assert!(!worker.told().contains("lost"), "frozen");
    worker.signal("CONT");
    worker.tells("lost").await;
    assert!(next.is_leader());
    next.shutdown(None).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_whose_session_is_ended_or_stuck_says_so() {
    let Some(url) = services::postgres() else { return };
    let (key, first, second) = pair();
    let db = stranger(&url).await;
    let ours = client(&url);

    let guard = ours.lock(&key).ttl(TTL).acquire().await.unwrap();
    let pid = backend(&db, first, second).await;
    db.execute("SELECT pg_terminate_backend($1)", &[&pid]).await.unwrap();
    let lost = tokio::time::timeout(TTL / 2, guard.lost()).await.expect("told at once");
    assert_eq!(lost.reason, Loss::Evicted);

    let guard = ours.lock(&key).ttl(TTL).acquire().await.unwrap();
    let pid = u32::try_from(backend(&db, first, second).await).unwrap();
    send("STOP", pid);
    let lost = tokio::time::timeout(TTL, guard.lost()).await;
    let held = ours.lock(&key).ttl(TTL).try_acquire().await;
    send("CONT", pid);
    assert_eq!(lost.expect("told in time").reason, Loss::Disconnected);
    assert_eq!(held.unwrap_err().kind(), ErrorKind::Held, "a stuck session keeps its lock");
    ours.lock(&key).ttl(TTL).timeout(TTL * 5).acquire().await.unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_behind_a_silent_link_is_lost_before_another_leads() {
    let Some(url) = services::postgres() else { return };
    let (key, ..) = pair();
    let link = Link::to(&url).await;
    let cut_off = client(&link.url).election(&key).ttl(TTL).build().unwrap();
    let mut events = cut_off.events();
    cut_off.start().await.unwrap();
    assert!(cut_off.wait_for_leadership(TTL * 5).await.unwrap());
    let next = follower(&url, &key).await;
    link.set(Mode::Silent);
    let begun = Instant::now();
    while !next.is_leader() {
        assert!(begun.elapsed() < TTL * 5, "nobody leads");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(!cut_off.is_leader());
    let took = begun.elapsed();
    assert!(took < TTL + Duration::from_secs(3), "{took:?}");
    loop {
        if let Event::Lost(lost) = events.next().await.unwrap() {
            assert_eq!(lost.reason, Loss::Disconnected);
            break;
        }
    }
    drop((cut_off, next));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_server_ends_a_term_and_begins_another() {
    let Some(mut server) = Server::start() else { return };
    let (key, ..) = pair();
    let worker = Worker::start(&server.url(), "lead", &key);
    worker.tells("leads").await;
    let before = token(&worker);
    server.down();
    worker.tells("lost").await;
    server.up();
    until("another term", async || token(&worker) > before).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_whose_packets_are_lost_is_followed_and_knows() {
    let Some(url) = services::postgres() else { return };
    let (key, ..) = pair();
    let Some(network) = Network::make("a leader whose packets are lost") else { return };
    let link = Link::at(&network.address, &url).await;
    let worker = Worker::start_in(&network, &link.url, "lead", &key);
    worker.tells("leads").await;
    let next = follower(&url, &key).await;
    network.set("down");
    let took = leads(&next).await;
    assert!(took < TTL + Duration::from_secs(3), "{took:?}");
    assert!(worker.told().contains("lost"), "it said so before: {}", worker.told());
    next.shutdown(None).await.unwrap();
    network.set("up");
    until("another term", async || worker.told().matches("leads").count() == 2).await;
}
