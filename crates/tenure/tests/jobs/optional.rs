//! Optional columns: added by the schema, used if they are there, and missed only by the feature that needs them.

use tenure::ErrorKind;
use tenure::jobs::{JobState, Queue, Schema};

use crate::services;
use crate::support::{job, with_scene, work_off};

const OPTIONAL: [&str; 4] = ["group_key", "progress", "result", "meta"];

#[test]
fn a_group_and_metadata_are_stored_with_the_job() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue().await;
        let new = job("1").group_key("customer 9").meta(r#"{"source": "import"}"#).unwrap();
        let jobs = queue.enqueue_many(vec![job("0"), new.clone(), job("2")]).await.unwrap();
        let claimed = queue.claim_many(3).await.unwrap();
        let metadata: Vec<Option<&str>> = claimed.iter().map(|job| job.meta()).collect();
        assert_eq!(metadata, [None, Some(r#"{"source": "import"}"#), None]);
        let row = queue.show(&jobs[1].id).await.unwrap().unwrap();
        assert_eq!(row.group_key.as_deref(), Some("customer 9"));
        assert_eq!(row.meta.as_deref(), Some(r#"{"source": "import"}"#));
        assert_eq!((row.progress, row.result), (None, None));
        let mut db = scene.connect().await;
        let transaction = db.transaction().await.unwrap();
        let id = queue.enqueue_in(&transaction, new).await.unwrap().id;
        transaction.commit().await.unwrap();
        assert!(queue.show(&id).await.unwrap().unwrap().meta.is_some());
        let sql = "SELECT sync_jobs_tenure_add('3', group_key => 'customer 8', meta => '{\"a\": 1}')::text";
        let id: String = db.query_one(sql, &[]).await.unwrap().get(0);
        let row = queue.show(&id).await.unwrap().unwrap();
        assert_eq!(
            (row.group_key.as_deref(), row.meta.as_deref()),
            (Some("customer 8"), Some("{\"a\": 1}"))
        );
    });
}

/// A table of an earlier version, and a table that has other columns of these names.
#[test]
fn without_an_optional_column_only_its_feature_is_missing() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let db = scene.connect().await;
        for change in ["DROP COLUMN", "ADD COLUMN"] {
            for column in OPTIONAL {
                let kind = if change == "ADD COLUMN" { "integer NOT NULL DEFAULT 7" } else { "" };
                let sql = format!("ALTER TABLE sync_jobs {change} {column} {kind}");
                db.batch_execute(&sql).await.unwrap();
            }
            let queue = scene.queue().await;
            for (new, column) in
                [(job("1").group_key("a"), "group_key"), (job("1").meta("{}").unwrap(), "meta")]
            {
                let error = queue.enqueue_many(vec![job("0"), new]).await.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
                let text = error.to_string();
                assert!(text.contains(&format!("no column {column}")), "{text}");
                assert!(text.contains("tenure schema --queue"), "{text}");
            }
            assert_eq!(queue.list(None, None, 10).await.unwrap(), [], "nothing was enqueued");
            let id = queue.enqueue(job("1")).await.unwrap().id;
            db.batch_execute("SELECT sync_jobs_tenure_add('2')").await.unwrap();
            assert_eq!(work_off(&queue).await.completed, 2);
            let row = queue.show(&id).await.unwrap().unwrap();
            assert_eq!((row.state, row.group_key, row.meta), (JobState::Completed, None, None));
            Schema::of_queue(&scene.table()).unwrap().apply(&scene.url).await.unwrap();
            let queue = scene.queue().await;
            let grouped = queue.enqueue(job("1").group_key("a")).await;
            assert_eq!(grouped.is_ok(), change == "DROP COLUMN", "{grouped:?}");
            db.batch_execute("DELETE FROM sync_jobs").await.unwrap();
            if change == "DROP COLUMN" {
                for column in OPTIONAL {
                    let sql = format!("ALTER TABLE sync_jobs DROP COLUMN {column}");
                    db.batch_execute(&sql).await.unwrap();
                }
            }
        }
    });
}

/// With two functions of one name, a call without all arguments would be ambiguous.
#[test]
fn the_function_of_an_earlier_version_is_replaced() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let db = scene.connect().await;
        let earlier = "DROP FUNCTION sync_jobs_tenure_add;
            CREATE FUNCTION sync_jobs_tenure_add(payload jsonb DEFAULT NULL, unique_key text DEFAULT NULL)
            RETURNS bigint LANGUAGE sql AS 'SELECT 0::bigint'";
        db.batch_execute(earlier).await.unwrap();
        for _ in 0..2 {
            scene.migrate().await;
        }
        let sql = "SELECT sync_jobs_tenure_add('7', unique_key => 'a', group_key => 'b')::text";
        let id: String = db.query_one(sql, &[]).await.unwrap().get(0);
        let queue = Queue::connect(&scene.url, &scene.table()).await.unwrap();
        let row = queue.show(&id).await.unwrap().unwrap();
        assert_eq!((row.unique_key.as_deref(), row.group_key.as_deref()), (Some("a"), Some("b")));
    });
}
