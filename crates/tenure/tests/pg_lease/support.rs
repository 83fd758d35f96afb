//! Schemas that go with their test, and processes that do.

use std::future::Future;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tenure::store::{KeySpace, KeyState};
use tenure::{Client, Key, PgLeaseStore, conformance};
use tokio_postgres::NoTls;

/// A schema with a table of its own.
#[derive(Clone, Debug)]
pub(crate) struct Schema {
    server: Arc<str>,
    pub(crate) name: Arc<str>,
}

/// The longest that a test may take.
const LIMIT: Duration = Duration::from_secs(600);

/// Runs a test with a new table on a server, and drops that whether the test passes or not.
pub(crate) fn with_schema<F: Future<Output = ()> + 'static>(
    url: &str,
    test: impl FnOnce(Schema) -> F + 'static,
) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let server = url.into();
    let local = tokio::task::LocalSet::new();
    local.block_on(&runtime.unwrap(), async {
        let name = format!("tenure_test_{:016x}", getrandom::u64().unwrap()).into();
        let schema = Schema { server, name };
        schema.store().apply_schema().await.unwrap();
        let tested = tokio::task::spawn_local(test(schema.clone()));
        let outcome = tokio::time::timeout(LIMIT, tested).await;
        let drop = format!("DROP SCHEMA {} CASCADE", schema.name);
        // The test may have stopped its server.
        if let Some(db) = schema.try_connect().await {
            db.batch_execute(&drop).await.unwrap();
        }
        if let Err(panic) = outcome.expect("the test is over in time") {
            std::panic::resume_unwind(panic.into_panic());
        }
    });
}

impl Schema {
    pub(crate) fn url(&self) -> String {
        self.url_at(&self.server)
    }

    /// The same table, reached another way.
    pub(crate) fn url_at(&self, server: &str) -> String {
        let sign = if server.contains('?') { '&' } else { '?' };
        format!("{server}{sign}table={}.locks", self.name)
    }

    pub(crate) fn store(&self) -> PgLeaseStore {
        PgLeaseStore::open(&self.url()).unwrap()
    }

    pub(crate) fn client(&self) -> Client {
        Client::with_store(Arc::new(self.store()))
    }

    pub(crate) async fn connect(&self) -> tokio_postgres::Client {
        self.try_connect().await.expect("the server is up")
    }

    async fn try_connect(&self) -> Option<tokio_postgres::Client> {
        let (client, connection) = tokio_postgres::connect(&self.server, NoTls).await.ok()?;
        tokio::spawn(connection);
        Some(client)
    }

    fn diary(&self) -> PathBuf {
        std::env::temp_dir().join(format!("{}.diary", self.name))
    }

    /// What workers tell.
    pub(crate) fn told(&self) -> String {
        std::fs::read_to_string(self.diary()).unwrap_or_default()
    }

    /// Waits until a worker tells this.
    pub(crate) async fn tells(&self, what: &str) {
        until(what, async || self.told().contains(what)).await;
    }
}

/// Waits until the condition holds, for much longer than it should take.
pub(crate) async fn until(what: &str, condition: impl AsyncFn() -> bool) {
    let begun = Instant::now();
    while !condition().await {
        assert!(begun.elapsed() < Duration::from_secs(60), "{what:?} did not come about");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

pub(crate) async fn state(client: &Client, key: &str) -> KeyState {
    let key = Key::new(key).unwrap();
    client.store().inspect(&key, KeySpace::Lock).await.unwrap()
}

/// This program again, in the one test that does what it is told. Killed in the end.
pub(crate) struct Worker {
    child: Child,
    diary: PathBuf,
}

const TASK: &str = "TENURE_TEST_TASK";
const URL: &str = "TENURE_TEST_URL";
const DIARY: &str = "TENURE_TEST_DIARY";

impl Worker {
    pub(crate) fn command(schema: &Schema, task: &str) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "support::worker", "--nocapture"]).stdout(Stdio::null());
        command.env(TASK, task).env(URL, schema.url()).env(DIARY, schema.diary());
        command
    }

    pub(crate) fn start(schema: &Schema, task: &str) -> Self {
        let child = Self::command(schema, task).spawn().unwrap();
        Self { child, diary: schema.diary() }
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn signal(&self, signal: &str) {
        let pid = self.child.id().to_string();
        let sent = Command::new("kill").args([&format!("-{signal}"), &pid]).status();
        assert!(sent.unwrap().success(), "{pid} got no {signal}");
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
        std::fs::remove_file(&self.diary).ok();
    }
}

/// The ttl of what workers hold.
pub(crate) const TTL: Duration = Duration::from_secs(2);

/// No test by itself: what the other processes of the tests do.
#[tokio::test]
async fn worker() {
    let Ok(task) = std::env::var(TASK) else { return };
    let diary = PathBuf::from(std::env::var_os(DIARY).unwrap());
    let client = Client::connect(&std::env::var(URL).unwrap()).await.unwrap();
    let tell = |text: &str| {
        let diary = std::fs::OpenOptions::new().create(true).append(true).open(&diary);
        diary.and_then(|mut diary| writeln!(diary, "{text}")).unwrap();
    };
    match &*task {
        "conform" => conformance::work(Arc::clone(client.store())).await,
        "hold" => {
            let guard = client.lock("key").ttl(TTL).acquire().await.unwrap();
            tell(&format!("held {}", guard.fencing_token()));
            tell(&format!("lost {:?}", guard.lost().await.reason));
        }
        other => panic!("there is no task {other}"),
    }
}
