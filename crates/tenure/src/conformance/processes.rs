//! Several processes that share a store.

use std::io;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::needs::{GRANTS, WORKER};
use super::outcome::grant;
use super::{CaseOutcome, Fixture, Outcome, cases};
use crate::store::{Liveness, Store};
use crate::{Client, FencingToken};

cases! {
    processes_exclude_each_other: "of several contending processes, one holds the lock at a time, and tokens grow across all of them", [WORKER];
    grants_of_other_clients_are_counted: "Grant::grants counts the grants of all clients and processes", [GRANTS];
    a_killed_process_is_freed: "when a process is killed while it holds the lock, the next waiter acquires it", [WORKER];
}

/// Environment variables that carry the task of a worker process.
const TASK_VAR: &str = "TENURE_CONFORMANCE_TASK";
const KEY_VAR: &str = "TENURE_CONFORMANCE_KEY";
const TTL_MS_VAR: &str = "TENURE_CONFORMANCE_TTL_MS";
const FILE_VAR: &str = "TENURE_CONFORMANCE_FILE";
const ROUNDS_VAR: &str = "TENURE_CONFORMANCE_ROUNDS";

/// Runs the task of a process that was started by [`Harness::worker`](super::Harness::worker). The environment names
/// the task; without a task it returns at once. The process must open `store` itself.
///
/// # Panics
///
/// If the store violates the contract. The process must then exit with a status other than 0.
pub async fn work(store: Arc<dyn Store>) {
    let setting = |name| std::env::var(name).expect("the suite sets the worker's environment");
    let Ok(task) = std::env::var(TASK_VAR) else { return };
    let client = Client::with_store(store);
    let ttl = Duration::from_millis(setting(TTL_MS_VAR).parse().expect("a number"));
    let lock = || client.lock(setting(KEY_VAR)).ttl(ttl);
    match &*task {
        "count" => {
            let (file, rounds) =
                (PathBuf::from(setting(FILE_VAR)), setting(ROUNDS_VAR).parse().expect("a number"));
            for _ in 0..rounds {
                let guard = lock().acquire().await.succeeds("LockRequest::acquire");
                let token = guard.fencing_token();
                let ordered = client.store().capabilities().ordered_tokens;
                Count::read(&file).expect("a count").up(token, ordered).write(&file);
                guard.release().await.succeeds("Guard::release");
            }
        }
        "pass" => lock()
            .acquire()
            .await
            .succeeds("LockRequest::acquire")
            .release()
            .await
            .succeeds("Guard::release"),
        "hold" => {
            let guard = lock().acquire().await.succeeds("LockRequest::acquire");
            panic!("the process was not killed: {}", guard.lost().await);
        }
        other => panic!("there is no task {other}"),
    }
}

/// Content of the file in which the workers count. If two workers hold the lock at once, the sum is wrong.
struct Count {
    rounds: u32,
    token: FencingToken,
}

impl Count {
    fn read(file: &PathBuf) -> io::Result<Self> {
        let text = std::fs::read_to_string(file)?;
        let (rounds, token) = text.split_once(' ').unwrap_or(("0", "0"));
        let (rounds, token) = (rounds.parse().ok(), token.parse().ok());
        rounds
            .zip(token)
            .map(|(rounds, token)| Self { rounds, token })
            .ok_or_else(|| io::Error::other(format!("two processes wrote at once: {text:?}")))
    }

    fn up(self, token: FencingToken, ordered: bool) -> Self {
        assert_eq!(token > self.token, ordered, "{:?}, then {token:?}", self.token);
        Self { rounds: self.rounds + 1, token }
    }

    fn write(&self, file: &PathBuf) {
        let Self { rounds, token } = self;
        std::fs::write(file, format!("{rounds} {token}")).expect("a file of the suite's own");
    }
}

/// A worker process, which is killed on drop.
struct WorkerProcess(Option<Child>);

impl WorkerProcess {
    fn start(scene: &Fixture, mut command: Command, task: &str) -> Self {
        let ttl = scene.ttl().as_millis().to_string();
        command.env(TASK_VAR, task).env(KEY_VAR, scene.key().as_str()).env(TTL_MS_VAR, ttl);
        Self(Some(command.spawn().expect("the worker can be started")))
    }

    /// Waits for the exit of the process, on a thread that may block.
    async fn ended(mut self) -> ExitStatus {
        let mut child = self.0.take().expect("waited for once");
        let waited = tokio::task::spawn_blocking(move || child.wait()).await;
        waited.expect("no panic").expect("a child of ours")
    }

    fn kill(&mut self) {
        if let Some(mut child) = self.0.take() {
            child.kill().expect("a child of ours");
            child.wait().expect("a child of ours");
        }
    }
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

async fn processes_exclude_each_other(scene: Fixture) -> CaseOutcome {
    // The file name must be unique, because several suites may run in one process.
    static SUITES: AtomicU32 = AtomicU32::new(0);
    let (processes, rounds) = (4, 50);
    let suite = SUITES.fetch_add(1, Ordering::Relaxed);
    let name = format!("tenure-conformance-{}-{suite}", std::process::id());
    let file = std::env::temp_dir().join(name);
    Count { rounds: 0, token: FencingToken::default() }.write(&file);
    let mut workers = Vec::new();
    for _ in 0..processes {
        let Some(mut command) = scene.harness.worker() else {
            return CaseOutcome::Skipped(WORKER);
        };
        command.env(FILE_VAR, &file).env(ROUNDS_VAR, rounds.to_string());
        workers.push(WorkerProcess::start(&scene, command, "count"));
    }
    for worker in workers {
        let status = worker.ended().await;
        assert!(status.success(), "a worker failed: {status}");
    }
    let count = Count::read(&file).expect("a count").rounds;
    std::fs::remove_file(file).expect("a file of the suite's own");
    assert_eq!(count, processes * rounds, "processes overwrote each other's counts");
    CaseOutcome::Passed
}

/// An election concludes from two consecutive numbers that no other leader came between two of its terms.
async fn grants_of_other_clients_are_counted(scene: Fixture) -> CaseOutcome {
    let store = scene.two.store();
    let numbered = async |nth| {
        let mut grant = grant(&**store, &scene.claim(nth)).await;
        grant.hold.release(scene.limit()).await.succeeds("Hold::release");
        grant.grants
    };
    let Some(first) = numbered(1).await else { return CaseOutcome::Skipped(GRANTS) };
    let second = numbered(2).await.expect("every grant is counted, or none");
    assert!(first < second, "Grant::grants: {first}, then {second}");
    drop(scene.acquire(&scene.one).await);
    scene.wait_until_free().await;
    let third = numbered(3).await.expect("every grant is counted, or none");
    assert!(
        second + 1 < third,
        "Grant::grants: {second}, then {third}, with another client's between"
    );
    if let Some(command) = scene.harness.worker() {
        let status = WorkerProcess::start(&scene, command, "pass").ended().await;
        assert!(status.success(), "a worker failed: {status}");
        let last = numbered(4).await.expect("every grant is counted, or none");
        assert!(
            third + 1 < last,
            "Grant::grants: {third}, then {last}, with another process's between"
        );
    }
    CaseOutcome::Passed
}

async fn a_killed_process_is_freed(scene: Fixture) -> CaseOutcome {
    let Some(command) = scene.harness.worker() else { return CaseOutcome::Skipped(WORKER) };
    let mut worker = WorkerProcess::start(&scene, command, "hold");
    scene.wait_until("the worker's hold", |state| state.holders.len() == 1).await;
    let pending = scene.lock(&scene.two).enqueue().await.succeeds("LockRequest::enqueue");
    let began = scene.clock.now();
    worker.kill();
    drop(pending.wait().await.succeeds("Pending::wait"));
    let took = scene.clock.now().since(began);
    let bound = match scene.can().liveness {
        Liveness::Session | Liveness::Both => Duration::from_secs(2),
        Liveness::Lease => scene.ttl() * 2 + Duration::from_secs(5),
    };
    assert!(took < bound, "a killed process blocked the lock for {took:?}");
    CaseOutcome::Passed
}
