//! What makes no sense is refused, and nothing is changed.

use std::time::Duration;

use tenure::ErrorKind;
use tenure::jobs::{JobState, NewJob, Options, Queue};

use crate::services;
use crate::support::{fill, job, state, with_scene};

#[test]
fn a_missing_table_says_what_to_run() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let table = format!("{}.none", scene.schema);
        let error = Queue::connect(&scene.url, &table).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misconfigured);
        let run = format!("tenure schema --queue {table} --apply");
        assert!(error.to_string().contains(&run), "{error}");
        for table in ["", "a.b.c", "Jobs", "a; drop table b", "a\"b"] {
            let error = Queue::connect(&scene.url, table).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{table:?}: {error}");
        }
        let db = scene.connect().await;
        db.batch_execute("ALTER TABLE sync_jobs DROP COLUMN lease_token CASCADE").await.unwrap();
        let error = Queue::connect(&scene.url, &scene.table()).await.unwrap_err();
        let text = error.to_string();
        assert!(text.contains("lease_token") && text.contains("tenure schema"), "{text}");
    });
}

#[test]
fn missing_rights_are_named() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let db = scene.connect().await;
        let role = format!("{}_role", scene.schema);
        let setup = format!(
            "CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA {0} TO {role}; GRANT SELECT ON {0}.sync_jobs TO {role}",
            scene.schema
        );
        db.batch_execute(&setup).await.unwrap();
        let url = scene.url.replace("postgres@", &format!("{role}@"));
        let queue = Queue::connect(&url, &scene.table()).await.unwrap();
        let error = queue.enqueue(job("1")).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
        assert_eq!(queue.claim().await.unwrap_err().kind(), ErrorKind::Denied);
        drop(queue);
        let drop = format!("DROP OWNED BY {role}; DROP ROLE {role}");
        db.batch_execute(&drop).await.unwrap();
    });
}

#[test]
fn options_that_cannot_be_kept_are_refused() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let default = Options::default();
        for options in [
            default.lease(Duration::ZERO),
            default.lease(Duration::from_millis(10)),
            default.lease(Duration::MAX),
            default.heartbeat(Duration::ZERO),
            default.heartbeat(Duration::from_secs(299)),
            default.stop_grace(Duration::from_secs(299)),
        ] {
            let error = Queue::connect_with(&scene.url, &scene.table(), options).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{options:?}: {error}");
        }
        let url = format!("{}?prepare=maybe", scene.url);
        let error = Queue::connect(&url, &scene.table()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
    });
}

#[test]
fn jobs_that_are_none_or_final_are_left_alone() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue().await;
        let ids = fill(&queue, 2).await;
        let done = queue.claim().await.unwrap().unwrap();
        done.complete().await.unwrap();
        let running = queue.claim().await.unwrap().unwrap();
        let free = queue.enqueue(job("3")).await.unwrap().id;
        for id in ["999", "-1", "abc", "", "99999999999999999999999"] {
            for error in [
                queue.requeue(id).await.unwrap_err(),
                queue.cancel(id, "").await.unwrap_err(),
                queue.remove(id).await.unwrap_err(),
            ] {
                assert_eq!(error.kind(), ErrorKind::Invalid, "{id:?}: {error}");
            }
        }
        for (id, what) in [(&ids[0], "COMPLETED"), (&ids[1], "RUNNING"), (&free, "AVAILABLE")] {
            let error = queue.requeue(id).await.unwrap_err();
            assert!(error.to_string().contains(what), "{error}");
        }
        let error = queue.cancel(&ids[0], "").await.unwrap_err();
        assert!(error.to_string().contains("COMPLETED"), "{error}");
        let error = queue.remove(&ids[1]).await.unwrap_err();
        assert!(error.to_string().contains("RUNNING"), "{error}");
        assert_eq!(state(&queue, &ids[0]).await, JobState::Completed);
        assert!(running.is_held());
        queue.cancel(&free, "no").await.unwrap();
        queue.remove(&free).await.unwrap();
        assert!(queue.show(&free).await.unwrap().is_none());
        assert!(queue.claim_many(0).await.is_err());
    });
}

#[test]
fn payloads_that_the_database_cannot_hold_are_refused() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue().await;
        let nul = NewJob::json("\"\\u0000\"").unwrap();
        let error = queue.enqueue(nul).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        let error = queue.enqueue_many(vec![job("1"), job("2").max_attempts(0)]).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(queue.claim().await.unwrap().is_none(), "nothing was enqueued");
    });
}
