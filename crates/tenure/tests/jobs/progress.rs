//! Progress and results of jobs.

use std::time::Duration;

use tenure::ErrorKind;
use tenure::jobs::{Failure, Job, JobState, Options, Worker};

use crate::services;
use crate::support::{fill, job, until, with_scene};

#[test]
fn progress_is_stored_by_the_next_heartbeat() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue_with(Options::default().lease(Duration::from_secs(1))).await;
        let ids = fill(&queue, 2).await;
        let [first, second] = queue.claim_many(2).await.unwrap().try_into().unwrap();
        first.set_progress("1 of 9").unwrap();
        first.set_progress(&format!("2 of 9\n{}", "ä".repeat(2_000))).unwrap();
        let shown = async |id: &str| queue.show(id).await.unwrap().unwrap().progress;
        assert_eq!(shown(&ids[0]).await, None, "no request of its own");
        until("stored", async || shown(&ids[0]).await.is_some()).await;
        let text = shown(&ids[0]).await.unwrap();
        assert!(text.starts_with("2 of 9 ää") && text.len() == 1_023, "{} {text}", text.len());
        assert_eq!(shown(&ids[1]).await, None, "the other job has none");
        second.set_progress("done").unwrap();
        until("stored", async || shown(&ids[1]).await.as_deref() == Some("done")).await;
        assert_eq!(shown(&ids[0]).await.unwrap(), text, "unchanged");
        first.complete().await.unwrap();
        assert_eq!(shown(&ids[0]).await.unwrap(), text, "the last one stays");
    });
}

#[test]
fn a_result_is_stored_by_every_kind_of_completion() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue().await;
        let ids = fill(&queue, 5).await;
        let [one, two, three, four] = queue.claim_many(4).await.unwrap().try_into().unwrap();
        let error = one.set_result("{").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        let long = format!("\"{}\"", "x".repeat(1 << 20));
        assert!(one.set_result(long).unwrap_err().to_string().contains("1048578 bytes"));
        one.complete_with(r#"{"rows": 7}"#).await.unwrap();
        two.set_result("[2]").unwrap();
        let mut db = scene.connect().await;
        let transaction = db.transaction().await.unwrap();
        two.complete_in(&transaction).await.unwrap();
        transaction.commit().await.unwrap();
        drop(two);
        three.set_result("3").unwrap();
        assert!(queue.complete_many(vec![three, four]).await.unwrap().is_empty());
        let handler = |job: Job| async move {
            job.set_result("\"by the worker\"")?;
            Ok::<(), Failure>(())
        };
        let worker = Worker::new(queue.clone(), handler).until_empty(true);
        assert_eq!(worker.run(std::future::pending()).await.unwrap().completed, 1);
        let expected =
            [Some(r#"{"rows": 7}"#), Some("[2]"), Some("3"), None, Some("\"by the worker\"")];
        for (id, result) in ids.iter().zip(expected) {
            let row = queue.show(id).await.unwrap().unwrap();
            assert_eq!((row.state, row.result.as_deref()), (JobState::Completed, result));
        }
    });
}

#[test]
fn without_their_columns_progress_and_results_are_refused() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let db = scene.connect().await;
        let drop = "ALTER TABLE sync_jobs DROP COLUMN progress, DROP COLUMN result";
        db.batch_execute(drop).await.unwrap();
        let queue = scene.queue_with(Options::default().lease(Duration::from_secs(1))).await;
        let id = fill(&queue, 1).await.remove(0);
        let guard = queue.claim().await.unwrap().unwrap();
        for (refused, column) in
            [(guard.set_progress("1"), "progress"), (guard.set_result("1"), "result")]
        {
            let error = refused.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
            assert!(error.to_string().contains(&format!("no column {column}")), "{error}");
        }
        tokio::time::sleep(Duration::from_millis(1_500)).await;
        assert!(guard.is_held(), "heartbeats go on");
        guard.complete().await.unwrap();
        assert_eq!(queue.show(&id).await.unwrap().unwrap().state, JobState::Completed);
    });
}

#[test]
fn a_trace_is_carried_with_the_job() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let queue = scene.queue().await;
        assert!(job("1").traceparent("00-1-2-3").is_err());
        let new = job("1").meta(r#"{"a": 1}"#).unwrap().traceparent(PARENT).unwrap();
        queue.enqueue(new).await.unwrap();
        let odd = job("2").meta(r#"{"traceparent": "nonsense"}"#).unwrap();
        queue.enqueue(odd).await.unwrap();
        let [first, second] = queue.claim_many(2).await.unwrap().try_into().unwrap();
        assert_eq!(first.traceparent().unwrap().as_str(), PARENT);
        assert!(first.meta().unwrap().contains("\"a\": 1"));
        assert_eq!(second.traceparent(), None);
    });
}
