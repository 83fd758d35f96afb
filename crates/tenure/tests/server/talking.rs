//! What is said to a server, and what becomes of claims when it answers late, oddly or not at all.

use std::sync::Arc;
use std::time::Duration;

use tenure::store::{
    Answer, Claim, Grant, HoldEvent, Identity, KeySpace, LeaseStart, Mode, Place, Waited,
};
use tenure::{Client, Clock, ErrorKind, FencingToken, Key, LockServerStore, Loss, Store};
use tokio::net::TcpStream;

use crate::script::{Peer, Script};
use crate::support::{TestServer, until};

const TOKEN: &str = "000000000000002adeadbeef00000001";
pub(crate) const LIMIT: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(30);
const TTL: Duration = Duration::from_millis(1500);

pub(crate) fn claim(id: u128, queue: bool) -> Claim {
    {
        let mut claim = Claim::new(
            id,
            Key::new("a b").expect("a key"),
            Mode::Exclusive,
            TTL,
            Arc::new(Identity::default()),
        );
        claim.queue = queue;
        claim
    }
}

pub(crate) async fn connected(script: &Script) -> (Arc<dyn Store>, Peer) {
    let url = script.url();
    let (client, peer) = tokio::join!(Client::connect(&url), script.greeted("1", 86_400_000));
    (Arc::clone(client.expect("greeted").store()), peer)
}

async fn connected_plainly(script: &Script) -> (Arc<dyn Store>, Peer) {
    let url = script.url();
    let (client, peer) = tokio::join!(Client::connect(&url), script.plain());
    (Arc::clone(client.expect("greeted").store()), peer)
}

fn granted(answer: tenure::Result<Answer>) -> Grant {
    match answer {
        Ok(Answer::Granted(grant)) => grant,
        other => panic!("not granted: {other:?}"),
    }
}

/// A hold that the script granted.
async fn held(store: &Arc<dyn Store>, peer: &mut Peer) -> Grant {
    let claim = claim(1, true);
    let (answer, ()) = tokio::join!(store.claim(&claim, LIMIT), async {
        peer.request().await;
        peer.say(&format!("ok {TOKEN} 1500")).await;
    });
    granted(answer)
}

#[tokio::test]
async fn grant_that_arrives_after_the_claim_timed_out_is_abandoned() {
    let script = Script::new().await;
    let (store, mut peer) = connected(&script).await;
    for (late, queue) in [(format!("ok {TOKEN} 1500"), false), ("queued".to_owned(), true)] {
        let error = store.claim(&claim(1, queue), SHORT).await.expect_err("nothing was said");
        assert_eq!(error.kind(), ErrorKind::Unknown, "{error}");
        let [command, key, argument] = peer.request().await;
        assert_eq!((&*command, &*key), ("x", "a\u{1f}b"));
        let way = if queue { "queue" } else { "try" };
        let expected = format!("{:032x} x 1500 {way} bound ", 1);
        assert!(argument.starts_with(&expected), "{argument}");
        peer.say(&late).await;
        assert_eq!(peer.request().await, ["xa", "_", &format!("{:032x}", 1)]);
        peer.say("ok").await;
    }
}

#[tokio::test]
async fn a_claim_that_is_repeated_finds_what_the_first_sending_got() {
    let script = Script::new().await;
    let (store, mut peer) = connected(&script).await;
    store.claim(&claim(1, true), SHORT).await.expect_err("nothing was said");
    peer.request().await;
    let again = claim(1, true);
    let (answer, ()) = tokio::join!(store.claim(&again, LIMIT), async {
        peer.say(&format!("ok {TOKEN} 1500")).await;
    });
    let grant = granted(answer);
    assert_eq!(grant.lease_start, LeaseStart::FromConfirm, "it is not known since when");
    drop(grant);
    assert_eq!(peer.request().await[0], "xa", "sent once, and given back");
}

#[tokio::test]
async fn a_grant_that_is_pushed_has_to_be_confirmed() {
    let script = Script::new().await;
    let (store, mut peer) = connected(&script).await;
    let waiting = claim(1, true);
    let (answer, ()) = tokio::join!(store.claim(&waiting, LIMIT), async {
        peer.request().await;
        peer.say("queued").await;
        // For another, and something that only later servers say.
        peer.say(&format!("! granted {:032x} {TOKEN} 1500", 2)).await;
        peer.say("! news 7").await;
    });
    let Ok(Answer::Queued(mut place)) = answer else { panic!("not queued: {answer:?}") };
    let (waited, ()) = tokio::join!(place.wait(SHORT), async {
        assert_eq!(peer.request().await[0], "xp");
        peer.say("ok 3").await;
    });
    assert!(matches!(waited, Ok(Waited::StillQueued { ahead: Some(3) })), "{waited:?}");
    peer.say(&format!("! granted {:032x} {TOKEN} 1500", 1)).await;
    let waited = place.wait(LIMIT).await;
    let Ok(Waited::Granted(mut grant)) = waited else { panic!("not granted: {waited:?}") };
    assert_eq!((grant.lease_start, grant.token.number()), (LeaseStart::FromConfirm, 42));
    let (renewed, ()) = tokio::join!(grant.hold.renew(TTL, LIMIT), async {
        assert_eq!(peer.request().await, ["xn", "a\u{1f}b", &format!("{TOKEN} 1500")]);
        peer.say("ok 1500 2").await;
    });
    assert!(renewed.expect("renewed").handoff_requested);
    assert_eq!(grant.hold.event().await, HoldEvent::HandoffRequested);
    peer.say("! ended 42 evicted by hand").await;
    assert_eq!(grant.hold.event().await, HoldEvent::Lost(Loss::Evicted));
}

#[tokio::test]
async fn a_hold_is_lost_with_its_connection_however_that_ends() {
    for how in ["close", "nonsense"] {
        let script = Script::new().await;
        let (store, mut peer) = connected(&script).await;
        let mut hold = held(&store, &mut peer).await.hold;
        match how {
            "close" => drop(peer),
            nonsense => peer.say(nonsense).await,
        }
        assert_eq!(hold.event().await, HoldEvent::Lost(Loss::Disconnected), "{how}");
        let error = hold.renew(TTL, LIMIT).await.expect_err("lost");
        assert_eq!(error.kind(), ErrorKind::NotHeld, "{error}");
        let error = hold.release(LIMIT).await.expect_err("lost");
        assert_eq!(error.kind(), ErrorKind::NotHeld, "{error}");
        assert!(
            hold.keep_open()
                .and_then(|open| open.upgrade())
                .is_some_and(|open| open.keep_open().is_err())
        );
        // The next request connects anew.
        let next = claim(2, false);
        let (answer, ()) = tokio::join!(store.claim(&next, LIMIT), async {
            let mut peer = script.greeted("2", 86_400_000).await;
            peer.request().await;
            peer.say("error_claimed_elsewhere").await;
        });
        assert_eq!(answer.expect_err("refused").kind(), ErrorKind::Unavailable);
    }
}

#[tokio::test]
async fn a_renewal_without_an_answer_leaves_the_hold_as_it_was() {
    let script = Script::new().await;
    let (store, mut peer) = connected(&script).await;
    let mut hold = held(&store, &mut peer).await.hold;
    let error = hold.renew(TTL, SHORT).await.expect_err("nothing was said");
    assert_eq!(error.kind(), ErrorKind::Unknown, "{error}");
    peer.request().await;
    let (renewed, ()) = tokio::join!(hold.renew(TTL, LIMIT), async {
        peer.request().await;
        peer.say("ok 1500 0").await;
        peer.say("error").await;
    });
    assert_eq!(renewed.expect_err("the answer to the second").kind(), ErrorKind::NotHeld);
}

#[tokio::test]
async fn a_lease_that_the_server_does_not_keep_is_refused() {
    let script = Script::new().await;
    let url = script.url();
    let (client, mut peer) = tokio::join!(Client::connect(&url), script.greeted("1", 2000));
    let store = Arc::clone(client.expect("greeted").store());
    let mut long = claim(1, true);
    long.ttl = Duration::from_secs(3);
    let error = store.claim(&long, LIMIT).await.expect_err("too long");
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    assert!(error.to_string().contains("2s"), "{error}");
    let shortened = claim(2, true);
    let (answer, ()) = tokio::join!(store.claim(&shortened, LIMIT), async {
        peer.request().await;
        peer.say(&format!("ok {TOKEN} 1499")).await;
        assert_eq!(peer.request().await[0], "xa", "given back");
    });
    assert_eq!(answer.expect_err("shorter than asked").kind(), ErrorKind::Invalid);
}

#[tokio::test]
async fn a_renewal_for_less_than_the_ttl_is_refused() {
    let script = Script::new().await;
    let (store, mut peer) = connected(&script).await;
    let mut hold = held(&store, &mut peer).await.hold;
    let (renewed, ()) = tokio::join!(hold.renew(TTL, LIMIT), async {
        peer.request().await;
        peer.say("ok 1499 0").await;
    });
    assert_eq!(renewed.expect_err("shorter than asked").kind(), ErrorKind::Invalid);
}

/// A place in the queue that the script gave to a claim.
pub(crate) async fn queued(id: u128, store: &Arc<dyn Store>, peer: &mut Peer) -> Box<dyn Place> {
    let waiting = claim(id, true);
    let (answer, ()) = tokio::join!(store.claim(&waiting, LIMIT), async {
        peer.request().await;
        peer.say("queued").await;
    });
    match answer {
        Ok(Answer::Queued(place)) => place,
        other => panic!("not queued: {other:?}"),
    }
}

#[tokio::test]
async fn a_place_whose_connection_broke_is_neither_gone_nor_abandoned() {
    let script = Script::new().await;
    let (store, mut peer) = connected(&script).await;
    let mut place = queued(1, &store, &mut peer).await;
    // Not a reply of the protocol: the client gives the connection up, and the server may not have noticed.
    peer.say("nonsense").await;
    let error = place.wait(LIMIT).await.expect_err("the connection is broken");
    assert_eq!(error.kind(), ErrorKind::Unknown, "{error}");
    let error = place.abandon(LIMIT).await.expect_err("the server may have granted it");
    assert_eq!(error.kind(), ErrorKind::Unknown, "{error}");
}

#[tokio::test]
async fn a_granted_place_whose_connection_ended_is_not_abandoned() {
    let script = Script::new().await;
    for detached in [false, true] {
        let (store, mut peer) = connected(&script).await;
        let mut claim = claim(1, true);
        claim.detached = detached;
        let (answer, ()) = tokio::join!(store.claim(&claim, LIMIT), async {
            peer.request().await;
            peer.say("queued").await;
        });
        let Ok(Answer::Queued(mut place)) = answer else { panic!("not queued: {answer:?}") };
        peer.say(&format!("! granted {:032x} {TOKEN} 1500", 1)).await;
        let waited = place.wait(LIMIT).await;
        let Ok(Waited::Granted(grant)) = waited else { panic!("not granted: {waited:?}") };
        drop(peer);
        // Requests go over another connection once the client has noticed the end of the first.
        let requests = async {
            loop {
                drop(store.inspect(&claim.key, KeySpace::Lock).await);
            }
        };
        let peer = tokio::select! {
            peer = script.greeted("1", 86_400_000) => peer,
            () = requests => unreachable!("endless"),
        };
        let error = place.abandon(LIMIT).await.expect_err("the server may have kept it");
        assert_eq!(error.kind(), ErrorKind::Unknown, "{error}");
        drop((grant, peer));
    }
}

#[tokio::test]
async fn connections_of_the_user_are_not_judged_by_the_hosts_of_the_url() {
    let server = TestServer::start(|_| {});
    let address = server.url().trim_start_matches("tenure://").to_owned();
    let connect = move |_: &str, _| TcpStream::connect(address.clone());
    let url = "tenure://nowhere.invalid:1";
    let store = LockServerStore::with_connections(url, Clock::system(), connect).await;
    let findings = store.expect("connected").examine(LIMIT).await;
    let names: Vec<_> = findings.iter().map(|finding| &*finding.what).collect();
    assert!(names.contains(&"server"), "{findings:?}");
    for name in ["addresses", "encryption"] {
        assert!(!names.contains(&name), "{findings:?}");
    }
}

#[tokio::test]
async fn a_grant_that_crosses_its_abandonment_is_not_taken() {
    let script = Script::new().await;
    let (store, mut peer) = connected(&script).await;
    let mut place = queued(1, &store, &mut peer).await;
    let (left, ()) = tokio::join!(place.abandon(LIMIT), async {
        assert_eq!(peer.request().await[0], "xa");
        peer.say("ok").await;
    });
    left.expect("abandoned");
    // The reply to a later request shows that the push before it was read.
    let key = Key::new("a b").expect("a key");
    let (shown, ()) = tokio::join!(store.inspect(&key, KeySpace::Lock), async {
        peer.request().await;
        peer.say(&format!("! granted {:032x} {TOKEN} 1500", 1)).await;
        peer.say("error").await;
    });
    shown.expect_err("an error was said");
    let waited = place.wait(LIMIT).await;
    assert!(matches!(waited, Ok(Waited::Gone)), "{waited:?}");
}

#[tokio::test]
async fn several_addresses_are_for_one_server() {
    let (one, two) = (Script::new().await, Script::new().await);
    let url = format!("tenure://{},{}", one.address(), two.address());
    let (client, mut peer) = tokio::join!(Client::connect(&url), one.greeted("1", 86_400_000));
    let store = Arc::clone(client.expect("greeted").store());
    let mut hold = held(&store, &mut peer).await.hold;
    drop((one, peer));
    assert_eq!(hold.event().await, HoldEvent::Lost(Loss::Disconnected));
    let next = claim(2, false);
    let (answer, _peer) = tokio::join!(store.claim(&next, LIMIT), two.greeted("2", 86_400_000));
    let error = answer.expect_err("another server");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("different servers"), "{error}");
}

#[tokio::test]
async fn the_plain_protocol_counts_whole_seconds_and_always_names_the_lease() {
    let script = Script::new().await;
    let (store, mut peer) = connected_plainly(&script).await;
    let first = claim(1, true);
    let (answer, ()) = tokio::join!(store.claim(&first, LIMIT), async {
        assert_eq!(peer.request().await, ["l", "a\u{1f}b", "0 2"]);
        peer.say(&format!("ok {TOKEN} 2")).await;
    });
    let mut grant = granted(answer);
    assert_eq!((grant.lease_start, grant.token), (LeaseStart::FromRequest, FencingToken::NONE));
    assert!(grant.hold.handle().is_none(), "it cannot outlive its connection");
    let (renewed, ()) = tokio::join!(grant.hold.renew(TTL, LIMIT), async {
        assert_eq!(peer.request().await, ["n", "a\u{1f}b", &format!("{TOKEN} 2")]);
        peer.say("ok 2").await;
    });
    renewed.expect("renewed");
    drop(grant);
    assert_eq!(peer.request().await, ["r", "a\u{1f}b", TOKEN], "given back");
}

#[tokio::test]
async fn a_plain_wait_has_a_connection_of_its_own_and_ends_with_it() {
    let script = Script::new().await;
    let (store, mut main) = connected_plainly(&script).await;
    let wait = async |id| {
        let waiting = claim(id, true);
        let mut own = None;
        let (answer, ()) = tokio::join!(store.claim(&waiting, LIMIT), async {
            assert_eq!(main.request().await[0], "l");
            main.say("timeout").await;
            let mut peer = script.plain().await;
            assert_eq!(peer.request().await, ["e", "a\u{1f}b", "2"]);
            assert_eq!(peer.request().await, ["w", "a\u{1f}b", "9223372036"]);
            peer.say("queued").await;
            own = Some(peer);
        });
        let Ok(Answer::Queued(place)) = answer else { panic!("not queued: {answer:?}") };
        (place, own.expect("accepted"))
    };
    let mut wait = wait;
    let (mut place, mut own) = wait(1).await;
    place.abandon(LIMIT).await.expect("left");
    own.is_left().await;
    let (place, mut own) = wait(2).await;
    drop(place);
    own.is_left().await;
    let (mut place, mut own) = wait(3).await;
    own.say(&format!("ok {TOKEN} 2")).await;
    let waited = place.wait(LIMIT).await;
    let Ok(Waited::Granted(mut grant)) = waited else { panic!("not granted: {waited:?}") };
    assert_eq!(grant.lease_start, LeaseStart::FromConfirm);
    let (released, ()) = tokio::join!(grant.hold.release(LIMIT), async {
        assert_eq!(own.request().await[0], "r", "on the connection that it was granted on");
        own.say("ok").await;
    });
    released.expect("released");
    drop((grant, place));
    // The connection serves the next waiter.
    let next = claim(4, true);
    let (_, ()) = tokio::join!(store.claim(&next, Duration::from_secs(2)), async {
        main.request().await;
        main.say("timeout").await;
        assert_eq!(own.request().await[0], "e");
        own.say("queued").await;
    });
}

#[tokio::test]
async fn a_client_outlives_a_restart_of_its_server() {
    let server = TestServer::start(|_| {});
    let client = server.client().await;
    let guard = client.lock("a").acquire().await.expect("free");
    let before = guard.fencing_token();
    server.restart();
    assert_eq!(guard.lost().await.reason, Loss::Disconnected);
    let guard = client.lock("a").acquire().await.expect("free after the restart");
    assert!(guard.fencing_token() > before);
}

#[tokio::test]
async fn a_hold_that_was_left_outlives_its_connection() {
    let server = TestServer::start(|_| {});
    let (client, other) = (server.client().await, server.client().await);
    let guard = client.lock("a").ttl(Duration::from_secs(60)).acquire().await.expect("free");
    let ends_with_it = client.lock("b").acquire().await.expect("free");
    let handle = guard.detach().await.expect("left");
    client.store().close().await;
    let error = client.lock("c").try_acquire().await.expect_err("closed");
    assert_eq!(error.kind(), ErrorKind::Shutdown, "{error}");
    drop(ends_with_it);
    drop(client);
    until("the end of the connection", async || {
        other.inspect("b").await.expect("shown").holders.is_empty()
    })
    .await;
    assert_eq!(other.inspect("a").await.expect("shown").holders.len(), 1);
    other.release("a", &handle).await.expect("released by its handle");
    assert_eq!(other.inspect("a").await.expect("shown").holders.len(), 0);
}

#[tokio::test]
async fn keys_of_others_do_not_hide_ours() {
    use std::io::{BufRead as _, Write as _};
    let server = TestServer::start(|_| {});
    let mut raw = std::net::TcpStream::connect(server.address).expect("it listens");
    // More than a page of keys that are none to us, not even text, before one that is.
    for n in 0..150_u8 {
        raw.write_all(
            &[&b"l\n\x01\xff"[..], &[0x80 + n % 100, 0x30 + n / 100], b"\n0 60\n"].concat(),
        )
        .expect("open");
    }
    raw.write_all(b"ping\n_\n\n").expect("open");
    let replies = std::io::BufReader::new(&raw).split(b'\n').take(151);
    assert!(replies.into_iter().all(|reply| reply.is_ok()));
    let client = server.client().await;
    let _guard = client.lock("a b").acquire().await.expect("free");
    let _plain = client.lock("a").acquire().await.expect("free");
    let space = KeySpace::Lock;
    let listed = client.store().list(space, "", None).await.expect("a page");
    let names: Vec<_> = listed.iter().map(|state| state.key.as_str()).collect();
    assert_eq!(names, ["a", "a b"]);
    let rest = client.store().list(space, "a", Some("a")).await.expect("a page");
    assert_eq!(rest.len(), 1);
    assert!(client.store().list(space, "a\n", None).await.expect("none").is_empty());
}

#[tokio::test]
async fn a_plain_client_is_shown_by_its_address() {
    use std::io::{Read as _, Write as _};
    let server = TestServer::start(|_| {});
    let mut raw = std::net::TcpStream::connect(server.address).expect("it listens");
    raw.write_all(b"l\na\n0 60\n").expect("open");
    assert_ne!(raw.read(&mut [0; 64]).expect("open"), 0);
    let error = server.client().await.lock("a").try_acquire().await.expect_err("held");
    assert_eq!(error.kind(), ErrorKind::Held);
    assert!(error.to_string().contains("127.0.0.1"), "{error}");
}

#[tokio::test]
async fn a_waiter_outlives_a_restart_of_its_server() {
    let server = TestServer::start(|_| {});
    let (client, other) = (server.client().await, server.client().await);
    let guard = client.lock("a").acquire().await.expect("free");
    let waiter = tokio::spawn(other.lock("a").timeout(LIMIT).acquire());
    until("a waiter", async || {
        client.inspect("a").await.is_ok_and(|state| state.waiters.len() == 1)
    })
    .await;
    server.restart();
    assert_eq!(guard.lost().await.reason, Loss::Disconnected);
    assert!(waiter.await.expect("no panic").expect("claimed again").is_held());
}

#[test]
fn programs_without_async_can_use_it() {
    let server = TestServer::start(|_| {});
    let client = tenure::blocking::Client::connect(&server.url()).expect("it listens");
    let guard = client.lock("a").try_acquire().expect("free");
    assert_eq!(client.inspect("a").expect("shown").holders.len(), 1);
    guard.release().expect("released");
}

#[tokio::test]
async fn the_end_of_one_connection_is_no_loss_on_another() {
    let script = Script::new().await;
    let (store, mut main) = connected_plainly(&script).await;
    let first = claim(1, true);
    let (answer, ()) = tokio::join!(store.claim(&first, LIMIT), async {
        main.request().await;
        main.say(&format!("ok {TOKEN} 2")).await;
    });
    let mut hold = granted(answer).hold;
    let second = claim(2, true);
    let mut own = None;
    let (answer, ()) = tokio::join!(store.claim(&second, LIMIT), async {
        main.request().await;
        main.say("timeout").await;
        let mut peer = script.plain().await;
        peer.request().await;
        peer.request().await;
        peer.say("queued").await;
        own = Some(peer);
    });
    let Ok(Answer::Queued(mut place)) = answer else { panic!("not queued: {answer:?}") };
    drop(own);
    assert!(place.wait(LIMIT).await.is_ok_and(|waited| matches!(waited, Waited::Gone)));
    let lost = tokio::time::timeout(SHORT, hold.event()).await;
    assert!(lost.is_err(), "{lost:?}");
}

/// The server may have granted a claim whose connection ended: a proxy closed it, or the hold is detached.
#[tokio::test]
async fn a_wait_whose_connection_ended_has_no_clear_outcome() {
    let script = Script::new().await;
    let (store, mut peer) = connected(&script).await;
    let mut waiting = claim(1, true);
    waiting.detached = true;
    let (answer, ()) = tokio::join!(store.claim(&waiting, LIMIT), async {
        peer.request().await;
        peer.say("queued").await;
    });
    let Ok(Answer::Queued(mut place)) = answer else { panic!("not queued: {answer:?}") };
    drop(peer);
    let error = place.wait(LIMIT).await.expect_err("the connection is gone");
    assert_eq!(error.kind(), ErrorKind::Unknown, "{error}");
}

#[tokio::test]
async fn a_hold_is_detached_when_the_server_has_confirmed_it() {
    let script = Script::new().await;
    for (said, kind) in
        [("ok", None), ("error", Some(ErrorKind::NotHeld)), ("", Some(ErrorKind::Unknown))]
    {
        let (store, mut peer) = connected(&script).await;
        let mut hold = held(&store, &mut peer).await.hold;
        let (detached, peer) = tokio::join!(hold.detach(LIMIT), async {
            assert_eq!(peer.request().await[0], "xl");
            if said.is_empty() {
                drop(peer);
                return None;
            }
            peer.say(said).await;
            Some(peer)
        });
        assert_eq!(detached.err().map(|error| error.kind()), kind, "{said:?}");
        drop((hold, peer));
    }
}
