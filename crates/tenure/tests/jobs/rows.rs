//! Rows that plain SQL wrote, with anything in them: none stops the queue.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tenure::jobs::{CheckpointClaim, Checkpoints, JobState, Options, Queue, Schema};

use crate::services;
use crate::support::{Scene, fill, job, until, with_scene, work_off};

/// A table of the field whose columns may all be null.
const NULLABLE: &str = "
    CREATE TABLE old_jobs (
        id bigserial PRIMARY KEY, priority int, created_at timestamptz, completed_at timestamptz, failed_at timestamptz,
        error_message text, locked_until timestamptz, locked_by text, payload json, attempts int, max_attempts int,
        lease_token bigint, unique_key text)";

/// A queue in a table whose columns may all be null.
async fn nullable(scene: &Scene, options: Options) -> (Queue, tokio_postgres::Client) {
    let db = scene.connect().await;
    db.batch_execute(NULLABLE).await.unwrap();
    let table = format!("{}.old_jobs", scene.schema);
    Schema::of_queue(&table).unwrap().apply(&scene.url).await.unwrap();
    (Queue::connect_with(&scene.url, &table, options).await.unwrap(), db)
}

#[test]
fn null_reads_as_the_default() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let (queue, db) = nullable(&scene, Options::default()).await;
        let rows = "INSERT INTO old_jobs (id, priority, created_at) VALUES
            (1, -1, now()), (2, NULL, now()), (3, 0, now() - interval '1 h'), (4, NULL, NULL), (5, 1, NULL),
            (6, 0, now() + interval '1 h')";
        db.batch_execute(rows).await.unwrap();
        let shown = queue.show("4").await.unwrap().unwrap();
        assert_eq!((shown.priority, shown.attempts, shown.lease_token), (0, 0, 0));
        assert_eq!((shown.created_at, shown.state), (None, JobState::Available));
        assert_eq!(queue.list(None, None, 10).await.unwrap().len(), 6);
        let first = queue.claim().await.unwrap().unwrap();
        assert_eq!((first.id(), first.attempt(), first.lease_token()), ("5", 1, 1));
        assert_eq!((first.payload(), first.max_attempts()), ("null", None));
        first.release().await.unwrap();
        // By priority, null as 0; then by age, null as the youngest.
        let mut jobs = Vec::new();
        while let Some(job) = queue.claim().await.unwrap() {
            jobs.push(job);
        }
        let order: Vec<&str> = jobs.iter().map(|job| job.id()).collect();
        assert_eq!(order, ["5", "3", "2", "6", "4", "1"]);
        assert!(jobs.iter().skip(1).all(|job| (job.attempt(), job.lease_token()) == (1, 1)));
        assert_eq!(queue.summary(10).await.unwrap().running.len(), 6);
        let error = jobs.pop().unwrap();
        error.retry_in(Duration::from_secs(60), "no").await.unwrap();
        assert!(queue.complete_many(jobs).await.unwrap().is_empty());
        assert_eq!(queue.show("1").await.unwrap().unwrap().state, JobState::Delayed);
    });
}

#[test]
fn leases_of_rows_with_null_are_swept_and_raised_by_plain_claims() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let (queue, db) = nullable(&scene, Options::default()).await;
        let rows = "INSERT INTO old_jobs (id, locked_by, locked_until, max_attempts) VALUES
            (1, 'gone', now() - interval '1 s', 1), (2, 'gone', NULL, NULL), (3, NULL, NULL, NULL)";
        db.batch_execute(rows).await.unwrap();
        assert_eq!(queue.sweep().await.unwrap().freed, 2, "no attempt was counted");
        let plain = "UPDATE old_jobs SET locked_by = 'plain', locked_until = now() + interval '1 h' WHERE id = 3";
        db.execute(plain, &[]).await.unwrap();
        let row = queue.show("3").await.unwrap().unwrap();
        assert_eq!((row.lease_token, row.attempts), (1, 1));
        queue.cancel("3", "no").await.unwrap();
        assert_eq!(queue.show("3").await.unwrap().unwrap().lease_token, 2);
        assert_eq!(work_off(&queue).await.completed, 2);
    });
}

#[test]
fn checkpoints_with_null_are_claimed() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let db = scene.connect().await;
        let rows = "
            CREATE TABLE old_chunks (matrix_id text, chunk_hash text, locked_until timestamptz, locked_by text,
                last_synced_at timestamptz, row_count int, lease_token bigint, UNIQUE (matrix_id, chunk_hash));
            INSERT INTO old_chunks (matrix_id, chunk_hash, last_synced_at) VALUES ('m', 'a', NULL), ('m', 'b', 'infinity');
            INSERT INTO old_chunks (matrix_id, chunk_hash, locked_by, locked_until, lease_token)
                VALUES ('m', 'c', 'operator', 'infinity', 1), ('m', 'd', NULL, NULL, 9223372036854775807)";
        db.batch_execute(rows).await.unwrap();
        let table = format!("{}.old_chunks", scene.schema);
        Schema::of_checkpoints(&table).unwrap().apply(&scene.url).await.unwrap();
        let chunks = Checkpoints::connect(&scene.url, &table).await.unwrap();
        for chunk in ["a", "b"] {
            let CheckpointClaim::Granted(guard) = chunks.claim("m", chunk).await.unwrap() else {
                panic!("{chunk} is free");
            };
            assert_eq!((guard.last_synced_at(), guard.row_count()), (None, None));
            guard.heartbeat().await.unwrap();
            guard.complete(7).await.unwrap();
        }
        let held = chunks.claim("m", "c").await.unwrap();
        assert!(
            matches!(&held, CheckpointClaim::Held { by: Some(by), until: None } if by == "operator"),
            "{held:?}"
        );
        let error = chunks.claim("m", "d").await.unwrap_err();
        assert!(error.to_string().contains("lease_token"), "{error}");
    });
}

#[test]
fn values_at_the_end_of_their_range_stop_no_claim() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let (queue, db) = nullable(&scene, Options::default()).await;
        let rows = "INSERT INTO old_jobs (id, created_at, attempts, lease_token, locked_until, locked_by) VALUES
            (1, 'infinity', 2147483647, -7, NULL, NULL), (2, '-infinity', -2147483648, NULL, NULL, NULL),
            (3, '294276-12-31', NULL, NULL, NULL, NULL), (4, '4713-01-01 BC', NULL, NULL, NULL, NULL),
            (5, now(), NULL, NULL, '294276-12-31', 'operator'), (6, now(), NULL, NULL, 'infinity', 'operator')";
        db.batch_execute(rows).await.unwrap();
        assert_eq!(queue.list(None, None, 10).await.unwrap().len(), 6);
        queue.sweep().await.unwrap();
        for id in ["2", "4", "3", "1"] {
            let job = queue.claim().await.unwrap().unwrap();
            assert_eq!((job.id(), job.lease_token()), (id, 1));
            job.release().await.unwrap();
            let job = queue.claim().await.unwrap().unwrap();
            assert_eq!((job.id(), job.lease_token()), (id, 2));
            job.complete().await.unwrap();
        }
        assert!(queue.claim().await.unwrap().is_none());
        let running = queue.summary(10).await.unwrap().running;
        assert_eq!(running.iter().map(|job| &*job.id).collect::<Vec<_>>(), ["5", "6"]);
    });
}

/// Collects the reports of a queue.
fn reports() -> (Arc<Mutex<Vec<String>>>, tenure::jobs::QueueBuilder) {
    let reports = Arc::new(Mutex::new(Vec::new()));
    let builder = Queue::builder().on_set_aside({
        let reports = Arc::clone(&reports);
        move |job| reports.lock().unwrap().push(job.to_string())
    });
    (reports, builder)
}

#[test]
fn a_row_that_cannot_be_claimed_is_set_aside_and_reported_once() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let (reports, builder) = reports();
        let queue = builder.connect(&scene.url, &scene.table()).await.unwrap();
        let ids = fill(&queue, 20).await;
        let db = scene.connect().await;
        let rows = format!(
            "UPDATE sync_jobs SET lease_token = 9223372036854775807 WHERE id = {};
             UPDATE sync_jobs SET priority = 666 WHERE id = {};
             ALTER TABLE sync_jobs ADD CONSTRAINT held CHECK (priority <> 666 OR locked_by IS NULL)",
            ids[0], ids[9]
        );
        db.batch_execute(&rows).await.unwrap();
        // One by one, as those that know no batches do.
        let job = queue.claim().await.unwrap().expect("others are available");
        assert_eq!(job.id(), ids[1], "a row that fails costs its place, no more");
        job.complete().await.unwrap();
        assert_eq!(work_off(&queue).await.completed, 17);
        assert!(queue.claim().await.unwrap().is_none());
        let told = reports.lock().unwrap().clone();
        assert_eq!(told.len(), 2, "{told:#?}");
        let says = |id: &str, why: &str| {
            told.iter().any(|it| it.contains(&format!("job {id} ")) && it.contains(why))
        };
        assert!(says(&ids[9], "\"held\"") && says(&ids[0], "lease_token"), "{told:#?}");
        assert!(!told.concat().contains("Failing row"), "no payloads in logs: {told:#?}");
        until("released", async || {
            queue.claim().await.unwrap();
            queue.show(&ids[0]).await.unwrap().unwrap().state == JobState::Available
        })
        .await;
        // A new process looks again: the row may have been mended.
        db.execute("UPDATE sync_jobs SET priority = 1 WHERE priority = 666", &[]).await.unwrap();
        assert_eq!(scene.queue().await.claim().await.unwrap().unwrap().id(), ids[9]);
    });
}

#[test]
fn a_table_that_refuses_every_claim_is_an_error_and_sets_nothing_aside() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let (reports, builder) = reports();
        let queue = builder.connect(&scene.url, &scene.table()).await.unwrap();
        fill(&queue, 30).await;
        let db = scene.connect().await;
        let check = "ALTER TABLE sync_jobs ADD CONSTRAINT held CHECK (locked_by IS NULL)";
        db.batch_execute(check).await.unwrap();
        for limit in [1, 30] {
            let error = queue.claim_many(limit).await.unwrap_err();
            assert!(error.chain().contains("\"held\""), "{}", error.chain());
        }
        assert!(reports.lock().unwrap().is_empty());
        db.batch_execute("ALTER TABLE sync_jobs DROP CONSTRAINT held").await.unwrap();
        assert_eq!(work_off(&queue).await.completed, 30);
    });
}

/// In a database without an encoding, texts may be no UTF-8.
#[test]
fn text_that_is_no_unicode_is_set_aside_and_shown() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let db = scene.connect().await;
        let name = format!("{}_ascii", scene.schema);
        let create =
            format!("CREATE DATABASE {name} TEMPLATE template0 ENCODING 'SQL_ASCII' LOCALE 'C'");
        db.batch_execute(&create).await.unwrap();
        let url = scene.url.rsplit_once('/').map(|(server, _)| format!("{server}/{name}")).unwrap();
        let inner = Scene { url: url.into(), schema: scene.schema.clone() };
        inner.migrate().await;
        let (reports, builder) = reports();
        let queue = builder.connect(&inner.url, &inner.table()).await.unwrap();
        let ascii = inner.connect().await;
        let rows = "INSERT INTO sync_jobs (id, payload, error_message)
            VALUES (-1, convert_from('\\x22ff22', 'SQL_ASCII')::jsonb, convert_from('\\xff21', 'SQL_ASCII'))";
        ascii.batch_execute(rows).await.unwrap();
        queue.enqueue(job("7")).await.unwrap();
        let shown = queue.show("-1").await.unwrap().unwrap();
        assert_eq!(shown.error.as_deref(), Some("\u{fffd}!"));
        let claimed = queue.claim().await.unwrap().unwrap();
        assert_eq!(claimed.payload(), "7");
        claimed.complete().await.unwrap();
        assert!(queue.claim().await.unwrap().is_none());
        let told = reports.lock().unwrap().clone();
        assert!(
            told.len() == 1 && told[0].contains("job -1") && told[0].contains("UTF8"),
            "{told:?}"
        );
        assert_eq!(queue.show("-1").await.unwrap().unwrap().state, JobState::Available);
        drop((queue, ascii));
        db.batch_execute(&format!("DROP DATABASE {name} WITH (FORCE)")).await.unwrap();
    });
}

#[test]
fn claims_of_a_table_with_nulls_use_an_index() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let (queue, db) = nullable(&scene, Options::default()).await;
        let rows = "INSERT INTO old_jobs (completed_at) SELECT now() FROM generate_series(1, 20000);
            INSERT INTO old_jobs (priority, created_at) SELECT n % 3, now() FROM generate_series(1, 5000) AS n;
            INSERT INTO old_jobs (priority) SELECT NULL FROM generate_series(1, 100); ANALYZE old_jobs";
        db.batch_execute(rows).await.unwrap();
        let [claim, ..] = queue.statements().await.unwrap();
        let claim = claim.replace("$1", "'w'").replace("$2", "1").replace("$3", "5");
        let plan = db.query(&format!("EXPLAIN {claim}"), &[]).await.unwrap();
        let plan = plan.iter().map(|row| row.get(0)).collect::<Vec<String>>().join("\n");
        assert!(plan.contains("_tenure_") && !plan.contains("Seq Scan"), "{plan}");
        assert!(!plan.contains("Sort"), "{plan}");
    });
}
