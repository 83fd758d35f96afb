//! Numbers of jobs in a large table: by index, never by a scan.

use std::time::{Duration, Instant};

use tenure::jobs::{NewJob, Options};

use crate::services;
use crate::support::{fill, job, with_scene};

#[test]
fn a_large_table_is_counted_by_index() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        const DONE: u64 = 200_000;
        let db = scene.connect().await;
        let done = format!(
            "INSERT INTO sync_jobs (payload, created_at, completed_at)
             SELECT '{{\"report\": 7}}', now() - interval '1 day', now() FROM generate_series(1, {DONE});
             ANALYZE sync_jobs"
        );
        db.batch_execute(&done).await.unwrap();
        let queue = scene.queue_with(Options::default().lease(Duration::from_secs(60))).await;
        fill(&queue, 30).await;
        let running = queue.claim_many(5).await.unwrap();
        for _ in 0..3 {
            queue.claim().await.unwrap().unwrap().fail("no such host").await.unwrap();
        }
        queue.enqueue(job("1").delay(Duration::from_secs(600))).await.unwrap();
        let begun = Instant::now();
        let seen = queue.summary(10).await.unwrap();
        println!("summary of {DONE} completed rows: {:?}", begun.elapsed());
        let number = |state: &str| seen.counts.get(state).copied().unwrap_or_default();
        assert_eq!(
            ["AVAILABLE", "RUNNING", "FAILED", "DELAYED", "EXPIRED"].map(number),
            [22, 5, 3, 1, 0]
        );
        assert!(seen.completed_is_estimate && seen.at_least.is_empty(), "{seen:?}");
        let completed = number("COMPLETED");
        assert!((DONE * 9 / 10..=DONE * 11 / 10).contains(&completed), "{completed}");
        assert_eq!((seen.running.len(), seen.failed.len()), (running.len(), 3));
        let oldest = seen.oldest_available.unwrap();
        assert!(oldest < Duration::from_secs(60), "{oldest:?}");

        for sql in queue.counting_statements() {
            let sql = sql.replace("$1", "10").replace("$2", "10000");
            let plan = db.query(&format!("EXPLAIN (ANALYZE, BUFFERS) {sql}"), &[]).await.unwrap();
            let plan: Vec<String> = plan.iter().map(|row| row.get(0)).collect();
            let plan = plan.join("\n");
            assert!(plan.contains("Index"), "{plan}");
            assert!(!plan.contains("Seq Scan on sync_jobs"), "{plan}");
            assert!(!plan.contains("sync_jobs_pkey"), "{plan}");
        }

        // Without the index, as in a table of an earlier version, failed jobs are not searched for.
        db.batch_execute("DROP INDEX sync_jobs_tenure_failed").await.unwrap();
        let seen = queue.summary(10).await.unwrap();
        assert!(seen.failed.is_empty() && !seen.counts.contains_key("FAILED"), "{seen:?}");
        assert_eq!(seen.counts["RUNNING"], 5);
    });
}

#[test]
fn more_jobs_than_are_counted_are_at_least_that_many() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let db = scene.connect().await;
        let open = "INSERT INTO sync_jobs (payload, priority)
            SELECT to_jsonb(repeat('x', 1000)), n % 2 FROM generate_series(1, 12000) AS n";
        db.batch_execute(open).await.unwrap();
        let queue = scene.queue().await;
        queue
            .enqueue_many(
                (0..3).map(|_| NewJob::json("1").unwrap().delay(Duration::from_secs(60))).collect(),
            )
            .await
            .unwrap();
        let seen = queue.summary(10).await.unwrap();
        assert_eq!((seen.counts["AVAILABLE"], seen.counts["DELAYED"]), (10_000, 3));
        assert_eq!(seen.at_least.into_iter().collect::<Vec<_>>(), ["AVAILABLE"]);
    });
}
