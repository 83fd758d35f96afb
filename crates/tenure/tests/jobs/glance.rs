//! A queue at a glance, and what a sweep says of what it freed.

use std::time::Duration;

use tenure::jobs::{JobState, Options};

use crate::services;
use crate::support::{fill, job, with_scene};

#[test]
fn summary_lists_running_and_last_failed_jobs_and_counts() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let long = scene.queue().await;
        let short = scene.queue_with(Options::default().lease(Duration::from_secs(60))).await;
        let ids = fill(&long, 6).await;
        let first = long.claim().await.unwrap().unwrap();
        let second = short.claim().await.unwrap().unwrap();
        for why in ["no such report", "no such host"] {
            long.claim().await.unwrap().unwrap().fail(why).await.unwrap();
        }
        let late = long.claim().await.unwrap().unwrap();
        let db = scene.connect().await;
        let end = format!(
            "UPDATE sync_jobs SET locked_until = clock_timestamp() - interval '1 s' WHERE id = {}",
            late.id()
        );
        db.execute(&end, &[]).await.unwrap();
        let seen = long.summary(10).await.unwrap();
        let running: Vec<_> = seen.running.iter().map(|job| (&*job.id, job.state)).collect();
        let expected = [
            (late.id(), JobState::Expired),
            (second.id(), JobState::Running),
            (first.id(), JobState::Running),
        ];
        assert_eq!(running, expected, "those in trouble first");
        assert_eq!(seen.running[0].left, Some(Duration::ZERO));
        let left = seen.running[1].left.unwrap();
        assert!((Duration::from_secs(30)..=Duration::from_secs(60)).contains(&left), "{left:?}");
        assert_eq!(seen.running[1].locked_by.as_deref(), Some(short.worker()));
        let failed: Vec<_> = seen.failed.iter().map(|job| job.error.as_deref().unwrap()).collect();
        assert_eq!(failed, ["no such host", "no such report"], "the last one first");
        let counts: Vec<_> =
            seen.counts.iter().map(|(state, number)| (&**state, *number)).collect();
        assert_eq!(counts, [("AVAILABLE", 1), ("EXPIRED", 1), ("FAILED", 2), ("RUNNING", 2)]);
        let one = long.summary(1).await.unwrap();
        assert_eq!((one.running.len(), one.failed.len()), (1, 1));
        assert_eq!(long.show(&ids[5]).await.unwrap().unwrap().left, None);
    });
}

#[test]
fn delayed_jobs_are_not_counted_as_reclaimed() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue().await;
        let delayed = (0..3).map(|_| job("1").delay(Duration::from_secs(60)));
        queue.enqueue_many(delayed.collect()).await.unwrap();
        fill(&queue, 1).await;
        let _lost = queue.claim().await.unwrap().unwrap();
        let db = scene.connect().await;
        db.execute("UPDATE sync_jobs SET locked_until = clock_timestamp()", &[]).await.unwrap();
        let swept = scene.queue().await.sweep().await.unwrap();
        assert_eq!((swept.freed, swept.failed, swept.reclaimed), (4, 0, 1));
    });
}

#[test]
fn the_oldest_available_job_is_found_in_any_priority() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue().await;
        assert_eq!(queue.oldest_available().await.unwrap(), None);
        let jobs = [5, -1, 3, 0].map(|priority| job("1").priority(priority));
        let added = queue.enqueue_many(jobs.into()).await.unwrap();
        let db = scene.connect().await;
        let age = async |id: &str, interval: &str| {
            let set = format!(
                "UPDATE sync_jobs SET created_at = clock_timestamp() - interval '{interval}' WHERE id = {id}"
            );
            db.execute(&set, &[]).await.unwrap();
        };
        age(&added[0].id, "1 minute").await;
        age(&added[2].id, "3 hours").await;
        let oldest = async || queue.oldest_available().await.unwrap().unwrap();
        let hours = |number: u64| Duration::from_secs(3_600 * number);
        assert!((hours(3)..hours(4)).contains(&oldest().await));
        age(&added[1].id, "1 day").await;
        assert!((hours(24)..hours(25)).contains(&oldest().await), "the lowest priority");
        // A job that waits for its time, and one that has failed, are not available.
        queue.cancel(&added[1].id, "no longer needed").await.unwrap();
        let hold = format!(
            "UPDATE sync_jobs SET locked_by = '~retry', locked_until = clock_timestamp() + interval '1 hour' WHERE id = {}",
            added[2].id
        );
        db.execute(&hold, &[]).await.unwrap();
        assert!(oldest().await < hours(1));
    });
}
