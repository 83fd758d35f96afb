//! The clock of the database is set while locks are held.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tenure::store::{Answer, Claim, Identity, Mode};
use tenure::{Client, Key, Loss, Store as _};

use crate::server::Server;
use crate::support::{Schema, state, until, with_schema};

const TTL: Duration = Duration::from_secs(1);
const TRIALS: u32 = 12;

#[test]
fn server_clock_set_forward_never_yields_two_holders() {
    let Some(server) = Server::start_under_faketime() else { return };
    with_schema(&server.url(), async move |schema| {
        for trial in 1..=TRIALS {
            let key = format!("key {trial}");
            let (holder, waiter) = (schema.client(), schema.client());
            // Half of them could do without the lock until the very end; half are about to renew it.
            let renews = trial % 2 == 0;
            let held = holder.lock(&key).ttl(TTL).keep_alive(renews).acquire().await.unwrap();
            let waiting = waiter.lock(&key).ttl(TTL).enqueue().await.unwrap();
            until("a waiter that knows the time", async || {
                state(&waiter, &key).await.holders.len() == 1
            })
            .await;
            server.set_clock(&format!("+{}", 3_600 * trial));
            let newcomer = newcomer(&schema, &key);
            let next = waiting.wait().await.unwrap();
            assert!(
                !held.is_held(),
                "trial {trial}: two hold it, the first for {:?}",
                held.remaining()
            );
            assert!(next.fencing_token() > held.fencing_token());
            if next.is_held() {
                next.release().await.unwrap();
            }
            newcomer.await.unwrap();
        }
        drop(server);
    });
}

/// A waiter that arrives after the clock step has no earlier time to compare with.
fn newcomer(schema: &Schema, key: &str) -> tokio::task::JoinHandle<()> {
    let request = schema.client().lock(key).ttl(TTL);
    tokio::spawn(async move {
        let guard = request.acquire().await.unwrap();
        guard.release().await.unwrap();
    })
}

#[test]
fn a_clock_that_is_set_back_keeps_no_dead_holder() {
    let Some(server) = Server::start_under_faketime() else { return };
    with_schema(&server.url(), async move |schema| {
        for (trial, mode) in [Mode::Exclusive, Mode::Shared].into_iter().enumerate() {
            let offset = |hours: usize| format!("-{}", 3_600 * hours);
            server.set_clock(&offset(trial * 2));
            let key = Key::new(&format!("key {trial}")).unwrap();
            let (dead, waiter) = (schema.store(), schema.client());
            let ttl = Duration::from_secs(3);
            let by = Arc::new(Identity { id: "dead".to_owned(), ..Identity::default() });
            let mut claim = Claim::new(1, key.clone(), mode, ttl, by);
            claim.queue = false;
            let waiting = |client: &Client| client.lock(&key).ttl(ttl).enqueue();
            let answer = dead.claim(&claim, ttl).await.unwrap();
            let died = Instant::now();
            assert!(matches!(answer, Answer::Granted(_)), "{answer:?}");
            let pending = waiting(&waiter).await.unwrap();
            server.set_clock(&offset(trial * 2 + 1));
            let next = pending.wait().await.unwrap();
            let took = died.elapsed();
            assert!(took >= ttl.mul_f64(5.0 / 6.0), "a holder may have counted on it: {took:?}");
            // By the clock that was set back it would be an hour.
            assert!(took < ttl + Duration::from_secs(60), "{mode:?}: freed after {took:?}");
            next.release().await.unwrap();
            drop(answer);
        }
        drop(server);
    });
}

#[test]
fn a_holder_says_lost_at_once_when_it_sees_the_clock_jump() {
    let Some(server) = Server::start_under_faketime() else { return };
    with_schema(&server.url(), async move |schema| {
        let client = schema.client();
        let ttl = Duration::from_secs(6);
        let guard = client.lock("key").ttl(ttl).acquire().await.unwrap();
        let begun = Instant::now();
        server.set_clock("-3600");
        let lost = guard.lost().await;
        assert_eq!(lost.reason, Loss::ClockJump);
        assert!(begun.elapsed() < ttl * 2 / 3, "by the next renewal: {:?}", begun.elapsed());
        drop(server);
    });
}
