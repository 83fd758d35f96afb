use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::Duration;

use tenure::fence::{Gate, Stale};
use tenure::{Client, ErrorKind, FencingToken};

use crate::holders::Frozen;

#[test]
fn a_frozen_holder_is_refused_though_its_guard_says_held() {
    let (gate, report) = (Gate::new(), Mutex::new(""));
    let save = |token, text| gate.write(token, || *report.lock().unwrap() = text);

    let old = Frozen::holding("reports");
    save(old.token(), "draft").unwrap();
    let newest = old.successor();
    gate.admit(newest).unwrap();

    let stale = save(old.token(), "late").unwrap_err();
    assert_eq!(stale, Stale { offered: old.token(), newest });
    assert_eq!(*report.lock().unwrap(), "draft");
    save(newest, "final").unwrap();
    assert_eq!(*report.lock().unwrap(), "final");

    assert_eq!(old.thaw().token, old.token());
    assert!(!old.guard.is_held());
}

#[tokio::test]
async fn an_evicted_holder_is_refused_and_told_that_it_lost() {
    let client = Client::connect("memory:").await.unwrap();
    let gate = Gate::new();
    let first = client.lock("reports").acquire().await.unwrap();
    gate.admit(first.fencing_token()).unwrap();

    client.store().evict(first.key(), first.fencing_token(), "test").await.unwrap();
    let second = client.lock("reports").timeout(Duration::from_secs(30)).acquire().await.unwrap();
    // Until the next holder has installed its token, the resource cannot know of it.
    gate.admit(first.fencing_token()).unwrap();
    gate.admit(second.fencing_token()).unwrap();

    let error = tenure::Error::from(gate.admit(first.fencing_token()).unwrap_err());
    assert_eq!(error.kind(), ErrorKind::Lost);
    assert!(std::error::Error::source(&error).unwrap().is::<Stale>());
    gate.admit(second.fencing_token()).unwrap();
}

#[test]
fn writes_of_many_threads_are_done_in_the_order_of_their_tokens() {
    const THREADS: u64 = 8;
    const WRITES: usize = 200;
    let (gate, log, start) = (Gate::new(), Mutex::new(Vec::new()), Barrier::new(8));
    let accepted: usize = thread::scope(|scope| {
        let threads: Vec<_> = (1..=THREADS)
            .map(|number| {
                let (gate, log, start) = (&gate, &log, &start);
                scope.spawn(move || {
                    start.wait();
                    let token = FencingToken::new(0, number);
                    let write = || log.lock().unwrap().push(number);
                    (0..WRITES).filter(|_| gate.write(token, write).is_ok()).count()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    let log = log.into_inner().unwrap();
    assert!(log.is_sorted(), "{log:?}");
    assert_eq!(log.len(), accepted);
    assert_eq!(log.iter().filter(|number| **number == THREADS).count(), WRITES);
    assert_eq!(gate.newest(), FencingToken::new(0, THREADS));
}
