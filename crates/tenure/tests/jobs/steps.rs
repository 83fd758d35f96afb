//! Steps of the database's clock: no job is taken from a worker that has it, and none is stuck.

use std::time::{Duration, Instant};

use tenure::jobs::{JobState, Options};

use crate::server::Server;
use crate::services;
use crate::support::{LEASE, Process, fill, state, until, with_scene};

#[test]
fn after_a_step_forward_a_job_is_taken_only_when_its_worker_has_lost_it() {
    let Some(server) = Server::start_under_faketime() else { return };
    with_scene(&server.url(), async move |scene| {
        let lease = Duration::from_secs(6);
        // Its heartbeats are rare: it learns of the step late.
        let options = Options::default().lease(lease).heartbeat(Duration::from_secs(3));
        let (holder, observer) = (scene.queue_with(options).await, scene.queue_with(options).await);
        for offset in ["+3600", "+7200"] {
            let ids = fill(&holder, 1).await;
            let held = holder.claim().await.unwrap().unwrap();
            observer.sweep().await.unwrap();
            server.set_clock(offset);
            let stepped = Instant::now();
            // One that saw the step, and one that connects after it.
            let newcomer = scene.queue_with(options).await;
            until("claimed by another", async || {
                for queue in [&observer, &newcomer] {
                    queue.sweep().await.unwrap();
                    let free = state(queue, &ids[0]).await == JobState::Available;
                    assert!(!(free && held.is_held()), "taken from its worker after {offset}");
                    if free {
                        return true;
                    }
                }
                false
            })
            .await;
            let passed = stepped.elapsed();
            assert!(passed < lease + Duration::from_secs(10), "stuck for {passed:?}");
            let next = observer.claim().await.unwrap().unwrap();
            assert_eq!(next.id(), ids[0]);
            next.complete().await.unwrap();
        }
        drop(server);
    });
}

#[test]
fn after_a_step_back_the_jobs_of_a_dead_worker_are_reclaimed_within_a_lease() {
    let Some(server) = Server::start_under_faketime() else { return };
    with_scene(&server.url(), async move |scene| {
        let queue = scene.queue_with(Options::default().lease(LEASE)).await;
        let ids = fill(&queue, 10).await;
        let mut worker = Process::start(&scene, "hold");
        until("held", async || scene.told().contains("held 10")).await;
        server.set_clock("-3600");
        worker.kill();
        let killed = Instant::now();
        assert_eq!(state(&queue, &ids[0]).await, JobState::Running);
        queue.requeue(&ids[7]).await.unwrap();
        assert_eq!(state(&queue, &ids[7]).await, JobState::Available, "by an operator, at once");
        let mut freed = 0;
        while freed < 9 {
            freed += queue.sweep().await.unwrap().reclaimed;
            let passed = killed.elapsed();
            assert!(freed == 0 || passed > LEASE, "reclaimed after {passed:?}");
            assert!(passed < LEASE + Duration::from_secs(10), "{freed} after {passed:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        assert_eq!(queue.claim_many(20).await.unwrap().len(), 10);
        drop(server);
    });
}

/// Its heartbeats succeed, and the end of its lease lies far ahead: nothing but the changes tells that it lives.
#[test]
fn a_lease_far_ahead_that_is_renewed_is_left_alone() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue_with(Options::default().lease(Duration::from_secs(1))).await;
        let ids = fill(&queue, 2).await;
        let db = scene.connect().await;
        let claim = "UPDATE sync_jobs SET locked_until = clock_timestamp() + interval '1 day',
            locked_by = CASE id::text WHEN $1 THEN 'host:1:a:0+1' ELSE 'worker-7' END";
        db.execute(claim, &[&ids[0]]).await.unwrap();
        let renew = "UPDATE sync_jobs SET locked_until = clock_timestamp() + interval '1 day'
            WHERE locked_by = 'host:1:a:0+1'";
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(4) {
            db.execute(renew, &[]).await.unwrap();
            assert_eq!(queue.sweep().await.unwrap().reclaimed, 0);
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        until("reclaimed", async || queue.sweep().await.unwrap().reclaimed == 1).await;
        assert_eq!(state(&queue, &ids[0]).await, JobState::Available);
        assert_eq!(state(&queue, &ids[1]).await, JobState::Running, "its lease is unknown");
        assert!(queue.requeue(&ids[1]).await.is_err());
    });
}
