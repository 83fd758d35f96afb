//! Workers that are killed, frozen or cut off; a server that restarts; a clock that is set.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use tenure::jobs::{CheckpointClaim, Checkpoints, JobState, Options, Queue};
use tenure::{ErrorKind, Loss};

use crate::link::{Link, Mode};
use crate::server::Server;
use crate::services;
use crate::support::{LEASE, Process, Scene, fill, job, state, until, with_scene};

#[test]
fn the_jobs_of_a_killed_worker_are_claimed_again_after_their_lease_and_not_before() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue().await;
        fill(&queue, 10).await;
        let mut process = Process::start(&scene, "hold");
        until("held", async || scene.told().contains("held 10")).await;
        let db = scene.connect().await;
        // It is killed between two heartbeats: until then its leases are renewed.
        process.kill();
        let ends = "SELECT (extract(epoch FROM max(locked_until) - clock_timestamp()) * 1000)::int8 FROM sync_jobs";
        let left: i64 = db.query_one(ends, &[]).await.unwrap().get(0);
        let killed = Instant::now();
        let mut again = Vec::new();
        let mut first = None;
        while again.len() < 10 {
            let more = queue.claim_many(10).await.unwrap();
            if !more.is_empty() {
                first.get_or_insert_with(|| killed.elapsed());
            }
            again.extend(more);
            assert!(killed.elapsed() < Duration::from_secs(60), "{} came back", again.len());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let (first, last) = (first.unwrap(), killed.elapsed());
        println!("{left} ms of lease were left: claimed again after {first:?} to {last:?}");
        let early = Duration::from_millis(u64::try_from(left).unwrap().saturating_sub(300));
        assert!(first >= early, "claimed before its lease ended");
        assert!(last < LEASE + Duration::from_secs(1) * 3, "lease and sweep: {last:?}");
        assert!(again.iter().all(|job| job.attempt() == 2 && job.lease_token() == 2));
        assert!(queue.complete_many(again).await.unwrap().is_empty());
    });
}

#[test]
fn a_frozen_worker_that_wakes_late_is_refused() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue().await;
        let ids = fill(&queue, 10).await;
        let process = Process::start(&scene, "hold");
        until("held", async || scene.told().contains("held 10")).await;
        process.signal("STOP");
        let mut again = Vec::new();
        until("claimed again", async || {
            queue.sweep().await.unwrap();
            queue.show(&ids[0]).await.unwrap().unwrap().state == JobState::Available
        })
        .await;
        while again.len() < 10 {
            again.extend(queue.claim_many(10).await.unwrap());
        }
        process.signal("CONT");
        until("its late completion", async || scene.told().contains("late")).await;
        let told = scene.told();
        assert!(told.contains("lost Expired") && told.contains("late Err(Lost)"), "{told}");
        for id in &ids {
            assert_eq!(state(&queue, id).await, JobState::Running, "nothing was changed");
        }
        assert!(queue.complete_many(again).await.unwrap().is_empty());
    });
}

/// Frozen while its claim is under way: the answer is there when it wakes, and the lease is as good as over.
#[test]
fn a_claim_that_is_answered_after_its_deadline_is_given_back_and_not_worked_on() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue().await;
        fill(&queue, 1).await;
        let (db, lock) = (scene.connect().await, i64::from(std::process::id()) << 20);
        let wait = format!(
            "SELECT pg_advisory_lock({lock});
             CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS
                 $$BEGIN PERFORM pg_advisory_xact_lock_shared({lock}); RETURN NEW; END$$;
             CREATE TRIGGER wait BEFORE UPDATE ON sync_jobs FOR EACH ROW EXECUTE FUNCTION wait();"
        );
        db.batch_execute(&wait).await.unwrap();
        let process = Process::start(&scene, "late");
        let yes = async |sql: &str| db.query_one(sql, &[]).await.unwrap().get::<_, bool>(0);
        let waits = format!(
            "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
                 AND classid = {} AND objid = {})",
            lock >> 32,
            lock & 0xffff_ffff
        );
        until("the claim under way", async || yes(&waits).await).await;
        process.signal("STOP");
        db.batch_execute(&format!("SELECT pg_advisory_unlock({lock})")).await.unwrap();
        let over = "SELECT coalesce(locked_until - clock_timestamp() < interval '250 ms', false) FROM sync_jobs";
        until("the end of its lease", async || yes(over).await).await;
        process.signal("CONT");
        until("the next claim", async || scene.told().contains("held")).await;
        let told = scene.told();
        assert!(!told.contains("claimed false"), "a worker had what was lost already: {told}");
        assert!(told.contains("held, attempt 1"), "{told}");
    });
}

/// Makes the next update of jobs wait at the server until this advisory lock is free.
async fn hold_updates(db: &tokio_postgres::Client, lock: i64) {
    let wait = format!(
        "CREATE TABLE waits (armed boolean); INSERT INTO waits VALUES (true);
         SELECT pg_advisory_lock({lock});
         CREATE FUNCTION wait_once() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN
             IF (SELECT armed FROM waits) THEN PERFORM pg_advisory_xact_lock_shared({lock}); END IF;
             RETURN NULL; END$$;
         ALTER FUNCTION wait_once() SET search_path FROM CURRENT;
         CREATE TRIGGER wait_once BEFORE UPDATE ON sync_jobs FOR EACH STATEMENT EXECUTE FUNCTION wait_once();"
    );
    db.batch_execute(&wait).await.unwrap();
}

/// The request of a client that gave up is executed late: the server waited for a lock, and did not notice.
#[test]
fn a_cleanup_that_is_executed_late_releases_no_job_that_was_claimed_since() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let link = Link::to(&scene.url).await;
        let mut options = Options::default();
        options.sweep_every = Duration::from_secs(3_600);
        let queue = Queue::connect_with(&link.url, &scene.table(), options).await.unwrap();
        let ids = fill(&queue, 1).await;
        // The next sweep is in an hour: claims send no other update.
        queue.sweep().await.unwrap();
        let (db, lock) = (scene.connect().await, i64::from(std::process::id()) << 20 | 1);
        let waits = async |count: i64| {
            let sql = format!(
                "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
                     AND classid = {} AND objid = {}",
                lock >> 32,
                lock & 0xffff_ffff
            );
            until("requests that wait", async || {
                db.query_one(&sql, &[]).await.unwrap().get::<_, i64>(0) == count
            })
            .await;
        };
        let unlock = format!("SELECT pg_advisory_unlock({lock})");
        // Twice in a row a request is executed after its client has lost the connection: a claim, then its cleanup.
        hold_updates(&db, lock).await;
        let lose_request = async || {
            let claiming = tokio::spawn({
                let queue = queue.clone();
                async move { queue.claim().await.map(drop) }
            });
            waits(1).await;
            link.set(Mode::Cut);
            let error = claiming.await.unwrap().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unknown, "{error}");
            link.set(Mode::Open);
        };
        lose_request().await;
        db.batch_execute(&unlock).await.unwrap();
        until("the claim", async || state(&queue, &ids[0]).await == JobState::Running).await;
        db.batch_execute(&format!("SELECT pg_advisory_lock({lock})")).await.unwrap();
        lose_request().await;

        db.batch_execute("UPDATE waits SET armed = false").await.unwrap();
        let job = queue.claim().await.unwrap().expect("it was cleaned up, and is available");
        db.batch_execute(&unlock).await.unwrap();
        waits(0).await;
        let active = "SELECT count(*) = 0 FROM pg_stat_activity WHERE state = 'active' AND pid <> pg_backend_pid() \
                      AND query LIKE 'UPDATE%' AND query LIKE '%' || current_schema() || '%'";
        until("the late cleanup", async || db.query_one(active, &[]).await.unwrap().get(0)).await;
        assert_eq!(state(&queue, &ids[0]).await, JobState::Running, "claimed, and valid");
        job.complete().await.unwrap();
    });
}

#[test]
fn a_restart_of_the_server_loses_no_job_and_ends_no_work() {
    let Some(mut server) = Server::start() else { return };
    with_scene(&server.url(), async move |scene| {
        let (sender, mut outages) = tokio::sync::mpsc::unbounded_channel();
        let queue = Queue::builder()
            .options(Options::default().lease(Duration::from_secs(20)))
            // Only a test that is over reads no reports.
            .on_outage(move |outage| drop(sender.send(outage.to_string())))
            .connect(&scene.url, &scene.table())
            .await
            .unwrap();
        let ids = fill(&queue, 3).await;
        let mut jobs = queue.claim_many(2).await.unwrap();
        let (first, second) = (jobs.remove(0), jobs.remove(0));
        server.down();
        let completing = tokio::spawn(first.complete());
        assert!(queue.claim().await.is_err(), "nobody is there");
        let outage = outages.recv().await.expect("reported");
        assert!(outage.contains("away"), "{outage}");
        server.up();
        completing.await.unwrap().expect("said again until it was heard");
        assert_eq!(state(&queue, &ids[0]).await, JobState::Completed);
        until("another claim", async || matches!(queue.claim().await, Ok(Some(_)))).await;
        assert!(second.is_held());
        second.complete().await.unwrap();
        drop(server);
    });
}

#[test]
fn a_crash_of_the_server_takes_back_nothing_that_was_acknowledged() {
    let Some(mut server) = Server::start_with_lazy_commits() else { return };
    with_scene(&server.url(), async move |scene| {
        let long = Options::default().lease(Duration::from_secs(600));
        let queue = scene.queue_with(long).await;
        let ids = fill(&queue, 5).await;
        let chunks = Checkpoints::connect(&scene.url, &scene.chunks()).await.unwrap();
        scene.connect().await.batch_execute("CHECKPOINT").await.unwrap();

        // Each of these is acknowledged, and the server crashes before it had to write them down.
        let mut jobs = queue.claim_many(5).await.unwrap();
        let held = jobs.pop().unwrap();
        queue.cancel(&ids[3], "test").await.unwrap();
        drop(jobs.pop());
        jobs.pop().unwrap().retry_in(Duration::from_secs(600), "test").await.unwrap();
        jobs.pop().unwrap().fail("test").await.unwrap();
        jobs.pop().unwrap().complete().await.unwrap();
        let CheckpointClaim::Granted(chunk) = chunks.claim("matrix", "chunk").await.unwrap() else {
            panic!("nobody else is there")
        };
        let CheckpointClaim::Granted(done) = chunks.claim("matrix", "done").await.unwrap() else {
            panic!("nobody else is there")
        };
        done.complete(7).await.unwrap();
        let added = queue.enqueue(job("\"added\"")).await.unwrap().id;
        server.down();
        server.up();

        let next = scene.queue_with(long).await;
        let expected = [
            JobState::Completed,
            JobState::Failed,
            JobState::Delayed,
            JobState::Failed,
            JobState::Running,
        ];
        for (id, expected) in ids.iter().zip(expected) {
            assert_eq!(state(&next, id).await, expected, "job {id}");
        }
        assert_eq!(state(&next, &added).await, JobState::Available);
        let chunks = Checkpoints::connect(&scene.url, &scene.chunks()).await.unwrap();
        let again = chunks.claim("matrix", "chunk").await.unwrap();
        assert!(
            matches!(again, CheckpointClaim::Held { .. }),
            "claimed twice: {chunk:?}, then {again:?}"
        );
        let again = chunks.claim("matrix", "done").await.unwrap();
        let CheckpointClaim::Granted(again) = again else { panic!("{again:?}") };
        assert_eq!(again.row_count(), Some(7));
        assert!(held.is_held());
        drop(server);
    });
}

#[test]
fn a_clock_that_is_set_breaks_no_fence() {
    let Some(server) = Server::start_under_faketime() else { return };
    with_scene(&server.url(), async move |scene| {
        let queue = scene.queue_with(Options::default().lease(Duration::from_secs(3))).await;
        let ids = fill(&queue, 2).await;
        let early = queue.claim().await.unwrap().unwrap();
        // Forward: the lease is over for the database at once, and another claims it.
        server.set_clock("+3600");
        let other = scene.queue_with(Options::default().lease(Duration::from_secs(3))).await;
        let mut next = None;
        until("claimed by another", async || {
            other.sweep().await.unwrap();
            state(&other, &ids[0]).await == JobState::Available
        })
        .await;
        while next.is_none() {
            next = other.claim().await.unwrap();
        }
        let next = next.unwrap();
        assert_eq!(next.id(), ids[0]);
        let reason = early.lost().await;
        assert!(matches!(reason, Loss::Taken | Loss::ClockJump | Loss::Expired), "{reason:?}");
        assert_eq!(early.complete().await.unwrap_err().kind(), ErrorKind::Lost);
        assert_eq!(state(&other, &ids[0]).await, JobState::Running);
        // The clock goes back: the holder of a job learns at its next heartbeat that the clock is unreliable.
        server.set_clock("+0");
        let reason = next.lost().await;
        assert!(matches!(reason, Loss::ClockJump | Loss::Expired), "{reason:?}");
        drop(server);
    });
}

/// How many workers, jobs and kills; more in `cargo xtask soak jobs`.
fn size() -> (usize, usize, usize) {
    let text = std::env::var("TENURE_SOAK_JOBS").unwrap_or_default();
    let numbers: Vec<usize> = text.split_whitespace().filter_map(|n| n.parse().ok()).collect();
    match numbers[..] {
        [workers, jobs, kills] => (workers, jobs, kills),
        _ => (4, 400, 6),
    }
}

#[test]
fn under_random_kills_each_job_has_its_effect_once() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| random_kills(scene).await);
}

async fn random_kills(scene: Scene) {
    let (count, jobs, kills) = size();
    let db = scene.connect().await;
    let tables = "CREATE TABLE starts (job text, token bigint, at timestamptz DEFAULT clock_timestamp());
                  CREATE TABLE effects (job text, token bigint, at timestamptz DEFAULT clock_timestamp());
                  CREATE TABLE refusals (job text, token bigint, at timestamptz DEFAULT clock_timestamp())";
    db.batch_execute(tables).await.unwrap();
    let queue = scene.queue().await;
    for _ in 0..jobs.div_ceil(1_000) {
        fill(&queue, jobs.min(1_000)).await;
    }
    db.execute("UPDATE sync_jobs SET max_attempts = NULL", &[]).await.unwrap();
    let mut processes: Vec<Process> = (0..count).map(|_| Process::start(&scene, "work")).collect();
    let mut random = tenure_core::Random::new(getrandom::u64().unwrap());
    for kill in 0..kills {
        tokio::time::sleep(Duration::from_millis(100 + random.below(400))).await;
        let victim = usize::try_from(random.below(count as u64)).unwrap();
        if kill % 3 == 2 {
            // Frozen past its lease, and woken.
            processes[victim].signal("STOP");
            tokio::time::sleep(LEASE + Duration::from_millis(700)).await;
            processes[victim].signal("CONT");
        } else {
            processes[victim].kill();
            processes[victim] = Process::start(&scene, "work");
        }
    }
    let begun = Instant::now();
    let limit = Duration::from_secs(60 + jobs as u64 / 20);
    loop {
        let counts = queue.counts().await.unwrap();
        if counts.get("COMPLETED") == Some(&(jobs as u64)) {
            break;
        }
        assert!(begun.elapsed() < limit, "{counts:?}");
        // Restarts workers that ended while the remaining jobs were still held by killed workers.
        for process in &mut processes {
            if process.0.try_wait().unwrap().is_some() {
                *process = Process::start(&scene, "work");
            }
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let one = async |sql: &str| db.query_one(sql, &[]).await.unwrap().get::<_, i64>(0);
    let effects = one("SELECT count(*) FROM effects").await;
    let different = one("SELECT count(DISTINCT job) FROM effects").await;
    let starts = one("SELECT count(*) FROM starts").await;
    // Two runs at once: a worker that was frozen past its lease continued when it woke, and was refused. A killed
    // worker does not continue. The effect that counts is that of the last claim.
    let overlaps = one("SELECT count(*) FROM refusals").await;
    let early = "SELECT count(*) FROM refusals AS o JOIN starts AS s ON s.job = o.job AND s.token = o.token + 1
                 WHERE s.at > o.at";
    let stale = "SELECT count(*) FROM effects AS e JOIN sync_jobs AS j ON j.id::text = e.job
                 WHERE e.token <> j.lease_token";
    let again: HashMap<&str, i64> =
        HashMap::from([("starts", starts), ("effects", effects), ("overlaps", overlaps)]);
    println!("{count} workers, {jobs} jobs, {kills} kills and freezes: {again:?}");
    let all = i64::try_from(jobs).unwrap();
    assert_eq!((effects, different), (all, all), "each effect once");
    assert_eq!(one(stale).await, 0, "by the holder of the last token");
    assert_eq!(one(early).await, 0, "who is refused was late: another had claimed before");
    assert!(overlaps <= starts - effects, "each was one start too many: {again:?}");
    assert!(starts >= effects, "{again:?}");
}
