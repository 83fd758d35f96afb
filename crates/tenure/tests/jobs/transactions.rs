//! Jobs and checkpoints in transactions of the caller.

use std::future::poll_fn;
use std::time::Duration;

use tenure::ErrorKind;
use tenure::jobs::{CheckpointClaim, Checkpoints, JobState, NewJob};
use tokio::sync::mpsc;
use tokio_postgres::{AsyncMessage, NoTls};

use crate::services;
use crate::support::{Scene, job, state, with_scene};

/// Wake-ups that workers of the queue receive.
struct WakeUps {
    db: tokio_postgres::Client,
    received: mpsc::UnboundedReceiver<String>,
    probes: usize,
}

impl WakeUps {
    async fn of(scene: &Scene) -> Self {
        let (db, mut connection) = tokio_postgres::connect(&scene.url, NoTls).await.unwrap();
        let (send, received) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            while let Some(Ok(message)) = poll_fn(|context| connection.poll_message(context)).await
            {
                if let AsyncMessage::Notification(it) = message {
                    send.send(it.payload().to_owned()).ok();
                }
            }
        });
        db.batch_execute(&format!("LISTEN \"{}\"", scene.table())).await.unwrap();
        Self { db, received, probes: 0 }
    }

    /// Number of wake-ups since the last call. Notifications arrive in the order of their commits, so those before the
    /// one that this sends are here when it is.
    async fn count(&mut self, scene: &Scene) -> usize {
        self.probes += 1;
        let probe = format!("probe {}", self.probes);
        let sql = "SELECT pg_notify($1, $2)";
        self.db.execute(sql, &[&scene.table(), &probe]).await.unwrap();
        let mut count = 0;
        while self.received.recv().await.expect("the connection is open") != probe {
            count += 1;
        }
        count
    }
}

#[test]
fn a_job_is_enqueued_with_its_transaction_or_not_at_all() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue().await;
        let mut wake_ups = WakeUps::of(&scene).await;
        let mut db = scene.connect().await;
        let transaction = db.transaction().await.unwrap();
        queue.enqueue_in(&transaction, job("1")).await.unwrap();
        assert!(queue.claim().await.unwrap().is_none(), "not before the commit");
        transaction.rollback().await.unwrap();
        assert!(queue.claim().await.unwrap().is_none(), "rolled back");
        assert_eq!(wake_ups.count(&scene).await, 0);

        let transaction = db.transaction().await.unwrap();
        let first = queue.enqueue_in(&transaction, job("1").priority(7)).await.unwrap();
        let jobs: Vec<NewJob> = (0..1_500).map(|_| job("2").unique_key("k")).collect();
        let rest = queue.enqueue_many_in(&transaction, &jobs).await.unwrap();
        assert_eq!(rest.iter().filter(|it| it.new).count(), 1, "one open job of a key");
        assert!(rest.iter().all(|it| it.id == rest[0].id));
        transaction.commit().await.unwrap();
        assert_eq!(wake_ups.count(&scene).await, 1, "exactly one, sent by the commit");
        let claimed = queue.claim_many(10).await.unwrap();
        let ids: Vec<&str> = claimed.iter().map(|job| job.id()).collect();
        assert_eq!(ids, [&first.id, &rest[0].id]);

        let transaction = db.transaction().await.unwrap();
        let again = queue.enqueue_in(&transaction, job("3").unique_key("k")).await.unwrap();
        assert_eq!((again.id, again.new), (rest[0].id.clone(), false));
        let later = job("4").delay(Duration::from_secs(60));
        let later = queue.enqueue_in(&transaction, later).await.unwrap();
        let error = queue.enqueue_in(&transaction, job("5").max_attempts(0)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        transaction.commit().await.unwrap();
        assert_eq!(state(&queue, &later.id).await, JobState::Delayed);
        assert_eq!(wake_ups.count(&scene).await, 0, "nothing can be claimed yet");
    });
}

/// The caller's transaction decides itself whether its commit waits for the disk.
#[test]
fn transactions_keep_their_own_synchronous_commit() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue().await;
        let mut db = scene.connect().await;
        db.batch_execute("SET synchronous_commit = off").await.unwrap();
        let transaction = db.transaction().await.unwrap();
        queue.enqueue_in(&transaction, job("1")).await.unwrap();
        let kept = transaction.query_one("SHOW synchronous_commit", &[]).await.unwrap();
        assert_eq!(kept.get::<_, &str>(0), "off");
    });
}

#[test]
fn a_chunk_is_completed_with_its_rows_or_not_at_all() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let chunks = Checkpoints::connect(&scene.url, &scene.chunks()).await.unwrap();
        let other = Checkpoints::connect(&scene.url, &scene.chunks()).await.unwrap();
        let mut db = scene.connect().await;
        let CheckpointClaim::Granted(chunk) = chunks.claim("m", "a").await.unwrap() else {
            panic!("it is new");
        };
        let rolled_back = db.transaction().await.unwrap();
        chunk.complete_in(&rolled_back, 5).await.unwrap();
        rolled_back.rollback().await.unwrap();
        chunk.heartbeat().await.unwrap();
        let held = other.claim("m", "a").await.unwrap();
        assert!(matches!(held, CheckpointClaim::Held { .. }), "still ours: {held:?}");
        let transaction = db.transaction().await.unwrap();
        chunk.complete_in(&transaction, 7).await.unwrap();
        transaction.commit().await.unwrap();
        drop(chunk);
        let CheckpointClaim::Granted(next) = other.claim("m", "a").await.unwrap() else {
            panic!("it was completed");
        };
        assert_eq!(next.row_count(), Some(7));
        assert!(next.last_synced_at().is_some());
        // Its holder is too late: another has the chunk by now.
        let expire = "UPDATE sync_checkpoints SET locked_until = clock_timestamp()";
        db.execute(expire, &[]).await.unwrap();
        let CheckpointClaim::Granted(_last) = chunks.claim("m", "a").await.unwrap() else {
            panic!("its lease has ended");
        };
        let transaction = db.transaction().await.unwrap();
        let error = next.complete_in(&transaction, 9).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
    });
}

#[test]
fn other_languages_enqueue_by_a_function_and_by_an_insert() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue().await;
        let mut wake_ups = WakeUps::of(&scene).await;
        let mut db = scene.connect().await;
        let add = "SELECT sync_jobs_tenure_add('{\"report\": 7}', priority => 5, max_attempts => 3, unique_key => 'report 7')";
        let transaction = db.transaction().await.unwrap();
        transaction.query_one(add, &[]).await.unwrap();
        transaction.rollback().await.unwrap();
        assert_eq!(wake_ups.count(&scene).await, 0, "rolled back");
        let id: i64 = db.query_one(add, &[]).await.unwrap().get(0);
        assert_eq!(wake_ups.count(&scene).await, 1);
        let again: i64 = db.query_one(add, &[]).await.unwrap().get(0);
        assert_eq!((again, wake_ups.count(&scene).await), (id, 0), "one open job of a key");
        let plain =
            "SELECT sync_jobs_tenure_add('1'), sync_jobs_tenure_add('2', delay => '1 hour')";
        db.query_one(plain, &[]).await.unwrap();
        assert_eq!(queue.counts().await.unwrap()["DELAYED"], 1);
        let first = queue.claim().await.unwrap().unwrap();
        assert_eq!((first.id(), first.payload()), (&*id.to_string(), "{\"report\": 7}"));
        assert_eq!(first.max_attempts(), Some(3));
        let second = queue.claim().await.unwrap().unwrap();
        assert_eq!((second.payload(), second.max_attempts()), ("1", Some(10)));
        // The statements that the schema prints as comments are valid as they are.
        let printed = tenure::jobs::Schema::of_queue(&scene.table()).unwrap();
        let comments: Vec<&str> =
            printed.sql().lines().filter_map(|line| line.strip_prefix("--     ")).collect();
        let [function, arguments, insert, at_once, delayed, notify] = comments[..] else {
            panic!("{comments:#?}");
        };
        let function = &*format!("{function} {arguments}");
        first.complete().await.unwrap();
        for sql in [function, notify, &format!("{insert} {delayed}")] {
            db.batch_execute(sql).await.unwrap();
        }
        db.batch_execute("DELETE FROM sync_jobs WHERE unique_key IS NOT NULL").await.unwrap();
        db.batch_execute(&format!("{insert} {at_once}")).await.unwrap();
        let third = queue.claim().await.unwrap().unwrap();
        assert_eq!((third.payload(), third.max_attempts()), ("{\"report\": 7}", Some(3)));
        assert_eq!(queue.counts().await.unwrap()["DELAYED"], 2, "and the one of the comment");
    });
}
