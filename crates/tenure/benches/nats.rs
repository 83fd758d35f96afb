//! `cargo xtask bench nats`: the NATS store against bare conditional writes, in the same run and on the same servers.
//!
//! Every figure is the median of several rounds, and the rounds of what is compared are interleaved. It is compared with
//! what a key-value library does to create and delete a key, and with the least that any lock on a bucket must do: two
//! conditional writes at sequences that are known. The hand-off is compared with asking every 250 ms, as nlock does.

#[cfg(feature = "nats")]
fn main() {
    bench::main();
}

#[cfg(not(feature = "nats"))]
fn main() {
    eprintln!("the NATS store is not in this build");
}

#[cfg(feature = "nats")]
mod bench {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::{Duration, Instant};

    use async_nats::HeaderMap;
    use futures_util::StreamExt as _;
    use serde_json::{Value, json};
    use tenure::Client;
    use tokio::task::JoinSet;

    const ROUNDS: usize = 3;
    const SPAN: Duration = Duration::from_secs(1);
    const HAND_OFFS: usize = 100;
    const POLLS: usize = 20;
    const WAITERS: u32 = 100;
    const OWNER: &str = "0b54ac6e-9d4d-4f3e-8f0e-2f6d0b8f0c11";
    const POLL: Duration = Duration::from_millis(250);

    pub(super) fn main() {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
        runtime.expect("a runtime can be built").block_on(run());
    }

    async fn run() {
        let server = |name| std::env::var(name).expect("cargo xtask bench nats starts the servers");
        let run = std::process::id();
        let one = format!("{}/bench-{run}", server("TENURE_TEST_NATS"));
        let three = format!("{}/bench-{run}?replicas=3", server("TENURE_TEST_NATS_CLUSTER"));
        for (what, url) in [("R1", &one), ("R3", &three)] {
            pairs(what, url).await;
        }
        for (what, url, limit) in [("R1", &one, 3.0), ("R3", &three, 10.0)] {
            let (took, polled) = hand_offs(url).await;
            report(&format!("{what} hand-off p50, ms"), took, took <= limit);
            report(&format!("{what} hand-off p50 of a poller, ms"), polled, true);
        }
        for (what, url) in [("R1", &one), ("R3", &three)] {
            let (operations, took) = turns(url).await;
            let each = format!("{what} {WAITERS} wait in order, operations a hand-off");
            // A waiter that looks in case it was not told may come between.
            report(&each, operations, operations < 3.05);
            report(&format!("{what} {WAITERS} wait in order, ms a hand-off"), took, true);
        }
    }

    async fn pairs(what: &str, url: &str) {
        for clients in [1, 10, 100] {
            let connected = connect_all(url, clients).await;
            let (mut least, mut library, mut ours) = (Vec::new(), Vec::new(), Vec::new());
            for _ in 0..ROUNDS {
                least.push(rate(connected.iter().map(|(bare, _)| least_pairs(bare.clone()))).await);
                library.push(
                    rate(connected.iter().map(|(bare, _)| library_pairs(bare.clone()))).await,
                );
                ours.push(rate(connected.iter().map(|(_, ours)| our_pairs(ours.clone()))).await);
            }
            let (least, library, ours) = (median(least), median(library), median(ours));
            let say = |of: &str, figure, kept| {
                report(&format!("{what} {clients} clients, {of}"), figure, kept);
            };
            say("pairs/s of two bare writes", least, true);
            say("pairs/s of KV create + delete", library, true);
            say("pairs/s of ours", ours, true);
            say("ours / KV create + delete", ours / library, ours / library >= 0.8);
            say("ours / two bare writes", ours / least, true);
        }
    }

    /// A bare connection and a subject of its own, and a client and a key of its own.
    type Pair = ((async_nats::Client, String), (Client, String));

    async fn connect_all(url: &str, clients: usize) -> Vec<Pair> {
        let mut connected = Vec::new();
        for number in 0..clients {
            let ours = Client::connect(url).await.expect("the server is up");
            let (place, bucket) =
                url.split('?').next().and_then(|url| url.rsplit_once('/')).expect("a bucket");
            let servers: Vec<_> =
                place.trim_start_matches("nats://").split(',').map(str::to_owned).collect();
            let bare = async_nats::connect(servers).await.expect("the server is up");
            let subject = format!("$KV.{bucket}.bare.{number}");
            connected.push(((bare, subject), (ours, format!("key-{number}"))));
        }
        connected
    }

    /// Pairs a second of all tasks together.
    async fn rate<F: Future<Output = u32> + Send + 'static>(tasks: impl Iterator<Item = F>) -> f64 {
        let begun = Instant::now();
        let mut running: JoinSet<u32> = tasks.collect();
        let mut done = 0;
        while let Some(pairs) = running.join_next().await {
            done += pairs.expect("no panic");
        }
        f64::from(done) / begun.elapsed().as_secs_f64()
    }

    /// The least that a lock can do: two writes, each at the sequence that the one before it got.
    async fn least_pairs((client, subject): (async_nats::Client, String)) -> u32 {
        let mut sequence = last(&client, &subject).await;
        let (begun, mut pairs) = (Instant::now(), 0);
        while begun.elapsed() < SPAN {
            let created = write(&client, &subject, sequence, Some(OWNER)).await;
            let deleted = match created {
                Some(sequence) => write(&client, &subject, sequence, None).await,
                None => None,
            };
            match deleted {
                Some(deleted) => (sequence, pairs) = (deleted, pairs + 1),
                None => sequence = last(&client, &subject).await,
            }
        }
        pairs
    }

    /// What the client library's key-value helper does: create where there is nothing, else look, and then at the
    /// sequence of what was deleted; delete.
    async fn library_pairs((client, subject): (async_nats::Client, String)) -> u32 {
        let (begun, mut pairs) = (Instant::now(), 0);
        while begun.elapsed() < SPAN {
            let mut created = write(&client, &subject, 0, Some(OWNER)).await;
            if created.is_none() {
                let sequence = last(&client, &subject).await;
                created = write(&client, &subject, sequence, Some(OWNER)).await;
            }
            if let Some(created) = created {
                pairs += u32::from(write(&client, &subject, created, None).await.is_some());
            }
        }
        pairs
    }

    /// Writes or deletes at a sequence; the new one where that was met.
    async fn write(
        client: &async_nats::Client,
        subject: &str,
        sequence: u64,
        value: Option<&'static str>,
    ) -> Option<u64> {
        let mut headers = HeaderMap::new();
        headers.insert("Nats-Expected-Last-Subject-Sequence", sequence.to_string());
        if value.is_none() {
            headers.insert("KV-Operation", "DEL");
        }
        let value = value.unwrap_or_default();
        let reply = client.request_with_headers(subject.to_owned(), headers, value.into()).await;
        let reply: Value = serde_json::from_slice(&reply.ok()?.payload).ok()?;
        reply["seq"].as_u64().filter(|sequence| *sequence > 0)
    }

    async fn last(client: &async_nats::Client, subject: &str) -> u64 {
        let ask = json!({ "last_by_subj": subject }).to_string();
        let stream = format!("KV_{}", subject.split('.').nth(1).expect("a bucket"));
        let last = client.request(format!("$JS.API.STREAM.MSG.GET.{stream}"), ask.into()).await;
        let last: Value = serde_json::from_slice(&last.expect("an answer").payload).expect("JSON");
        last["message"]["seq"].as_u64().unwrap_or(0)
    }

    async fn our_pairs((client, key): (Client, String)) -> u32 {
        let (begun, mut pairs) = (Instant::now(), 0);
        while begun.elapsed() < SPAN {
            let guard = client.lock(&key).acquire().await.expect("free");
            guard.release().await.expect("ours");
            pairs += 1;
        }
        pairs
    }

    /// Milliseconds from letting go to having it elsewhere: woken, and by polling.
    async fn hand_offs(url: &str) -> (f64, f64) {
        let one = Client::connect(url).await.expect("the server is up");
        let two = Client::connect(url).await.expect("the server is up");
        let (mut took, mut polled) = (Vec::new(), Vec::new());
        for round in 0..HAND_OFFS + POLLS {
            let guard = one.lock("hand-off").acquire().await.expect("free");
            let polls = round >= HAND_OFFS;
            let client = two.clone();
            let waiting = tokio::spawn(async move {
                let guard = loop {
                    let request = client.lock("hand-off");
                    if !polls {
                        break request.acquire().await.expect("its turn");
                    }
                    match request.try_acquire().await {
                        Ok(guard) => break guard,
                        Err(_) => tokio::time::sleep(POLL).await,
                    }
                };
                let had = Instant::now();
                guard.release().await.expect("ours");
                had
            });
            // Long enough to wait in earnest, and at another point of the poller's pause each time.
            tokio::time::sleep(Duration::from_millis(10 + 13 * (round as u64 % 20))).await;
            let begun = Instant::now();
            guard.release().await.expect("ours");
            let had = waiting.await.expect("no panic");
            let span = had.duration_since(begun).as_secs_f64() * 1e3;
            if polls { polled.push(span) } else { took.push(span) }
        }
        (median(took), median(polled))
    }

    /// Requests to the bucket and milliseconds for each of many hand-offs in order of arrival.
    async fn turns(url: &str) -> (f64, f64) {
        let client = Client::connect(url).await.expect("the server is up");
        let request = |client: &Client| client.lock("turns").ttl(Duration::from_secs(60)).fair();
        let guard = request(&client).acquire().await.expect("free");
        let mut places = Vec::new();
        // One more than take their turn: the queue is never empty.
        for _ in 0..=WAITERS {
            let client = Client::connect(url).await.expect("the server is up");
            places.push(request(&client).enqueue().await.expect("enqueued"));
        }
        let counted = Operations::count(url).await;
        let begun = Instant::now();
        let mut guard = guard;
        let _last = places.pop();
        let mut served: JoinSet<_> = places.into_iter().map(tenure::Pending::wait).collect();
        for _ in 0..WAITERS {
            guard.release().await.expect("ours");
            guard =
                served.join_next().await.expect("one more").expect("no panic").expect("granted");
        }
        let took = begun.elapsed().as_secs_f64() * 1e3;
        let hand_offs = f64::from(WAITERS);
        (counted.so_far().await / hand_offs, took / hand_offs)
    }

    /// Counts what is asked of a bucket, by whomever: the server passes every request on to us, too.
    struct Operations {
        client: async_nats::Client,
        seen: Arc<AtomicU32>,
    }

    impl Operations {
        async fn count(url: &str) -> Self {
            let (place, bucket) =
                url.split('?').next().and_then(|url| url.rsplit_once('/')).expect("a bucket");
            let servers: Vec<_> =
                place.trim_start_matches("nats://").split(',').map(str::to_owned).collect();
            let client = async_nats::connect(servers).await.expect("the server is up");
            let seen = Arc::new(AtomicU32::new(0));
            for subject in [format!("$KV.{bucket}.>"), "$JS.API.>".to_owned()] {
                let mut heard = client.subscribe(subject).await.expect("may listen");
                let seen = Arc::clone(&seen);
                tokio::spawn(async move {
                    while heard.next().await.is_some() {
                        seen.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            // On a cluster the other servers hear of the subscription a little later.
            client.flush().await.expect("connected");
            tokio::time::sleep(Duration::from_millis(500)).await;
            seen.store(0, Ordering::Relaxed);
            Self { client, seen }
        }

        async fn so_far(&self) -> f64 {
            self.client.flush().await.expect("connected");
            tokio::time::sleep(Duration::from_millis(100)).await;
            f64::from(self.seen.load(Ordering::Relaxed))
        }
    }

    fn median(mut figures: Vec<f64>) -> f64 {
        figures.sort_by(f64::total_cmp);
        figures[figures.len() / 2]
    }

    fn report(what: &str, figure: f64, kept: bool) {
        println!("{}", json!({ "what": what, "figure": figure, "kept": kept }));
        eprintln!("{what:<45} {figure:>12.2} {}", if kept { "" } else { "MISSED" });
    }
}
