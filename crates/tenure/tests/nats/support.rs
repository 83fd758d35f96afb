//! Servers and buckets that go with their test.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tenure::{Client, conformance};

use crate::network::Network;
pub(crate) use crate::proxy::Proxy;
use crate::raw::Raw;

/// A name that no other test uses, also in another run on the same server.
pub(crate) fn unique(what: &str) -> String {
    static MADE: AtomicU32 = AtomicU32::new(0);
    let made = MADE.fetch_add(1, Ordering::Relaxed);
    format!("{what}-{}-{made}", std::process::id())
}

/// A server of the test's own, killed in the end.
pub(crate) struct Server {
    program: String,
    folder: PathBuf,
    pub(crate) port: u16,
    arguments: Vec<String>,
    child: Option<Child>,
}

impl Server {
    pub(crate) fn start(program: &str) -> Self {
        Self::with(program, &["--jetstream"])
    }

    pub(crate) fn with(program: &str, arguments: &[&str]) -> Self {
        let folder = std::env::temp_dir().join(unique("tenure-test-nats"));
        let arguments = arguments.iter().map(|&argument| argument.to_owned()).collect();
        let (program, port) = (program.to_owned(), free_port());
        let mut server = Self { program, folder, port, arguments, child: None };
        server.resume_after_kill();
        server
    }

    /// Starts it on its port, with the data that it has.
    pub(crate) fn resume_after_kill(&mut self) {
        std::fs::create_dir_all(&self.folder).expect("a folder of the test's own");
        let log = std::fs::File::create(self.folder.join("log")).expect("ours");
        let mut command = Command::new(&self.program);
        command.args(["--addr", "127.0.0.1", "--port", &self.port.to_string(), "--store_dir"]);
        command.arg(&self.folder).args(&self.arguments).stdin(Stdio::null());
        command.stdout(Stdio::null()).stderr(log);
        self.child = Some(command.spawn().expect("the server can be started"));
        let begun = Instant::now();
        while !self.greets() {
            assert!(begun.elapsed() < Duration::from_secs(20), "no server: {}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// What it has logged since it was started.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }

    fn greets(&self) -> bool {
        let Ok(mut stream) = TcpStream::connect(("127.0.0.1", self.port)) else { return false };
        let mut first = [0; 5];
        stream.read_exact(&mut first).is_ok() && &first == b"INFO "
    }

    pub(crate) fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().expect("a child of ours");
            child.wait().expect("a child of ours");
        }
    }

    pub(crate) fn pause(&self) {
        self.signal(Signal::STOP);
    }

    pub(crate) fn go_on(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        let child = self.child.as_ref().expect("it runs");
        let pid = Pid::from_child(child);
        kill_process(pid, signal).expect("a child of ours");
    }
}

/// Three servers that know each other.
pub(crate) struct Cluster(pub(crate) Vec<Server>);

impl Cluster {
    pub(crate) fn start(program: &str) -> Self {
        let ports: Vec<_> = (0..3).map(|_| free_port()).collect();
        let routes: Vec<_> = ports.iter().map(|port| format!("nats://127.0.0.1:{port}")).collect();
        let known = routes.join(",");
        let nodes = routes.iter().enumerate().map(|(number, route)| {
            let name = format!("node{number}");
            let more = ["--jetstream", "--name", &name, "--cluster_name", "faults", "--cluster"];
            let more = [&more[..], &[route, "--routes", &known]].concat();
            Server::with(program, &more)
        });
        Self(nodes.collect())
    }

    pub(crate) fn url(&self) -> String {
        let nodes: Vec<_> = self.0.iter().map(|node| format!("127.0.0.1:{}", node.port)).collect();
        format!("nats://{}", nodes.join(","))
    }

    /// The node that leads the stream of a bucket.
    pub(crate) async fn leader(&self, raw: &Raw) -> usize {
        self.leader_other_than(raw, usize::MAX).await
    }

    /// The node that leads it once that one does not.
    pub(crate) async fn leader_other_than(&self, raw: &Raw, old: usize) -> usize {
        let begun = Instant::now();
        loop {
            assert!(begun.elapsed() < Duration::from_secs(60), "no leader");
            let info = raw.info().await;
            let leader = info.as_ref().and_then(|info| info["cluster"]["leader"].as_str());
            if let Some(number) = leader.and_then(|name| name.strip_prefix("node")?.parse().ok())
                && number != old
            {
                return number;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.child.is_some() {
            self.go_on();
        }
        self.kill();
        std::fs::remove_dir_all(&self.folder).ok();
    }
}

pub(crate) fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("bound").port()
}

pub(crate) async fn connect(url: &str) -> Client {
    Client::connect(url).await.unwrap_or_else(|error| panic!("{url}: {error}"))
}

/// The words of an error and of all its causes.
pub(crate) fn words(error: &tenure::Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(next) = cause {
        text = format!("{text}: {next}");
        cause = next.source();
    }
    text
}

/// Waits until the condition holds, for much longer than it should take.
pub(crate) async fn until(what: &str, condition: impl AsyncFn() -> bool) {
    let begun = Instant::now();
    while !condition().await {
        assert!(begun.elapsed() < Duration::from_secs(30), "{what:?} did not come about");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

const URL: &str = "TENURE_TEST_WORKER_URL";
const DIARY: &str = "TENURE_TEST_WORKER_DIARY";
const TTL: &str = "TENURE_TEST_WORKER_TTL_MS";

/// This program again, in the one test that does what the suite tells it.
pub(crate) fn worker(url: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", "support::work", "--nocapture"]).stdout(Stdio::null());
    command.env(URL, url);
    command
}

/// A process in another network that holds `key-0` and so on, and writes down what becomes of each. Killed in the end.
pub(crate) struct Holder {
    child: Child,
    diary: PathBuf,
}

/// How many keys such a process holds.
pub(crate) const KEYS: usize = 20;

impl Holder {
    pub(crate) fn start(network: &Network, url: &str, ttl: Duration) -> Self {
        let diary = std::env::temp_dir().join(unique("tenure-test-nats-diary"));
        let mut inner = worker(url);
        inner.env(DIARY, &diary).env(TTL, ttl.as_millis().to_string());
        let mut command = network.within(&inner);
        let child = command.stdout(Stdio::null()).spawn().expect("this program can be started");
        Self { child, diary }
    }

    pub(crate) fn told(&self) -> String {
        std::fs::read_to_string(&self.diary).unwrap_or_default()
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
        std::fs::remove_file(&self.diary).ok();
    }
}

async fn hold(client: &Client, diary: PathBuf, ttl: Duration) {
    let tell = move |text: String| {
        let diary = std::fs::OpenOptions::new().create(true).append(true).open(&diary);
        let written = diary.and_then(|mut diary| diary.write_all(format!("{text}\n").as_bytes()));
        written.expect("a file of the test's own");
    };
    let mut held = tokio::task::JoinSet::new();
    for number in 0..KEYS {
        let key = format!("key-{number}");
        let guard = client.lock(&key).ttl(ttl).acquire().await.expect("free");
        tell(format!("held {key}"));
        let tell = tell.clone();
        held.spawn(async move {
            let lost = guard.lost().await;
            tell(format!("lost {key}: {:?}", lost.reason));
        });
    }
    held.join_all().await;
    std::future::pending::<()>().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn work() {
    let Ok(url) = std::env::var(URL) else { return };
    let client = connect(&url).await;
    if let Some(diary) = std::env::var_os(DIARY) {
        let ttl = std::env::var(TTL).ok().and_then(|ms| ms.parse().ok()).expect("milliseconds");
        return hold(&client, diary.into(), Duration::from_millis(ttl)).await;
    }
    conformance::work(client.store().clone()).await;
}
