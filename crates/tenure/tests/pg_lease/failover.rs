//! Fail-overs, on servers of the test's own that follow each other.

use std::sync::Arc;

use tenure::jobs::{CheckpointClaim, Checkpoints, NewJob, Queue, Schema as JobSchema};
use tenure::{Client, FencingToken, PgAdvisoryStore};
use tokio_postgres::NoTls;

use crate::server::Server;
use crate::services;
use crate::support::{Schema, TTL, until, with_schema};

/// One of each kind of grant, on one server.
struct Fleet {
    locks: Client,
    sessions: Client,
    queue: Queue,
    chunks: Checkpoints,
}

impl Fleet {
    async fn connect(schema: &Schema, server: &Server) -> Self {
        let url = server.url();
        let terms = format!("{url}?terms={}.terms", schema.name);
        let queue = Queue::connect(&url, &format!("{}.jobs", schema.name)).await.unwrap();
        let chunks = format!("{}.chunks", schema.name);
        Self {
            locks: Client::connect(&schema.url_at(&url)).await.unwrap(),
            sessions: Client::with_store(Arc::new(PgAdvisoryStore::open(&terms).unwrap())),
            queue,
            chunks: Checkpoints::connect(&url, &chunks).await.unwrap(),
        }
    }

    /// The tokens of one more grant of each kind: lock, shared lock, job, checkpoint, advisory lock.
    async fn grants(&self) -> [FencingToken; 5] {
        let lock = self.locks.lock("key").ttl(TTL).acquire().await.unwrap();
        let shared = self.locks.lock("shared").shared().ttl(TTL).acquire().await.unwrap();
        let session = self.sessions.lock("key").ttl(TTL).acquire().await.unwrap();
        let job = self.queue.claim().await.unwrap().expect("it is given back every time");
        let CheckpointClaim::Granted(chunk) = self.chunks.claim("matrix", "chunk").await.unwrap()
        else {
            panic!("it is given back every time")
        };
        let tokens = [
            lock.fencing_token(),
            shared.fencing_token(),
            job.fencing_token(),
            chunk.fencing_token(),
            session.fencing_token(),
        ];
        chunk.release().await.unwrap();
        job.release().await.unwrap();
        lock.release().await.unwrap();
        shared.release().await.unwrap();
        session.release().await.unwrap();
        tokens
    }
}

async fn timeline(server: &Server) -> i32 {
    let (db, connection) = tokio_postgres::connect(&server.url(), NoTls).await.unwrap();
    tokio::spawn(connection);
    let sql = "SELECT left(pg_walfile_name(pg_current_wal_lsn()), 8)::int";
    db.query_one(sql, &[]).await.unwrap().get(0)
}

#[test]
fn tokens_grow_though_a_second_fail_over_repeats_the_timeline() {
    let Some(mut first) = Server::start() else { return };
    with_schema(&first.url(), async move |schema| {
        let url = first.url();
        let tables = [
            JobSchema::of_queue(&format!("{}.jobs", schema.name)),
            JobSchema::of_checkpoints(&format!("{}.chunks", schema.name)),
        ];
        for table in tables {
            table.unwrap().apply(&url).await.unwrap();
        }
        let terms = PgAdvisoryStore::open(&format!("{url}?terms={}.terms", schema.name)).unwrap();
        terms.apply_schema().await.unwrap();
        let fleet = Fleet::connect(&schema, &first).await;
        fleet.queue.enqueue(NewJob::json("1").unwrap()).await.unwrap();
        let mut before = fleet.grants().await;
        assert!(before.iter().all(|token| token.epoch() == 1), "the timeline: {before:?}");

        // Both have all of it. The third never hears of what the second grants.
        let (mut second, third) = (first.standby(), first.standby());
        let mark = "SELECT pg_current_wal_flush_lsn()::text";
        let flushed: String = schema.connect().await.query_one(mark, &[]).await.unwrap().get(0);
        for standby in [&second, &third] {
            let (db, connection) = tokio_postgres::connect(&standby.url(), NoTls).await.unwrap();
            tokio::spawn(connection);
            let sql = format!("SELECT pg_last_wal_replay_lsn() >= '{flushed}'");
            until("a standby that has all of it", async || {
                db.query_one(&sql, &[]).await.unwrap().get(0)
            })
            .await;
        }
        first.down();
        second.promote();
        let fleet = Fleet::connect(&schema, &second).await;
        for _ in 0..3 {
            let tokens = fleet.grants().await;
            let grown = tokens.iter().zip(&before).all(|(now, before)| now > before);
            assert!(grown, "{before:?}, then {tokens:?}");
            before = tokens;
        }
        assert_eq!(timeline(&second).await, 2);
        second.down();
        third.promote();
        assert_eq!(timeline(&third).await, 2, "again");
        let tokens = Fleet::connect(&schema, &third).await.grants().await;
        let grown = tokens.iter().zip(&before).all(|(now, before)| now > before);
        assert!(grown, "{before:?}, then {tokens:?}");
        drop(third);
    });
}

/// What the table of the incarnation says of the epoch.
async fn epoch(schema: &Schema) -> u64 {
    let sql = format!("SELECT epoch FROM {}.tenure_incarnation", schema.name);
    let epoch: i64 = schema.connect().await.query_one(&sql, &[]).await.unwrap().get(0);
    epoch.unsigned_abs()
}

async fn token(client: &Client) -> FencingToken {
    let guard = client.lock("key").ttl(TTL).acquire().await.unwrap();
    let token = guard.fencing_token();
    guard.release().await.unwrap();
    token
}

/// A server whose start time can be set under its connections: so looks a pooler that reached another run meanwhile.
const FAKE: &str = "CREATE SCHEMA fake; CREATE TABLE fake.started (at timestamptz); \
    INSERT INTO fake.started VALUES (now()); CREATE FUNCTION fake.pg_postmaster_start_time() RETURNS timestamptz \
    LANGUAGE sql STABLE AS 'SELECT at FROM fake.started'; \
    ALTER ROLE postgres SET search_path = fake, pg_catalog, public";

#[test]
fn a_new_run_is_seen_on_connections_that_outlive_the_old_one_and_raises_the_epoch_once() {
    let Some(server) = Server::start() else { return };
    with_schema(&server.url(), async move |schema| {
        let db = schema.connect().await;
        db.batch_execute(FAKE).await.unwrap();
        let clients: Vec<Client> = (0..6).map(|_| schema.client()).collect();
        let mut newest = FencingToken::new(0, 0);
        for client in &clients {
            let next = token(client).await;
            assert!(next > newest);
            newest = next;
        }
        // Another run; a row that is gone; an epoch ahead of the clock.
        let table = format!("{}.tenure_incarnation", schema.name);
        for change in [
            String::new(),
            format!("DELETE FROM {table};"),
            format!("UPDATE {table} SET epoch = epoch + 3600000000;"),
        ] {
            let later = "UPDATE fake.started SET at = at + interval '1 second'";
            db.batch_execute(&format!("BEGIN; {change} {later}; COMMIT")).await.unwrap();
            let ahead = if change.is_empty() || change.starts_with("UPDATE") {
                epoch(&schema).await
            } else {
                newest.epoch()
            };
            let mut tasks = tokio::task::JoinSet::new();
            for client in &clients {
                let client = client.clone();
                tasks.spawn(async move { token(&client).await });
            }
            let mut tokens = tasks.join_all().await;
            tokens.sort_unstable();
            assert!(tokens[0] > newest, "{newest:?}, then {tokens:?}");
            assert!(tokens.windows(2).all(|pair| pair[0] < pair[1]), "{tokens:?}");
            assert!(tokens.iter().all(|token| token.epoch() == tokens[0].epoch()), "{tokens:?}");
            assert!(tokens[0].epoch() > ahead, "{ahead}, then {tokens:?}");
            newest = tokens[5];
        }
        drop(server);
    });
}

#[test]
fn a_table_for_the_incarnation_changes_no_token_when_it_is_made() {
    let Some(url) = services::postgres() else { return };
    with_schema(&url, async |schema| {
        let db = schema.connect().await;
        let drop = format!("DROP TABLE {}.tenure_incarnation", schema.name);
        db.batch_execute(&drop).await.unwrap();
        // As it was before there were incarnations: the timeline.
        let client = schema.client();
        let without = token(&client).await;
        schema.store().apply_schema().await.unwrap();
        assert_eq!(epoch(&schema).await, without.epoch());
        let (old, new) = (token(&client).await, token(&schema.client()).await);
        assert_eq!((old.epoch(), new.epoch()), (without.epoch(), without.epoch()));
        assert_eq!((old.number(), new.number()), (without.number() + 1, without.number() + 2));
    });
}
