//! What cannot work is refused once, with what to do, and never with a password.

use std::collections::BTreeMap;
use std::error::Error as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tenure::election::{Event, StopReason};
use tenure::store::Finding;
use tenure::{Client, Error, ErrorKind, PgAdvisoryStore};
use tokio::task::JoinSet;
use tokio_postgres::Row;

use crate::server::Server;
use crate::services;
use crate::support::{TTL, advisory, client, pair, stranger, until};

pub(crate) fn says(error: &Error, kind: ErrorKind, part: &str) {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    assert_eq!(error.kind(), kind, "{text}");
    assert!(text.contains(part), "{part:?} in {text}");
    assert!(!text.contains("hunter2"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pooler_in_transaction_mode_is_refused() {
    let Some(url) = services::pgbouncer() else { return };
    let (key, first, second) = pair();
    for attempt in 0..3 {
        let client = client(&url);
        let error = client.lock(&key).ttl(TTL).acquire().await.unwrap_err();
        says(&error, ErrorKind::Misconfigured, "session mode");
        let election = client.election(&key).ttl(TTL).build().unwrap();
        let mut events = election.events();
        election.start().await.unwrap();
        let mut errors = 0;
        loop {
            match events.next().await.unwrap() {
                Event::Error(_) => errors += 1,
                Event::Stopped(StopReason::Failed(error)) => {
                    says(&error, ErrorKind::Misconfigured, "postgres://");
                    break;
                }
                Event::Acquired(_) => panic!("leads through a pooler"),
                _ => {}
            }
        }
        assert_eq!(errors, 1, "attempt {attempt}");
    }
    let direct = stranger(&services::postgres().unwrap()).await;
    let sql = format!("SELECT pg_try_advisory_lock({first}, {second})");
    assert!(direct.query_one(&sql, &[]).await.unwrap().get::<_, bool>(0), "nothing was left");
}

/// Server sessions of a pool and their settings, but for those that PgBouncer sets for each client itself.
pub(crate) async fn pool_settings(pool: &str) -> BTreeMap<i32, String> {
    const QUERY: &str = "SELECT pg_backend_pid(), (SELECT string_agg(name || '=' || setting, ' ' ORDER BY name) \
         FROM pg_settings WHERE name NOT IN ('application_name', 'client_encoding', 'DateStyle', 'TimeZone', \
         'standard_conforming_strings', 'IntervalStyle')), current_setting('tenure.session', true), \
         (SELECT count(*) FROM pg_listening_channels()), pg_sleep(0.05)";
    // All at once, so that every session of the pool answers.
    let mut answers = JoinSet::new();
    for _ in 0..16 {
        let client = stranger(pool).await;
        answers.spawn(async move { client.query_typed(QUERY, &[]).await.unwrap() });
    }
    let rows = answers.join_all().await.into_iter().flatten();
    let text = |row: &Row| {
        let settings: String = row.get(1);
        format!("{settings} {:?} {}", row.get::<_, Option<String>>(2), row.get::<_, i64>(3))
    };
    rows.map(|row| (row.get(0), text(&row))).collect()
}

/// Every start is refused however busy the pool is, and sets nothing on the sessions that other clients get next.
/// `TENURE_SOAK_POOLER=1000` is the number of starts.
#[tokio::test(flavor = "multi_thread")]
async fn a_refused_start_leaves_no_trace_in_a_busy_pool() {
    let (Some(pooler), Some(server)) = (services::pgbouncer(), services::postgres()) else {
        return;
    };
    let starts = std::env::var("TENURE_SOAK_POOLER").map_or(60, |count| count.parse().unwrap());
    let database = format!("pool_{}", std::process::id());
    let admin = stranger(&server).await;
    admin.batch_execute(&format!("CREATE DATABASE {database}")).await.unwrap();
    let url = format!("{}/{database}", pooler.rsplit_once('/').unwrap().0);
    let stop = Arc::new(AtomicBool::new(false));
    let mut others = JoinSet::new();
    for _ in 0..12 {
        let (client, stop) = (stranger(&url).await, Arc::clone(&stop));
        others.spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                client.batch_execute("SELECT pg_sleep(random() * 0.003)").await.unwrap();
            }
        });
    }
    let before = pool_settings(&url).await;
    let (key, ..) = pair();
    let mut refused = 0;
    for _ in 0..starts / 5 {
        let mut attempts = JoinSet::new();
        for nth in 0..5 {
            let (client, key) = (client(&url), key.clone());
            attempts.spawn(async move {
                if nth == 0 {
                    let findings = client.examine(TTL * 10).await;
                    let names = |it: &Finding| it.detail.contains("PgBouncer in transaction mode");
                    assert!(findings.iter().any(names), "{findings:?}");
                }
                client.lock(&key).ttl(TTL * 10).acquire().await.map(|guard| guard.fencing_token())
            });
        }
        for attempt in attempts.join_all().await {
            says(&attempt.unwrap_err(), ErrorKind::Misconfigured, "PgBouncer in transaction mode");
            refused += 1;
        }
    }
    let after = pool_settings(&url).await;
    stop.store(true, Ordering::Relaxed);
    while others.join_next().await.is_some() {}
    assert_eq!(refused, starts);
    assert!(before.len() >= 4, "few sessions: {}", before.len());
    let same = |text: &String| before.values().next() == Some(text);
    assert!(before.values().all(same) && after.values().all(same), "{before:#?}\n{after:#?}");
    println!("{refused} starts were refused; {} sessions of the pool are as before", after.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_input_is_told_once_and_names_the_server() {
    let Some(server) = Server::start() else { return };
    let (key, ..) = pair();
    let admin = stranger(&server.url()).await;
    admin.batch_execute("CREATE ROLE locked_out LOGIN PASSWORD 'right'").await.unwrap();
    let at = |user: &str, database: &str| {
        format!("postgres+advisory://{user}@127.0.0.1:{}/{database}", server.port)
    };
    let refusal = async |url: &str, key: &str| {
        let client = Client::connect(url).await.unwrap();
        // Time enough for each answer, on a busy machine as well.
        client.lock(key).ttl(TTL * 10).try_acquire().await.unwrap_err()
    };
    let place = format!("127.0.0.1:{}/postgres", server.port);
    says(&refusal(&at("locked_out:hunter2", "postgres"), &key).await, ErrorKind::Denied, &place);
    says(&refusal(&at("postgres", "nowhere"), &key).await, ErrorKind::Misconfigured, "nowhere");
    let tls = format!("{}?sslmode=require", at("postgres:hunter2", "postgres"));
    says(&refusal(&tls, &key).await, ErrorKind::Denied, "does not support TLS");
    let far = refusal(&at("postgres", "postgres"), "4294967296,1").await;
    says(&far, ErrorKind::Invalid, "32 bits");
    let client = Client::connect(&at("postgres", "postgres")).await.unwrap();
    let far = client.election("4294967296,1").build().unwrap_err();
    says(&far, ErrorKind::Invalid, "32 bits");
    for bad in ["postgres+advisory://u:hunter2@[::1", "postgres+advisory://h/d?wait=never"] {
        let error = Client::connect(bad).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(!error.to_string().contains("hunter2"), "{error}");
    }

    let revoked = "CREATE ROLE plain LOGIN PASSWORD 'right'; \
                   REVOKE EXECUTE ON FUNCTION pg_try_advisory_lock(int, int) FROM PUBLIC";
    admin.batch_execute(revoked).await.unwrap();
    let denied = refusal(&at("plain:right", "postgres"), &key).await;
    says(&denied, ErrorKind::Denied, "GRANT EXECUTE ON FUNCTION pg_try_advisory_lock");
    admin
        .batch_execute("GRANT EXECUTE ON FUNCTION pg_try_advisory_lock(int, int) TO PUBLIC")
        .await
        .unwrap();

    // One error, and no storm of connections.
    let client = Client::connect(&at("locked_out:hunter2", "postgres")).await.unwrap();
    let election = client.election(&key).build().unwrap();
    let mut events = election.events();
    let refused = || server.log().matches("password authentication failed").count();
    let before = refused();
    election.start().await.unwrap();
    let mut errors = 0;
    loop {
        match events.next().await.unwrap() {
            Event::Error(error) => {
                says(&error, ErrorKind::Denied, "password");
                errors += 1;
            }
            Event::Stopped(StopReason::Failed(error)) => {
                says(&error, ErrorKind::Denied, "password");
                break;
            }
            _ => {}
        }
    }
    assert_eq!(errors, 1);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(refused() - before, 1, "as the server saw it: {}", server.log());
    let right = Client::connect(&at("locked_out:right", "postgres")).await.unwrap();
    right.lock(&key).ttl(TTL).acquire().await.unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_down_at_the_start_is_waited_for() {
    let Some(mut server) = Server::start() else { return };
    let (key, ..) = pair();
    let url = advisory(&server.url());
    server.down();
    let client = Client::connect(&url).await.unwrap();
    let election = client.election(&key).ttl(TTL).build().unwrap();
    let mut events = election.events();
    election.start().await.unwrap();
    loop {
        if let Event::Error(error) = events.next().await.unwrap() {
            says(&error, ErrorKind::Unavailable, "is the server up?");
            break;
        }
    }
    server.up();
    assert!(election.wait_for_leadership(Duration::from_secs(30)).await.unwrap());
    election.shutdown(None).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_dies_in_the_middle_of_a_wait_is_named_and_waited_for() {
    let Some(mut server) = Server::start() else { return };
    let (key, ..) = pair();
    let url = server.url();
    let place = format!("127.0.0.1:{}/postgres", server.port);
    let (one, two) = (client(&url), client(&url));
    let guard = one.lock(&key).ttl(TTL).acquire().await.unwrap();
    let bounded = two.lock(&key).ttl(TTL).timeout(TTL * 2).enqueue().await.unwrap();
    let election = two.election(&key).ttl(TTL).build().unwrap();
    let mut events = election.events();
    election.start().await.unwrap();
    until("two in the queue", async || one.inspect(&key).await.unwrap().waiters.len() == 2).await;
    server.down();
    let error = bounded.wait().await.unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Unknown), "{error}");
    assert!(error.to_string().contains(&place), "{error}");
    loop {
        if let Event::Error(error) = events.next().await.unwrap() {
            assert!(error.to_string().contains(&place), "{error}");
            break;
        }
    }
    assert!(!guard.is_held());
    server.up();
    assert!(election.wait_for_leadership(Duration::from_secs(30)).await.unwrap());
    election.shutdown(None).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn terms_that_cannot_be_counted_are_refused_and_nothing_is_left() {
    let Some(url) = services::postgres() else { return };
    let (key, first, second) = pair();
    let admin = stranger(&url).await;
    let name = format!("tenure_terms_{}", std::process::id());
    let counted = format!("{url}?terms={name}");
    let refusal = async || client(&counted).lock(&key).ttl(TTL).acquire().await.unwrap_err();
    says(&refusal().await, ErrorKind::Misconfigured, "tenure schema --apply");
    admin.batch_execute(&format!("CREATE TABLE {name} (key1 int, key2 int)")).await.unwrap();
    says(&refusal().await, ErrorKind::Misconfigured, "is not a table of terms");
    let store = PgAdvisoryStore::open(&advisory(&counted)).unwrap();
    says(&store.apply_schema().await.unwrap_err(), ErrorKind::Misconfigured, "nothing was changed");
    admin.batch_execute(&format!("DROP TABLE {name}")).await.unwrap();
    store.apply_schema().await.unwrap();
    store.apply_schema().await.unwrap();
    let try_lock = format!("SELECT pg_try_advisory_lock({first}, {second})");
    let free = async || -> bool { admin.query_one(&try_lock, &[]).await.unwrap().get(0) };
    until("nothing is left", free).await;
    admin.batch_execute(&format!("SELECT pg_advisory_unlock({first}, {second})")).await.unwrap();
    let ours = client(&counted);
    for term in 1..=3_i64 {
        ours.lock(&key).ttl(TTL).acquire().await.unwrap().release().await.unwrap();
        ours.lock(&key).shared().ttl(TTL).acquire().await.unwrap().release().await.unwrap();
        let sql = format!("SELECT terms FROM {name} WHERE key1 = {first} AND key2 = {second}");
        assert_eq!(admin.query_one(&sql, &[]).await.unwrap().get::<_, i64>(0), term);
    }
    let error = Client::connect("postgres+advisory://h/d?terms=No-Name").await.unwrap_err();
    says(&error, ErrorKind::Invalid, "terms=NAME");
    admin.batch_execute(&format!("DROP TABLE {name}")).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_function_is_told_in_the_language_of_the_server() {
    let Some(server) = Server::start_with(None, "lc_messages = 'C.UTF-8'\n") else { return };
    let admin = stranger(&server.url()).await;
    let spoken = admin.batch_execute("SELECT missing").await.unwrap_err();
    if spoken.as_db_error().unwrap().severity() == "ERROR" {
        services::skip::skip("PostgreSQL has no messages in another language here");
        return;
    }
    let revoked = "CREATE ROLE plain LOGIN; \
                   REVOKE EXECUTE ON FUNCTION pg_try_advisory_lock(int, int) FROM PUBLIC";
    admin.batch_execute(revoked).await.unwrap();
    let plain = client(&server.url().replace("postgres@", "plain@"));
    let denied = plain.lock(pair().0).ttl(TTL * 10).try_acquire().await.unwrap_err();
    says(&denied, ErrorKind::Denied, "GRANT EXECUTE on the function");
    says(&denied, ErrorKind::Denied, "pg_try_advisory_lock");
    assert!(!denied.to_string().contains("table"), "{denied}");
}
