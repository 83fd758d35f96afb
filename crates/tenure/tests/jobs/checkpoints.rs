//! Checkpoints: free, held and unknown told apart; fenced like jobs.

use std::time::Duration;

use tenure::ErrorKind;
use tenure::jobs::{CheckpointClaim, CheckpointGuard, Checkpoints};

use crate::services;
use crate::support::{Scene, until, with_scene};

async fn connect(scene: &Scene, lease: Duration) -> Checkpoints {
    let options = Checkpoints::options().lease(lease).heartbeat(lease / 4);
    Checkpoints::connect_with(&scene.url, &scene.chunks(), options).await.unwrap()
}

fn granted(claimed: CheckpointClaim) -> CheckpointGuard {
    match claimed {
        CheckpointClaim::Granted(guard) => guard,
        other => panic!("{other:?}"),
    }
}

#[test]
fn free_held_and_unknown_are_told_apart() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let one = Checkpoints::connect(&scene.url, &scene.chunks()).await.unwrap();
        let two = connect(&scene, Duration::from_secs(60)).await;
        assert!(matches!(two.claim_known("m", "a").await.unwrap(), CheckpointClaim::Unknown));
        let guard = granted(one.claim("m", "a").await.unwrap());
        assert!(guard.remaining() > Duration::from_secs(90) && guard.row_count().is_none());
        for claimed in [two.claim("m", "a").await, two.claim_known("m", "a").await] {
            let CheckpointClaim::Held { by: Some(by), until: Some(_) } = claimed.unwrap() else {
                panic!("another holds it");
            };
            assert!(by.contains(":c"), "{by}");
        }
        // The same chunk of another matrix is another.
        let other = granted(two.claim("n", "a").await.unwrap());
        guard.heartbeat().await.unwrap();
        let token = guard.fencing_token();
        guard.complete(42).await.unwrap();
        let again = granted(two.claim_known("m", "a").await.unwrap());
        assert_eq!(again.row_count(), Some(42));
        assert!(again.last_synced_at().is_some() && again.fencing_token() > token);
        again.release().await.unwrap();
        drop(other);
        until("given back", async || {
            matches!(one.claim_known("n", "a").await.unwrap(), CheckpointClaim::Granted(_))
        })
        .await;
    });
}

#[test]
fn expired_checkpoint_claim_writes_nothing_and_plain_claims_are_respected() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let ours = connect(&scene, Duration::from_secs(2)).await;
        let db = scene.connect().await;
        let guard = granted(ours.claim("m", "a").await.unwrap());
        let plain = "UPDATE sync_checkpoints SET locked_until = NOW() + INTERVAL '2 minutes', locked_by = 'plain'
             WHERE matrix_id = 'm' AND chunk_hash = 'a' AND (locked_until IS NULL OR locked_until <= NOW()) RETURNING *";
        assert!(db.query(plain, &[]).await.unwrap().is_empty(), "ours is respected");
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert!(!guard.remaining().is_zero(), "its heartbeats go on");
        let expire = "UPDATE sync_checkpoints SET locked_until = clock_timestamp()";
        db.execute(expire, &[]).await.unwrap();
        assert_eq!(db.query(plain, &[]).await.unwrap().len(), 1);
        let error = guard.heartbeat().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
        let reason = tokio::time::timeout(Duration::from_secs(5), guard.lost()).await.unwrap();
        assert_eq!(reason, tenure::Loss::Taken);
        assert_eq!(guard.complete(7).await.unwrap_err().kind(), ErrorKind::Lost);
        let row = db.query_one("SELECT locked_by, row_count FROM sync_checkpoints", &[]).await;
        let row = row.unwrap();
        assert_eq!((row.get::<_, &str>(0), row.get::<_, Option<i64>>(1)), ("plain", None));
        assert!(matches!(ours.claim("m", "a").await.unwrap(), CheckpointClaim::Held { .. }));
    });
}

#[test]
fn concurrent_claims_of_one_chunk_grant_exactly_one() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let chunks = connect(&scene, Duration::from_secs(60)).await;
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..16 {
            let chunks = chunks.clone();
            tasks.spawn(async move { chunks.claim("m", "new").await.unwrap() });
        }
        let answers = tasks.join_all().await;
        let won = answers.iter().filter(|it| matches!(it, CheckpointClaim::Granted(_))).count();
        assert_eq!(won, 1, "{answers:?}");
    });
}
