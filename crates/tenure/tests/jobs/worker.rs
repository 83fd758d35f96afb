//! Workers: concurrency, failures, shutdown, news.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tenure::jobs::{Failure, Job, JobState, Options, Queue, Worker};
use tenure::retry::ExponentialBackoff;
use tokio::sync::{Semaphore, oneshot};

use crate::services;
use crate::support::{fill, job, state, until, with_scene};

fn quick() -> Options {
    let backoff = ExponentialBackoff {
        base: Duration::from_millis(50),
        max: Duration::from_millis(200),
        multiplier: 2.0,
        jitter: 0.1,
    };
    Options::default().backoff(backoff)
}

#[test]
fn a_poison_job_ends_failed_with_its_error_and_the_others_are_done() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue_with(quick()).await;
        fill(&queue, 20).await;
        let poison = queue.enqueue(job("\"poison\"").max_attempts(3)).await.unwrap().id;
        let panics = queue.enqueue(job("\"panic\"").max_attempts(2)).await.unwrap().id;
        let hopeless = queue.enqueue(job("\"hopeless\"")).await.unwrap().id;
        let handler = |job: Job| async move {
            match job.payload() {
                "\"poison\"" => {
                    let error = std::io::Error::other(format!("attempt {}", job.attempt()));
                    Err(error)?;
                }
                "\"panic\"" => panic!("on purpose"),
                "\"hopeless\"" => return Err(Failure::permanent("no attempt can do it")),
                _ => {}
            }
            Ok(())
        };
        let told = Arc::new(AtomicUsize::new(0));
        let worker = Worker::new(queue.clone(), handler).concurrency(4).until_empty(true);
        let worker = worker.on_outcome({
            let told = Arc::clone(&told);
            move |_, _| {
                told.fetch_add(1, Ordering::Relaxed);
            }
        });
        let tally = worker.run(std::future::pending()).await.unwrap();
        assert_eq!((tally.completed, tally.failed, tally.retried), (20, 3, 3), "{tally:?}");
        assert_eq!(told.load(Ordering::Relaxed), 26);
        let row = queue.show(&poison).await.unwrap().unwrap();
        assert_eq!((row.state, row.attempts), (JobState::Failed, 3));
        assert_eq!(row.error.as_deref(), Some("attempt 3"));
        let row = queue.show(&panics).await.unwrap().unwrap();
        assert_eq!((row.state, row.attempts), (JobState::Failed, 2));
        let row = queue.show(&hopeless).await.unwrap().unwrap();
        assert_eq!((row.state, row.attempts), (JobState::Failed, 1));
    });
}

#[test]
fn no_more_run_at_once_than_was_asked_for() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue().await;
        fill(&queue, 40).await;
        let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let handler = {
            let (now, most) = (Arc::clone(&now), Arc::clone(&most));
            move |_: Job| {
                let (now, most) = (Arc::clone(&now), Arc::clone(&most));
                async move {
                    most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    now.fetch_sub(1, Ordering::SeqCst);
                    Ok::<(), Failure>(())
                }
            }
        };
        let worker = Worker::new(queue, handler).concurrency(3).until_empty(true);
        assert_eq!(worker.run(std::future::pending()).await.unwrap().completed, 40);
        assert_eq!(most.load(Ordering::SeqCst), 3);
    });
}

#[test]
fn a_shutdown_finishes_what_is_quick_and_gives_back_what_is_not() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue().await;
        let slow = queue.enqueue(job("60000").priority(1)).await.unwrap().id;
        queue.enqueue(job("100").priority(1)).await.unwrap();
        let more = fill(&queue, 5).await;
        // No job ends before the shutdown, however slow this machine is: a free place would be filled with another job.
        let (shutting_down, begun) = (Arc::new(Semaphore::new(0)), Arc::new(AtomicUsize::new(0)));
        let handler = {
            let (shutting_down, begun) = (Arc::clone(&shutting_down), Arc::clone(&begun));
            move |job: Job| {
                let shutting_down = Arc::clone(&shutting_down);
                begun.fetch_add(1, Ordering::SeqCst);
                async move {
                    drop(shutting_down.acquire().await);
                    tokio::time::sleep(Duration::from_millis(job.payload_as::<u64>()?)).await;
                    Ok::<(), Failure>(())
                }
            }
        };
        let worker = Worker::new(queue.clone(), handler).concurrency(2);
        let worker = worker.shutdown_budget(Duration::from_millis(1_500));
        let (stop, stopped) = oneshot::channel::<()>();
        let running = tokio::spawn(worker.run(async { drop(stopped.await) }));
        until("both run", async || begun.load(Ordering::SeqCst) == 2).await;
        stop.send(()).unwrap();
        shutting_down.add_permits(2);
        let begun = Instant::now();
        let tally = running.await.unwrap().unwrap();
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
        assert_eq!((tally.completed, tally.released), (1, 1), "{tally:?}");
        let row = queue.show(&slow).await.unwrap().unwrap();
        assert_eq!((row.state, row.attempts), (JobState::Available, 0), "as if never claimed");
        assert_eq!(state(&queue, &more[0]).await, JobState::Available, "nothing more was claimed");
    });
}

#[test]
fn an_idle_worker_hears_of_a_job() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        // So rarely that only a notification can be quick.
        let mut options = Options::default();
        options.poll = Duration::from_secs(300);
        options.sweep_every = Duration::from_secs(300);
        let idle = scene.queue_with(options).await;
        let other: Queue = scene.queue().await;
        let handler = |_: Job| async { Ok::<(), Failure>(()) };
        let (stop, stopped) = oneshot::channel::<()>();
        let worker = Worker::new(idle, handler);
        let running = tokio::spawn(worker.run(async { drop(stopped.await) }));
        let db = scene.connect().await;
        let listens = format!("LISTEN \"{}\"", scene.table());
        until("a worker that listens", async || {
            let sql = "SELECT count(*) > 0 FROM pg_stat_activity WHERE query = $1";
            db.query_one(sql, &[&listens]).await.unwrap().get(0)
        })
        .await;
        for nth in 0..5 {
            let id = other.enqueue(job(&nth.to_string())).await.unwrap().id;
            until("done", async || state(&other, &id).await == JobState::Completed).await;
        }
        stop.send(()).unwrap();
        assert_eq!(running.await.unwrap().unwrap().completed, 5);
    });
}

#[test]
fn work_on_a_job_that_was_cancelled_is_dropped() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue_with(quick().lease(Duration::from_secs(2))).await;
        let id = queue.enqueue(job("1")).await.unwrap().id;
        let handler = |_: Job| async {
            std::future::pending::<()>().await;
            Ok::<(), Failure>(())
        };
        let worker = Worker::new(queue.clone(), handler).until_empty(true);
        let running = tokio::spawn(worker.run(std::future::pending()));
        until("it runs", async || state(&queue, &id).await == JobState::Running).await;
        queue.cancel(&id, "not needed any more").await.unwrap();
        let tally = running.await.unwrap().unwrap();
        assert_eq!(tally.lost, 1, "{tally:?}");
        let row = queue.show(&id).await.unwrap().unwrap();
        assert_eq!(row.error.as_deref(), Some("not needed any more"));
    });
}
