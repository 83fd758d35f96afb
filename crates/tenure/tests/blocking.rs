//! Programs without async: threads, the same promises.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use tenure::blocking::{Client, Guard, Once};
use tenure::election::{ElectionState, Ended};
use tenure::{ErrorKind, Key, Loss, MemoryStore};

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

#[test]
fn callbacks_may_fail_and_be_added_to_an_election_that_was_built() {
    let client = client();
    let (told, tells) = mpsc::channel();
    let request = client.election("boss").ttl(TTL).stop_grace(TTL / 10).on_outage(|_| {});
    let request = request.on_acquired(|leadership| {
        Err(std::io::Error::other(format!("refused {}", leadership.key())))
    });
    let election = request.build().unwrap();
    assert_eq!(election.state(), ElectionState::Stopped);
    let (failed, acquired, stopped) = (told.clone(), told.clone(), told);
    election.on_error(move |error| failed.send(error.chain()).unwrap());
    election.on_acquired(move |leadership| {
        acquired.send(leadership.fencing_token().to_string()).unwrap();
    });
    election
        .on_stopped(move |why| stopped.send(why.to_string()).map_err(|error| error.to_string()));
    election.on_released(|| {});
    election.on_lost(|_| {});
    election.on_acquire_failed(|_| {});
    election.on_state_change(|_| {});
    election.start().unwrap();
    assert!(election.wait_for_leadership(SOON).unwrap());
    let mut said = [tells.recv_timeout(SOON).unwrap(), tells.recv_timeout(SOON).unwrap()];
    said.sort();
    assert_eq!(said[0], election.fencing_token().unwrap().to_string());
    assert!(said[1].contains("refused boss"), "{said:?}");

    let leadership = election.leadership().unwrap();
    assert!(!leadership.ending(Duration::ZERO) && !leadership.handoff_requested(Duration::ZERO));
    let follower = client.election("boss").ttl(TTL).start().unwrap();
    assert!(leadership.handoff_requested(SOON));
    let mut leader = client.leader("boss").unwrap().poll_every(TTL);
    assert_eq!(leader.changed().unwrap().unwrap().token, leadership.fencing_token());
    election.shutdown(SOON).unwrap();
    assert!(leadership.ending(SOON));
    assert!(follower.wait_for_leadership(SOON).unwrap());
    follower.shutdown(SOON).unwrap();
    drop((election, follower));
    assert!(client.idle(SOON), "no task is left");
}

#[test]
fn work_runs_under_a_free_lock_only() {
    let client = client();
    let request = client.lock("a").class("reports");
    assert_eq!(request.key().unwrap().as_str(), "a");
    let token = request.try_run(Guard::fencing_token).unwrap().expect("it was free");
    let guard = client.lock("a").acquire().unwrap();
    assert!(guard.fencing_token() > token);
    assert!(!client.idle(Duration::ZERO), "a lock is held");
    assert!(client.lock("a").try_run(|_| unreachable!("it is held")).unwrap().is_none());
    drop(guard);
    assert!(client.idle(SOON));
    let lost = client.lock("a").ttl(TTL).keep_alive(false).try_run(|guard| guard.lost(SOON));
    assert_eq!(lost.unwrap_err().kind(), ErrorKind::Lost);
}

#[test]
fn detached_holds_are_renewed_and_released_by_their_handle() {
    let client = client();
    let handle = client.lock("a").ttl(SOON).detached().acquire().unwrap().detach().unwrap();
    client.renew("a", &handle, SOON * 2).unwrap();
    assert!(client.inspect("a").unwrap().is_in_use());
    client.release("a", &handle).unwrap();
    assert_eq!(client.renew("a", &handle, SOON).unwrap_err().kind(), ErrorKind::NotHeld);
    assert!(client.store().capabilities().detached);
}

#[test]
fn slots_are_run_once_without_async() {
    let client = client();
    let daily = || client.once("report").per(Duration::from_secs(86_400)).ttl(TTL).retry(true);
    let Once::Run(run) = daily().begin().unwrap() else { panic!("it was not run yet") };
    assert!(run.is_held() && run.remaining() > Duration::ZERO && run.slot().is_some());
    assert!(run.lost(Duration::ZERO).is_none() && !run.ending(Duration::ZERO));
    assert!(matches!(daily().begin().unwrap(), Once::Ran(_)), "it is being run");
    let token = run.fencing_token();
    run.failed().unwrap();
    let Once::Run(run) = daily().begin().unwrap() else { panic!("the first run failed") };
    assert!(run.fencing_token() > token);
    run.done().unwrap();
    assert!(matches!(daily().begin().unwrap(), Once::Ran(_)), "it was run");
}

#[test]
fn several_locks_and_semaphores_are_followed_without_async() {
    let client = client();
    let guards = client.lock_all(["a", "b"]).each(|lock| lock.ttl(TTL)).acquire().unwrap();
    assert_eq!(guards.keys().map(Key::as_str).collect::<Vec<_>>(), ["a", "b"]);
    assert!(guards.remaining() > Duration::ZERO && !guards.ending(Duration::ZERO));
    assert!(!guards.handoff_requested(Duration::ZERO));
    let (keys, more) = client.list_first("", 1).unwrap();
    assert_eq!((keys.len(), keys[0].key.as_str(), more), (1, "a", true));
    let waiter = client.lock("b").timeout(SOON).enqueue().unwrap();
    assert!(guards.handoff_requested(SOON));
    guards.release().unwrap();
    waiter.wait().unwrap().release().unwrap();

    let mut watch = client.watch_semaphore("s").unwrap().poll_every(TTL);
    assert!(!watch.next(SOON).unwrap().unwrap().is_in_use());
    let slot = client.semaphore("s", 2).acquire().unwrap();
    assert_eq!(watch.next(SOON).unwrap().unwrap().holders[0].token, slot.fencing_token());
    assert!(!client.inspect("s").unwrap().is_in_use(), "the lock of this name is another");
    // Only a lock server keeps events.
    let kinds = [client.history("s"), client.history_semaphore("s")];
    let kinds = kinds.map(|history| history.unwrap_err().kind());
    assert_eq!(kinds, [ErrorKind::Unsupported; 2]);
}
