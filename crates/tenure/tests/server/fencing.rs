//! Fencing tokens of servers without our extension: none, unless the URL declares that they are ordered.

use std::time::Duration;

use tenure::fence::Gate;
use tenure::store::FindingLevel;
use tenure::{Client, ErrorKind, FencingToken, Guard};

use crate::script::Script;
use crate::support::TestServer;

/// Holders in a row, each granted the lock by a plain server with one of these tokens.
async fn holders(options: &str, tokens: &[u128], mut each: impl FnMut(&Guard)) {
    let script = Script::new().await;
    let url = format!("{}{options}", script.url());
    let (client, mut peer) = tokio::join!(Client::connect(&url), script.plain());
    let client = client.expect("a server");
    for token in tokens {
        let served = async {
            assert_eq!(peer.request().await[0], "l");
            peer.say(&format!("ok {token:032x} 15")).await;
        };
        let (guard, ()) = tokio::join!(client.lock("k").acquire(), served);
        let guard = guard.expect("free");
        each(&guard);
        let served = async {
            assert_eq!(peer.request().await, ["r".to_owned(), "k".into(), format!("{token:032x}")]);
            peer.say("ok").await;
        };
        let (released, ()) = tokio::join!(guard.release(), served);
        released.expect("it was held");
    }
}

/// Numbers without an order, as version 4 UUIDs are: the tokens of dflockd 1.x.
fn unordered(count: u128) -> Vec<u128> {
    let mix = |n: u128| n.wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835).rotate_left(64);
    (1..=count).map(mix).collect()
}

#[tokio::test]
async fn no_rightful_holder_is_refused_for_a_number_without_order() {
    let (gate, mut refused) = (Gate::new(), 0);
    holders("", &unordered(20), |guard| {
        let admitted = gate.admit(guard.fencing_token());
        refused += usize::from(admitted.is_err_and(|stale| stale.offered.as_u128() != 0));
    })
    .await;
    assert_eq!(
        refused, 0,
        "of 20 holders in a row, refused by a gate as older than the one before"
    );
}

#[tokio::test]
async fn a_server_without_our_extension_gives_no_token() {
    let gate = Gate::new();
    holders("", &unordered(2), |guard| {
        assert_eq!(guard.fencing_token(), FencingToken::NONE);
        let refused = tenure::Error::from(gate.admit(guard.fencing_token()).unwrap_err());
        assert_eq!(refused.kind(), ErrorKind::Unsupported);
        assert!(refused.to_string().contains("?fencing=ordered"), "{refused}");
    })
    .await;
}

#[tokio::test]
async fn a_server_that_is_declared_ordered_gives_its_numbers() {
    let (gate, mut last) = (Gate::new(), FencingToken::NONE);
    // The number is the first half, the second one is secret.
    let tokens: Vec<u128> = (7..10).map(|n| n << 64 | u128::from(u64::MAX - 5)).collect();
    holders("?fencing=ordered", &tokens, |guard| {
        last = guard.fencing_token();
        gate.admit(last).expect("newer than the one before");
    })
    .await;
    assert_eq!(last, FencingToken::new(0, 9));
}

#[tokio::test]
async fn plain_server_fencing_is_declared_in_capabilities_and_findings() {
    let server = TestServer::start(|setup| setup.settings.extension = false);
    for (options, ordered, verdict) in
        [("", false, FindingLevel::Warning), ("?fencing=ordered", true, FindingLevel::Ok)]
    {
        let client = Client::connect(&format!("{}{options}", server.url())).await.expect("serves");
        assert_eq!(client.store().capabilities().ordered_tokens, ordered);
        assert!(client.store().to_string().ends_with(options), "{}", client.store());
        let findings = client.examine(Duration::from_secs(10)).await;
        let of = |what| findings.iter().find(|finding| finding.what == what).expect("a finding");
        assert_eq!(of("fencing tokens").level, verdict);
        let (can, cannot) =
            of("abilities").detail.split_once("; not supported: ").expect("not everything");
        let part = if ordered { can } else { cannot };
        assert!(part.contains("ordered fencing tokens"), "{}", of("abilities").detail);
        let guard = client.lock("k").acquire().await.expect("free");
        assert_eq!(guard.fencing_token().is_none(), !ordered);
        let error = client.store().evict(guard.key(), guard.fencing_token(), "a test").await;
        let error = error.expect_err("the protocol has no such request");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("plain protocol"), "{error}");
        guard.release().await.expect("held");
    }
    let error = Client::connect(&format!("{}?fencing=maybe", server.url())).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
}
