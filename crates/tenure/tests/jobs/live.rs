//! Tables in use: changed in stages while they are read and written, resumed, undone.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tenure::ErrorKind;
use tenure::jobs::{Queue, Schema, UndoOptions};
use tokio_postgres::Client;

use crate::services;
use crate::support::{Scene, until, with_scene, work_off};

/// A table of a team's own, with rows.
pub(crate) async fn create_old_jobs(db: &Client, rows: i64) {
    let sql = "
        CREATE TABLE old_jobs (
            id bigserial PRIMARY KEY, kind text NOT NULL DEFAULT 'sync', priority int NOT NULL DEFAULT 0,
            created_at timestamptz NOT NULL DEFAULT now(), completed_at timestamptz, failed_at timestamptz,
            error_message text, locked_until timestamptz, locked_by text);
        CREATE INDEX old_jobs_kind ON old_jobs (kind);";
    db.batch_execute(sql).await.unwrap();
    let fill = "INSERT INTO old_jobs (priority, completed_at)
        SELECT n % 3, CASE WHEN n % 100 > 0 THEN now() END FROM generate_series(1, $1::int8) AS n";
    db.execute(fill, &[&rows]).await.unwrap();
}

fn old_jobs(scene: &Scene) -> Schema {
    Schema::of_queue(&format!("{}.old_jobs", scene.schema)).unwrap()
}

/// Columns, indexes, triggers and functions of a schema, as text.
async fn objects(scene: &Scene, db: &Client) -> Vec<String> {
    let sql = "
        SELECT 'column ' || c.relname || '.' || a.attname FROM pg_attribute AS a JOIN pg_class AS c ON c.oid = a.attrelid
            WHERE c.relkind IN ('r', 'v') AND a.attnum > 0 AND NOT a.attisdropped AND c.relnamespace = $1::text::regnamespace
        UNION ALL SELECT 'index ' || pg_get_indexdef(i.indexrelid) || i.indisvalid FROM pg_index AS i
            JOIN pg_class AS c ON c.oid = i.indrelid WHERE c.relnamespace = $1::text::regnamespace
        UNION ALL SELECT 'trigger ' || pg_get_triggerdef(t.oid) FROM pg_trigger AS t
            JOIN pg_class AS c ON c.oid = t.tgrelid WHERE c.relnamespace = $1::text::regnamespace
        UNION ALL SELECT 'function ' || p.proname FROM pg_proc AS p WHERE p.pronamespace = $1::text::regnamespace
        ORDER BY 1";
    let rows = db.query(sql, &[&&*scene.schema]).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

/// A writer does not commit: the stages wait briefly and again, and other statements do not wait long behind them.
#[test]
fn a_table_that_is_locked_is_tried_again_while_readers_and_writers_proceed() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let (mut writer, reader) = (scene.connect().await, scene.connect().await);
        create_old_jobs(&reader, 1_000).await;
        let transaction = writer.transaction().await.unwrap();
        transaction.execute("UPDATE old_jobs SET kind = 'x' WHERE id = 1", &[]).await.unwrap();
        let attempts = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&attempts);
        let schema =
            old_jobs(&scene).lock_timeout(Duration::from_millis(50)).on_progress(move |line| {
                if line.contains("no lock within") {
                    counter.fetch_add(1, Ordering::Relaxed);
                }
            });
        let applying = tokio::spawn({
            let (schema, url) = (schema.clone(), scene.url.clone());
            async move { schema.apply(&url).await }
        });
        // Each statement ends while the transaction is still open.
        until("three attempts", async || {
            let read = reader.query("SELECT count(*) FROM old_jobs", &[]);
            let read = tokio::time::timeout(Duration::from_secs(20), read).await;
            read.expect("the reader waits for the transaction").unwrap();
            let write = reader.execute("UPDATE old_jobs SET kind = 'y' WHERE id = 2", &[]);
            let write = tokio::time::timeout(Duration::from_secs(20), write).await;
            write.expect("the writer waits for the transaction").unwrap();
            attempts.load(Ordering::Relaxed) >= 3
        })
        .await;
        assert!(!applying.is_finished());
        transaction.commit().await.unwrap();
        applying.await.unwrap().unwrap();
        assert!(schema.plan(&scene.url).await.unwrap().is_empty());
    });
}

#[test]
fn a_plan_changes_nothing_and_says_what_apply_does() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let db = scene.connect().await;
        let missing = Schema::of_queue(&format!("{}.missing", scene.schema)).unwrap();
        assert!(missing.plan(&scene.url).await.unwrap().to_string().contains("CREATE TABLE"));
        create_old_jobs(&db, 10).await;
        let before = objects(&scene, &db).await;
        let schema = old_jobs(&scene);
        let plan = schema.plan(&scene.url).await.unwrap().to_string();
        assert_eq!(objects(&scene, &db).await, before);
        for says in
            ["ADD COLUMN payload", "CREATE INDEX CONCURRENTLY", "CREATE TRIGGER", "lock_timeout"]
        {
            assert!(plan.contains(says), "{says}: {plan}");
        }
        assert!(!plan.contains("ADD COLUMN priority"), "{plan}");
        // The printed plan is SQL. A client sends each statement alone, as psql does.
        let path = format!("{}.old_jobs", scene.schema);
        let mut psql =
            std::process::Command::new(services::postgres_programs().unwrap().join("psql"));
        let mut psql = psql
            .args([&*scene.url, "-Xq", "-v", "ON_ERROR_STOP=1", "-f", "-"])
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        std::io::Write::write_all(&mut psql.stdin.take().unwrap(), plan.as_bytes()).unwrap();
        assert!(psql.wait().unwrap().success());
        let again = schema.plan(&scene.url).await.unwrap();
        assert!(again.is_empty(), "{again}");
        assert!(again.to_string().contains("nothing to do"), "{again}");
        let queue = Queue::connect(&scene.url, &path).await.unwrap();
        assert_eq!(work_off(&queue).await.completed, 0, "10 rows, all completed");
    });
}

#[test]
fn an_invalid_index_of_an_interrupted_run_is_made_again() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let (mut writer, db) = (scene.connect().await, scene.connect().await);
        create_old_jobs(&db, 100).await;
        let transaction = writer.transaction().await.unwrap();
        transaction.execute("UPDATE old_jobs SET kind = 'x' WHERE id = 1", &[]).await.unwrap();
        db.batch_execute("SET statement_timeout = '300ms'").await.unwrap();
        let create = "CREATE INDEX CONCURRENTLY old_jobs_tenure_held ON old_jobs (id)";
        db.batch_execute(create).await.unwrap_err();
        db.batch_execute("RESET statement_timeout").await.unwrap();
        transaction.commit().await.unwrap();
        let invalid = "SELECT count(*) FROM pg_index WHERE NOT indisvalid AND indrelid = 'old_jobs'::regclass";
        let count = async |sql: &str| db.query_one(sql, &[]).await.unwrap().get::<_, i64>(0);
        assert_eq!(count(invalid).await, 1);
        let schema = old_jobs(&scene);
        let plan = schema.plan(&scene.url).await.unwrap().to_string();
        assert!(plan.contains("DROP INDEX CONCURRENTLY"), "{plan}");
        schema.apply(&scene.url).await.unwrap();
        assert_eq!(count(invalid).await, 0);
        assert!(schema.plan(&scene.url).await.unwrap().is_empty());
        // Two open jobs of one key: the unique index cannot be built, and none that is invalid stays behind.
        db.batch_execute(
            "DROP INDEX old_jobs_tenure_key; UPDATE old_jobs SET unique_key = 'same', completed_at = NULL WHERE id < 3",
        )
        .await
        .unwrap();
        assert!(schema.apply(&scene.url).await.is_err());
        assert_eq!(count(invalid).await, 0);
    });
}

#[test]
fn a_run_that_was_cut_off_at_any_time_is_continued_by_the_next() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let db = scene.connect().await;
        create_old_jobs(&db, 20_000).await;
        let (schema, all) = (old_jobs(&scene), UndoOptions::default().drop_columns(true));
        let mut cut_off = 0;
        for millis in [5, 10, 20, 30, 40, 50, 60, 80, 100, 150] {
            // The connection is closed with the future. The server may still be busy with its last statement.
            let limit = Duration::from_millis(millis);
            cut_off +=
                u32::from(tokio::time::timeout(limit, schema.apply(&scene.url)).await.is_err());
            schema.apply(&scene.url).await.unwrap();
            let plan = schema.plan(&scene.url).await.unwrap();
            assert!(plan.is_empty(), "{plan}");
            let limit = Duration::from_millis(millis / 2);
            cut_off +=
                u32::from(tokio::time::timeout(limit, schema.undo(&scene.url, all)).await.is_err());
            schema.undo(&scene.url, all).await.unwrap();
            let plan = schema.undo_plan(&scene.url, all).await.unwrap();
            assert!(plan.is_empty(), "{plan}");
        }
        println!("{cut_off} of 20 runs were cut off");
        assert!(cut_off > 0);
    });
}

#[test]
fn a_pooler_in_transaction_mode_is_refused_before_anything_is_changed() {
    let (Some(url), Some(pooler)) = (services::postgres(), services::pgbouncer()) else { return };
    with_scene(&url, async move |scene| {
        let db = scene.connect().await;
        create_old_jobs(&db, 10).await;
        let before = objects(&scene, &db).await;
        let error = old_jobs(&scene).apply(&pooler).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
        assert!(error.to_string().contains("transaction mode"), "{error}");
        assert_eq!(objects(&scene, &db).await, before);
        if let Some(pooler) = services::pgbouncer_in_session_mode() {
            old_jobs(&scene).apply(&pooler).await.unwrap();
        }
        old_jobs(&scene).apply(&scene.url).await.unwrap();
        // Nothing is missing: no session is needed.
        old_jobs(&scene).apply(&pooler).await.unwrap();
    });
}

#[test]
fn five_change_an_existing_table_at_once() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let db = scene.connect().await;
        create_old_jobs(&db, 5_000).await;
        db.batch_execute("CREATE TABLE child (PRIMARY KEY (id)) INHERITS (old_jobs)")
            .await
            .unwrap();
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..5 {
            let (schema, url) = (old_jobs(&scene), scene.url.clone());
            tasks.spawn(async move { schema.apply(&url).await });
        }
        for applied in tasks.join_all().await {
            applied.unwrap();
        }
        assert!(old_jobs(&scene).plan(&scene.url).await.unwrap().is_empty());
        let children =
            "SELECT count(*) FROM pg_index WHERE indrelid = 'child'::regclass AND indisvalid";
        assert_eq!(db.query_one(children, &[]).await.unwrap().get::<_, i64>(0), 5);
    });
}

#[test]
fn undo_leaves_the_table_as_it_was() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let db = scene.connect().await;
        create_old_jobs(&db, 200).await;
        db.batch_execute("CREATE TABLE child (PRIMARY KEY (id)) INHERITS (old_jobs)")
            .await
            .unwrap();
        let before = objects(&scene, &db).await;
        let (schema, table) = (old_jobs(&scene), format!("{}.old_jobs", scene.schema));
        schema.apply(&scene.url).await.unwrap();
        let queue = Queue::connect(&scene.url, &table).await.unwrap();
        let held = queue.claim().await.unwrap().unwrap();
        let all = UndoOptions::default().drop_columns(true);
        let error = schema.undo(&scene.url, all).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains("1 rows"), "{error}");
        held.release().await.unwrap();
        let plan = schema.undo_plan(&scene.url, UndoOptions::default()).await.unwrap();
        assert_eq!(plan.kept_columns.len(), 9, "{plan}");
        schema.undo(&scene.url, UndoOptions::default()).await.unwrap();
        assert_eq!(objects(&scene, &db).await.len(), before.len() + 18, "only columns are left");
        schema.undo(&scene.url, all).await.unwrap();
        assert_eq!(objects(&scene, &db).await, before);
        // A table that tenure made is kept, with all its columns.
        let own = Schema::of_queue(&scene.table()).unwrap();
        own.undo(&scene.url, all).await.unwrap();
        let queue = scene.queue().await;
        assert!(queue.claim().await.unwrap().is_none());
        own.apply(&scene.url).await.unwrap();
    });
}

/// Clients of the table's team: each reads and writes single rows. Returns when `stop` is set, with the number of
/// statements and the longest one.
async fn load(db: Client, rows: i64, seed: i64, stop: Arc<AtomicBool>) -> (u64, Duration) {
    let (mut count, mut longest) = (0, Duration::ZERO);
    let mut id = seed;
    while !stop.load(Ordering::Relaxed) {
        id = (id * 7_919 + 13) % rows + 1;
        for sql in [
            "SELECT customer FROM tasks WHERE task_id = $1",
            "UPDATE tasks SET customer = customer || 'x' WHERE task_id = $1 AND length(customer) < 20",
            "INSERT INTO tasks (customer) SELECT customer FROM tasks WHERE task_id = $1",
        ] {
            let begun = Instant::now();
            db.execute(sql, &[&id]).await.unwrap();
            longest = longest.max(begun.elapsed());
            count += 1;
        }
    }
    (count, longest)
}

/// `cargo xtask soak schema` runs it with a million rows.
#[test]
fn a_table_with_other_names_is_changed_and_undone_under_load() {
    let Some(url) = services::postgres() else { return };
    let rows = std::env::var("TENURE_SOAK_SCHEMA").ok().and_then(|rows| rows.parse().ok());
    let rows: i64 = rows.unwrap_or(20_000);
    with_scene(&url, async move |scene| {
        let db = scene.connect().await;
        let create = "CREATE TABLE tasks (task_id bigserial PRIMARY KEY, customer text NOT NULL DEFAULT 'some customer',
            details text DEFAULT repeat('d', 100), created_at timestamptz NOT NULL DEFAULT now(), done_at timestamptz,
            leased_until timestamptz, owner text)";
        db.batch_execute(create).await.unwrap();
        let fill = "INSERT INTO tasks (done_at) SELECT CASE WHEN n % 10 > 0 THEN now() END FROM generate_series(1, $1::int8) AS n";
        db.execute(fill, &[&rows]).await.unwrap();
        let columns = async || -> Vec<String> { objects(&scene, &db).await };
        let before = columns().await;
        let columns = [
            ("id", "task_id"),
            ("completed_at", "done_at"),
            ("locked_until", "leased_until"),
            ("locked_by", "owner"),
        ];
        let queue = format!("{}.queue", scene.schema);
        let schema = Schema::of_queue(&queue).unwrap();
        let schema = schema.mapped(&format!("{}.tasks", scene.schema), columns).unwrap();
        let limit = Duration::from_secs(1);
        let schema = schema.lock_timeout(limit).on_progress(|line| println!("    {line}"));
        let all = UndoOptions::default().drop_columns(true);
        for (what, undo) in [("changed", false), ("undone", true)] {
            let stop = Arc::new(AtomicBool::new(false));
            let mut clients = tokio::task::JoinSet::new();
            for seed in 0..4 {
                clients.spawn(load(scene.connect().await, rows, seed, Arc::clone(&stop)));
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
            let begun = Instant::now();
            if undo {
                schema.undo(&scene.url, all).await.unwrap();
            } else {
                schema.apply(&scene.url).await.unwrap();
            }
            let took = begun.elapsed();
            stop.store(true, Ordering::Relaxed);
            let loads = clients.join_all().await;
            let count: u64 = loads.iter().map(|(count, _)| count).sum();
            let longest = loads.iter().map(|(_, longest)| *longest).max().unwrap();
            println!(
                "{rows} rows {what} in {took:.1?} beside {count} statements, the longest of which took {longest:.0?}"
            );
            assert!(count > 0);
            // Some time beyond the limit for a busy machine. A lock on the table for the time of an index exceeds it.
            assert!(longest < limit * 3, "a statement took {longest:?}");
            if !undo {
                let queue = Queue::connect(&scene.url, &queue).await.unwrap();
                let job = queue.claim().await.unwrap().unwrap();
                job.complete().await.unwrap();
            }
        }
        let after = objects(&scene, &db).await;
        assert_eq!(after, before);
    });
}
