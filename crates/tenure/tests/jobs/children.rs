//! Tables that inherit from the queue's, and partitions of one: a row's place is its own only within its table.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tenure::ErrorKind;
use tenure::jobs::{Failure, Job, Options, Queue, Schema, Worker};
use tenure::store::{FindingLevel, Store as _};

use crate::services;
use crate::support::{Scene, with_scene};

/// Open jobs and completed ones in the table and in both of its children.
const PER_TABLE: i64 = 40;
const COMPLETED: i64 = 20;
const WORKERS: usize = 4;

/// Two tables that inherit from a queue, one of them from a child. As teams have them: with keys of their own.
async fn with_children(scene: &Scene) -> String {
    let db = scene.connect().await;
    let sql = "
        CREATE TABLE one (PRIMARY KEY (id)) INHERITS (sync_jobs);
        CREATE TABLE two (PRIMARY KEY (id)) INHERITS (one);";
    db.batch_execute(sql).await.unwrap();
    scene.migrate().await;
    fill(&db, &["sync_jobs", "one", "two"]).await;
    scene.table()
}

/// A queue in partitions, made by hand: `schema` refuses it.
async fn with_partitions(scene: &Scene) -> String {
    let db = scene.connect().await;
    let sql = "
        CREATE TABLE parted (LIKE sync_jobs INCLUDING DEFAULTS, PRIMARY KEY (id)) PARTITION BY RANGE (id);
        CREATE TABLE low PARTITION OF parted FOR VALUES FROM (MINVALUE) TO (1001);
        CREATE TABLE middle PARTITION OF parted FOR VALUES FROM (1001) TO (2001);
        CREATE TABLE high PARTITION OF parted FOR VALUES FROM (2001) TO (MAXVALUE);";
    db.batch_execute(sql).await.unwrap();
    fill(&db, &["low", "middle", "high"]).await;
    format!("{}.parted", scene.schema)
}

/// The same rows at the same places of each table: every third is completed.
async fn fill(db: &tokio_postgres::Client, tables: &[&str]) {
    for (nth, table) in tables.iter().enumerate() {
        let sql = format!(
            "INSERT INTO {table} (id, created_at, payload, completed_at, error_message)
             SELECT {nth} * 1000 + n, clock_timestamp(), '1', CASE WHEN n % 3 = 0 THEN now() END,
                 CASE WHEN n % 3 = 0 THEN 'as it was' END
             FROM generate_series(1, $1::int8) AS n"
        );
        db.execute(&sql, &[&(PER_TABLE + COMPLETED)]).await.unwrap();
    }
}

/// How often each job was run by several workers, each with a connection and a name of its own.
async fn work_off(scene: &Scene, table: &str) -> HashMap<String, u32> {
    let runs: Arc<Mutex<HashMap<String, u32>>> = Arc::default();
    let mut workers = tokio::task::JoinSet::new();
    for _ in 0..WORKERS {
        let queue = Queue::connect(&scene.url, table).await.unwrap();
        let runs = Arc::clone(&runs);
        let handler = move |job: Job| {
            *runs.lock().unwrap().entry(job.id().to_owned()).or_default() += 1;
            async { Ok::<(), Failure>(()) }
        };
        let worker = Worker::new(queue, handler).until_empty(true).concurrency(2);
        workers.spawn(worker.run(std::future::pending()));
    }
    for done in workers.join_all().await {
        done.unwrap();
    }
    Arc::into_inner(runs).unwrap().into_inner().unwrap()
}

/// Every open job ran once, and the completed ones are as they were.
async fn each_runs_once(scene: &Scene, table: &str) {
    let db = scene.connect().await;
    let runs = work_off(scene, table).await;
    let again: Vec<_> = runs.iter().filter(|(_, runs)| **runs != 1).collect();
    assert!(again.is_empty(), "ran more than once: {again:?}");
    let open = 3 * usize::try_from(PER_TABLE).unwrap();
    assert_eq!(runs.len(), open);
    let count = async |condition: &str| -> i64 {
        let sql = format!("SELECT count(*) FROM {table} WHERE {condition}");
        db.query_one(&sql, &[]).await.unwrap().get(0)
    };
    let (done, untouched) = (
        count("completed_at IS NOT NULL AND lease_token = 1 AND attempts = 1").await,
        count("error_message = 'as it was' AND lease_token = 0 AND locked_by IS NULL").await,
    );
    assert_eq!((done, untouched), (3 * PER_TABLE, 3 * COMPLETED));
}

/// A sweep frees what expired, in whichever table it is, and nothing at the same place of another.
async fn sweep_frees_its_own(scene: &Scene, table: &str) {
    let db = scene.connect().await;
    let expire = format!(
        "UPDATE {table} SET locked_by = 'gone', locked_until = now() - interval '1 s', attempts = 1
         WHERE id IN (1, 1004) AND completed_at IS NULL"
    );
    assert_eq!(db.execute(&expire, &[]).await.unwrap(), 2);
    let held = format!(
        "UPDATE {table} SET locked_by = 'there', locked_until = now() + interval '1 h', attempts = 1
         WHERE id IN (1001, 2001, 4, 2004)"
    );
    assert_eq!(db.execute(&held, &[]).await.unwrap(), 4);
    let options = Options::default().lease(Duration::from_secs(60));
    let queue = Queue::connect_with(&scene.url, table, options).await.unwrap();
    let swept = queue.sweep().await.unwrap();
    assert_eq!((swept.freed, swept.failed, swept.reclaimed), (2, 0, 2));
    let left = format!("SELECT count(*) FROM {table} WHERE locked_by = 'there'");
    assert_eq!(db.query_one(&left, &[]).await.unwrap().get::<_, i64>(0), 4);
}

#[test]
fn jobs_in_tables_that_inherit_run_once() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let table = with_children(&scene).await;
        each_runs_once(&scene, &table).await;
    });
}

#[test]
fn jobs_in_partitions_run_once() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let table = with_partitions(&scene).await;
        each_runs_once(&scene, &table).await;
    });
}

#[test]
fn a_sweep_frees_nothing_at_the_same_place_of_another_table() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        for table in [with_children(&scene).await, with_partitions(&scene).await] {
            sweep_frees_its_own(&scene, &table).await;
        }
    });
}

#[test]
fn schema_refuses_a_partitioned_table_and_says_why() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let table = with_partitions(&scene).await;
        let error = Schema::of_queue(&table).unwrap().apply(&scene.url).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
        let text = error.to_string();
        assert!(text.contains("partitioned") && text.contains("nothing was changed"), "{text}");
    });
}

/// What is not inherited by itself: indexes, so that claims stay cheap, and the trigger that raises the token.
#[test]
fn schema_adds_to_tables_that_inherit_what_they_lack() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        with_children(&scene).await;
        scene.migrate().await;
        let db = scene.connect().await;
        for table in ["one", "two"] {
            let sql =
                "SELECT indexrelid::regclass::text FROM pg_index WHERE indrelid = to_regclass($1)";
            let rows = db.query(sql, &[&table]).await.unwrap();
            let names: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
            for suffix in ["free", "held", "plain"] {
                let name = format!("{table}_tenure_{suffix}");
                assert!(names.iter().any(|it| it.ends_with(&name)), "{name}: {names:?}");
            }
            let claim = format!(
                "UPDATE ONLY {table} SET locked_by = 'plain', locked_until = now() + interval '5 minutes'
                 WHERE id % 1000 = 1 RETURNING lease_token"
            );
            assert_eq!(db.query_one(&claim, &[]).await.unwrap().get::<_, i64>(0), 1, "{table}");
        }
        for (sql, says) in [
            ("CREATE TABLE three () INHERITS (two)", "unique in"),
            ("DROP TABLE three; UPDATE two SET id = 7 WHERE id = 2007", "has the id 7"),
        ] {
            db.batch_execute(sql).await.unwrap();
            let schema = Schema::of_queue(&scene.table()).unwrap();
            let error = schema.apply(&scene.url).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
            assert!(error.to_string().contains(says), "{says}: {error}");
        }
    });
}

#[test]
fn the_doctor_tells_of_partitions_and_of_tables_that_lack_something() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let db = scene.connect().await;
        let join = if scene.url.contains('?') { '&' } else { '?' };
        let url = format!("{}{join}table={}.locks", scene.url, scene.schema);
        let store = tenure::PgLeaseStore::open(&url).unwrap();
        store.apply_schema().await.unwrap();
        let queues = async || {
            let findings = store.examine(Duration::from_secs(10)).await;
            findings.into_iter().find(|finding| finding.what == "queues").unwrap()
        };
        assert_eq!(queues().await.level, FindingLevel::Ok);
        with_children(&scene).await;
        assert_eq!(queues().await.level, FindingLevel::Ok);
        db.batch_execute("CREATE TABLE three (PRIMARY KEY (id)) INHERITS (two)").await.unwrap();
        let found = queues().await;
        assert_eq!(found.level, FindingLevel::Warning);
        assert!(found.detail.contains("three") && found.advice.is_some(), "{found:?}");
        with_partitions(&scene).await;
        let found = queues().await;
        assert_eq!(found.level, FindingLevel::Failed);
        assert!(found.detail.contains("parted is partitioned"), "{found:?}");
    });
}
