//! Imports of many jobs.

use std::time::Duration;

use tenure::ErrorKind;
use tenure::jobs::{JobState, NewJob};

use crate::services;
use crate::support::{job, with_scene};

#[test]
fn imported_jobs_are_as_enqueued_ones() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue().await;
        queue.enqueue(job("0").unique_key("open")).await.unwrap();
        let mut jobs: Vec<NewJob> = (1..3_000).map(|nth| job(&nth.to_string())).collect();
        jobs.push(
            job(r#"{"a": "\u00e4\n"}"#)
                .priority(-3)
                .max_attempts(7)
                .delay(Duration::from_secs(3600)),
        );
        let described = job("8").priority(-9).group_key("customer 9").meta(r#"{"a": 1}"#).unwrap();
        jobs.push(described.clone());
        jobs.push(described.unique_key("described"));
        jobs.extend(["open", "new", "new"].map(|key| job("9").priority(9).unique_key(key)));
        let imported = queue.import(&jobs).await.unwrap();
        assert_eq!((imported.new, imported.existing), (3_003, 2));
        let delayed = &queue.list(Some(JobState::Delayed), None, 10).await.unwrap()[0];
        assert_eq!((delayed.priority, delayed.max_attempts, delayed.attempts), (-3, Some(7), 0));
        assert_eq!(delayed.payload.as_deref(), Some("{\"a\": \"ä\\n\"}"));
        let left = delayed.left.unwrap();
        assert!(
            left > Duration::from_secs(3_500) && left <= Duration::from_secs(3_601),
            "{left:?}"
        );
        let jobs = queue.list(None, None, 1_000).await.unwrap();
        let described: Vec<_> = jobs.iter().filter(|job| job.group_key.is_some()).collect();
        assert_eq!(described.len(), 2);
        for job in described {
            assert_eq!(job.group_key.as_deref(), Some("customer 9"));
            assert_eq!(job.meta.as_deref(), Some(r#"{"a": 1}"#));
        }
        let claimed = queue.claim_many(4).await.unwrap();
        let order: Vec<&str> = claimed.iter().map(|job| job.payload()).collect();
        assert_eq!(order, ["9", "0", "1", "2"], "by priority, then in their order");
    });
}

#[test]
fn an_import_is_all_or_nothing() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue().await;
        let invalid = [job("1"), job("2").max_attempts(0)];
        assert_eq!(queue.import(&invalid).await.unwrap_err().kind(), ErrorKind::Invalid);
        // JSON that PostgreSQL does not store.
        let unstorable = [job("1"), job(r#""\u0000""#)];
        queue.import(&unstorable).await.unwrap_err();
        // A key that fails after the plain jobs were copied.
        let db = scene.connect().await;
        db.batch_execute("ALTER TABLE sync_jobs ADD CHECK (unique_key <> 'bad')").await.unwrap();
        queue.import(&[job("1"), job("2").unique_key("bad")]).await.unwrap_err();
        assert!(queue.counts().await.unwrap().is_empty());
        assert_eq!(queue.import(&[job("1")]).await.unwrap().new, 1);
        assert_eq!(queue.import(&[]).await.unwrap().new, 0);
    });
}

#[test]
fn other_types_of_ids_priorities_and_payloads_are_imported() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let db = scene.connect().await;
        let change = "ALTER TABLE sync_jobs ALTER id DROP IDENTITY; ALTER TABLE sync_jobs ALTER payload TYPE json;";
        db.batch_execute(change).await.unwrap();
        for (id, priority) in [("uuid", "bigint"), ("text", "smallint")] {
            let retype = format!(
                "ALTER TABLE sync_jobs ALTER id TYPE {id} USING gen_random_uuid()::text::{id}, ALTER priority TYPE {priority}"
            );
            db.batch_execute(&retype).await.unwrap();
            let queue = scene.queue().await;
            let jobs = [job("1").priority(3), job("2").priority(4)];
            assert_eq!(queue.import(&jobs).await.unwrap().new, 2);
            let claimed = queue.claim_many(10).await.unwrap();
            assert_eq!(claimed.len(), 2);
            assert_eq!(
                (claimed[0].payload(), claimed[0].id().len()),
                ("2", 36),
                "{}",
                claimed[0].id()
            );
            queue.complete_many(claimed).await.unwrap();
            let large = queue.import(&[job("1").priority(40_000)]).await;
            assert_eq!(large.is_ok(), priority == "bigint");
            db.batch_execute("DELETE FROM sync_jobs").await.unwrap();
        }
    });
}
