//! Processes that share a store.

use std::io;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::{CaseOutcome, Fixture, always, cases};
use crate::store::{Liveness, Store};
use crate::{Client, FencingToken};

cases! {
    processes_exclude_each_other: "of several processes that contend, one is inside at a time, and tokens grow over all of them", always;
    a_killed_process_is_freed: "a process that is killed while it holds frees the lock for the next one", always;
}

const NO_PROCESSES: &str = "the harness starts no processes";

/// What a worker is told by its environment.
const TASK_VAR: &str = "TENURE_CONFORMANCE_TASK";
const KEY_VAR: &str = "TENURE_CONFORMANCE_KEY";
const TTL_MS_VAR: &str = "TENURE_CONFORMANCE_TTL_MS";
const FILE_VAR: &str = "TENURE_CONFORMANCE_FILE";
const ROUNDS_VAR: &str = "TENURE_CONFORMANCE_ROUNDS";

/// What a process started by [`Harness::worker`](super::Harness::worker) does: the part of a case that its environment
/// names, on a store that it opened by itself; nothing where it names none.
///
/// # Panics
///
/// Where the store does not keep the contract: the process has to end with another status than 0 then.
pub async fn work(store: Arc<dyn Store>) {
    let told = |name| std::env::var(name).expect("the suite says what to do");
    let Ok(task) = std::env::var(TASK_VAR) else { return };
    let client = Client::with_store(store);
    let ttl = Duration::from_millis(told(TTL_MS_VAR).parse().expect("a number"));
    let lock = || client.lock(told(KEY_VAR)).ttl(ttl);
    match &*task {
        "count" => {
            let (file, rounds) =
                (PathBuf::from(told(FILE_VAR)), told(ROUNDS_VAR).parse().expect("a number"));
            for _ in 0..rounds {
                let guard = lock().acquire().await.expect("every process gets its turn");
                let token = guard.fencing_token();
                let ordered = client.store().capabilities().ordered_tokens;
                Count::read(&file).expect("a count").up(token, ordered).write(&file);
                guard.release().await.expect("what is held can be released");
            }
        }
        "hold" => {
            let guard = lock().acquire().await.expect("free");
            panic!("nobody ended us: {}", guard.lost().await);
        }
        other => panic!("there is no task {other}"),
    }
}

/// What is in the file that workers count in: nobody else is inside, or the sum will be wrong.
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
            .ok_or_else(|| io::Error::other(format!("two wrote at once: {text:?}")))
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

/// A process that is killed when the case ends before it.
struct WorkerProcess(Option<Child>);

impl WorkerProcess {
    fn start(scene: &Fixture, mut command: Command, task: &str) -> Self {
        let ttl = scene.ttl().as_millis().to_string();
        command.env(TASK_VAR, task).env(KEY_VAR, scene.key().as_str()).env(TTL_MS_VAR, ttl);
        Self(Some(command.spawn().expect("the worker can be started")))
    }

    /// Waits for the end, on a thread that may.
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
    // Several suites may run in one process.
    static SUITES: AtomicU32 = AtomicU32::new(0);
    let (processes, rounds) = (4, 50);
    let suite = SUITES.fetch_add(1, Ordering::Relaxed);
    let name = format!("tenure-conformance-{}-{suite}", std::process::id());
    let file = std::env::temp_dir().join(name);
    Count { rounds: 0, token: FencingToken::default() }.write(&file);
    let mut workers = Vec::new();
    for _ in 0..processes {
        let Some(mut command) = scene.harness.worker() else {
            return CaseOutcome::Skipped(NO_PROCESSES);
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
    assert_eq!(count, processes * rounds, "some overwrote what others had counted");
    CaseOutcome::Passed
}

async fn a_killed_process_is_freed(scene: Fixture) -> CaseOutcome {
    let Some(command) = scene.harness.worker() else { return CaseOutcome::Skipped(NO_PROCESSES) };
    let mut worker = WorkerProcess::start(&scene, command, "hold");
    scene.wait_until("the worker's hold", |state| state.holders.len() == 1).await;
    let pending = scene.lock(&scene.two).enqueue().await.expect("enqueued");
    let began = scene.clock.now();
    worker.kill();
    drop(pending.wait().await.expect("the dead no longer hold it"));
    let took = scene.clock.now().since(began);
    let bound = match scene.can().liveness {
        Liveness::Session | Liveness::Both => Duration::from_secs(2),
        Liveness::Lease => scene.ttl() * 2 + Duration::from_secs(5),
    };
    assert!(took < bound, "a killed process kept others out for {took:?}");
    CaseOutcome::Passed
}
