//! Several clients, a store that fails often, and one truth: never two valid guards, and the number always grows.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tenure::{Client, ErrorKind};

use crate::fake::Fake;
use crate::faults::client;

/// What all clients are watched by.
#[derive(Default)]
struct Watch {
    inside: AtomicU64,
    last: AtomicU64,
    grants: AtomicU64,
}

async fn course(client: Client, watch: Arc<Watch>, seed: u64) {
    let mut random = tenure_core::Random::new(seed);
    for _ in 0..12 {
        let request = client.lock("k").ttl(Duration::from_millis(900));
        let patience = Duration::from_millis(50 + random.below(2_000));
        let guard = if random.chance(0.2) {
            request.try_acquire().await
        } else {
            request.timeout(patience).acquire().await
        };
        let guard = match guard {
            Ok(guard) => guard,
            Err(error) => {
                let expected = [
                    ErrorKind::Held,
                    ErrorKind::Timeout,
                    ErrorKind::Unknown,
                    ErrorKind::Unavailable,
                ];
                assert!(expected.contains(&error.kind()), "{error:?}");
                continue;
            }
        };
        watch.grants.fetch_add(1, Ordering::SeqCst);
        let number = guard.fencing_token().number();
        let before = watch.last.fetch_max(number, Ordering::SeqCst);
        // Only while it is held does anything else have to stay outside.
        let work = async {
            assert_eq!(watch.inside.fetch_add(1, Ordering::SeqCst), 0, "two hold it at once");
            let _out = Out(&watch);
            assert!(number > before, "{number} after {before}");
            tokio::time::sleep(Duration::from_millis(random.below(120))).await;
        };
        if guard.run(work).await.is_ok() && random.chance(0.8) {
            // What becomes of the release is the store's word; the next one is judged by the guards alone.
            drop(guard.release().await);
        }
    }
}

struct Out<'a>(&'a Watch);

impl Drop for Out<'_> {
    fn drop(&mut self) {
        self.0.inside.fetch_sub(1, Ordering::SeqCst);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn never_two_valid_guards_and_the_number_always_grows() {
    let mut grants = 0;
    for seed in 0..2 {
        let fake = Fake::quick();
        fake.trouble(12, seed + 1);
        let watch = Arc::new(Watch::default());
        let mut clients = tokio::task::JoinSet::new();
        for n in 0..5 {
            clients.spawn(course(client(&fake).await, Arc::clone(&watch), seed * 100 + n));
        }
        while let Some(ended) = clients.join_next().await {
            ended.expect("no client saw another inside");
        }
        grants += watch.grants.load(Ordering::SeqCst);
    }
    assert!(grants > 25, "the course is too quiet to show anything: {grants}");
}
