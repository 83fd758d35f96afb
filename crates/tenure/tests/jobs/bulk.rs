//! Changes of many jobs at once.

use std::time::Duration;

use tenure::jobs::{JobChange, JobFilter, JobState, Options};

use crate::services;
use crate::support::{fill, job, state, with_scene};

const HOUR: Duration = Duration::from_secs(3600);

#[test]
fn failed_jobs_are_retried_by_age_and_key_and_a_count_changes_nothing() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue().await;
        let keys = ["report 1", "report 2", "report 3", "100% x", "1000 x"];
        for key in keys {
            queue.enqueue(job("1").unique_key(key)).await.unwrap();
        }
        for guard in queue.claim_many(9).await.unwrap() {
            guard.fail("no").await.unwrap();
        }
        let db = scene.connect().await;
        let age = "UPDATE sync_jobs SET failed_at = failed_at - interval '2 h' WHERE unique_key <> 'report 3'";
        db.execute(age, &[]).await.unwrap();
        let failed = JobFilter::new().state(JobState::Failed);
        let old_reports = failed.clone().older_than(HOUR).key("report *");
        let counted = queue.count_many(&old_reports, JobChange::Requeue).await.unwrap();
        assert_eq!(counted.changed, 2);
        assert_eq!(queue.counts().await.unwrap()["FAILED"], 5);
        let changed = queue.change_many(&old_reports, JobChange::Requeue).await.unwrap();
        assert_eq!((changed.changed, changed.duplicates), (2, 0));
        assert_eq!(queue.claim_many(9).await.unwrap().len(), 2, "with all their attempts");
        let percent = failed.clone().key("100% *");
        assert_eq!(queue.change_many(&percent, JobChange::Requeue).await.unwrap().changed, 1);
        assert_eq!(queue.change_many(&failed, JobChange::Requeue).await.unwrap().changed, 2);
    });
}

#[test]
fn of_several_failed_jobs_of_a_key_one_is_retried() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue().await;
        for _ in 0..3 {
            for key in ["a", "b"] {
                queue.enqueue(job("1").unique_key(key)).await.unwrap();
            }
            for guard in queue.claim_many(9).await.unwrap() {
                guard.fail("no").await.unwrap();
            }
        }
        queue.enqueue(job("1").unique_key("b")).await.unwrap();
        let failed = JobFilter::new().state(JobState::Failed);
        let counted = queue.count_many(&failed, JobChange::Requeue).await.unwrap();
        let changed = queue.change_many(&failed, JobChange::Requeue).await.unwrap();
        assert_eq!(counted, changed);
        assert_eq!((changed.changed, changed.duplicates), (1, 5));
    });
}

#[test]
fn more_jobs_than_one_statement_changes_are_cancelled_and_removed() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue_with(Options::default().lease(HOUR)).await;
        let db = scene.connect().await;
        db.execute(
            "INSERT INTO sync_jobs (payload) SELECT '1' FROM generate_series(1, 12000)",
            &[],
        )
        .await
        .unwrap();
        let running = queue.claim().await.unwrap().unwrap();
        let some = JobFilter::new().state(JobState::Available).limit(2_500);
        let cancelled = queue.change_many(&some, JobChange::Cancel("not needed")).await.unwrap();
        assert_eq!(cancelled.changed, 2_500);
        let counts = queue.counts().await.unwrap();
        assert_eq!((counts["FAILED"], counts["AVAILABLE"]), (2_500, 9_499));
        let failed = &queue.list(Some(JobState::Failed), None, 1).await.unwrap()[0];
        assert_eq!(failed.error.as_deref(), Some("not needed"));
        assert_eq!(failed.id, "2501", "those with the lowest ids");
        let removed = queue.change_many(&JobFilter::new(), JobChange::Remove).await.unwrap();
        assert_eq!(removed.changed, 11_999);
        assert_eq!(state(&queue, running.id()).await, JobState::Running);
        let all = JobFilter::new();
        assert_eq!(queue.change_many(&all, JobChange::Cancel("stop")).await.unwrap().changed, 1);
        assert_eq!(running.complete().await.unwrap_err().kind(), tenure::ErrorKind::Lost);
    });
}

#[test]
fn bulk_changes_and_completions_do_not_fail_each_other() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue().await;
        fill(&queue, 600).await;
        let jobs = queue.claim_many(600).await.unwrap();
        let operator = scene.queue().await;
        let all = JobFilter::new();
        let (lost, cancelled) = tokio::join!(
            queue.complete_many(jobs),
            operator.change_many(&all, JobChange::Cancel("stop"))
        );
        assert_eq!(lost.unwrap().len(), usize::try_from(cancelled.unwrap().changed).unwrap());
    });
}
