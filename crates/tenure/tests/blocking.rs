//! Programs without async: threads, the same promises.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use tenure::blocking::Client;
use tenure::election::Ended;
use tenure::{ErrorKind, Loss, MemoryStore};

const SOON: Duration = Duration::from_secs(20);
const TTL: Duration = Duration::from_millis(600);

fn client() -> Client {
    Client::with_store(Arc::new(MemoryStore::new()))
}

#[test]
fn threads_exclude_each_other() {
    let client = client();
    let inside = AtomicU32::new(0);
    let entered = AtomicU32::new(0);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..50 {
                    let guard = client.lock("a").timeout(SOON).acquire().unwrap();
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                    entered.fetch_add(1, Ordering::SeqCst);
                    inside.fetch_sub(1, Ordering::SeqCst);
                    guard.release().unwrap();
                }
            });
        }
    });
    assert_eq!(entered.load(Ordering::SeqCst), 200);
}

#[test]
fn a_hold_is_renewed_while_its_thread_is_busy() {
    let client = client();
    let guard = client.lock("a").ttl(TTL).acquire().unwrap();
    assert!(guard.lost(TTL * 3).is_none(), "blocked for three ttls, and still held");
    assert!(guard.is_held());
    let pending = client.lock("a").ttl(TTL).timeout(SOON).enqueue().unwrap();
    assert!(guard.handoff_requested(SOON));
    drop(guard);
    pending.wait().unwrap().release().unwrap();
}

#[test]
fn a_loss_and_a_refusal_are_told() {
    let client = client();
    let guard = client.lock("a").ttl(TTL).keep_alive(false).acquire().unwrap();
    let error = client.lock("a").try_acquire().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Held);
    assert!(guard.ending(SOON));
    assert_eq!(guard.lost(SOON).unwrap().reason, Loss::Expired);
    assert_eq!(guard.release().unwrap_err().kind(), ErrorKind::Lost);
}

#[tokio::test]
async fn it_works_from_within_a_runtime() {
    let guard = client().lock("a").acquire().unwrap();
    guard.release().unwrap();
}

#[test]
fn elections_work_without_async() {
    let client = client();
    let (told, tells) = mpsc::channel();
    let (acquired, stopped) = (told.clone(), told);
    let election = client
        .election("boss")
        .ttl(TTL)
        .on_acquired(move |leadership| {
            acquired.send(leadership.fencing_token().to_string()).unwrap();
        })
        .on_stopped(move |why| stopped.send(why.to_string()).unwrap())
        .start()
        .unwrap();
    assert!(election.wait_for_leadership(SOON).unwrap() && election.is_leader());
    let leadership = election.leadership().unwrap();
    let seen = client.leader("boss").unwrap().current().unwrap().unwrap();
    assert_eq!(seen.token, leadership.fencing_token());
    election.shutdown(SOON).unwrap();
    assert!(matches!(leadership.ended(SOON), Some(Ended::Released)));
    assert_eq!(tells.recv_timeout(SOON).unwrap(), seen.token.to_string());
    tells.recv_timeout(SOON).expect("told of the stop");
}

#[test]
fn keys_are_listed_watched_and_broken_without_async() {
    let client = client();
    let mut watch = client.watch("b").unwrap();
    assert!(!watch.next(SOON).unwrap().unwrap().is_in_use());
    assert!(watch.next(Duration::ZERO).unwrap().is_none(), "nothing has changed");
    let guards = client.lock_all(["b", "a"]).each(|lock| lock.ttl(TTL)).acquire().unwrap();
    let token = guards.fencing_token("b").unwrap();
    assert_eq!(watch.next(SOON).unwrap().unwrap().holders[0].token, token);
    let keys: Vec<String> =
        client.list("").unwrap().iter().map(|state| state.key.to_string()).collect();
    assert_eq!(keys, ["a", "b"]);
    client.evict("b", token, "test").unwrap();
    assert_eq!(guards.lost(SOON).unwrap().key.as_str(), "b");
    guards.release().expect_err("one was lost");
    assert!(!client.inspect("a").unwrap().is_in_use());
}
