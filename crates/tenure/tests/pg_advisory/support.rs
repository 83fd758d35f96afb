//! Keys of a test's own, processes that go with it, and participants that are not ours.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use tenure::election::Event;
use tenure::{Client, PgAdvisoryStore, conformance};
use tokio_postgres::NoTls;

use crate::network::Network;

/// The ttl of what workers hold.
pub(crate) const TTL: Duration = Duration::from_secs(2);

/// The URL of this store on a server.
pub(crate) fn advisory(url: &str) -> String {
    url.replacen("postgres:", "postgres+advisory:", 1)
}

pub(crate) fn client(url: &str) -> Client {
    Client::with_store(Arc::new(PgAdvisoryStore::open(&advisory(url)).unwrap()))
}

/// A pair of numbers that no other test uses, as a key.
pub(crate) fn pair() -> (String, i32, i32) {
    static MADE: AtomicU32 = AtomicU32::new(0);
    let first = i32::from_be_bytes(getrandom::u32().unwrap().to_be_bytes());
    let second = i32::try_from(MADE.fetch_add(1, Ordering::Relaxed)).unwrap() - 3;
    (format!("{first},{second}"), first, second)
}

/// The forms of keys, as the option of a URL.
pub(crate) const FORMS: [&str; 2] = ["key=pair", "key=bigint"];

/// A lock of a form that no other test uses: its key, and the SQL condition of its rows in `pg_locks`.
pub(crate) fn own_lock(form: &str) -> (String, String) {
    let (key, first, second) = pair();
    let (first, second) = (first.cast_unsigned(), second.cast_unsigned());
    let row = |objsubid| {
        format!(
            "locktype = 'advisory' AND objsubid = {objsubid} AND classid::int8 = {first} AND objid::int8 = {second}"
        )
    };
    match form {
        "key=pair" => (key, row(2)),
        _ => ((u64::from(first) << 32 | u64::from(second)).cast_signed().to_string(), row(1)),
    }
}

/// A participant that knows SQL and nothing else.
pub(crate) async fn stranger(url: &str) -> tokio_postgres::Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

/// Waits until the condition holds, for much longer than it should take.
pub(crate) async fn until(what: &str, condition: impl AsyncFn() -> bool) {
    let begun = Instant::now();
    while !condition().await {
        assert!(begun.elapsed() < Duration::from_secs(60), "{what:?} did not come about");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// This program again, in the one test that does what it is told. Killed in the end.
pub(crate) struct Worker {
    child: Child,
    diary: PathBuf,
}

const TASK: &str = "TENURE_TEST_TASK";
const URL: &str = "TENURE_TEST_URL";
const DIARY: &str = "TENURE_TEST_DIARY";
const KEY: &str = "TENURE_TEST_KEY";

impl Worker {
    pub(crate) fn command(url: &str, task: &str, key: &str) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "support::worker", "--nocapture"]).stdout(Stdio::null());
        command.env(TASK, task).env(URL, advisory(url)).env(KEY, key);
        command
    }

    pub(crate) fn start(url: &str, task: &str, key: &str) -> Self {
        Self::begin(Self::command(url, task, key))
    }

    /// Starts it in another network.
    pub(crate) fn start_in(network: &Network, url: &str, task: &str, key: &str) -> Self {
        let mut command = network.within(&Self::command(url, task, key));
        command.stdout(Stdio::null());
        Self::begin(command)
    }

    fn begin(mut command: Command) -> Self {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let made = MADE.fetch_add(1, Ordering::Relaxed);
        let name = format!("tenure-advisory-{}-{made}.diary", std::process::id());
        let diary = std::env::temp_dir().join(name);
        let child = command.env(DIARY, &diary).spawn().unwrap();
        Self { child, diary }
    }

    pub(crate) fn told(&self) -> String {
        std::fs::read_to_string(&self.diary).unwrap_or_default()
    }

    /// Waits until it tells this.
    pub(crate) async fn tells(&self, what: &str) {
        until(what, async || self.told().contains(what)).await;
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn signal(&self, signal: &str) {
        crate::server::send(signal, self.child.id());
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
        std::fs::remove_file(&self.diary).ok();
    }
}

/// No test by itself: what the other processes of the tests do.
#[tokio::test]
async fn worker() {
    let Ok(task) = std::env::var(TASK) else { return };
    let (url, key) = (std::env::var(URL).unwrap(), std::env::var(KEY).unwrap());
    let client = Client::connect(&url).await.unwrap();
    let diary = std::env::var_os(DIARY).map(PathBuf::from);
    let tell = |text: &str| {
        let path = diary.as_ref().unwrap();
        let diary = std::fs::OpenOptions::new().create(true).append(true).open(path);
        diary.and_then(|mut diary| writeln!(diary, "{text}")).unwrap();
    };
    match &*task {
        "conform" => conformance::work(Arc::clone(client.store())).await,
        "lead" => {
            let election = client.election(&key).ttl(TTL).build().unwrap();
            let mut events = election.events();
            election.start().await.unwrap();
            while let Some(event) = events.next().await {
                match event {
                    Event::Acquired(lead) => tell(&format!("leads {}", lead.fencing_token())),
                    Event::Lost(lost) => tell(&format!("lost {:?}", lost.reason)),
                    _ => {}
                }
            }
        }
        "follow" => {
            let election = client.election(&key).ttl(TTL).build().unwrap();
            let mut events = election.events();
            election.start().await.unwrap();
            while let Some(event) = events.next().await {
                if let Event::Error(error) = event {
                    tell(&format!("error {error}"));
                }
            }
        }
        other => panic!("there is no task {other}"),
    }
}
