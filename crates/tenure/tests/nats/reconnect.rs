//! Requests around the end of a connection.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tenure::store::{Answer, Claim, Grant, Identity, KeySpace, Mode};
use tenure::{Client, ErrorKind, Key};

use crate::raw::Raw;
use crate::services;
use crate::support::{Server, connect, unique, until};

const TTL: Duration = Duration::from_secs(20);
/// Time limit of requests that are expected to fail.
const SHORT: Duration = Duration::from_millis(200);

fn claim(key: &str, id: u128) -> Claim {
    {
        let mut claim = Claim::new(
            id,
            Key::new(key).expect("a key"),
            Mode::Exclusive,
            TTL,
            Arc::new(Identity::default()),
        );
        claim.queue = false;
        claim
    }
}

/// Claims until the server answers again.
async fn granted(client: &Client, key: &str, id: u128) -> Grant {
    let begun = Instant::now();
    loop {
        match client.store().claim(&claim(key, id), TTL).await {
            Ok(Answer::Granted(grant)) => return grant,
            answer => assert!(begun.elapsed() < TTL, "{answer:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_during_an_outage_is_not_written_after_it() {
    let Some(program) = services::nats_server() else { return };
    let mut server = Server::start(&program);
    let url = format!("{}/{}", server.url(), unique("reconnect"));
    let client = connect(&url).await;
    for key in ["probe", "key"] {
        granted(&client, key, 1).await.hold.release(TTL).await.expect("held");
    }
    let before = Raw::connect(&url).await.revision("lock.key").await;
    let known_since = Instant::now();
    server.kill();
    // The free records are known for two seconds: until then a claim is a write without a read. The claims of the probe
    // go on until the client has noticed the outage.
    while known_since.elapsed() < Duration::from_secs(1) {
        let error = client.store().claim(&claim("probe", 2), SHORT).await.expect_err("no server");
        if error.kind() == ErrorKind::Unavailable {
            break;
        }
    }
    for id in 3..6 {
        let error = client.store().claim(&claim("key", id), SHORT).await.expect_err("no server");
        assert!(matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Unknown), "{error}");
    }
    server.resume_after_kill();
    // Over the connection of the claims: what they have left to be sent is sent before this answer.
    until("the client is connected again", async || {
        client.store().inspect(&claim("key", 0).key, KeySpace::Lock).await.is_ok()
    })
    .await;
    let after = Raw::connect(&url).await.revision("lock.key").await;
    assert_eq!(after, before, "written after the outage");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeated_claim_repeats_no_renewal_count_of_its_earlier_hold() {
    let Some(program) = services::nats_server() else { return };
    let mut server = Server::start(&program);
    let url = format!("{}/{}", server.url(), unique("reconnect"));
    let client = connect(&url).await;
    let mut first = granted(&client, "key", 1).await;
    server.kill();
    first.hold.renew(TTL, SHORT).await.expect_err("no server");
    drop(first);
    server.resume_after_kill();
    let mut second = granted(&client, "key", 1).await;
    second.hold.renew(TTL, TTL).await.expect("held");
    let record = Raw::connect(&url).await.value("lock.key").await;
    assert_eq!(record["holders"][0]["beat"], 2, "the first renewal may still land: {record}");
}
