//! Leading: won, kept, lost, and won again within the window.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tenure::ErrorKind;
use tenure::conformance::{Fault, Op};
use tenure::election::{ElectionRequest, ElectionState, Event, StopReason};
use tenure::retry::{FixedInterval, Retry, RetryContext};

use super::{KEY, Stage, ms, secs, told, until};

#[tokio::test]
async fn a_leader_leads_for_as_long_as_it_renews() {
    let stage = Stage::new();
    let (election, mut events) = stage.leading(stage.election()).await;
    let token = election.fencing_token().expect("it leads");
    for _ in 0..24 {
        stage.pass(secs(5)).await;
        assert!(election.is_leader());
    }
    assert_eq!(election.fencing_token(), Some(token));
    assert_eq!(told(&mut events), [""; 0]);
}

#[tokio::test]
async fn two_proofs_a_ttl_are_enough() {
    let stage = Stage::new();
    let request = stage.election().ttl(secs(10)).health_interval(secs(5));
    let (election, mut events) = stage.leading(request).await;
    // Each is answered only after the machine has looked.
    stage.faults.always(Op::Renew, Fault::Delay);
    stage.pass(secs(60)).await;
    assert!(election.is_leader());
    assert_eq!(told(&mut events), [""; 0]);
}

#[tokio::test]
async fn an_outage_leaves_a_follower_with_one_claim() {
    let stage = Stage::new();
    let _held = stage.other.lock(KEY).acquire().await.expect("free");
    stage.faults.set_down(true);
    let election = stage.election().build().expect("good settings");
    let mut events = election.events();
    election.start().await.expect("started");
    stage.pass(secs(20)).await;
    assert!(told(&mut events).iter().filter(|name| **name == "error").count() > 3);
    stage.faults.heal();
    stage.pass(secs(6)).await;
    let seen = stage.other.inspect(KEY).await.expect("an answer");
    assert_eq!(seen.waiters.len(), 1, "{seen:?}");
}

#[tokio::test]
async fn leadership_is_a_deadline_and_not_a_state() {
    let stage = Stage::new();
    let (election, _) = stage.leading(stage.election()).await;
    stage.hand.advance(ms(12_499));
    assert!(election.is_leader());
    stage.hand.advance(ms(1));
    // No task has run since.
    assert_eq!(election.state(), ElectionState::Leader);
    assert!(!election.is_leader());
    assert_eq!(election.fencing_token(), None);
    assert!(election.leadership().is_none());
}

#[tokio::test]
async fn a_retry_strategy_polls_and_takes_no_place_in_the_queue() {
    let stage = Stage::new();
    let held = stage.other.lock(KEY).acquire().await.expect("free");
    let pauses = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&pauses);
    let request = stage.election().retry(FixedInterval { interval: secs(2) });
    let request = request.on_acquire_failed(move |failed| {
        assert_eq!(failed.next_delay, Some(secs(2)));
        count.store(failed.attempt, Ordering::SeqCst);
    });
    let election = request.start().await.expect("started");
    stage.pass(secs(7)).await;
    assert_eq!(election.state(), ElectionState::Follower);
    assert!(stage.other.inspect(KEY).await.expect("an answer").waiters.is_empty());
    held.release().await.expect("released");
    stage.pass(secs(2)).await;
    assert!(election.is_leader());
    election.shutdown(None).await.expect("released");
    assert_eq!(pauses.load(Ordering::SeqCst), 4, "at 0, 2, 4 and 6 s");
}

/// Two attempts, then no more.
#[derive(Debug)]
struct Twice;

impl Retry for Twice {
    fn next_delay(&mut self, context: &RetryContext<'_>, _random: f64) -> Option<Duration> {
        (context.attempt < 2).then_some(secs(1))
    }

    fn reset(&mut self) {}
}

#[tokio::test]
async fn a_strategy_that_gives_up_stops_the_election() {
    let stage = Stage::new();
    let _held = stage.other.lock(KEY).acquire().await.expect("free");
    let election = stage.election().retry(Twice).build().expect("good settings");
    let mut events = election.events();
    election.start().await.expect("started");
    let (waited, ()) = tokio::join!(election.wait_for_leadership(None), stage.pass(secs(2)));
    let error = waited.expect_err("gave up");
    assert!(error.to_string().contains("gave up"), "{error}");
    let stopped = until(&mut events, |event| matches!(event, Event::Stopped(_))).await;
    assert!(matches!(stopped, Event::Stopped(StopReason::GaveUp)), "{stopped:?}");
}

/// The end of a run and its reason must become visible together: a reader on another thread sees every state between.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn the_end_of_a_run_is_never_seen_without_its_reason() {
    for _ in 0..200 {
        let stage = Stage::new();
        stage.faults.always(Op::Claim, Fault::Deny);
        let election = stage.election().build().expect("good settings");
        let mut status = tokio::task::JoinSet::new();
        let election = Arc::new(election);
        election.start().await.expect("started");
        for _ in 0..4 {
            let election = Arc::clone(&election);
            status.spawn(async move { election.wait_for_leadership(None).await });
        }
        while let Some(waited) = status.join_next().await {
            let error = waited.expect("no panic").expect_err("denied");
            assert!(error.chain().contains("access refused"), "{}", error.chain());
        }
    }
}

#[tokio::test]
async fn an_error_that_waiting_will_not_cure_stops_the_election() {
    let stage = Stage::new();
    stage.faults.always(Op::Claim, Fault::Deny);
    let election = stage.election().build().expect("good settings");
    let mut events = election.events();
    election.start().await.expect("started");
    until(
        &mut events,
        |event| matches!(event, Event::Error(error) if error.kind() == ErrorKind::Denied),
    )
    .await;
    let stopped = until(&mut events, |event| matches!(event, Event::Stopped(_))).await;
    let Event::Stopped(StopReason::Failed(error)) = stopped else { panic!("{stopped:?}") };
    assert_eq!(error.kind(), ErrorKind::Denied);
    let error = election.wait_for_leadership(None).await.expect_err("stopped");
    let source = std::error::Error::source(&error).expect("says why").to_string();
    assert!(source.contains("access refused (injected fault)"), "{source}");
}

#[tokio::test]
async fn a_claim_that_may_have_landed_is_told_and_leaves_nothing_behind() {
    let stage = Stage::new();
    stage.faults.next(Op::Claim, Fault::LoseReply);
    let election = stage.election().build().expect("good settings");
    let mut events = election.events();
    election.start().await.expect("started");
    stage.pass(secs(3)).await;
    assert!(election.is_leader());
    assert_eq!(told(&mut events), ["error", "acquired"]);
    let seen = stage.other.inspect(KEY).await.expect("an answer");
    assert_eq!((seen.holders.len(), seen.waiters.len()), (1, 0), "{seen:?}");
}

#[tokio::test]
async fn a_renewal_that_fails_is_an_error_and_no_loss() {
    let stage = Stage::new();
    let (election, mut events) = stage.leading(stage.election()).await;
    stage.faults.next(Op::Renew, Fault::LoseRequest);
    stage.pass(secs(20)).await;
    assert!(election.is_leader());
    assert_eq!(told(&mut events), ["error"]);
}

#[tokio::test]
async fn a_hold_that_does_not_come_back_in_time_is_told_as_lost_when_the_window_closes() {
    let stage = Stage::new();
    let (election, mut events) = stage.leading(stage.election().reconnect_grace(secs(10))).await;
    stage.faults.set_down(true);
    // The last proof was at 0 s, the deadline is at 12.5 s.
    stage.pass(ms(12_500)).await;
    assert!(!election.is_leader());
    assert_eq!(election.state(), ElectionState::Reconnecting);
    assert!(!told(&mut events).contains(&"lost"));
    stage.pass(ms(9_750)).await;
    assert!(!told(&mut events).contains(&"lost"));
    stage.pass(ms(250)).await;
    assert!(told(&mut events).contains(&"lost"));
    stage.faults.heal();
    stage.pass(secs(10)).await;
    assert!(election.is_leader());
}

#[tokio::test]
async fn another_leader_closes_the_window() {
    let stage = Stage::new();
    let (election, mut events) = stage.leading(stage.election().reconnect_grace(secs(60))).await;
    let next = stage.other.election(KEY).start().await.expect("started");
    stage.faults.set_down(true);
    stage.pass(ms(12_500)).await;
    assert_eq!(election.state(), ElectionState::Reconnecting);
    stage.pass(ms(2_500)).await;
    assert!(next.is_leader(), "the store's lease is over");
    assert!(!told(&mut events).contains(&"lost"), "not known while the store is away");
    stage.faults.heal();
    stage.pass(secs(6)).await;
    assert_eq!(told(&mut events).iter().filter(|name| **name == "lost").count(), 1);
    assert!(!election.is_leader() && next.is_leader());
}

#[tokio::test]
async fn own_leftover_hold_does_not_end_the_reconnect_grace() {
    let stage = Stage::new();
    let (election, mut events) = stage.leading(stage.election().reconnect_grace(secs(60))).await;
    let token = election.fencing_token();
    // The store keeps the hold past its loss: no release gets through, but claims do.
    stage.faults.always(Op::Renew, Fault::LoseRequest);
    stage.faults.always(Op::Release, Fault::LoseRequest);
    stage.pass(ms(13_000)).await;
    assert_eq!(election.state(), ElectionState::Reconnecting);
    assert_eq!(stage.other.inspect(KEY).await.expect("an answer").holders.len(), 1);
    stage.pass(secs(10)).await;
    assert!(election.is_leader() && election.fencing_token() > token);
    let told = told(&mut events);
    assert!(!told.contains(&"lost") && !told.contains(&"acquired"), "{told:?}");
}

#[test]
fn bad_settings_are_refused_with_the_values_that_conflict() {
    let stage = Stage::new();
    let refused = |request: ElectionRequest, parts: &[&str]| {
        let error = request.build().expect_err("bad settings");
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        let message = error.to_string();
        assert!(parts.iter().all(|part| message.contains(part)), "{parts:?} in {message}");
    };
    let request = || stage.election();
    refused(request().ttl(secs(9)).health_interval(secs(5)), &["scheduler", "5s", "9s", "10s"]);
    refused(request().health_interval(Duration::ZERO), &["health interval of 0"]);
    refused(request().ttl(Duration::ZERO), &["ttl of 0"]);
    refused(request().reconnect_grace(Duration::ZERO), &["grace of 0"]);
    refused(request().ttl(ms(60)), &["60ms"]);
    refused(request().health_interval(Duration::MAX), &["ttl"]);
    refused(request().id("a\nb"), &["U+000A"]);
    refused(stage.client.election(""), &[]);
    assert_eq!(stage.client.leader("").expect_err("no key").kind(), ErrorKind::Invalid);
}

#[tokio::test]
async fn the_leader_s_work_is_told_to_stop_before_the_deadline() {
    let stage = Stage::new();
    let request = stage.election().stop_grace(secs(2));
    let (election, _) = stage.leading(request).await;
    let leadership = election.leadership().expect("it leads");
    let ending = tokio::spawn({
        let leadership = leadership.clone();
        async move { leadership.ending().await }
    });
    stage.pass(secs(60)).await;
    assert!(!ending.is_finished(), "renewals go well");
    stage.faults.set_down(true);
    while !ending.is_finished() {
        stage.pass(ms(250)).await;
        assert!(leadership.is_held(), "told too late");
    }
    let left = leadership.remaining();
    assert!(left > ms(1_500) && left <= secs(2), "{left:?}");
}
