//! Tables of any name and shape: handled, or refused before the first claim.

use std::time::{Duration, Instant};

use tenure::ErrorKind;
use tenure::jobs::{CheckpointClaim, Checkpoints, Failure, Job, JobState, Queue, Schema, Worker};
use tenure::store::{Finding, FindingLevel, Store as _};

use crate::services;
use crate::support::{Scene, job, until, with_scene, work_off};

/// The finding of `tenure doctor` about tables of jobs.
pub(crate) async fn doctor(scene: &Scene) -> Finding {
    let join = if scene.url.contains('?') { '&' } else { '?' };
    let url = format!("{}{join}table={}.locks", scene.url, scene.schema);
    let store = tenure::PgLeaseStore::open(&url).unwrap();
    store.apply_schema().await.unwrap();
    let findings = store.examine(Duration::from_secs(10)).await;
    findings.into_iter().find(|finding| finding.what == "queues").unwrap()
}

#[test]
fn columns_that_do_not_fit_are_refused_by_schema_by_doctor_and_before_the_first_claim() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        assert_eq!(doctor(&scene).await.level, FindingLevel::Ok, "{:?}", doctor(&scene).await);
        let db = scene.connect().await;
        for (change, says) in [
            (
                "ALTER locked_by TYPE varchar(12)",
                "locked_by holds 12 characters, and 32 are needed",
            ),
            ("ALTER locked_until TYPE timestamp", "locked_until is timestamp without time zone"),
            ("ALTER created_at TYPE timestamp", "created_at is timestamp without time zone"),
            ("ALTER attempts TYPE bigint", "attempts is bigint, not integer"),
            (
                "DROP CONSTRAINT sync_jobs_pkey, ADD UNIQUE (id), ALTER id DROP IDENTITY, ALTER id DROP NOT NULL",
                "id may be null",
            ),
        ] {
            // Without the trigger: PostgreSQL does not change the type of a column that a trigger mentions.
            let sql = format!(
                "DROP TRIGGER sync_jobs_tenure_claimed ON sync_jobs; ALTER TABLE sync_jobs {change}"
            );
            db.batch_execute(&sql).await.unwrap();
            let schema = Schema::of_queue(&scene.table()).unwrap();
            for error in [
                schema.apply(&scene.url).await.unwrap_err(),
                Queue::connect(&scene.url, &scene.table()).await.unwrap_err(),
            ] {
                assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
                let text = error.to_string();
                assert!(
                    text.contains(says) && text.contains("alter the table"),
                    "{change}: {text}"
                );
            }
            let found = doctor(&scene).await;
            assert_eq!(found.level, FindingLevel::Failed, "{found:?}");
            assert!(found.detail.contains(says), "{found:?}");
            let drop = "DROP TABLE sync_jobs; DROP FUNCTION sync_jobs_tenure_add, sync_jobs_tenure_claimed";
            db.batch_execute(drop).await.unwrap();
            scene.migrate().await;
        }
        let chunks = "DROP TRIGGER sync_checkpoints_tenure_claimed ON sync_checkpoints;
            ALTER TABLE sync_checkpoints ALTER locked_by TYPE varchar(31)";
        db.batch_execute(chunks).await.unwrap();
        let error = Checkpoints::connect(&scene.url, &scene.chunks()).await.unwrap_err();
        assert!(error.to_string().contains("holds 31 characters"), "{error}");
        let found = doctor(&scene).await;
        assert!(found.detail.contains("sync_checkpoints cannot be used"), "{found:?}");
    });
}

/// A table that tenure does not use yet may belong to another program.
#[test]
fn the_doctor_warns_of_tables_that_plain_workers_use() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let db = scene.connect().await;
        let plain =
            "CREATE TABLE plain (id int PRIMARY KEY, completed_at timestamp, failed_at timestamp,
            locked_until timestamp, locked_by text)";
        db.batch_execute(plain).await.unwrap();
        let found = doctor(&scene).await;
        assert_eq!(found.level, FindingLevel::Warning, "{found:?}");
        assert!(found.detail.contains("plain cannot be used by tenure"), "{found:?}");
        db.batch_execute("DROP TABLE plain; DROP TRIGGER sync_jobs_tenure_claimed ON sync_jobs")
            .await
            .unwrap();
        let found = doctor(&scene).await;
        assert_eq!(found.level, FindingLevel::Warning, "{found:?}");
        assert!(found.detail.contains("sync_jobs lacks the trigger"), "{found:?}");
    });
}

#[test]
fn short_columns_hold_what_fits() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let db = scene.connect().await;
        let sql = "CREATE TABLE short (id uuid PRIMARY KEY, locked_by varchar(32), error_message varchar(20),
            unique_key varchar(5))";
        db.batch_execute(sql).await.unwrap();
        let table = format!("{}.short", scene.schema);
        Schema::of_queue(&table).unwrap().apply(&scene.url).await.unwrap();
        let queue = Queue::connect(&scene.url, &table).await.unwrap();
        let other = Queue::connect(&scene.url, &table).await.unwrap();
        assert!(queue.worker().len() <= 32 && queue.worker() != other.worker());
        let error = queue.enqueue(job("1").unique_key("too long")).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{}", error.chain());
        // The program that made the table makes its ids; so do we, as it has no default.
        let ids: Vec<String> = (0..4).map(|_| String::new()).collect();
        let jobs = ids.iter().map(|_| job("1").max_attempts(1)).collect();
        let ids: Vec<String> =
            queue.enqueue_many(jobs).await.unwrap().into_iter().map(|it| it.id).collect();
        let why = "a reason that is longer than the column";
        queue.cancel(&ids[0], why).await.unwrap();
        queue.claim().await.unwrap().unwrap().fail(why).await.unwrap();
        queue.claim().await.unwrap().unwrap().retry_in(Duration::ZERO, why).await.unwrap();
        let _lost = queue.claim().await.unwrap().unwrap();
        db.batch_execute("UPDATE short SET locked_until = now() WHERE locked_by IS NOT NULL")
            .await
            .unwrap();
        assert_eq!(other.sweep().await.unwrap().failed, 1);
        for id in &ids {
            let row = queue.show(id).await.unwrap().unwrap();
            assert_eq!(row.state, JobState::Failed);
            assert_eq!(row.error.unwrap().chars().count(), 20);
        }
    });
}

#[test]
fn names_in_quotes_are_used_as_they_are() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let db = scene.connect().await;
        let schema = format!("{} Mixed-Case", scene.schema);
        let (table, chunks) =
            (format!("\"{schema}\".\"Sync Jobs\""), format!("\"{schema}\".\"Chunks\""));
        let error = Queue::connect(&scene.url, &table).await.unwrap_err();
        let run = format!("tenure schema --queue '{table}' --apply");
        assert!(error.to_string().contains(&run), "{error}");
        for _ in 0..2 {
            Schema::of_queue(&table).unwrap().apply(&scene.url).await.unwrap();
            Schema::of_checkpoints(&chunks).unwrap().apply(&scene.url).await.unwrap();
        }
        let queue = Queue::connect(&scene.url, &table).await.unwrap();
        assert_eq!(queue.table(), table);
        let handler = |_: Job| async { Ok::<(), Failure>(()) };
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let worker = Worker::new(queue.clone(), handler).run(async { drop(stopped.await) });
        let worker = tokio::spawn(worker);
        let listens =
            "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN %' || $1 || '%'";
        until("it listens", async || {
            db.query_one(listens, &[&schema]).await.unwrap().get::<_, i64>(0) > 0
        })
        .await;
        let begun = Instant::now();
        let id = queue.enqueue(job("1")).await.unwrap().id;
        until("done", async || {
            queue.show(&id).await.unwrap().unwrap().state == JobState::Completed
        })
        .await;
        println!("done after {:?}", begun.elapsed());
        drop(stop);
        worker.await.unwrap().unwrap();
        let add = format!("SELECT \"{schema}\".\"Sync Jobs_tenure_add\"('7')");
        db.execute(&add, &[]).await.unwrap();
        let claim = format!(
            "UPDATE {table} SET locked_by = 'plain', locked_until = now() WHERE completed_at IS NULL"
        );
        db.execute(&claim, &[]).await.unwrap();
        assert_eq!(queue.sweep().await.unwrap().freed, 1);
        assert_eq!(work_off(&queue).await.completed, 1);
        let checkpoints = Checkpoints::connect(&scene.url, &chunks).await.unwrap();
        let CheckpointClaim::Granted(chunk) = checkpoints.claim("m", "a").await.unwrap() else {
            panic!("it is new");
        };
        chunk.complete(1).await.unwrap();
        db.batch_execute(&format!("DROP SCHEMA \"{schema}\" CASCADE")).await.unwrap();
    });
}
