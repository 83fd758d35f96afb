//! Workers that use the plain SQL of the field share the table with ours.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tenure::jobs::{Failure, Job, JobState, Options, Worker};
use tenure::{ErrorKind, Loss};

use crate::services;
use crate::support::{Scene, fill, job, state, until, with_scene};

/// As workers in the field write them.
const CLAIM: &str = "
    UPDATE sync_jobs SET locked_until = NOW() + INTERVAL '5 minutes', locked_by = $1
    WHERE id = (SELECT id FROM sync_jobs
        WHERE completed_at IS NULL AND failed_at IS NULL AND (locked_until IS NULL OR locked_until <= NOW())
        ORDER BY priority DESC, created_at ASC FOR UPDATE SKIP LOCKED LIMIT 1)
    RETURNING id";
const HEARTBEAT: &str = "
    UPDATE sync_jobs SET locked_until = NOW() + INTERVAL '5 minutes'
    WHERE id = $1 AND locked_by = $2 AND locked_until > NOW()";
const COMPLETE: &str = "
    UPDATE sync_jobs SET completed_at = NOW(), locked_until = NULL, locked_by = NULL WHERE id = $1";

async fn plain_claim(db: &tokio_postgres::Client, worker: &str) -> Option<i64> {
    db.query_opt(CLAIM, &[&worker]).await.unwrap().map(|row| row.get(0))
}

/// Works plainly until nothing is left; how many it did.
async fn plain_worker(scene: Scene, name: &'static str, running: Arc<Running>) -> usize {
    let db = scene.connect().await;
    let mut done = 0;
    while let Some(id) = plain_claim(&db, name).await {
        running.begin(id);
        assert_eq!(db.execute(HEARTBEAT, &[&id, &name]).await.unwrap(), 1);
        running.end(id);
        db.execute(COMPLETE, &[&id]).await.unwrap();
        done += 1;
    }
    done
}

/// The running jobs, to check that no two workers run the same job.
#[derive(Default)]
struct Running(std::sync::Mutex<std::collections::HashSet<i64>>, AtomicUsize);

impl Running {
    fn begin(&self, id: i64) {
        assert!(self.0.lock().unwrap().insert(id), "two work on {id}");
        self.1.fetch_add(1, Ordering::Relaxed);
    }

    fn end(&self, id: i64) {
        assert!(self.0.lock().unwrap().remove(&id));
    }
}

#[test]
fn a_thousand_jobs_are_shared_and_each_is_done_once() {
    const JOBS: usize = 1_000;
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue().await;
        fill(&queue, JOBS).await;
        let running = Arc::new(Running::default());
        let plain = ["plain 1", "plain 2"]
            .map(|name| tokio::spawn(plain_worker(scene.clone(), name, Arc::clone(&running))));
        let handler = {
            let running = Arc::clone(&running);
            move |job: Job| {
                let running = Arc::clone(&running);
                async move {
                    let id = job.id().parse().unwrap();
                    running.begin(id);
                    tokio::task::yield_now().await;
                    running.end(id);
                    Ok::<(), Failure>(())
                }
            }
        };
        let worker = Worker::new(queue.clone(), handler).concurrency(2).until_empty(true);
        let ours = worker.run(std::future::pending()).await.unwrap();
        let mut theirs = 0;
        for worker in plain {
            theirs += worker.await.unwrap();
        }
        println!("{} by ours, {theirs} by plain SQL", ours.completed);
        assert_eq!(ours.completed + theirs as u64, JOBS as u64);
        assert_eq!(running.1.load(Ordering::Relaxed), JOBS, "each was begun once");
        assert!(ours.completed > 0 && theirs > 0, "both had some");
        assert_eq!(queue.counts().await.unwrap()["COMPLETED"], JOBS as u64);
        let twice = "SELECT count(*) FROM sync_jobs WHERE lease_token <> 1 OR attempts <> 1";
        let db = scene.connect().await;
        assert_eq!(db.query_one(twice, &[]).await.unwrap().get::<_, i64>(0), 0);
    });
}

#[test]
fn each_excludes_the_other_and_a_plain_claim_raises_the_token() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue_with(Options::default().lease(Duration::from_secs(2))).await;
        let db = scene.connect().await;
        let ids = fill(&queue, 1).await;
        let ours = queue.claim().await.unwrap().unwrap();
        assert_eq!(plain_claim(&db, "plain").await, None, "ours is respected");
        // The worker is taken to be gone, and the plain one claims what is expired.
        let expire = "UPDATE sync_jobs SET locked_until = clock_timestamp()";
        db.execute(expire, &[]).await.unwrap();
        let id = plain_claim(&db, "plain").await.expect("an expired lease");
        assert_eq!(id.to_string(), ids[0]);
        let row = queue.show(&ids[0]).await.unwrap().unwrap();
        assert_eq!((row.state, row.lease_token, row.attempts), (JobState::Running, 2, 2));
        let lost = tokio::time::timeout(Duration::from_secs(5), ours.lost()).await.unwrap();
        assert_eq!(lost, Loss::Taken, "at its next heartbeat");
        assert_eq!(ours.complete().await.unwrap_err().kind(), ErrorKind::Lost);
        assert!(queue.claim().await.unwrap().is_none(), "theirs is respected");
        assert_eq!(queue.sweep().await.unwrap().freed, 0);
        // The same name again, after a restart: still another claim.
        db.execute(expire, &[]).await.unwrap();
        plain_claim(&db, "plain").await.unwrap();
        assert_eq!(queue.show(&ids[0]).await.unwrap().unwrap().lease_token, 3);
        db.execute(COMPLETE, &[&id]).await.unwrap();
        assert_eq!(state(&queue, &ids[0]).await, JobState::Completed);
    });
}

/// Saves a row as an object-relational mapper does: every column, as it was read and with some changes.
async fn save(db: &tokio_postgres::Client, read: &str, changes: &str) {
    let sql = format!(
        "UPDATE sync_jobs AS t SET priority = r.priority, created_at = r.created_at, completed_at = r.completed_at,
             failed_at = r.failed_at, error_message = r.error_message, payload = r.payload, unique_key = r.unique_key,
             locked_until = r.locked_until, locked_by = r.locked_by, attempts = r.attempts, max_attempts = r.max_attempts,
             lease_token = r.lease_token
         FROM (SELECT (jsonb_populate_record(NULL::sync_jobs, $1::text::jsonb || {changes})).*) AS r WHERE t.id = r.id"
    );
    assert_eq!(db.execute(&sql, &[&read]).await.unwrap(), 1);
}

async fn read(db: &tokio_postgres::Client) -> String {
    db.query_one("SELECT to_jsonb(t)::text FROM sync_jobs AS t", &[]).await.unwrap().get(0)
}

/// Changes of a program that claims for five minutes, or renews its claim.
const LEASE: &str =
    "jsonb_build_object('locked_by', 'orm', 'locked_until', now() + interval '5 minutes')";

#[test]
fn a_program_that_saves_whole_rows_uses_up_no_attempts() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue_with(Options::default().lease(Duration::from_secs(2))).await;
        let db = scene.connect().await;
        let id = fill(&queue, 1).await.remove(0);
        let counted = async || {
            let row = queue.show(&id).await.unwrap().unwrap();
            (row.lease_token, row.attempts)
        };
        let free = read(&db).await;
        save(&db, &free, "'{\"priority\": 3}'").await;
        assert_eq!(counted().await, (0, 0), "a change of another column");
        save(&db, &free, LEASE).await;
        assert_eq!(counted().await, (1, 1), "a claim");
        for _ in 0..3 {
            save(&db, &read(&db).await, LEASE).await;
        }
        assert_eq!(counted().await, (1, 1), "heartbeats");
        save(&db, &free, LEASE).await;
        assert_eq!(counted().await, (1, 1), "a heartbeat with what was read before the claim");
        db.execute("UPDATE sync_jobs SET locked_until = clock_timestamp()", &[]).await.unwrap();
        save(&db, &free, LEASE).await;
        assert_eq!(counted().await, (2, 2), "a claim of the same name after its lease");
        save(&db, &read(&db).await, "'{\"locked_by\": null, \"locked_until\": null}'").await;
        assert_eq!(counted().await, (2, 2), "a release");
        let ours = queue.claim().await.unwrap().unwrap();
        let held = read(&db).await;
        save(&db, &held, "'{\"priority\": 4}'").await;
        assert_eq!(counted().await, (3, 3), "our own claim, and a change of another column");
        let lost = tokio::time::timeout(Duration::from_secs(3), ours.lost()).await;
        assert!(lost.is_err(), "its heartbeats go on: {lost:?}");
        // What was read before our claim comes back: the token must not, or the next claim would have ours again.
        save(&db, &free, "'{}'").await;
        assert_eq!(counted().await, (3, 3));
        let again = queue.claim().await.unwrap().unwrap();
        assert_eq!(again.lease_token(), 4);
        assert_eq!(ours.complete().await.unwrap_err().kind(), ErrorKind::Lost);
    });
}

#[test]
fn schema_replaces_the_trigger_that_counted_every_update() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let db = scene.connect().await;
        let old = "
            CREATE OR REPLACE FUNCTION sync_jobs_tenure_claimed() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN
                NEW.lease_token := OLD.lease_token + 1;
                NEW.attempts := OLD.attempts + 1;
                RETURN NEW;
            END $$;
            DROP TRIGGER sync_jobs_tenure_claimed ON sync_jobs;
            CREATE TRIGGER sync_jobs_tenure_claimed BEFORE UPDATE OF locked_by ON sync_jobs FOR EACH ROW
                WHEN (NEW.locked_by <> '~retry' AND NEW.lease_token = OLD.lease_token)
                EXECUTE FUNCTION sync_jobs_tenure_claimed();
            CREATE TABLE child (PRIMARY KEY (id)) INHERITS (sync_jobs);
            CREATE TRIGGER sync_jobs_tenure_claimed BEFORE UPDATE OF locked_by ON child FOR EACH ROW
                WHEN (NEW.locked_by <> '~retry' AND NEW.lease_token = OLD.lease_token)
                EXECUTE FUNCTION sync_jobs_tenure_claimed();
            INSERT INTO sync_jobs (id, locked_by, locked_until) VALUES (1, 'orm', now() + interval '1 h');
            INSERT INTO child (id, locked_by, locked_until) VALUES (2, 'orm', now() + interval '1 h')";
        db.batch_execute(old).await.unwrap();
        let saved = async || {
            let heartbeat =
                "UPDATE sync_jobs SET locked_by = 'orm', locked_until = now() + interval '2 h'";
            db.execute(heartbeat, &[]).await.unwrap();
            let sum = "SELECT sum(attempts)::int8 FROM sync_jobs";
            db.query_one(sum, &[]).await.unwrap().get::<_, i64>(0)
        };
        assert_eq!(saved().await, 2, "the old trigger");
        let triggers = "SELECT string_agg(oid::text, ' ' ORDER BY oid) FROM pg_trigger
             WHERE tgrelid IN ('sync_jobs'::regclass, 'child'::regclass)";
        scene.migrate().await;
        let first: String = db.query_one(triggers, &[]).await.unwrap().get(0);
        scene.migrate().await;
        let second: String = db.query_one(triggers, &[]).await.unwrap().get(0);
        assert_eq!(first, second, "replaced once");
        assert_eq!(saved().await, 2, "heartbeats count nothing");
    });
}

#[test]
fn delayed_job_is_not_claimable_by_plain_workers() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue().await;
        let db = scene.connect().await;
        queue.enqueue(job("1").delay(Duration::from_millis(800))).await.unwrap();
        assert_eq!(plain_claim(&db, "plain").await, None);
        until("its time", async || plain_claim(&db, "plain").await.is_some()).await;
    });
}

#[test]
fn the_plain_claim_has_an_index() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let db = scene.connect().await;
        let rows = "INSERT INTO sync_jobs (completed_at) SELECT now() FROM generate_series(1, 20000);
                    INSERT INTO sync_jobs (priority) SELECT 0 FROM generate_series(1, 100); ANALYZE sync_jobs";
        db.batch_execute(rows).await.unwrap();
        let plan = db.query(&format!("EXPLAIN {}", CLAIM.replace("$1", "'w'")), &[]).await.unwrap();
        let plan: Vec<String> = plan.iter().map(|row| row.get(0)).collect();
        let plan = plan.join("\n");
        assert!(plan.contains("sync_jobs_tenure_") && !plan.contains("Seq Scan"), "{plan}");
        assert!(!plan.contains("Sort"), "{plan}");
    });
}
