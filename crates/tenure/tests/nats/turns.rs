//! The queue in order of arrival: no herd, and a waiter that is gone costs its turn once.

use std::time::{Duration, Instant};

use tenure::store::{Answer, Claim, Identity, Mode};
use tenure::{Client, Key};

use crate::services;
use crate::support::{connect, unique, until};

const TTL: Duration = Duration::from_secs(5);

async fn waiters(client: &Client) -> usize {
    client.inspect("key").await.expect("shown").waiters.len()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_wait_in_order_and_only_the_first_tries() {
    const MANY: u64 = 50;
    let Some(server) = services::nats() else { return };
    let url = format!("{server}/{}", unique("turns"));
    let client = connect(&url).await;
    let guard = client.lock("key").ttl(TTL).fair().acquire().await.expect("free");
    let (entered, mut order) = tokio::sync::mpsc::unbounded_channel();
    for number in 0..MANY {
        let (client, entered) = (connect(&url).await, entered.clone());
        let request = client.lock("key").ttl(TTL).fair().timeout(Duration::from_secs(60));
        tokio::spawn(async move {
            let guard = request.acquire().await.expect("its turn");
            entered.send(number).expect("somebody listens");
            guard.release().await.expect("held");
        });
        until("one more waits", async || waiters(&client).await as u64 == number + 1).await;
    }
    let before = guard.fencing_token().number();
    let begun = Instant::now();
    guard.release().await.expect("held");
    for number in 0..MANY {
        let next = tokio::time::timeout(Duration::from_secs(30), order.recv()).await;
        assert_eq!(next.expect("the next one's turn"), Some(number), "in order of arrival");
    }
    let took = begun.elapsed();
    let last = client.lock("key").ttl(TTL).fair().timeout(Duration::from_secs(10)).acquire();
    let last = last.await.expect("the queue is empty");
    // Every write of the bucket has a sequence: a release, a grant and its confirmation for each.
    let writes = last.fencing_token().number() - before;
    eprintln!("{MANY} turns: {writes} writes in {took:?}");
    assert!(writes <= MANY * 3 + MANY + 10, "the tickets, and three writes a turn: {writes}");
    until("no ticket is left", async || waiters(&client).await == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_that_is_gone_costs_its_turn_once() {
    let Some(server) = services::nats() else { return };
    let client = connect(&format!("{server}/{}", unique("turns"))).await;
    let guard = client.lock("key").ttl(TTL).fair().acquire().await.expect("free");
    let claim = Claim {
        id: 77,
        key: Key::new("key").expect("a key"),
        mode: Mode::Exclusive,
        ttl: TTL,
        by: std::sync::Arc::new(Identity { id: "gone".to_owned(), ..Identity::default() }),
        queue: true,
        unless_awaited: false,
        fair: true,
        detached: false,
    };
    let place = client.store().claim(&claim, TTL).await.expect("an answer");
    assert!(matches!(place, Answer::Queued(_)), "{place:?}");
    drop(place);
    let next = client.lock("key").ttl(TTL).fair().timeout(Duration::from_secs(30)).enqueue();
    let next = next.await.expect("enqueued");
    let begun = Instant::now();
    guard.release().await.expect("held");
    let next = next.wait().await.expect("past the one that is gone");
    let took = begun.elapsed();
    assert!(took >= Duration::from_secs(1) && took < Duration::from_secs(6), "{took:?}");
    next.release().await.expect("held");
    let begun = Instant::now();
    let again = client.lock("key").ttl(TTL).fair().timeout(Duration::from_secs(30)).acquire();
    again.await.expect("free").release().await.expect("held");
    assert!(begun.elapsed() < Duration::from_secs(1), "once: {:?}", begun.elapsed());
}
