//! What goes wrong in the field: killed and frozen holders, servers that restart and fail over.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tenure::store::{Answer, Claim, Grant, Identity, KeySpace, Mode};
use tenure::{Client, ErrorKind, Key, Loss, PgLeaseStore, Store};

use crate::server::Server;
use crate::services;
use crate::support::{Schema, TTL, Worker, state, until, with_schema};

fn claim(key: &str, id: u128, ttl: Duration) -> Claim {
    let by = Arc::new(Identity { id: format!("claim {id}"), ..Identity::default() });
    let key = Key::new(key).unwrap();
    {
        let mut claim = Claim::new(id, key, Mode::Exclusive, ttl, by);
        claim.queue = false;
        claim
    }
}

/// Acquires what a worker holds; how long that took from the moment that something was done to the worker.
async fn next(schema: &Schema, worker: &mut Worker, fault: impl FnOnce(&mut Worker)) -> Duration {
    let client = schema.client();
    let pending = client.lock("key").ttl(TTL).enqueue().await.unwrap();
    let begun = Instant::now();
    fault(worker);
    let guard = pending.wait().await.unwrap();
    let took = begun.elapsed();
    schema.tells("held").await;
    let before: tenure::FencingToken =
        schema.told().split_whitespace().nth(1).unwrap().parse().unwrap();
    assert!(guard.fencing_token() > before, "{before:?}, then {:?}", guard.fencing_token());
    guard.release().await.unwrap();
    took
}

#[test]
fn a_killed_holder_is_followed_when_its_lease_ends() {
    let Some(url) = services::postgres() else { return };
    with_schema(&url, async |schema| {
        let mut worker = Worker::start(&schema, "hold");
        schema.tells("held").await;
        let took = next(&schema, &mut worker, Worker::kill).await;
        assert!(took < TTL + Duration::from_secs(1), "the next came after {took:?}");
    });
}

#[test]
fn a_frozen_holder_is_lost_when_it_wakes_and_fenced() {
    let Some(url) = services::postgres() else { return };
    with_schema(&url, async |schema| {
        let mut worker = Worker::start(&schema, "hold");
        schema.tells("held").await;
        let took = next(&schema, &mut worker, |worker| worker.signal("STOP")).await;
        assert!(took < TTL + Duration::from_secs(1), "the next came after {took:?}");
        assert!(!schema.told().contains("lost"), "it is frozen");
        worker.signal("CONT");
        schema.tells("lost").await;
    });
}

#[test]
fn a_restart_of_the_server_loses_nothing() {
    let Some(mut server) = Server::start() else { return };
    with_schema(&server.url(), async move |schema| {
        let client = schema.client();
        let guard = client.lock("key").ttl(Duration::from_secs(20)).acquire().await.unwrap();
        let waiter = schema.client();
        let waiting = tokio::spawn(waiter.lock("key").ttl(TTL).acquire());
        until("a watcher", async || connections(&schema, "LISTEN%").await > 0).await;
        server.down();
        server.up();
        let shown = state(&client, "key").await;
        assert_eq!(shown.holders.first().map(|holder| holder.token), Some(guard.fencing_token()));
        // Renewed on a new connection.
        let left = shown.holders[0].lease_left.unwrap();
        until("a renewal", async || {
            let shown = state(&client, "key").await;
            shown.holders.first().is_some_and(|holder| holder.lease_left.unwrap() > left)
        })
        .await;
        assert!(guard.is_held());
        guard.release().await.unwrap();
        let next = waiting.await.unwrap().unwrap();
        assert!(next.is_held());
        next.release().await.unwrap();
        drop(server);
    });
}

/// A grant of this claim, which must be had at once.
async fn granted(store: &PgLeaseStore, claim: &Claim) -> Grant {
    let answer = store.claim(claim, TTL).await.unwrap();
    let Answer::Granted(grant) = answer else { panic!("{answer:?}") };
    grant
}

#[test]
fn a_crash_of_the_server_takes_back_nothing_that_was_acknowledged() {
    let Some(mut server) = Server::start_with_lazy_commits() else { return };
    with_schema(&server.url(), async move |schema| {
        let (store, long) = (schema.store(), Duration::from_secs(600));
        let mut used = granted(&store, &claim("used", 1, long)).await;
        used.hold.release(TTL).await.unwrap();
        let mut renewed = granted(&store, &claim("renewed", 2, TTL * 5)).await;
        let evicted = granted(&store, &claim("evicted", 3, long)).await;
        let mut sharer = claim("renewed, shared", 4, TTL * 5);
        sharer.mode = Mode::Shared;
        let mut renewed_sharer = granted(&store, &sharer).await;
        schema.connect().await.batch_execute("CHECKPOINT").await.unwrap();

        // Each of these is acknowledged, and the server crashes before it had to write them down.
        renewed.hold.renew(long, TTL).await.unwrap();
        renewed_sharer.hold.renew(long, TTL).await.unwrap();
        store.evict(&Key::new("evicted").unwrap(), evicted.token, "test").await.unwrap();
        let mut claims = ["used", "new", "slot"].map(|key| claim(key, 5, long));
        claims[1].id = 6;
        claims[2].id = 7;
        claims[2].mode = Mode::Slot { limit: 1 };
        let mut tokens = Vec::new();
        for claim in &claims {
            tokens.push(granted(&store, claim).await.token);
        }
        server.down();
        server.up();

        let next = schema.store();
        for (claim, token) in claims.iter().zip(tokens) {
            let mut other = claim.clone();
            other.id += 100;
            match next.claim(&other, TTL).await.unwrap() {
                Answer::Contended(_) => {}
                Answer::Granted(again) => {
                    panic!("{} was granted twice: {token}, then {}", claim.key, again.token)
                }
                other => panic!("{other:?}"),
            }
        }
        let left = async |key: &str| {
            let shown = next.inspect(&Key::new(key).unwrap(), KeySpace::Lock).await.unwrap();
            shown.holders.first().and_then(|holder| holder.lease_left)
        };
        for key in ["renewed", "renewed, shared"] {
            assert!(left(key).await > Some(long / 2), "{key}: {:?}", left(key).await);
        }
        assert_eq!(left("evicted").await, None);
        sharer.id = 104;
        assert!(granted(&next, &sharer).await.token > renewed_sharer.token);
        drop(server);
    });
}

async fn connections(schema: &Schema, like: &str) -> i64 {
    let db = schema.connect().await;
    let sql =
        "SELECT count(*) FROM pg_stat_activity WHERE query LIKE $1 AND pid <> pg_backend_pid()";
    db.query_one(sql, &[&like]).await.unwrap().get(0)
}

#[test]
fn a_standby_is_refused_and_after_a_fail_over_that_lost_grants_tokens_grow() {
    let Some(mut primary) = Server::start() else { return };
    let standby = primary.standby();
    with_schema(&primary.url(), async move |schema| {
        let client = schema.client();
        // Told by the primary before the link is cut.
        let first = client.lock("key").ttl(TTL).acquire().await.unwrap();
        let before = first.fencing_token();
        first.release().await.unwrap();
        let (replica, connection) =
            tokio_postgres::connect(&standby.url(), tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        let table = format!("SELECT to_regclass('{}.locks') IS NOT NULL", schema.name);
        until("the table on the standby", async || {
            replica.query_one(&table, &[]).await.unwrap().get(0)
        })
        .await;

        let refused = Client::connect(&schema.url_at(&standby.url())).await.unwrap();
        let error = refused.lock("key").try_acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
        assert!(error.to_string().contains("standby"), "{error}");

        replica.batch_execute("ALTER SYSTEM SET primary_conninfo = ''").await.unwrap();
        replica.batch_execute("SELECT pg_reload_conf()").await.unwrap();
        until("the end of replication", async || {
            let sql = "SELECT count(*) = 0 FROM pg_stat_wal_receiver";
            replica.query_one(sql, &[]).await.unwrap().get(0)
        })
        .await;

        // Granted by the primary, and unknown to the one that comes after it.
        let both = format!(
            "postgres://postgres@127.0.0.1:{},127.0.0.1:{}/postgres",
            primary.port, standby.port
        );
        let url = schema.url_at(&both);
        let holder = Client::connect(&url).await.unwrap();
        let mut lost = holder.lock("key").ttl(TTL).acquire().await.unwrap();
        for _ in 0..5 {
            lost.release().await.unwrap();
            lost = holder.lock("key").ttl(TTL).acquire().await.unwrap();
        }
        assert!(lost.fencing_token() > before);
        primary.down();
        standby.promote();

        let next = Client::connect(&url).await.unwrap();
        let next = next.lock("key").ttl(TTL).acquire().await.unwrap();
        assert!(next.fencing_token() > lost.fencing_token(), "tokens grow over the fail-over");
        let why = lost.lost().await;
        assert!(matches!(why.reason, Loss::Taken | Loss::Expired), "{why}");
        next.release().await.unwrap();
        drop(standby);
    });
}

#[test]
fn a_claim_that_lands_late_does_nothing() {
    let Some(url) = services::postgres() else { return };
    with_schema(&url, async |schema| {
        let store = schema.store();
        let key = Key::new("key").unwrap();
        let warm = store.claim(&claim("key", 1, TTL), TTL).await.unwrap();
        let Answer::Granted(mut grant) = warm else { panic!("{warm:?}") };
        grant.hold.release(TTL).await.unwrap();

        // Whatever is sent now waits at the server, longer than its sender does.
        let db = schema.connect().await;
        let lock = format!("BEGIN; LOCK TABLE {}.locks", schema.name);
        db.batch_execute(&lock).await.unwrap();
        for mode in [Mode::Exclusive, Mode::Shared] {
            let mut claim = claim("key", 2, TTL);
            claim.mode = mode;
            let limit = Duration::from_millis(200);
            let late = store.claim(&claim, limit).await.unwrap_err();
            assert_eq!(late.kind(), ErrorKind::Unknown, "{late}");
        }
        assert!(connections(&schema, "WITH taken%").await > 0, "they wait");
        tokio::time::sleep(Duration::from_millis(300)).await;
        db.batch_execute("COMMIT").await.unwrap();
        until("their end", async || {
            let active = "SELECT count(*) = 0 FROM pg_stat_activity \
                          WHERE state = 'active' AND query LIKE 'WITH taken%' AND query LIKE $1";
            let like = format!("%{}%", schema.name);
            db.query_one(active, &[&like]).await.unwrap().get(0)
        })
        .await;
        let shown = store.inspect(&key, KeySpace::Lock).await.unwrap();
        assert!(shown.holders.is_empty(), "{shown:?}");
    });
}

#[test]
fn row_locked_by_another_transaction_does_not_block_other_renewals() {
    let Some(url) = services::postgres() else { return };
    with_schema(&url, async |schema| {
        let client = schema.client();
        let ttl = Duration::from_secs(3);
        let stuck = client.lock("stuck").ttl(ttl).acquire().await.unwrap();
        // So many that they are renewed together.
        let mut others = Vec::new();
        for nth in 0..20 {
            others.push(client.lock(format!("other {nth}")).ttl(ttl).acquire().await.unwrap());
        }
        let mut db = schema.connect().await;
        let transaction = db.transaction().await.unwrap();
        let lock = format!("SELECT FROM {}.locks WHERE key = 'stuck' FOR UPDATE", schema.name);
        transaction.execute(&lock, &[]).await.unwrap();
        assert_eq!(stuck.lost().await.reason, Loss::Expired);
        tokio::time::sleep(ttl).await;
        let lost = others.iter().filter(|guard| !guard.is_held()).count();
        assert_eq!(lost, 0, "renewed all the time");
        transaction.rollback().await.unwrap();
    });
}

#[test]
fn hold_resumed_by_handle_can_be_renewed_and_released() {
    let Some(url) = services::postgres() else { return };
    with_schema(&url, async |schema| {
        for mode in [Mode::Exclusive, Mode::Shared, Mode::Slot { limit: 3 }] {
            let mut claim = claim("key", 3, TTL);
            claim.mode = mode;
            let answer = schema.store().claim(&claim, TTL).await.unwrap();
            let Answer::Granted(grant) = answer else { panic!("{answer:?}") };
            let handle = grant.hold.handle().unwrap();
            drop(grant);
            let elsewhere = PgLeaseStore::open(&schema.url()).unwrap();
            let mut hold = elsewhere.resume(&claim.key, &handle).await.unwrap();
            hold.renew(TTL, TTL).await.unwrap();
            hold.release(TTL).await.unwrap();
            let gone = hold.release(TTL).await.unwrap_err();
            assert_eq!(gone.kind(), ErrorKind::NotHeld, "{mode:?}: {gone}");
        }
    });
}
