//! The tables: made, extended, refused.

use tenure::ErrorKind;
use tenure::jobs::{JobState, Queue, Schema};

use crate::services;
use crate::support::{job, with_scene};

/// As teams have them: the columns of plain SQL, and some of their own.
const FIELD: &str = "
    CREATE TABLE old_jobs (
        id serial PRIMARY KEY, kind text NOT NULL DEFAULT 'sync', priority int NOT NULL DEFAULT 0,
        created_at timestamptz NOT NULL DEFAULT now(), completed_at timestamptz, failed_at timestamptz,
        error_message text, locked_until timestamptz, locked_by text);
    INSERT INTO old_jobs (priority, completed_at) SELECT n % 3, CASE WHEN n % 2 = 0 THEN now() END
        FROM generate_series(1, 100) AS n;
    CREATE TABLE old_checkpoints (
        id bigserial PRIMARY KEY, matrix_id int NOT NULL, chunk_hash varchar(64) NOT NULL, row_count int,
        last_synced_at timestamptz);
    INSERT INTO old_checkpoints (matrix_id, chunk_hash) VALUES (1, 'a'), (2, 'a');";

#[test]
fn a_table_in_use_gets_what_it_lacks_and_keeps_what_it_has() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let db = scene.connect().await;
        db.batch_execute(FIELD).await.unwrap();
        let table = format!("{}.old_jobs", scene.schema);
        let schema = Schema::of_queue(&table).unwrap();
        for _ in 0..2 {
            schema.apply(&url_of(&scene)).await.unwrap();
        }
        let queue = Queue::connect(&scene.url, &table).await.unwrap();
        let counts = queue.counts().await.unwrap();
        assert_eq!((counts["COMPLETED"], counts["AVAILABLE"]), (50, 50));
        queue.enqueue(job("{\"new\": true}").priority(9)).await.unwrap();
        let first = queue.claim().await.unwrap().unwrap();
        assert_eq!(first.payload(), "{\"new\": true}");
        let old = queue.claim().await.unwrap().unwrap();
        assert_eq!((old.payload(), old.max_attempts()), ("null", Some(10)));
        let kept = "SELECT count(*) FROM old_jobs WHERE kind = 'sync'";
        assert_eq!(db.query_one(kept, &[]).await.unwrap().get::<_, i64>(0), 101);

        let table = format!("{}.old_checkpoints", scene.schema);
        Schema::of_checkpoints(&table).unwrap().apply(&scene.url).await.unwrap();
        Schema::of_checkpoints(&table).unwrap().apply(&scene.url).await.unwrap();
        let chunks = tenure::jobs::Checkpoints::connect(&scene.url, &table).await.unwrap();
        let claimed = chunks.claim_known("2", "a").await.unwrap();
        assert!(matches!(claimed, tenure::jobs::CheckpointClaim::Granted(_)), "{claimed:?}");
    });
}

fn url_of(scene: &crate::support::Scene) -> String {
    scene.url.to_string()
}

#[test]
fn ids_may_be_of_any_common_type() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let db = scene.connect().await;
        for (name, kind) in [
            ("by_uuid", "uuid PRIMARY KEY DEFAULT gen_random_uuid()"),
            ("by_text", "text PRIMARY KEY DEFAULT md5(random()::text)"),
            ("by_name", "varchar(40) PRIMARY KEY DEFAULT md5(random()::text)"),
            ("by_int", "int PRIMARY KEY GENERATED ALWAYS AS IDENTITY"),
        ] {
            db.batch_execute(&format!("CREATE TABLE {name} (id {kind})")).await.unwrap();
            let table = format!("{}.{name}", scene.schema);
            Schema::of_queue(&table).unwrap().apply(&scene.url).await.unwrap();
            let queue = Queue::connect(&scene.url, &table).await.unwrap();
            queue.enqueue_many((0..30).map(|_| job("1")).collect()).await.unwrap();
            let mut done = 0;
            while let Some(guard) = queue.claim().await.unwrap() {
                let id = guard.id().to_owned();
                guard.complete().await.unwrap();
                assert_eq!(queue.show(&id).await.unwrap().unwrap().state, JobState::Completed);
                done += 1;
            }
            assert_eq!(done, 30, "{name}");
        }
    });
}

#[test]
fn several_make_it_at_once() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let table = format!("{}.rush", scene.schema);
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..8 {
            let (table, url) = (table.clone(), scene.url.clone());
            tasks.spawn(async move { Schema::of_queue(&table).unwrap().apply(&url).await });
        }
        for applied in tasks.join_all().await {
            applied.unwrap();
        }
        let queue = Queue::connect(&scene.url, &table).await.unwrap();
        queue.enqueue(job("1")).await.unwrap();
        assert!(queue.claim().await.unwrap().is_some());
    });
}

#[test]
fn unsupported_table_is_rejected_and_left_unchanged() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let db = scene.connect().await;
        for (name, sql, says) in [
            ("t1", "CREATE TABLE t1 (id int PRIMARY KEY, locked_until timestamp)", "locked_until"),
            ("t2", "CREATE TABLE t2 (id int PRIMARY KEY, payload bytea)", "bytea"),
            ("t3", "CREATE TABLE t3 (name text)", "no column id"),
            ("t4", "CREATE TABLE t4 (id int)", "unique"),
            ("t5", "CREATE VIEW t5 AS SELECT 1 AS id", "no table"),
            ("t6", "CREATE TABLE t6 (id point)", "id is point"),
        ] {
            db.batch_execute(sql).await.unwrap();
            let columns =
                "SELECT count(*) FROM pg_attribute WHERE attrelid = to_regclass($1) AND attnum > 0";
            let before: i64 = db.query_one(columns, &[&name]).await.unwrap().get(0);
            let table = format!("{}.{name}", scene.schema);
            let schema = Schema::of_queue(&table).unwrap();
            let error = schema.apply(&scene.url).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
            let text = error.to_string();
            assert!(text.contains(says) && text.contains("nothing was changed"), "{name}: {text}");
            let after: i64 = db.query_one(columns, &[&name]).await.unwrap().get(0);
            assert_eq!(before, after, "{name}");
            let error = Queue::connect(&scene.url, &table).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
        }
    });
}
