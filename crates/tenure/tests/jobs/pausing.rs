//! Pauses of a queue.

use std::sync::{Arc, Mutex};

use tenure::ErrorKind;
use tenure::jobs::Queue;

use crate::services;
use crate::support::{fill, until, with_scene, work_off};

#[test]
fn claims_find_nothing_in_a_paused_queue() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let (reports, operator) = (Arc::new(Mutex::new(Vec::new())), scene.queue().await);
        let heard = Arc::clone(&reports);
        let queue = Queue::builder().on_pause(move |pause| {
            heard.lock().unwrap().push(pause.map(|pause| pause.reason.clone()));
        });
        let queue = queue.connect(&scene.url, &scene.table()).await.unwrap();
        fill(&queue, 3).await;
        assert_eq!(operator.paused().await.unwrap(), None);
        let running = queue.claim().await.unwrap().unwrap();
        operator.pause("").await.unwrap();
        let first = operator.paused().await.unwrap().unwrap();
        operator.pause("maintenance").await.unwrap();
        let pause = operator.paused().await.unwrap().unwrap();
        assert_eq!((pause.since, pause.reason.as_deref()), (first.since, Some("maintenance")));
        assert_eq!(operator.summary(1).await.unwrap().paused, Some(pause));
        assert!(operator.claim().await.unwrap().is_none(), "at once where it was paused");
        until("the pause is known", async || {
            if let Some(job) = queue.claim().await.unwrap() {
                job.release().await.unwrap();
            }
            !reports.lock().unwrap().is_empty()
        })
        .await;
        assert!(queue.claim().await.unwrap().is_none());
        running.complete().await.unwrap();
        fill(&queue, 1).await;
        operator.resume().await.unwrap();
        until("all are done", async || {
            work_off(&queue).await;
            queue.counts().await.unwrap().get("COMPLETED") == Some(&4)
        })
        .await;
        assert_eq!(*reports.lock().unwrap(), [Some(Some("maintenance".to_owned())), None]);
        let long = operator.pause(&"x".repeat(1_001)).await.unwrap_err();
        assert_eq!(long.kind(), ErrorKind::Invalid);
    });
}

#[test]
fn a_role_that_may_not_read_the_settings_is_refused_and_schema_grants_the_rights() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let (db, role) = (scene.connect().await, format!("{}_role", scene.schema));
        let rights = format!(
            "CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA {0} TO {role};
             GRANT SELECT, INSERT, UPDATE ON {0}.sync_jobs, {0}.tenure_incarnation TO {role}",
            scene.schema
        );
        db.batch_execute(&rights).await.unwrap();
        let theirs = scene.url.replace("postgres@", &format!("{role}@"));
        let queue = Queue::connect(&theirs, &scene.table()).await.unwrap();
        let error = queue.claim().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
        assert!(error.chain().contains("tenure_queues"), "{}", error.chain());
        scene.migrate().await;
        assert!(queue.claim().await.unwrap().is_none());
        queue.pause("").await.unwrap();
        db.batch_execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await.unwrap();
    });
}
