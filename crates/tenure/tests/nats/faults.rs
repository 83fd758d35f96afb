//! What happens to servers, links, keys and buckets: never two holders, lost in time, and back soon.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use tenure::{ErrorKind, Guard, Loss};

use crate::network::Network;
use crate::raw::Raw;
use crate::services;
use crate::support::{Holder, KEYS, Proxy, Server, connect, unique, until};

const TTL: Duration = Duration::from_millis(1_200);

fn bucket(server: &str) -> String {
    format!("{server}/{}", unique("faults"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_that_is_cut_off_is_lost_before_another_has_it() {
    let Some(url) = services::nats() else { return };
    let port = url.rsplit_once(':').expect("a port").1.parse().expect("a number");
    let proxy = Proxy::start(port).await;
    let name = unique("faults");
    let near = connect(&format!("{url}/{name}")).await;
    let far = connect(&format!("nats://127.0.0.1:{}/{name}", proxy.port)).await;
    let mut pairs = tokio::task::JoinSet::new();
    let mut held = Vec::new();
    for number in 0..20 {
        let key = format!("key-{number}");
        let guard = far.lock(&key).ttl(TTL).acquire().await.expect("free");
        let waiting = near.lock(&key).ttl(TTL).timeout(Duration::from_secs(30)).enqueue();
        held.push((guard, waiting.await.expect("enqueued")));
    }
    proxy.cut();
    for (guard, waiting) in held {
        pairs.spawn(async move {
            let lost = async {
                let reason = guard.lost().await.reason;
                (reason, Instant::now())
            };
            let next = async { (waiting.wait().await.expect("taken over"), Instant::now()) };
            let ((reason, lost), (next, granted)) = tokio::join!(lost, next);
            assert_eq!(reason, Loss::Expired);
            assert!(lost <= granted, "lost {:?} after the next had it", lost - granted);
            assert!(next.fencing_token() > guard.fencing_token());
        });
    }
    let mut seen = 0;
    while let Some(pair) = pairs.join_next().await {
        pair.expect("lost first");
        seen += 1;
    }
    assert_eq!(seen, 20);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_whose_network_is_gone_is_lost_before_another_has_it() {
    let Some(url) = services::nats() else { return };
    let Some(network) = Network::make("a holder whose network is gone") else { return };
    let port = url.rsplit_once(':').expect("a port").1.parse().expect("a number");
    let proxy = Proxy::at(&network.address, port).await;
    let name = unique("faults");
    let near = connect(&format!("{url}/{name}")).await;
    let ttl = Duration::from_secs(3);
    let there = format!("nats://{}:{}/{name}", network.address, proxy.port);
    let holder = Holder::start(&network, &there, ttl);
    until("all are held", async || holder.told().matches("held ").count() == KEYS).await;
    let mut waiting = Vec::new();
    for number in 0..KEYS {
        let request = near.lock(format!("key-{number}")).ttl(ttl).timeout(Duration::from_secs(30));
        waiting.push(request.enqueue().await.expect("enqueued"));
    }
    network.set("down");
    let holder = Arc::new(holder);
    let mut next = tokio::task::JoinSet::new();
    for (number, waiting) in waiting.into_iter().enumerate() {
        let holder = Arc::clone(&holder);
        next.spawn(async move {
            let guard = waiting.wait().await.expect("taken over");
            let told = holder.told();
            assert!(
                told.contains(&format!("lost key-{number}: Expired\n")),
                "it had said so: {told}"
            );
            guard.release().await.expect("held");
        });
    }
    let mut seen = 0;
    while let Some(taken) = next.join_next().await {
        taken.expect("lost first");
        seen += 1;
    }
    assert_eq!(seen, KEYS);
}

async fn loses(guard: &Guard) -> Loss {
    let lost = tokio::time::timeout(Duration::from_secs(20), guard.lost()).await;
    assert!(!guard.is_held());
    lost.expect("lost in time").reason
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_is_deleted_or_overwritten_by_hand_is_lost() {
    let Some(server) = services::nats() else { return };
    let url = bucket(&server);
    let (client, raw) = (connect(&url).await, Raw::connect(&url).await);
    let guard = client.lock("key").ttl(TTL).acquire().await.expect("free");
    raw.delete("lock.key").await;
    assert_eq!(loses(&guard).await, Loss::Taken);
    let next = client.lock("key").ttl(TTL).acquire().await.expect("free again");
    assert!(next.fencing_token() > guard.fencing_token());

    raw.overwrite("lock.key", "hello").await;
    assert_eq!(loses(&next).await, Loss::Taken);
    let error = client.lock("key").ttl(TTL).acquire().await.expect_err("not ours to touch");
    assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
    assert!(error.to_string().contains("not a record of tenure"), "{error}");
    raw.delete("lock.key").await;
    client.lock("key").ttl(TTL).acquire().await.expect("free").release().await.expect("held");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_without_a_lease_is_reported_and_never_taken_over() {
    let Some(server) = services::nats() else { return };
    let url = bucket(&server);
    let (client, raw) = (connect(&url).await, Raw::connect(&url).await);
    let holder = json!({ "claim": "7", "mode": "exclusive", "beat": 0, "id": "the-operator" });
    let record = json!({ "tenure": 1, "epoch": 0, "fence": 0, "holders": [holder] });
    raw.overwrite("lock.key", &record.to_string()).await;
    let request = client.lock("key").ttl(Duration::from_millis(300));
    let error = request.timeout(Duration::from_secs(2)).acquire().await.expect_err("held for ever");
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    assert!(error.to_string().contains("the-operator"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bucket_that_is_made_anew_loses_holds_and_keeps_tokens_growing() {
    let Some(server) = services::nats() else { return };
    let url = bucket(&server);
    let (client, other) = (connect(&url).await, connect(&url).await);
    let guard = client.lock("key").ttl(TTL).acquire().await.expect("free");
    let raw = Raw::connect(&url).await;
    raw.drop_bucket().await;
    // The next client that connects creates the bucket again; the other clients find it by themselves.
    let third = connect(&url).await;
    loses(&guard).await;
    let mut last = guard.fencing_token();
    for client in [&other, &client, &third, &other] {
        let request = client.lock("key").ttl(TTL).timeout(Duration::from_secs(20));
        let guard = request.acquire().await.expect("the new bucket serves");
        assert!(guard.fencing_token() > last, "{last}, then {}", guard.fencing_token());
        last = guard.fencing_token();
        guard.release().await.expect("held");
    }
    // A key that had no record in either life of the bucket.
    let fresh = other.lock("fresh").ttl(TTL).acquire().await.expect("free");
    assert_eq!(fresh.fencing_token().epoch(), last.epoch());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_went_back_is_refused() {
    let Some(server) = services::nats() else { return };
    let url = bucket(&server);
    let (client, raw) = (connect(&url).await, Raw::connect(&url).await);
    client.lock("key").ttl(TTL).acquire().await.expect("free").release().await.expect("held");
    // What a restored copy looks like: the record knows of a grant that the stream has yet to reach.
    let epoch =
        client.lock("other").ttl(TTL).acquire().await.expect("free").fencing_token().epoch();
    let record = json!({ "tenure": 1, "epoch": epoch, "fence": 1_000_000, "holders": [] });
    raw.overwrite("lock.key", &record.to_string()).await;
    let error = connect(&url).await.lock("key").ttl(TTL).try_acquire().await.expect_err("refused");
    assert!(error.to_string().contains("went back from sequence 1000000"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_newcomers_try_is_let_in_where_the_holder_is_long_dead() {
    let Some(server) = services::nats() else { return };
    let url = bucket(&server);
    let short = Duration::from_millis(200);
    let client = connect(&url).await;
    let guard = client.lock("key").ttl(short).detached().acquire().await.expect("free");
    let dead = guard.fencing_token();
    guard.detach().await.expect("left behind");
    let begun = Instant::now();
    // Each try is a program of its own, which has watched nothing.
    let next = loop {
        let newcomer = connect(&url).await;
        match newcomer.lock("key").ttl(short).try_acquire().await {
            Ok(guard) => break guard,
            Err(error) => assert_eq!(error.kind(), ErrorKind::Held, "{error}"),
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "refused for ever");
        tokio::time::sleep(Duration::from_secs(1)).await;
    };
    assert!(begun.elapsed() >= Duration::from_secs(30), "after {:?}", begun.elapsed());
    assert!(next.fencing_token() > dead);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_gone_for_a_while_costs_what_its_absence_takes() {
    let Some(program) = services::nats_server() else { return };
    let mut server = Server::start(&program);
    let client = connect(&bucket(&server.url())).await;
    let long = client.lock("long").ttl(Duration::from_secs(20)).acquire().await.expect("free");
    let short = client.lock("short").ttl(TTL).acquire().await.expect("free");
    server.kill();
    assert_eq!(loses(&short).await, Loss::Expired);
    let request = client.lock("other").ttl(TTL).timeout(Duration::from_millis(500));
    let error = request.acquire().await.expect_err("no server");
    assert!(matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Unknown), "{error}");
    server.resume_after_kill();
    until("the service is back", async || {
        client.lock("short").ttl(TTL).timeout(Duration::from_secs(5)).acquire().await.is_ok()
    })
    .await;
    assert!(long.is_held());
    long.release().await.expect("held through the restart");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_too_slow_for_its_news_is_cut_off_and_gets_its_lock() {
    let Some(program) = services::nats_server() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let config = folder.path().join("server.conf");
    std::fs::write(&config, "max_payload: 16384, max_pending: 16384, write_deadline: \"1s\"")
        .expect("a file");
    let config = config.to_str().expect("a plain name");
    let server = Server::with(&program, &["--jetstream", "--config", config]);
    let proxy = Proxy::start(server.port).await;
    let name = unique("faults");
    let near = connect(&format!("{}/{name}", server.url())).await;
    let slow = connect(&format!("nats://127.0.0.1:{}/{name}", proxy.port)).await;
    let ttl = Duration::from_secs(20);
    let guard = near.lock("key").ttl(ttl).acquire().await.expect("free");
    let request = slow.lock("key").ttl(ttl).timeout(Duration::from_secs(60));
    let waiting = request.enqueue().await.expect("enqueued");
    // It has looked, and is told of changes from here on.
    let raw = Raw::connect(&format!("{}/{name}", server.url())).await;
    until("a consumer", async || {
        raw.info().await.is_some_and(|info| info["state"]["consumer_count"] == 1)
    })
    .await;
    proxy.stall(true);
    // What it does not read piles up: every round is two changes of its key.
    let long = "x".repeat(200);
    guard.release().await.expect("held");
    let begun = Instant::now();
    let last = loop {
        let request = near.lock("key").ttl(ttl).note(&long).timeout(Duration::from_secs(10));
        let guard = request.acquire().await.expect("the other one is stuck");
        if server.log().contains("Slow Consumer") {
            break guard;
        }
        assert!(begun.elapsed() < Duration::from_secs(30), "never too slow: {}", server.log());
        guard.release().await.expect("held");
    };
    proxy.stall(false);
    last.release().await.expect("held");
    let begun = Instant::now();
    waiting.wait().await.expect("its turn").release().await.expect("held");
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
}
