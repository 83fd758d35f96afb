//! What cannot work is refused once, with what to do, and never with a password.

use std::error::Error as _;
use std::time::Duration;

use tenure::election::{Event, StopReason};
use tenure::{Client, Error, ErrorKind, PgAdvisoryStore};

use crate::server::Server;
use crate::services;
use crate::support::{TTL, advisory, client, pair, stranger, until};

fn says(error: &Error, kind: ErrorKind, part: &str) {
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
    for bad in ["postgres+advisory://u:hunter2@[::1", "postgres+advisory://h/d?wait=never"] {
        let error = Client::connect(bad).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(!error.to_string().contains("hunter2"), "{error}");
    }

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
