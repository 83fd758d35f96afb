//! Folders that go with their test, and processes that do.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use tenure::store::{KeySpace, KeyState};
use tenure::{Client, FileStore, Key, conformance};

/// A folder of its own, removed in the end.
pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let made = MADE.fetch_add(1, Ordering::Relaxed);
        let name = format!("tenure-test-{}-{made}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }

    pub(crate) fn open(&self) -> FileStore {
        FileStore::open(&self.0).expect("a folder of our own")
    }

    pub(crate) fn client(&self) -> Client {
        Client::with_store(Arc::new(self.open()))
    }

    /// What a worker tells.
    pub(crate) fn told(&self) -> String {
        std::fs::read_to_string(self.diary()).unwrap_or_default()
    }

    fn diary(&self) -> PathBuf {
        self.0.with_extension("diary")
    }

    /// Waits until a worker tells this.
    pub(crate) async fn tells(&self, what: &str) {
        until(what, async || self.told().contains(what)).await;
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
        std::fs::remove_file(self.diary()).ok();
    }
}

/// Waits until the condition holds, for much longer than it should take.
pub(crate) async fn until(what: &str, condition: impl AsyncFn() -> bool) {
    let begun = Instant::now();
    while !condition().await {
        assert!(begun.elapsed() < Duration::from_secs(20), "{what:?} did not come about");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

pub(crate) async fn state(client: &Client, key: &str) -> KeyState {
    let key = Key::new(key).expect("a key");
    client.store().inspect(&key, KeySpace::Lock).await.expect("it can be inspected")
}

/// Waits until so many hold and so many wait.
pub(crate) async fn until_shown(client: &Client, key: &str, holders: usize, waiters: usize) {
    until("holders and waiters", async || {
        let state = state(client, key).await;
        (state.holders.len(), state.waiters.len()) == (holders, waiters)
    })
    .await;
}

/// This program again, in the one test that does what it is told. Killed in the end.
pub(crate) struct Worker(Child);

const TASK: &str = "TENURE_TEST_TASK";
const FOLDER: &str = "TENURE_TEST_FOLDER";
const NAME: &str = "TENURE_TEST_NAME";

impl Worker {
    pub(crate) fn command(folder: &Folder, task: &str) -> Command {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["--exact", "support::worker", "--nocapture"]).stdout(Stdio::null());
        command.env(TASK, task).env(FOLDER, &folder.0);
        command
    }

    pub(crate) fn start(folder: &Folder, task: &str, name: &str) -> Self {
        Self::spawn(Self::command(folder, task).env(NAME, name))
    }

    pub(crate) fn spawn(command: &mut Command) -> Self {
        Self(command.spawn().expect("this program can be started again"))
    }

    pub(crate) fn kill(&mut self) {
        self.0.kill().expect("a child of ours");
        self.0.wait().expect("a child of ours");
    }

    pub(crate) fn signal(&self, signal: &str) {
        send(signal, &self.0.id().to_string());
    }

    pub(crate) async fn succeeds(mut self) {
        let mut status = None;
        let child = &mut self.0;
        let begun = Instant::now();
        while status.is_none() {
            assert!(begun.elapsed() < Duration::from_secs(60), "the worker does not end");
            tokio::time::sleep(Duration::from_millis(1)).await;
            status = child.try_wait().expect("a child of ours");
        }
        let status = status.expect("it ended");
        assert!(status.success(), "the worker failed: {status}");
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

pub(crate) fn send(signal: &str, pid: &str) {
    let sent = Command::new("kill").args([&format!("-{signal}"), pid]).status();
    assert!(sent.expect("kill is there").success(), "{pid} got no {signal}");
}

/// No test by itself: what the other processes of the tests do.
#[tokio::test]
async fn worker() {
    let Ok(task) = std::env::var(TASK) else { return };
    let folder = Folder(std::env::var_os(FOLDER).expect("the test says where").into());
    let name = std::env::var(NAME).unwrap_or_default();
    let client = folder.client();
    let tell = |text: &str| {
        let diary = std::fs::OpenOptions::new().create(true).append(true).open(folder.diary());
        diary.and_then(|mut diary| writeln!(diary, "{text}")).expect("a file of the test's own");
    };
    match &*task {
        "conform" => conformance::work(Arc::clone(client.store())).await,
        "pass" => {
            let guard = client.lock("key").acquire().await.expect("its turn");
            tell(&name);
            guard.release().await.expect("released");
        }
        "hold" => {
            let guard = client.lock("key").id(&*name).acquire().await.expect("free");
            tell(&format!("held {}", guard.fencing_token()));
            tell(&format!("lost {:?}", guard.lost().await.reason));
        }
        "guarded" => {
            let guard = client.lock("key").acquire().await.expect("free");
            let mut sleep = Command::new("sleep");
            sleep.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            if name == "guardian" {
                let copy = guard.keep_open().expect("held").expect("files have descriptors");
                sleep.stdin(copy);
            }
            tell(&format!("child {}", sleep.arg("1000").spawn().expect("sleep is there").id()));
            guard.lost().await;
        }
        "default" => crate::folders::by_default(&name).await,
        "fill" => crate::folders::fill(&client, Path::new(&name)).await,
        other => panic!("there is no task {other}"),
    }
    // The folder is the test's.
    std::mem::forget(folder);
}
