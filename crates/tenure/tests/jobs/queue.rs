//! Enqueue, claim, complete, fail, retry, release, sweep.

use std::time::Duration;

use tenure::ErrorKind;
use tenure::jobs::{JobState, Options};

use crate::services;
use crate::support::{fill, job, state, until, with_scene};

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn jobs_are_claimed_by_priority_and_age_and_completed_once() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue().await;
        let jobs = [("1", 0), ("2", 5), ("3", 0), ("4", 9), ("5", 5)];
        let jobs = jobs.map(|(payload, priority)| job(payload).priority(priority));
        let enqueued = queue.enqueue_many(jobs.to_vec()).await.unwrap();
        assert!(enqueued.iter().all(|job| job.new));
        let first = queue.claim().await.unwrap().unwrap();
        assert_eq!((first.payload(), first.attempt(), first.lease_token()), ("4", 1, 1));
        assert!(first.is_held() && first.remaining() > Duration::from_secs(200));
        assert_eq!(state(&queue, first.id()).await, JobState::Running);
        let rest = queue.claim_many(10).await.unwrap();
        let order: Vec<&str> = rest.iter().map(|job| job.payload()).collect();
        assert_eq!(order, ["2", "5", "1", "3"]);
        assert!(queue.claim().await.unwrap().is_none());
        let id = first.id().to_owned();
        first.complete().await.unwrap();
        assert_eq!(state(&queue, &id).await, JobState::Completed);
        assert!(queue.complete_many(rest).await.unwrap().is_empty());
        assert_eq!(queue.counts().await.unwrap()["COMPLETED"], 5);
    });
}

#[test]
fn job_of_higher_priority_is_claimed_next_even_if_enqueued_late() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let (queue, other) = (scene.queue().await, scene.queue().await);
        fill(&queue, 20).await;
        let held = queue.claim_many(5).await.unwrap();
        // Enqueued through another handle, so that this queue is not notified.
        other.enqueue(job("\"urgent\"").priority(9)).await.unwrap();
        // Longer than `RESUME_WINDOW` (50 ms): until then a claim continues where the last one ended, on purpose.
        tokio::time::sleep(Duration::from_millis(60)).await;
        let urgent = queue.claim().await.unwrap().unwrap();
        assert_eq!(urgent.payload(), "\"urgent\"");
        // What comes back is claimed before what is younger.
        let oldest = held.into_iter().next().unwrap();
        oldest.release().await.unwrap();
        // As above.
        tokio::time::sleep(Duration::from_millis(60)).await;
        assert_eq!(queue.claim().await.unwrap().unwrap().payload(), "0");
    });
}

#[test]
fn a_failed_attempt_is_tried_again_until_they_are_used_up() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue().await;
        let id = queue.enqueue(job("1").max_attempts(2)).await.unwrap().id;
        let guard = queue.claim().await.unwrap().unwrap();
        assert!(guard.retry_in(SECOND, "first trouble").await.unwrap(), "will be tried again");
        assert_eq!(state(&queue, &id).await, JobState::Delayed);
        assert!(queue.claim().await.unwrap().is_none(), "not before its time");
        let mut again = None;
        until("the second attempt", async || state(&queue, &id).await == JobState::Available).await;
        while again.is_none() {
            again = queue.claim().await.unwrap();
        }
        let again = again.unwrap();
        assert_eq!((again.attempt(), again.lease_token()), (2, 2));
        assert!(!again.retry_in(SECOND, "second\0 trouble").await.unwrap(), "no attempt is left");
        let row = queue.show(&id).await.unwrap().unwrap();
        assert_eq!((row.state, row.error.as_deref()), (JobState::Failed, Some("second trouble")));
        queue.requeue(&id).await.unwrap();
        let row = queue.show(&id).await.unwrap().unwrap();
        assert_eq!((row.state, row.attempts), (JobState::Available, 0));
        let guard = queue.claim().await.unwrap().unwrap();
        guard.fail("for good").await.unwrap();
        assert_eq!(state(&queue, &id).await, JobState::Failed);
    });
}

#[test]
fn release_gives_the_attempt_back_and_a_dropped_guard_does_not() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue().await;
        let id = queue.enqueue(job("1").max_attempts(2)).await.unwrap().id;
        let guard = queue.claim().await.unwrap().unwrap();
        guard.release().await.unwrap();
        let row = queue.show(&id).await.unwrap().unwrap();
        assert_eq!((row.state, row.attempts, row.lease_token), (JobState::Available, 0, 1));
        for attempt in 1..=2 {
            let guard = queue.claim().await.unwrap().unwrap();
            assert_eq!(guard.attempt(), attempt);
            drop(guard);
            until("given back", async || state(&queue, &id).await != JobState::Running).await;
        }
        let row = queue.show(&id).await.unwrap().unwrap();
        assert_eq!(row.state, JobState::Failed, "a job that is dropped for ever ends: {row:?}");
    });
}

#[test]
fn the_last_guard_is_given_back_also_when_its_queue_is_gone() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let (queue, other) = (scene.queue().await, scene.queue().await);
        let id = queue.enqueue(job("1")).await.unwrap().id;
        let guard = queue.claim().await.unwrap().unwrap();
        drop(queue);
        drop(guard);
        until("given back", async || state(&other, &id).await == JobState::Available).await;
    });
}

#[test]
fn a_delayed_job_waits_for_its_time() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue().await;
        let begun = std::time::Instant::now();
        let id = queue.enqueue(job("1").delay(SECOND)).await.unwrap().id;
        assert_eq!(state(&queue, &id).await, JobState::Delayed);
        until("its time", async || queue.claim().await.unwrap().is_some()).await;
        assert!(begun.elapsed() >= SECOND, "{:?}", begun.elapsed());
    });
}

#[test]
fn one_open_job_of_a_unique_key() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue().await;
        let keyed = || job("1").unique_key("nightly");
        let jobs = vec![keyed(), job("2"), keyed(), job("3").unique_key("other")];
        let enqueued = queue.enqueue_many(jobs).await.unwrap();
        assert_eq!([0, 1, 2, 3].map(|nth| enqueued[nth].new), [true, true, false, true]);
        assert_eq!(enqueued[0].id, enqueued[2].id);
        let again = queue.enqueue(keyed()).await.unwrap();
        assert_eq!((&again.id, again.new), (&enqueued[0].id, false));
        let guard = queue.claim().await.unwrap().unwrap();
        assert_eq!(queue.enqueue(keyed()).await.unwrap().id, enqueued[0].id, "while it runs");
        guard.fail("gone").await.unwrap();
        let next = queue.enqueue(keyed()).await.unwrap();
        assert!(next.new && next.id != enqueued[0].id, "once it is final");
        let error = queue.requeue(&enqueued[0].id).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert_eq!(state(&queue, &enqueued[0].id).await, JobState::Failed);
    });
}

#[test]
fn an_expired_lease_is_swept_and_a_late_completion_counts_unless_another_has_claimed() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue().await;
        let other = scene.queue_with(Options::default()).await;
        let ids = fill(&queue, 3).await;
        let db = scene.connect().await;
        let mut guards = queue.claim_many(3).await.unwrap().into_iter();
        let (early, late, used_up) =
            (guards.next().unwrap(), guards.next().unwrap(), guards.next().unwrap());
        db.execute("UPDATE sync_jobs SET locked_until = clock_timestamp()", &[]).await.unwrap();
        let last = format!("UPDATE sync_jobs SET max_attempts = 1 WHERE id = {}", ids[2]);
        db.execute(&last, &[]).await.unwrap();
        assert_eq!(state(&queue, &ids[0]).await, JobState::Expired);
        let swept = other.sweep().await.unwrap();
        assert_eq!((swept.freed, swept.failed, swept.reclaimed), (2, 1, 3));
        assert_eq!(state(&queue, &ids[0]).await, JobState::Available);
        let row = queue.show(&ids[2]).await.unwrap().unwrap();
        assert_eq!(row.state, JobState::Failed);
        assert!(row.error.unwrap().contains("lease of attempt 1"));
        early.complete().await.expect("late, but nobody else has claimed it");
        let next = other.claim().await.unwrap().unwrap();
        assert_eq!(next.id(), ids[1]);
        assert_eq!(late.complete().await.unwrap_err().kind(), ErrorKind::Lost);
        assert_eq!(used_up.complete().await.unwrap_err().kind(), ErrorKind::Lost);
        assert_eq!(state(&queue, &ids[1]).await, JobState::Running, "nothing was changed");
        assert!(next.fencing_token() > tenure::FencingToken::new(0, 1));
        next.complete().await.unwrap();
    });
}

#[test]
fn a_job_is_completed_with_its_effect_or_not_at_all() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let (queue, other) = (scene.queue().await, scene.queue().await);
        let ids = fill(&queue, 2).await;
        let mut db = scene.connect().await;
        db.batch_execute("CREATE TABLE effects (job text)").await.unwrap();
        let guard = queue.claim().await.unwrap().unwrap();
        for commit in [false, true] {
            let transaction = db.transaction().await.unwrap();
            transaction.execute("INSERT INTO effects VALUES ($1)", &[&guard.id()]).await.unwrap();
            guard.complete_in(&transaction).await.unwrap();
            if commit {
                transaction.commit().await.unwrap();
            } else {
                transaction.rollback().await.unwrap();
                assert_eq!(state(&queue, &ids[0]).await, JobState::Running, "still ours");
            }
        }
        drop(guard);
        assert_eq!(state(&queue, &ids[0]).await, JobState::Completed);
        let late = queue.claim().await.unwrap().unwrap();
        db.execute("UPDATE sync_jobs SET locked_until = clock_timestamp() WHERE id = 2", &[])
            .await
            .unwrap();
        other.sweep().await.unwrap();
        let next = other.claim().await.unwrap().unwrap();
        let transaction = db.transaction().await.unwrap();
        let error = late.complete_in(&transaction).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Lost);
        let sql = tenure::jobs::sql::complete(&scene.table(), "bigint").unwrap();
        assert_eq!(sql, late.complete_sql());
        let mine: (String, i64, &str) = (next.id().to_owned(), next.lease_token(), other.worker());
        let done = transaction.query(&sql, &[&mine.0, &mine.1, &mine.2]).await.unwrap();
        assert_eq!(done.len(), 1, "the published statement, with the holder's own token");
        transaction.commit().await.unwrap();
        assert_eq!(state(&queue, &ids[1]).await, JobState::Completed);
    });
}

#[test]
fn it_works_through_a_pooler_in_transaction_mode() {
    let Some(url) = services::pgbouncer() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue_with(Options::default().lease(SECOND * 2)).await;
        fill(&queue, 50).await;
        let slow = queue.claim().await.unwrap().unwrap();
        let tally = crate::support::work_off(&queue).await;
        assert_eq!(tally.completed, 49);
        tokio::time::sleep(SECOND * 3).await;
        assert!(slow.is_held(), "its lease was renewed");
        slow.complete().await.unwrap();
    });
}
