//! A pool that changes from session mode to transaction mode under a running process.

use std::fs;
use std::net::TcpStream;
use std::process::Child;
use std::time::{Duration, Instant};

use tenure::ErrorKind;
use tokio::task::JoinSet;

use crate::refusals::{pool_settings, says};
use crate::server::{self, Server};
use crate::services;
use crate::support::{client, pair, stranger, until};

/// A PgBouncer of the test's own in front of a server of its own, in session mode at first.
struct Bouncer {
    process: Child,
    url: String,
    /// Connection to its console.
    console: tokio_postgres::Client,
}

impl Bouncer {
    async fn start(server: &Server) -> Option<Self> {
        let program = services::pgbouncer_program()?;
        let port = server::free_port();
        let settings = format!(
            "[databases]\n* = host=127.0.0.1 port={}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n\
             unix_socket_dir =\nauth_type = trust\nauth_file = users\nadmin_users = postgres\n\
             pool_mode = session\ndefault_pool_size = 8\n",
            server.port
        );
        fs::write(server.folder().join("settings"), settings).unwrap();
        fs::write(server.folder().join("users"), "\"postgres\" \"\"\n").unwrap();
        let log = fs::File::create(server.folder().join("bouncer.log")).unwrap();
        let mut command = server.beside(&program);
        command.arg("settings").stdout(log.try_clone().unwrap()).stderr(log);
        let process = command.spawn().unwrap();
        let begun = Instant::now();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(begun.elapsed() < Duration::from_secs(60), "PgBouncer does not answer");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let at = |database: &str| format!("postgres://postgres@127.0.0.1:{port}/{database}");
        let console = stranger(&at("pgbouncer")).await;
        Some(Self { process, url: at("postgres"), console })
    }

    async fn share_sessions(&self) {
        self.console.simple_query("SET pool_mode = 'transaction'").await.unwrap();
    }
}

impl Drop for Bouncer {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

/// Takes the sessions of a pool that tenure has marked, and keeps them in transactions.
async fn keep_marked_sessions(pool: &str) -> Vec<tokio_postgres::Client> {
    let mut all = JoinSet::new();
    for _ in 0..8 {
        let client = stranger(pool).await;
        all.spawn(async move {
            let sql = "SELECT coalesce(current_setting('tenure.session', true), '') <> ''";
            client.batch_execute("BEGIN").await.unwrap();
            let row = client.query_typed(sql, &[]).await.unwrap().remove(0);
            (client, row.get::<_, bool>(0))
        });
    }
    let (marked, others): (Vec<_>, Vec<_>) =
        all.join_all().await.into_iter().partition(|(_, marked)| *marked);
    for (client, _) in others {
        client.batch_execute("COMMIT").await.unwrap();
    }
    marked.into_iter().map(|(client, _)| client).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_written_to_sessions_of_a_pool_that_begins_to_share_them() {
    let Some(server) = Server::start() else { return };
    let Some(bouncer) = Bouncer::start(&server).await else { return };
    let ttl = Duration::from_secs(4);
    let ((key, ..), (other, ..)) = (pair(), pair());
    let queue = |url: &str| client(&format!("{url}?queue=1"));
    let (direct, pooled) = (queue(&server.url()), queue(&bouncer.url));
    let guard = direct.lock(&key).ttl(ttl).acquire().await.unwrap();
    let ahead = direct.lock(&key).ttl(ttl).enqueue().await.unwrap();
    // The only place of the queue is taken: this one stands by, and polls.
    let reserve = pooled.lock(&key).ttl(ttl).enqueue().await.unwrap();
    let waiters = async || direct.inspect(&key).await.unwrap().waiters.len();
    until("one blocks, one stands by", async || waiters().await == 2).await;
    let before = pool_settings(&server.url()).await.into_values().next().unwrap();

    pooled.lock(&other).ttl(ttl).acquire().await.unwrap().release().await.unwrap();
    bouncer.share_sessions().await;
    // A session goes back to the pool with the end of the first statement after the change.
    pooled.inspect(&other).await.unwrap();
    let mut kept = keep_marked_sessions(&bouncer.url).await;
    assert!(!kept.is_empty(), "the session of the released lock is in the pool");
    let refused = pooled.lock(&other).ttl(ttl).acquire().await.unwrap_err();
    says(&refused, ErrorKind::Misconfigured, "transaction mode");
    // The reserve polls once on its own session, which is then free for others.
    let begun = Instant::now();
    while kept.len() < 2 {
        assert!(begun.elapsed() < Duration::from_secs(60), "the reserve has not polled");
        kept.extend(keep_marked_sessions(&bouncer.url).await);
    }
    let refused = tokio::time::timeout(Duration::from_secs(30), reserve.wait()).await;
    let refused = refused.expect("a poll on another session is noticed").unwrap_err();
    says(&refused, ErrorKind::Misconfigured, "transaction mode");
    // A new session is examined again.
    let refused = pooled.lock(&other).ttl(ttl * 10).try_acquire().await.unwrap_err();
    says(&refused, ErrorKind::Misconfigured, "PgBouncer in transaction mode");

    let after = pool_settings(&bouncer.url).await;
    assert!(after.len() >= 4, "{after:#?}");
    assert!(after.values().all(|settings| *settings == before), "{before}\n{after:#?}");
    guard.release().await.unwrap();
    ahead.wait().await.unwrap().release().await.unwrap();
}
