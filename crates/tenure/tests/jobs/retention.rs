//! Retention of ended jobs.

use std::time::{Duration, Instant};

use tenure::ErrorKind;
use tenure::jobs::{Failure, Job, Queue, Retention, Worker};

use crate::services;
use crate::support::{Scene, until, with_scene};

const WEEK: Duration = Duration::from_secs(7 * 24 * 3600);

/// Inserts jobs that were created this many days ago, and ended soon afterwards unless `end` is empty.
async fn insert(scene: &Scene, count: i64, days: i64, end: &str) {
    let db = scene.connect().await;
    let (column, value) = match end {
        "" => (String::new(), ""),
        end => (format!(", {end}"), ", now() - $2 * interval '1 day' + interval '1 min'"),
    };
    let sql = format!(
        "INSERT INTO sync_jobs (payload, created_at{column}) \
         SELECT '1', now() - $2 * interval '1 day'{value} FROM generate_series(1, $1::int8)"
    );
    let sql = sql.replace("$2", &days.to_string());
    db.execute(&sql, &[&count]).await.unwrap();
}

#[test]
fn old_completed_and_failed_jobs_are_deleted_and_others_kept() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue().await;
        insert(&scene, 5_000, 10, "completed_at").await;
        insert(&scene, 10, 40, "failed_at").await;
        insert(&scene, 10, 10, "failed_at").await;
        insert(&scene, 10, 10, "").await;
        insert(&scene, 10, 1, "completed_at").await;
        assert_eq!(queue.prune(Retention::new().completed(WEEK)).await.unwrap(), 5_000);
        let both = Retention::new().completed(WEEK).failed(4 * WEEK);
        assert_eq!(queue.prune(both).await.unwrap(), 10);
        assert_eq!(queue.prune(both).await.unwrap(), 0);
        let counts = queue.counts().await.unwrap();
        assert_eq!((counts["COMPLETED"], counts["FAILED"], counts["AVAILABLE"]), (10, 10, 10));
        let error = queue.prune(Retention::new()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
    });
}

#[test]
fn a_run_ends_at_the_first_window_of_young_jobs() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue().await;
        insert(&scene, 10, 10, "completed_at").await;
        insert(&scene, 4_000, 1, "completed_at").await;
        // Behind a window of young jobs, which a walk does not pass.
        insert(&scene, 10, 10, "completed_at").await;
        assert_eq!(queue.prune(Retention::new().completed(WEEK)).await.unwrap(), 10);
        assert_eq!(queue.counts().await.unwrap()["COMPLETED"], 4_010);
    });
}

#[test]
fn one_of_many_workers_deletes_per_minute_and_continues_where_the_last_run_ended() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        // Open jobs, which are kept, in more windows than one run reads; then old ones.
        insert(&scene, 45_000, 10, "").await;
        insert(&scene, 100, 10, "completed_at").await;
        let db = scene.connect().await;
        let queue = scene.queue().await;
        queue.pause("").await.unwrap();
        let worker = |queue: Queue| {
            let worker = Worker::new(queue, |_: Job| async { Ok::<(), Failure>(()) });
            tokio::spawn(worker.keep(Retention::new().completed(WEEK)).run(std::future::pending()))
        };
        let place = async || -> Option<String> {
            let rows = db.query("SELECT prune_after FROM tenure_queues", &[]).await.unwrap();
            rows[0].get("prune_after")
        };
        let completed =
            async || queue.counts().await.unwrap().get("COMPLETED").copied().unwrap_or(0);
        let workers = [worker(scene.queue().await), worker(scene.queue().await)];
        until("the first run ends", async || place().await.is_some()).await;
        assert_eq!((place().await.as_deref(), completed().await), (Some("40000"), 100));
        workers.iter().for_each(tokio::task::JoinHandle::abort);
        // As if the minute were over.
        db.execute("UPDATE tenure_queues SET pruned_at = NULL", &[]).await.unwrap();
        let begun = Instant::now();
        let next = worker(scene.queue().await);
        until("the second run ends", async || completed().await == 0).await;
        assert!(begun.elapsed() < Duration::from_secs(30));
        until("it begins anew", async || place().await.is_none()).await;
        next.abort();
    });
}
