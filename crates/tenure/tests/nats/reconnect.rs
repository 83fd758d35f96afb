//! Requests around the end of a connection.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tenure::store::{Answer, Claim, Grant, Identity, Mode};
use tenure::{Client, ErrorKind, Key};

use crate::raw::Raw;
use crate::services;
use crate::support::{Server, connect, unique, until};

const TTL: Duration = Duration::from_secs(20);
/// Time limit of requests that are expected to fail.
const SHORT: Duration = Duration::from_millis(200);

fn claim(id: u128) -> Claim {
    Claim {
        id,
        key: Key::new("key").expect("a key"),
        mode: Mode::Exclusive,
        ttl: TTL,
        by: Arc::new(Identity::default()),
        queue: false,
        fail_if_contended: false,
        fair: false,
        detached: false,
    }
}

/// Claims until the server answers again.
async fn granted(client: &Client, id: u128) -> Grant {
    let begun = Instant::now();
    loop {
        match client.store().claim(&claim(id), TTL).await {
            Ok(Answer::Granted(grant)) => return grant,
            answer => assert!(begun.elapsed() < TTL, "{answer:?}"),
        }
    }
}

/// Number of messages that the bucket has taken.
async fn writes(raw: &Raw) -> u64 {
    let info = raw.info().await.expect("the server answers");
    info["state"]["last_seq"].as_u64().expect("a sequence")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_during_an_outage_is_not_written_after_it() {
    let Some(program) = services::nats_server() else { return };
    let mut server = Server::start(&program);
    let url = format!("{}/{}", server.url(), unique("reconnect"));
    let client = connect(&url).await;
    granted(&client, 1).await.hold.release(TTL).await.expect("held");
    let before = writes(&Raw::connect(&url).await).await;
    server.kill();
    // The free record is known, so that each of these claims is a write without a read.
    for id in 2..5 {
        let error = client.store().claim(&claim(id), SHORT).await.expect_err("no server");
        assert!(matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Unknown), "{error}");
    }
    server.resume_after_kill();
    // Over the connection of the claims: whatever they left to be sent is sent before this answer.
    until("the client is connected again", async || {
        client.store().inspect(&claim(0).key, claim(0).mode.space()).await.is_ok()
    })
    .await;
    assert_eq!(writes(&Raw::connect(&url).await).await, before, "written after the outage");
}
