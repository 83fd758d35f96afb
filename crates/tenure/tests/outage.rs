//! A store that is away is waited for, and reported in time.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tenure::conformance::{Fault, Faults, Op};
use tenure::{Client, Clock, Election, ErrorKind, ManualClock, MemoryStore, StoreOutage};

const STEP: Duration = Duration::from_millis(100);

type Reports = Arc<Mutex<Vec<StoreOutage>>>;

fn setup() -> (Client, Faults, ManualClock, Reports) {
    let (clock, hand) = Clock::manual();
    let (store, faults) = Faults::wrap(Arc::new(MemoryStore::new()), clock.clone());
    let client = Client::with_store(Arc::new(store)).with_clock(clock);
    (client, faults, hand, Reports::default())
}

/// Lets every task run, then advances the clock, until there are `count` reports. Returns the time that passed.
async fn until_reported(count: usize, reports: &Reports, hand: &ManualClock) -> Duration {
    for steps in 0..1_000 {
        for _ in 0..50 {
            tokio::task::yield_now().await;
        }
        if reports.lock().expect("reports").len() >= count {
            return STEP * steps;
        }
        hand.advance(STEP);
    }
    panic!("no {count} reports after {:?}", STEP * 1_000);
}

#[tokio::test]
async fn an_outage_is_reported_within_two_seconds_then_every_thirty_and_at_its_end() {
    let (client, faults, hand, reports) = setup();
    faults.set_down(true);
    let told = Arc::clone(&reports);
    let request =
        client.lock("a").on_outage(move |outage| told.lock().unwrap().push(outage.clone()));
    let acquiring = tokio::spawn(request.acquire());
    assert!(until_reported(1, &reports, &hand).await <= Duration::from_secs(2));
    let again = until_reported(2, &reports, &hand).await;
    assert!((29..=31).contains(&again.as_secs()), "{again:?}");
    faults.set_down(false);
    until_reported(3, &reports, &hand).await;
    let guard = acquiring.await.unwrap().expect("the store is back");
    let reports = reports.lock().unwrap();
    let [StoreOutage::Away { reason: Some(reason), .. }, _, StoreOutage::Back { after, .. }] =
        &reports[..]
    else {
        panic!("{reports:?}")
    };
    assert!(reason.contains("the store is unavailable"), "{reason}");
    assert!(after.as_secs() >= 30, "{after:?}");
    drop(guard);
}

#[tokio::test]
async fn a_store_that_does_not_answer_is_reported_while_the_request_hangs() {
    let (client, faults, hand, reports) = setup();
    faults.always(Op::Claim, Fault::Hang);
    let told = Arc::clone(&reports);
    let request = client.lock("a").ttl(Duration::from_secs(60));
    let request = request.on_outage(move |outage| told.lock().unwrap().push(outage.clone()));
    let acquiring = tokio::spawn(request.acquire());
    assert!(until_reported(1, &reports, &hand).await <= Duration::from_secs(2));
    assert!(matches!(reports.lock().unwrap()[..], [StoreOutage::Away { reason: None, .. }]));
    acquiring.abort();
}

/// The claim may have reached the store, so it is cleaned up after the caller has its answer.
#[tokio::test]
async fn nothing_is_reported_after_the_caller_has_its_answer() {
    let (client, faults, hand, reports) = setup();
    faults.always(Op::Claim, Fault::Hang);
    let told = Arc::clone(&reports);
    let request = client.lock("a").ttl(Duration::from_secs(120)).timeout(Duration::from_secs(1));
    let request = request.on_outage(move |outage| told.lock().unwrap().push(outage.clone()));
    let acquiring = tokio::spawn(request.acquire());
    let (mut before, mut after) = (None, 0);
    for _ in 0..2_000 {
        for _ in 0..50 {
            tokio::task::yield_now().await;
        }
        hand.advance(STEP);
        after = reports.lock().unwrap().len();
        if acquiring.is_finished() {
            before.get_or_insert(after);
        }
    }
    let error = acquiring.await.unwrap().unwrap_err();
    assert_eq!((error.kind(), before), (ErrorKind::Unknown, Some(after)));
}

#[tokio::test]
async fn a_try_fails_at_once_and_a_permanent_refusal_is_no_outage() {
    let (client, faults, _hand, reports) = setup();
    let count = |reports: &Reports| reports.lock().unwrap().len();
    faults.set_down(true);
    let request = |reports: &Reports| {
        let told = Arc::clone(reports);
        client.lock("a").on_outage(move |outage| told.lock().unwrap().push(outage.clone()))
    };
    let error = request(&reports).try_acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    faults.set_down(false);
    faults.always(Op::Claim, Fault::Deny);
    let error = request(&reports).acquire().await.unwrap_err();
    assert_eq!((error.kind(), count(&reports)), (ErrorKind::Denied, 0));
}

#[tokio::test]
async fn connecting_to_a_wrong_url_fails_at_once() {
    let builder = Client::builder().wait_for_store(Duration::MAX);
    let error = builder.connect("carrier-pigeon://coop").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

#[tokio::test]
async fn connecting_to_a_store_that_does_not_answer_ends_with_the_limit() {
    let builder = Client::builder().scheme("silent", |_| std::future::pending());
    let connecting = builder.wait_for_store(Duration::from_millis(1)).connect("silent:");
    let error = connecting.await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.chain().contains("does not answer"), "{}", error.chain());
}

/// An election that has started while its store is away.
async fn election_without_store() -> (Election, Faults, ManualClock, Reports) {
    let (client, faults, hand, reports) = setup();
    faults.set_down(true);
    let told = Arc::clone(&reports);
    let request =
        client.election("a").on_outage(move |o| told.lock().expect("reports").push(o.clone()));
    let election = request.start().await.expect("started");
    (election, faults, hand, reports)
}

/// Each claim of an election fails at once, so the outage lasts over many claims.
#[tokio::test]
async fn an_election_reports_an_outage_over_all_its_claims() {
    let (_election, faults, hand, reports) = election_without_store().await;
    assert!(until_reported(1, &reports, &hand).await <= Duration::from_secs(2));
    faults.set_down(false);
    until_reported(2, &reports, &hand).await;
    assert!(matches!(reports.lock().unwrap()[1], StoreOutage::Back { .. }));
}

#[tokio::test]
async fn an_election_that_has_stopped_reports_nothing() {
    let (election, _faults, hand, reports) = election_without_store().await;
    until_reported(1, &reports, &hand).await;
    election.shutdown(None).await.unwrap();
    for _ in 0..1_000 {
        hand.advance(STEP);
        tokio::task::yield_now().await;
    }
    assert_eq!(reports.lock().unwrap().len(), 1);
}
