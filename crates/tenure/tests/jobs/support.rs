//! Tables that go with their test, and processes that do.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tenure::jobs::{Failure, Job, JobState, NewJob, Options, Queue, Schema, Worker};
use tokio_postgres::NoTls;

/// A schema with a queue and checkpoints of its own.
#[derive(Clone, Debug)]
pub(crate) struct Scene {
    pub(crate) url: Arc<str>,
    pub(crate) schema: Arc<str>,
}

/// The longest that a test may take.
const LIMIT: Duration = Duration::from_secs(600);

/// Runs a test with new tables on a server, and drops them whether the test passes or not.
pub(crate) fn with_scene<F: Future<Output = ()> + 'static>(
    url: &str,
    test: impl FnOnce(Scene) -> F + 'static,
) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let url = url.into();
    let local = tokio::task::LocalSet::new();
    local.block_on(&runtime.unwrap(), async {
        let schema = format!("tenure_jobs_{:016x}", getrandom::u64().unwrap()).into();
        let scene = Scene { url, schema };
        scene.migrate().await;
        let tested = tokio::task::spawn_local(test(scene.clone()));
        let outcome = tokio::time::timeout(LIMIT, tested).await;
        // The test may have stopped its server.
        if let Some(db) = scene.try_connect().await {
            db.batch_execute(&format!("DROP SCHEMA {} CASCADE", scene.schema)).await.unwrap();
        }
        std::fs::remove_file(scene.diary()).ok();
        if let Err(panic) = outcome.expect("the test is over in time") {
            std::panic::resume_unwind(panic.into_panic());
        }
    });
}

impl Scene {
    pub(crate) async fn migrate(&self) {
        Schema::of_queue(&self.table()).unwrap().apply(&self.url).await.unwrap();
        Schema::of_checkpoints(&self.chunks()).unwrap().apply(&self.url).await.unwrap();
    }

    pub(crate) fn table(&self) -> String {
        format!("{}.sync_jobs", self.schema)
    }

    pub(crate) fn chunks(&self) -> String {
        format!("{}.sync_checkpoints", self.schema)
    }

    pub(crate) async fn queue(&self) -> Queue {
        Queue::connect(&self.url, &self.table()).await.unwrap()
    }

    pub(crate) async fn queue_with(&self, options: Options) -> Queue {
        Queue::connect_with(&self.url, &self.table(), options).await.unwrap()
    }

    /// A connection whose search path is this schema: plain SQL finds the tables by their names.
    pub(crate) async fn connect(&self) -> tokio_postgres::Client {
        self.try_connect().await.expect("the server is up")
    }

    pub(crate) async fn try_connect(&self) -> Option<tokio_postgres::Client> {
        let (client, connection) = tokio_postgres::connect(&self.url, NoTls).await.ok()?;
        tokio::spawn(connection);
        let path = format!("SET search_path = {}, public", self.schema);
        client.batch_execute(&path).await.ok()?;
        Some(client)
    }

    pub(crate) fn diary(&self) -> PathBuf {
        std::env::temp_dir().join(format!("{}.diary", self.schema))
    }

    /// What other processes tell.
    pub(crate) fn told(&self) -> String {
        std::fs::read_to_string(self.diary()).unwrap_or_default()
    }
}

pub(crate) fn job(payload: &str) -> NewJob {
    NewJob::json(payload).unwrap()
}

/// Enqueues so many jobs whose payloads are their numbers.
pub(crate) async fn fill(queue: &Queue, count: usize) -> Vec<String> {
    let jobs = (0..count).map(|nth| job(&nth.to_string())).collect();
    let enqueued = queue.enqueue_many(jobs).await.unwrap();
    enqueued.into_iter().map(|enqueued| enqueued.id).collect()
}

pub(crate) async fn state(queue: &Queue, id: &str) -> JobState {
    queue.show(id).await.unwrap().unwrap().state
}

/// Waits until the condition holds, for much longer than it should take.
pub(crate) async fn until(what: &str, condition: impl AsyncFn() -> bool) {
    let begun = Instant::now();
    while !condition().await {
        assert!(begun.elapsed() < Duration::from_secs(60), "{what:?} did not come about");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// This program again, in the one test that does what it is told. Killed in the end.
pub(crate) struct Process(pub(crate) Child);

const TASK: &str = "TENURE_TEST_TASK";
const URL: &str = "TENURE_TEST_URL";
const TABLE: &str = "TENURE_TEST_TABLE";
const DIARY: &str = "TENURE_TEST_DIARY";

/// The lease of other processes.
pub(crate) const LEASE: Duration = Duration::from_secs(2);

impl Process {
    pub(crate) fn start(scene: &Scene, task: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "support::process", "--nocapture"]).stdout(Stdio::null());
        command.env(TASK, task).env(URL, &*scene.url).env(TABLE, scene.table());
        Self(command.env(DIARY, scene.diary()).spawn().unwrap())
    }

    pub(crate) fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    pub(crate) fn signal(&self, signal: &str) {
        crate::server::send(signal, self.0.id());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// No test by itself: what the other processes of the tests do.
#[tokio::test]
async fn process() {
    let Ok(task) = std::env::var(TASK) else { return };
    let variable = |name: &str| std::env::var(name).unwrap();
    let tell = {
        let diary = PathBuf::from(variable(DIARY));
        move |text: &str| {
            let diary = std::fs::OpenOptions::new().create(true).append(true).open(&diary);
            diary.and_then(|mut diary| diary.write_all(format!("{text}\n").as_bytes())).unwrap();
        }
    };
    let options = Options::default().lease(LEASE);
    let queue = Queue::connect_with(&variable(URL), &variable(TABLE), options).await.unwrap();
    match &*task {
        // Claims ten and holds them until it is killed; when it was frozen, completes the first late.
        "hold" => {
            let mut jobs = queue.claim_many(10).await.unwrap();
            tell(&format!("held {}", jobs.len()));
            let first = jobs.remove(0);
            let reason = first.lost().await;
            tell(&format!("lost {reason:?}"));
            let late = first.complete().await;
            tell(&format!("late {:?}", late.map_err(|error| error.kind())));
        }
        // Claims until it has a job that it holds.
        "late" => loop {
            match queue.claim().await {
                Ok(Some(job)) if job.is_held() => {
                    return tell(&format!("held, attempt {}", job.attempt()));
                }
                Ok(Some(_)) => tell("claimed false"),
                Ok(None) => tokio::time::sleep(Duration::from_millis(20)).await,
                Err(error) => tell(&format!("failed {:?}", error.kind())),
            }
        },
        // Works on jobs, each of which has a fenced effect, until it is killed.
        "work" => {
            let url = variable(URL);
            let schema = variable(TABLE).split('.').next().unwrap().to_owned();
            let (db, connection) = tokio_postgres::connect(&url, NoTls).await.unwrap();
            tokio::spawn(connection);
            let db = Arc::new(tokio::sync::Mutex::new(db));
            while let Ok(jobs) = queue.claim_many(2).await {
                if jobs.is_empty() {
                    if !queue.has_pending().await.unwrap_or(true) && idle(&queue).await {
                        return;
                    }
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                for guard in jobs {
                    let mut db = db.lock().await;
                    effect(&mut db, &schema, &guard).await;
                }
            }
        }
        other => panic!("there is no task {other}"),
    }
}

/// Whether nothing is left that is not final.
async fn idle(queue: &Queue) -> bool {
    let Ok(counts) = queue.counts().await else { return false };
    counts.keys().all(|state| state == "COMPLETED" || state == "FAILED")
}

/// Notes the start without a fence, then has the effect and the completion in one transaction.
async fn effect(db: &mut tokio_postgres::Client, schema: &str, guard: &tenure::jobs::JobGuard) {
    let (id, token) = (guard.id().to_owned(), guard.lease_token());
    let begin = format!("INSERT INTO {schema}.starts (job, token) VALUES ($1, $2)");
    db.execute(&begin, &[&id, &token]).await.unwrap();
    let transaction = db.transaction().await.unwrap();
    let write = format!("INSERT INTO {schema}.effects (job, token) VALUES ($1, $2)");
    transaction.execute(&write, &[&id, &token]).await.unwrap();
    match guard.complete_in(&transaction).await {
        Ok(()) => transaction.commit().await.unwrap(),
        Err(error) => {
            transaction.rollback().await.unwrap();
            // It worked on what another had by then.
            assert_eq!(error.kind(), tenure::ErrorKind::Lost, "{error}");
            let note = format!("INSERT INTO {schema}.refusals (job, token) VALUES ($1, $2)");
            db.execute(&note, &[&id, &token]).await.unwrap();
        }
    }
}

/// A worker that does nothing but complete.
pub(crate) async fn work_off(queue: &Queue) -> tenure::jobs::WorkerStats {
    let handler = |_: Job| async { Ok::<(), Failure>(()) };
    let worker = Worker::new(queue.clone(), handler).until_empty(true).concurrency(8);
    worker.run(std::future::pending()).await.unwrap()
}
