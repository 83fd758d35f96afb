//! Schedules: jobs at the times of a cron expression, once over all workers.

use std::time::Duration;

use tenure::ErrorKind;
use tenure::jobs::{CatchUp, Failure, Job, NewSchedule, Queue, Worker};
use tokio_postgres::types::{ToSql, Type};

use crate::services;
use crate::support::{Scene, job, until, with_scene};

fn schedule(name: &str, cron: &str) -> NewSchedule {
    NewSchedule::new(name, cron, job(r#"{"report": 7}"#).priority(5).max_attempts(3)).unwrap()
}

/// Sets the next slot of a schedule to a time in the past, as if no worker had run since.
async fn miss(scene: &Scene, name: &str, ago: &str) {
    let db = scene.connect().await;
    let sql = format!(
        "UPDATE tenure_schedules SET next_at = date_trunc('minute', clock_timestamp()) - interval '{ago}' WHERE name = $1"
    );
    assert_eq!(db.execute(&sql, &[&name]).await.unwrap(), 1);
}

/// Runs this many workers, each in its own queue, until a schedule has fired.
async fn run_workers(scene: &Scene, workers: usize) {
    let stop = tokio_stop();
    let mut running = Vec::new();
    for _ in 0..workers {
        let queue = scene.queue().await;
        let stopped = stop.subscribe();
        let worker = Worker::new(queue, |_: Job| async { Ok::<(), Failure>(()) });
        running.push(tokio::spawn(worker.run(async move {
            let mut stopped = stopped;
            let _ = stopped.changed().await;
        })));
    }
    let db = scene.connect().await;
    until("no schedule is due", async || {
        let sql = "SELECT count(*) FROM tenure_schedules WHERE next_at <= clock_timestamp()";
        db.query_one(sql, &[]).await.unwrap().get::<_, i64>(0) == 0
    })
    .await;
    // Long enough for all workers to look again.
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    stop.send_replace(true);
    for worker in running {
        worker.await.unwrap().unwrap();
    }
}

fn tokio_stop() -> tokio::sync::watch::Sender<bool> {
    tokio::sync::watch::channel(false).0
}

async fn keys(scene: &Scene) -> Vec<String> {
    let db = scene.connect().await;
    let rows = db.query("SELECT unique_key FROM sync_jobs ORDER BY unique_key", &[]).await.unwrap();
    rows.iter().map(|row| row.get("unique_key")).collect()
}

#[test]
fn a_slot_fires_once_over_many_workers() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue().await;
        // Once per year: no slot comes while the test runs.
        let added = queue.add_schedule(&schedule("yearly", "@yearly")).await.unwrap();
        assert_eq!((added.last_at, &*added.time_zone), (None, "UTC"));
        miss(&scene, "yearly", "370 days").await;
        run_workers(&scene, 6).await;
        let keys = keys(&scene).await;
        assert_eq!(keys.len(), 1, "{keys:?}");
        assert!(
            keys[0].starts_with("schedule yearly 20") && keys[0].ends_with("-01-01T00:00:00Z"),
            "{keys:?}"
        );
        let fired = &queue.schedules().await.unwrap()[0];
        assert_eq!(fired.next_at, added.next_at);
        assert!(fired.last_at.is_some_and(|at| Some(at) < fired.next_at));
        let done = &queue.list(None, None, 1).await.unwrap()[0];
        assert_eq!((done.priority, done.max_attempts), (5, Some(3)));
        assert_eq!(done.payload.as_deref(), Some(r#"{"report": 7}"#));
        assert!(queue.remove_schedule("yearly").await.unwrap());
        assert!(!queue.remove_schedule("yearly").await.unwrap());
    });
}

/// The unique key of a slot's job excludes a second one only while the first is open.
#[test]
fn a_worker_that_read_a_slot_before_another_fired_it_fires_nothing() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue().await;
        queue.add_schedule(&schedule("yearly", "@yearly")).await.unwrap();
        let db = scene.connect().await;
        let slot = "SELECT queue, (extract(epoch FROM next_at) * 1000000)::int8 AS slot FROM tenure_schedules";
        let read = db.query_one(slot, &[]).await.unwrap();
        let (name, slot): (String, i64) = (read.get("queue"), read.get("slot"));
        let (next, keys) = (slot + 1_000_000, vec!["schedule yearly".to_owned()]);
        let fire = async || {
            let parameters: [(&(dyn ToSql + Sync), Type); 6] = [
                (&name, Type::TEXT),
                (&"yearly", Type::TEXT),
                (&slot, Type::INT8),
                (&next, Type::INT8),
                (&vec![slot], Type::INT8_ARRAY),
                (&keys, Type::TEXT_ARRAY),
            ];
            let rows = db.query_typed(&queue.firing_statement(), &parameters).await.unwrap();
            (rows[0].get::<_, i64>("moved"), rows[0].get::<_, i64>("jobs"))
        };
        assert_eq!(fire().await, (1, 1));
        queue.claim().await.unwrap().unwrap().complete().await.unwrap();
        assert_eq!(fire().await, (0, 0));
        assert!(queue.claim().await.unwrap().is_none());
    });
}

#[test]
fn missed_slots_are_caught_up_by_the_policy() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue().await;
        // Daily at a time that lies half a day ahead, and so half a day back.
        let db = scene.connect().await;
        let cron: String = db
            .query_one("SELECT to_char(now() - interval '12 h', 'FMMI FMHH24 * * *')", &[])
            .await
            .unwrap()
            .get(0);
        for policy in CatchUp::ALL {
            let name = policy.to_string();
            queue.add_schedule(&schedule(&name, &cron).catch_up(policy)).await.unwrap();
            miss(&scene, &name, "4 days").await;
        }
        let broken = "INSERT INTO tenure_schedules SELECT queue, 'broken', 'nonsense', time_zone, catch_up, payload, priority,
                max_attempts, next_at FROM tenure_schedules WHERE name = 'last'; ";
        db.batch_execute(broken).await.unwrap();
        let fix = "UPDATE tenure_schedules SET next_at = 'infinity' WHERE name = 'broken'";
        let (fixed, ()) = tokio::join!(
            async {
                until("the others fire", async || keys(&scene).await.len() >= 5).await;
                db.batch_execute(fix).await
            },
            run_workers(&scene, 2)
        );
        fixed.unwrap();
        let keys = keys(&scene).await;
        let of = |name: &str| {
            keys.iter().filter(|key| key.starts_with(&format!("schedule {name} "))).count()
        };
        assert_eq!((of("none"), of("last"), of("all")), (0, 1, 4), "{keys:?}");
    });
}

#[test]
fn a_schedule_is_replaced_by_name_and_refused_if_it_has_no_time() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue().await;
        let first = queue.add_schedule(&schedule("a", "@hourly")).await.unwrap();
        let db = scene.connect().await;
        db.batch_execute("UPDATE tenure_schedules SET next_at = next_at + interval '1 h'")
            .await
            .unwrap();
        let same =
            queue.add_schedule(&schedule("a", "@hourly").catch_up(CatchUp::All)).await.unwrap();
        assert!(same.next_at > first.next_at && same.catch_up == "all", "{same:?}");
        let other = schedule("a", "@hourly").time_zone("Asia/Kolkata").unwrap();
        let other = queue.add_schedule(&other).await.unwrap();
        assert!(other.next_at < same.next_at);
        assert_eq!(queue.schedules().await.unwrap(), [other]);
        let never = queue.add_schedule(&schedule("b", "0 0 30 2 *")).await.unwrap_err();
        assert_eq!(never.kind(), ErrorKind::Invalid, "{never}");
        db.batch_execute("DROP TABLE tenure_schedules").await.unwrap();
        let queue = Queue::connect(&scene.url, &scene.table()).await.unwrap();
        let missing = queue.schedules().await.unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::Misconfigured);
        assert!(missing.to_string().contains("tenure schema"), "{missing}");
        assert!(queue.claim().await.unwrap().is_none(), "claims need no schedules");
    });
}
