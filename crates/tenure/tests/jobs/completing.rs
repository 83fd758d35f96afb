//! Jobs that their own work completes, in a transaction with its effect.

use std::time::Duration;

use tenure::ErrorKind;
use tenure::jobs::{Failure, Job, JobState, Options, Worker};

use crate::services;
use crate::support::{job, state, until, with_scene};

const LEASE: Duration = Duration::from_secs(2);

#[test]
fn a_job_completed_in_a_transaction_is_not_lost() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue_with(Options::default().lease(LEASE)).await;
        let id = queue.enqueue(job("1")).await.unwrap().id;
        let guard = queue.claim().await.unwrap().unwrap();
        let mut db = scene.connect().await;
        let transaction = db.transaction().await.unwrap();
        guard.complete_in(&transaction).await.unwrap();
        assert!(!guard.is_completed(), "not before the commit");
        transaction.commit().await.unwrap();
        let found = tokio::time::timeout(LEASE * 5, guard.completed()).await;
        found.expect("the next heartbeat finds it");
        assert!(guard.is_completed() && guard.is_held());
        assert_eq!(guard.remaining(), Duration::MAX);
        let work = async { tokio::time::sleep(LEASE).await };
        guard.run(work).await.expect("it is left to end");
        // What the worker reports at last changes nothing.
        assert!(queue.claim().await.unwrap().is_none(), "none is left");
        guard.complete().await.expect("it is completed");
        assert_eq!(state(&queue, &id).await, JobState::Completed);
    });
}

#[test]
fn a_completion_is_found_without_a_heartbeat_as_well() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        // The first heartbeat is due in a minute.
        let queue = scene.queue().await;
        for _ in 0..2 {
            queue.enqueue(job("1")).await.unwrap();
        }
        let db = scene.connect().await;
        let [first, second] = [queue.claim().await.unwrap(), queue.claim().await.unwrap()];
        let (first, second) = (first.unwrap(), second.unwrap());
        for guard in [&first, &second] {
            guard.complete_in(&db).await.unwrap();
        }
        let handle = second.job().clone();
        first.complete().await.expect("it is completed already");
        let error = second.retry_in(Duration::ZERO, "no").await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Lost);
        assert!(error.to_string().contains("its work has completed it"), "{error}");
        assert!(handle.is_completed());
    });
}

#[test]
fn a_handler_that_completes_its_job_is_left_to_end() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue_with(Options::default().lease(LEASE)).await;
        let id = queue.enqueue(job("1")).await.unwrap().id;
        let sql = tenure::jobs::sql::complete(&scene.table(), "bigint").unwrap();
        let (worker, place) = (queue.worker().to_owned(), scene.clone());
        let handler = move |job: Job| {
            let (sql, worker, place) = (sql.clone(), worker.clone(), place.clone());
            async move {
                let db = place.connect().await;
                let done = db.query(&sql, &[&job.id(), &job.lease_token(), &worker]).await;
                assert_eq!(done.unwrap().len(), 1);
                job.completed().await;
                tokio::time::sleep(LEASE).await;
                // An error after the completion does not undo it.
                Err::<(), _>(Failure::retry("too late"))
            }
        };
        let worker = Worker::new(queue.clone(), handler).until_empty(true);
        let stats = worker.run(std::future::pending()).await.unwrap();
        assert_eq!((stats.completed, stats.lost, stats.retried), (1, 0, 0), "{stats:?}");
        until("it is final", async || state(&queue, &id).await == JobState::Completed).await;
    });
}

#[test]
fn a_job_that_another_claim_completed_is_lost() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue_with(Options::default().lease(LEASE)).await;
        queue.enqueue(job("1")).await.unwrap();
        let guard = queue.claim().await.unwrap().unwrap();
        let db = scene.connect().await;
        let taken = "UPDATE sync_jobs SET lease_token = lease_token + 1, completed_at = now(), \
                     locked_by = NULL, locked_until = NULL";
        db.execute(taken, &[]).await.unwrap();
        let lost = tokio::time::timeout(LEASE * 5, guard.lost()).await.unwrap();
        assert_eq!(lost, tenure::Loss::Taken);
        assert!(!guard.is_completed());
        assert_eq!(guard.complete().await.unwrap_err().kind(), ErrorKind::Lost);
    });
}
