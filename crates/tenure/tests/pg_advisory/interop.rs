//! Beside participants that know SQL and nothing else, and roles that have no rights.

use std::io::{BufRead as _, BufReader, Lines, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tenure::store::KeySpace;
use tenure::{Client, ErrorKind, Key, PgAdvisoryStore};
use tokio_postgres::NoTls;

use crate::server::Server;
use crate::services;
use crate::support::{TTL, Worker, advisory, client, pair, stranger, until};

#[tokio::test(flavor = "multi_thread")]
async fn a_stranger_excludes_us_and_is_excluded() {
    let Some(url) = services::postgres() else { return };
    let (key, first, second) = pair();
    let (ours, theirs) = (client(&url), stranger(&url).await);
    let sql = |call: &str| format!("SELECT pg_{call}({first}, {second})");
    let try_lock =
        async || -> bool { theirs.query_one(&sql("try_advisory_lock"), &[]).await.unwrap().get(0) };
    assert!(try_lock().await);
    let error = ours.lock(&key).ttl(TTL).try_acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Held, "{error}");
    assert!(error.to_string().contains("PostgreSQL backend"), "{error}");
    let waiting = tokio::spawn(ours.lock(&key).ttl(TTL).acquire());
    until("our wait", async || ours.inspect(&key).await.unwrap().waiters.len() == 1).await;
    theirs.execute(&sql("advisory_unlock"), &[]).await.unwrap();
    let guard = waiting.await.unwrap().unwrap();
    assert!(!try_lock().await, "held by us");
    guard.release().await.unwrap();
    assert!(try_lock().await, "free again");
}

/// A participant that is psql: it sends what it is told, and ends with its input.
pub(crate) struct Psql {
    child: Child,
    input: Option<ChildStdin>,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Psql {
    pub(crate) fn start(programs: &Path, url: &str) -> Self {
        let mut psql = Command::new(programs.join("psql"));
        psql.args([url, "-XAtq"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = psql.spawn().unwrap();
        let (input, output) = (child.stdin.take(), child.stdout.take().unwrap());
        Self { child, input, answers: BufReader::new(output).lines() }
    }

    pub(crate) fn ask(&mut self, sql: &str) -> String {
        writeln!(self.input.as_mut().unwrap(), "{sql};").unwrap();
        self.answers.next().unwrap().unwrap()
    }
}

impl Drop for Psql {
    fn drop(&mut self) {
        self.input = None;
        self.child.wait().ok();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn psql_that_only_tries_excludes_us_and_is_excluded() {
    let Some(url) = services::postgres() else { return };
    let Some(programs) = services::postgres_programs() else { return };
    let (key, first, second) = pair();
    let (ours, theirs) = (client(&url), || Psql::start(&programs, &url));
    let lock = format!("SELECT pg_try_advisory_lock({first},{second})");
    let mut one = theirs();
    assert_eq!(one.ask(&lock), "t");
    let error = ours.lock(&key).ttl(TTL).try_acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Held, "{error}");
    let election = ours.election(&key).ttl(TTL).start().await.unwrap();
    until("our wait", async || ours.inspect(&key).await.unwrap().waiters.len() == 1).await;
    assert!(!election.is_leader());
    let mut two = theirs();
    assert_eq!(two.ask(&lock), "f", "held by the other");
    drop(one);
    assert!(election.wait_for_leadership(TTL * 10).await.unwrap(), "its session has ended");
    assert_eq!(two.ask(&lock), "f", "held by us");
    election.shutdown(None).await.unwrap();
    assert_eq!(two.ask(&lock), "t", "free again");
    assert_eq!(two.ask(&format!("SELECT pg_advisory_unlock({first},{second})")), "t");
    ours.lock(&key).ttl(TTL).try_acquire().await.unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_in_session_mode_serves() {
    let (Some(url), Some(pool)) = (services::postgres(), services::pgbouncer_in_session_mode())
    else {
        return;
    };
    let (key, ..) = pair();
    let (direct, pooled) = (client(&url), client(&pool));
    let guard = pooled.lock(&key).ttl(TTL).acquire().await.unwrap();
    let held = direct.lock(&key).ttl(TTL).try_acquire().await.unwrap_err();
    assert_eq!(held.kind(), ErrorKind::Held, "{held}");
    let waiting = tokio::spawn(direct.lock(&key).ttl(TTL).acquire());
    // Proved again and again on the same session.
    tokio::time::sleep(TTL * 2).await;
    assert!(guard.is_held() && !waiting.is_finished());
    let before = guard.fencing_token();
    guard.release().await.unwrap();
    let next = waiting.await.unwrap().unwrap();
    assert!(next.fencing_token() > before);
    next.release().await.unwrap();

    // The pool notices that a client is gone, and reuses its session only after the lock is free.
    let mut worker = Worker::start(&pool, "lead", &key);
    worker.tells("leads").await;
    let waiting = tokio::spawn(direct.lock(&key).ttl(TTL).acquire());
    until("our wait", async || direct.inspect(&key).await.unwrap().waiters.len() == 1).await;
    worker.kill();
    waiting.await.unwrap().unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_is_the_pair_that_the_docs_say() {
    let Some(url) = services::postgres() else { return };
    let name = format!("reports/nightly/{}", std::process::id());
    let sql = stranger(&url).await;
    let page = include_str!("../../../../docs/postgres-advisory.md");
    let (_, block) = page.split_once("```sql\n").unwrap();
    let pair = block.split_once("```").unwrap().0.replace("reports/nightly", &name);
    let pair = sql.query_one(&pair, &[]).await.unwrap();
    let (first, second): (i32, i32) = (pair.get("key1"), pair.get("key2"));
    let lock = format!("SELECT pg_try_advisory_lock({first}, {second})");
    let ours = client(&url);
    let guard = ours.lock(&name).ttl(TTL).acquire().await.unwrap();
    assert!(!sql.query_one(&lock, &[]).await.unwrap().get::<_, bool>(0), "the same lock");
    let shown = ours.store().list(KeySpace::Lock, &name, None).await.unwrap();
    assert_eq!(shown.len(), 1, "by its name: {shown:?}");
    guard.release().await.unwrap();
    assert!(sql.query_one(&lock, &[]).await.unwrap().get::<_, bool>(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_role_without_rights_can_do_all_and_is_seen_by_others() {
    let Some(url) = services::postgres() else { return };
    let (key, ..) = pair();
    let admin = stranger(&url).await;
    let role = format!("tenure_plain_{}", std::process::id());
    admin
        .batch_execute(&format!("CREATE ROLE {role} LOGIN; CREATE ROLE {role}_2 LOGIN"))
        .await
        .unwrap();
    let one = client(&url.replace("postgres@", &format!("{role}@")));
    let two = client(&url.replace("postgres@", &format!("{role}_2@")));
    let guard = one.lock(&key).id("web-1").note("deploy 42").ttl(TTL).acquire().await.unwrap();
    // Another role sees the name and the token, and no more.
    let error = two.lock(&key).ttl(TTL).try_acquire().await.unwrap_err();
    assert!(error.to_string().contains("web-1"), "{error}");
    let state = two.inspect(&key).await.unwrap();
    assert_eq!(state.holders[0].token, guard.fencing_token());
    assert!(state.holders[0].held_for.is_none());
    let key = Key::new(&key).unwrap();
    let denied = two.store().evict(&key, guard.fencing_token(), "a test").await.unwrap_err();
    assert_eq!(denied.kind(), ErrorKind::Denied, "{denied}");
    let own = one.inspect(&key).await.unwrap();
    assert_eq!(own.holders[0].by.as_ref().unwrap().note, "deploy 42");
    assert!(own.holders[0].held_for.is_some_and(|held| held < TTL));
    guard.release().await.unwrap();
    drop((one, two));
    let gone = format!("SELECT count(*) = 0 FROM pg_stat_activity WHERE usename LIKE '{role}%'");
    until("the end of idle sessions", async || admin.query_one(&gone, &[]).await.unwrap().get(0))
        .await;
    admin.batch_execute(&format!("DROP ROLE {role}; DROP ROLE {role}_2")).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn waits_that_are_cut_short_all_the_time_lose_nothing() {
    const ROUNDS: u32 = 60;
    let Some(url) = services::postgres() else { return };
    let (key, ..) = pair();
    let (inside, entered) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let mut tasks = Vec::new();
    for task in 0..4 {
        // Each wait ends about when the lock comes free: the server may say "too late" and have granted it.
        let url = format!("{}?wait={}ms", advisory(&url), 2 + task);
        let client = Client::connect(&url).await.unwrap();
        let (key, inside, entered) = (key.clone(), Arc::clone(&inside), Arc::clone(&entered));
        tasks.push(tokio::spawn(async move {
            for _ in 0..ROUNDS {
                let guard = client.lock(&key).ttl(TTL * 5).acquire().await.unwrap();
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two are inside at once");
                tokio::time::sleep(Duration::from_millis(2)).await;
                inside.fetch_sub(1, Ordering::SeqCst);
                entered.fetch_add(1, Ordering::SeqCst);
                guard.release().await.unwrap();
            }
        }));
    }
    for task in tasks {
        tokio::time::timeout(Duration::from_secs(60), task)
            .await
            .expect("no lock is lost")
            .unwrap();
    }
    assert_eq!(entered.load(Ordering::SeqCst), ROUNDS * 4);
    let state = client(&url).inspect(&key).await.unwrap();
    assert!(state.holders.is_empty() && state.waiters.is_empty(), "{state:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_outlive_a_crash_at_any_moment() {
    let Some(mut server) = Server::start() else { return };
    let (key, ..) = pair();
    let mut last = None;
    for _ in 0..3 {
        let client = client(&server.url());
        let guard = client.lock(&key).ttl(TTL * 5).acquire().await.unwrap();
        // Before the server has had the time to write down what it need not.
        server.down();
        assert!(Some(guard.fencing_token()) > last, "{:?} after {last:?}", guard.fencing_token());
        last = Some(guard.fencing_token());
        assert!(tokio::time::timeout(TTL, guard.lost()).await.is_ok(), "told by the connection");
        server.up();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_grow_over_a_fail_over_that_loses_transactions() {
    let Some(mut primary) = Server::start() else { return };
    let standby = primary.standby();
    let (key, ..) = pair();
    let refused = client(&standby.url()).lock(&key).ttl(TTL).try_acquire().await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Misconfigured, "{refused}");
    assert!(refused.to_string().contains("standby"), "{refused}");
    let replica = stranger(&standby.url()).await;
    replica.batch_execute("ALTER SYSTEM SET primary_conninfo = ''").await.unwrap();
    replica.batch_execute("SELECT pg_reload_conf()").await.unwrap();
    until("the end of replication", async || {
        let sql = "SELECT count(*) = 0 FROM pg_stat_wal_receiver";
        replica.query_one(sql, &[]).await.unwrap().get(0)
    })
    .await;
    let both = format!(
        "postgres+advisory://postgres@127.0.0.1:{},127.0.0.1:{}/postgres",
        primary.port, standby.port
    );
    let holder = Client::connect(&both).await.unwrap();
    let mut lost = holder.lock(&key).ttl(TTL).acquire().await.unwrap();
    for _ in 0..5 {
        lost.release().await.unwrap();
        lost = holder.lock(&key).ttl(TTL).acquire().await.unwrap();
    }
    primary.down();
    standby.promote();
    let next = holder.lock(&key).ttl(TTL).acquire().await.unwrap();
    assert!(next.fencing_token() > lost.fencing_token(), "tokens grow over the fail-over");
    assert_eq!(next.fencing_token().epoch(), lost.fencing_token().epoch() + 1);
    assert!(!lost.is_held());
    next.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_can_be_made_by_the_user() {
    let Some(url) = services::postgres() else { return };
    let (key, ..) = pair();
    let made = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&made);
    let plain = url.clone();
    let store = PgAdvisoryStore::with_connections(move || {
        count.fetch_add(1, Ordering::SeqCst);
        let plain = plain.clone();
        async move { tokio_postgres::connect(&plain, NoTls).await }
    });
    let own = Client::with_store(Arc::new(store));
    let guard = own.lock(&key).ttl(TTL).acquire().await.unwrap();
    assert!(made.load(Ordering::SeqCst) > 0);
    let error = client(&url).lock(&key).ttl(TTL).try_acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Held);
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_is_reached_by_its_local_socket_and_past_one_that_does_not_answer() {
    let Some(server) = Server::start() else { return };
    let (key, ..) = pair();
    let folder = server.folder().display().to_string().replace('/', "%2F");
    let local = format!("postgres://postgres@{folder}:{}/postgres", server.port);
    client(&local).lock(&key).ttl(TTL).acquire().await.unwrap().release().await.unwrap();

    let silent = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let port = silent.local_addr().unwrap().port();
    let both = format!("postgres://postgres@127.0.0.1:{port},127.0.0.1:{}/postgres", server.port);
    let guard = client(&both).lock(&key).ttl(TTL * 4).try_acquire().await.unwrap();
    guard.release().await.unwrap();
}
