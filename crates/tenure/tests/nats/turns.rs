//! The queue in order of arrival: no herd, and a waiter that is gone costs its turn once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use tenure::store::{Answer, Claim, Identity, Mode, Waited};
use tenure::{Client, Key};

use crate::raw::Raw;
use crate::services;
use crate::support::{connect, unique, until};

const TTL: Duration = Duration::from_secs(5);

async fn waiters(client: &Client) -> usize {
    client.inspect("key").await.expect("shown").waiters.len()
}

/// Counts what is asked of a bucket, by whomever: the server passes every request on to us, too.
struct Asked(Arc<AtomicU64>);

impl Asked {
    async fn of(url: &str) -> Self {
        let raw = Raw::connect(url).await;
        let bucket = url.rsplit_once('/').expect("a bucket").1.to_owned();
        let (mine, seen) = (format!("KV_{bucket}"), Arc::new(AtomicU64::new(0)));
        for subject in [format!("$KV.{bucket}.>"), "$JS.API.>".to_owned()] {
            let mut heard = raw.client.subscribe(subject.clone()).await.expect("may listen");
            let (seen, mine) = (Arc::clone(&seen), mine.clone());
            let all = subject.starts_with("$KV");
            tokio::spawn(async move {
                while let Some(asked) = heard.next().await {
                    // The same server serves other tests.
                    let ours = all || asked.subject.split('.').any(|part| part == mine);
                    seen.fetch_add(u64::from(ours), Ordering::SeqCst);
                }
            });
        }
        raw.client.flush().await.expect("connected");
        Self(seen)
    }

    fn so_far(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_wait_in_order_and_only_the_first_tries() {
    const MANY: u64 = 100;
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
    let asked = Asked::of(&url).await;
    let begun = Instant::now();
    guard.release().await.expect("held");
    for number in 0..MANY {
        let next = tokio::time::timeout(Duration::from_secs(30), order.recv()).await;
        assert_eq!(next.expect("the next one's turn"), Some(number), "in order of arrival");
    }
    let (took, operations) = (begun.elapsed(), asked.so_far());
    // The server notifies subscribers a moment later. Queued waiters also poll now and then, in case a notification is
    // lost.
    let looks = 2 * MANY / 10 + 4 * took.as_secs();
    eprintln!("{MANY} turns: {operations} operations");
    assert!(operations <= MANY * 3 + looks, "three a turn: {operations} in {took:?}");
    assert!(operations >= MANY * 2, "they are counted: {operations}");
    let last = client.lock("key").ttl(TTL).fair().timeout(Duration::from_secs(10)).acquire();
    let last = last.await.expect("the queue is empty");
    // Every write of the bucket has a sequence: a grant, a release and the end of a ticket for each.
    let writes = last.fencing_token().number() - before;
    eprintln!("{MANY} turns: {writes} writes in {took:?}");
    assert!(writes <= MANY * 3 + MANY + 10, "the tickets, and three writes a turn: {writes}");
    until("no ticket is left", async || waiters(&client).await == 0).await;
}

fn claim(id: u128) -> Claim {
    {
        let mut claim = Claim::new(
            id,
            Key::new("key").expect("a key"),
            Mode::Exclusive,
            TTL,
            Arc::new(Identity { id: "gone".to_owned(), ..Identity::default() }),
        );
        claim.fair = true;
        claim
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_cleanup_by_a_new_waiter_removes_no_place() {
    let Some(server) = services::nats() else { return };
    let client = connect(&format!("{server}/{}", unique("turns"))).await;
    let guard = client.lock("key").ttl(TTL).fair().acquire().await.expect("free");
    let mut places = Vec::new();
    // Among this many claims at least one cleans up the queue, before any waiter is served.
    for id in 1..=64 {
        let answer = client.store().claim(&claim(id), TTL).await.expect("an answer");
        let Answer::Queued(place) = answer else { panic!("{answer:?}") };
        places.push(place);
    }
    assert_eq!(waiters(&client).await, 64);
    guard.release().await.expect("held");
    for mut place in places.drain(..2) {
        let waited = place.wait(TTL).await.expect("an answer");
        let Waited::Granted(mut grant) = waited else { panic!("{waited:?}") };
        grant.hold.release(TTL).await.expect("held");
    }
    let answer = client.store().claim(&claim(128), TTL).await.expect("an answer");
    assert!(matches!(answer, Answer::Queued(_)), "{answer:?}");
    assert_eq!(waiters(&client).await, 63);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_that_is_gone_costs_its_turn_once() {
    let Some(server) = services::nats() else { return };
    let client = connect(&format!("{server}/{}", unique("turns"))).await;
    let guard = client.lock("key").ttl(TTL).fair().acquire().await.expect("free");
    let claim = claim(77);
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_out_of_the_queue_that_dies_is_followed_by_the_next_in_line() {
    let Some(server) = services::nats() else { return };
    let url = format!("{server}/{}", unique("turns"));
    let ttl = Duration::from_secs(1);
    let clients = [connect(&url).await, connect(&url).await, connect(&url).await];
    let fair =
        |client: &Client| client.lock("key").ttl(ttl).fair().timeout(Duration::from_secs(30));
    let first = fair(&clients[0]).acquire().await.expect("free");
    let second = fair(&clients[1]).keep_alive(false).enqueue().await.expect("enqueued");
    let third = fair(&clients[2]).enqueue().await.expect("enqueued");
    first.release().await.expect("held");
    let second = second.wait().await.expect("its turn");
    let begun = Instant::now();
    // It is not renewed, and never gives its ticket back.
    let third = third.wait().await.expect("the next one's turn");
    let took = begun.elapsed();
    assert!(!second.is_held(), "lost before");
    assert!(third.fencing_token() > second.fencing_token());
    assert!(took < ttl + Duration::from_secs(4), "{took:?}");
    third.release().await.expect("held");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_leaving_mid_queue_does_not_delay_the_next() {
    let Some(server) = services::nats() else { return };
    let url = format!("{server}/{}", unique("turns"));
    let (one, two) = (connect(&url).await, connect(&url).await);
    let fair =
        |client: &Client| client.lock("key").ttl(TTL).fair().timeout(Duration::from_secs(30));
    let guard = fair(&one).acquire().await.expect("free");
    let first = fair(&two).enqueue().await.expect("enqueued");
    let leaves = fair(&one).enqueue().await.expect("enqueued");
    let last = fair(&two).enqueue().await.expect("enqueued");
    until("all wait", async || waiters(&one).await == 3).await;
    drop(leaves);
    until("one has left", async || waiters(&one).await == 2).await;
    guard.release().await.expect("held");
    first.wait().await.expect("its turn").release().await.expect("held");
    let begun = Instant::now();
    last.wait().await.expect("its turn").release().await.expect("held");
    assert!(begun.elapsed() < Duration::from_secs(1), "woken: {:?}", begun.elapsed());
}
