//! Starting, stepping down and stopping, within their bounds.

use tenure::ErrorKind;
use tenure::conformance::{Fault, Op};
use tenure::election::{ElectionState, Ended, Event, StopReason};

use super::{KEY, Stage, ms, now_or_never, secs, settle, told, until};

#[tokio::test]
async fn two_starts_are_one() {
    let stage = Stage::new();
    let (election, mut events) = stage.leading(stage.election()).await;
    let token = election.fencing_token();
    election.start().await.expect("it runs");
    settle().await;
    assert_eq!(election.fencing_token(), token);
    assert_eq!(told(&mut events), [""; 0]);
    let seen = stage.other.inspect(KEY).await.expect("an answer");
    assert_eq!((seen.holders.len(), seen.waiters.len()), (1, 0));
}

#[tokio::test]
async fn an_election_can_be_started_again_after_it_stopped() {
    let stage = Stage::new();
    let (election, mut events) = stage.leading(stage.election()).await;
    let first = election.fencing_token();
    election.shutdown(None).await.expect("released");
    assert!(election.wait_for_leadership(None).await.is_err());
    election.start().await.expect("a new run");
    assert!(election.wait_for_leadership(None).await.expect("it runs"));
    assert!(election.fencing_token() > first);
    assert_eq!(told(&mut events), ["released", "stopped", "acquired"]);
}

#[tokio::test]
async fn a_wait_notices_a_run_that_ended_and_began_anew() {
    let stage = Stage::new();
    let held = stage.other.lock(KEY).acquire().await.expect("free");
    let election = stage.election().start().await.expect("started");
    let mut wait = std::pin::pin!(election.wait_for_leadership(None));
    assert!(now_or_never(wait.as_mut()).is_none());
    election.shutdown(None).await.expect("stopped");
    election.start().await.expect("a new run");
    let error = wait.await.expect_err("that run is over");
    assert_eq!(error.kind(), ErrorKind::Shutdown);
    drop(held);
}

#[tokio::test]
async fn shutdown_with_a_store_that_hangs_keeps_its_bound() {
    let stage = Stage::new();
    let (election, mut events) = stage.leading(stage.election()).await;
    let leadership = election.leadership().expect("it leads");
    stage.faults.always(Op::Release, Fault::Hang);
    let mut shutdown = std::pin::pin!(election.shutdown(secs(2)));
    assert!(now_or_never(shutdown.as_mut()).is_none());
    settle().await;
    assert!(!election.is_leader(), "nobody leads while it is being released");
    assert!(!leadership.is_held() && leadership.remaining().is_zero());
    assert_eq!(election.state(), ElectionState::Releasing);
    let error = election.start().await.expect_err("it is shutting down");
    assert_eq!(error.kind(), ErrorKind::Shutdown);
    stage.pass(ms(1_750)).await;
    assert!(now_or_never(shutdown.as_mut()).is_none());
    stage.hand.advance(ms(250));
    let error = shutdown.await.expect_err("nothing is clear");
    assert_eq!(error.kind(), ErrorKind::Unknown, "{error}");
    assert!(error.may_be_held_for().is_some());
    settle().await;
    assert_eq!(election.state(), ElectionState::Stopped);
    assert_eq!(told(&mut events), ["error", "released", "stopped"]);
    // The keeper goes on in the background.
    stage.faults.heal();
    stage.pass(secs(20)).await;
    assert!(stage.other.inspect(KEY).await.expect("an answer").holders.is_empty());
}

#[tokio::test]
async fn shutdown_of_a_claim_that_hangs_is_quick() {
    let stage = Stage::new();
    stage.faults.always(Op::Claim, Fault::Hang);
    let election = stage.election().start().await.expect("started");
    settle().await;
    assert_eq!(election.state(), ElectionState::Acquiring);
    // No time passes.
    election.shutdown(secs(1)).await.expect("nothing is held");
    assert_eq!(election.state(), ElectionState::Stopped);
}

#[tokio::test]
async fn shutdown_of_a_follower_leaves_the_queue() {
    let stage = Stage::new();
    let held = stage.other.lock(KEY).acquire().await.expect("free");
    let election = stage.election().start().await.expect("started");
    settle().await;
    assert_eq!(stage.other.inspect(KEY).await.expect("an answer").waiters.len(), 1);
    election.shutdown(None).await.expect("nothing is held");
    settle().await;
    assert!(stage.other.inspect(KEY).await.expect("an answer").waiters.is_empty());
    drop(held);
}

#[tokio::test]
async fn step_down_with_a_store_that_hangs_keeps_its_bound() {
    let stage = Stage::new();
    let (election, mut events) = stage.leading(stage.election()).await;
    stage.faults.always(Op::Release, Fault::Hang);
    let mut stepping = std::pin::pin!(election.step_down(secs(1)));
    assert!(now_or_never(stepping.as_mut()).is_none());
    stage.pass(secs(1)).await;
    assert_eq!(stepping.await.expect_err("nothing is clear").kind(), ErrorKind::Unknown);
    assert_eq!(election.state(), ElectionState::Follower);
    assert_eq!(told(&mut events), ["error", "released"]);
}

#[tokio::test]
async fn step_down_delays_the_next_claim_by_exactly_the_cool_down() {
    let stage = Stage::new();
    let (election, mut events) = stage.leading(stage.election().cool_down(secs(7))).await;
    let leadership = election.leadership().expect("it leads");
    let work = tokio::spawn(async move { leadership.run(std::future::pending::<()>()).await });
    settle().await;
    election.step_down(None).await.expect("released");
    let error = work.await.expect("no panic").expect_err("given up");
    assert_eq!(error.kind(), ErrorKind::NotHeld, "{error}");
    stage.pass(ms(6_750)).await;
    assert!(!election.is_leader());
    stage.pass(ms(250)).await;
    assert!(election.is_leader());
    assert_eq!(told(&mut events), ["released", "acquired"]);
}

#[tokio::test]
async fn one_term_is_enough_without_auto_reacquire() {
    let stage = Stage::new();
    let (election, mut events) = stage.leading(stage.election().auto_reacquire(false)).await;
    election.step_down(None).await.expect("released");
    let stopped = until(&mut events, |event| matches!(event, Event::Stopped(_))).await;
    assert!(matches!(stopped, Event::Stopped(StopReason::TermOver)), "{stopped:?}");
    assert_eq!(election.state(), ElectionState::Stopped);
}

#[tokio::test]
async fn a_signal_shuts_down_for_good() {
    let stage = Stage::new();
    let (fire, signal) = tokio::sync::oneshot::channel::<()>();
    let (election, mut events) = stage.leading(stage.election().shutdown_on(signal)).await;
    fire.send(()).expect("it listens");
    let stopped = until(&mut events, |event| matches!(event, Event::Stopped(_))).await;
    assert!(matches!(stopped, Event::Stopped(StopReason::Requested)), "{stopped:?}");
    assert!(stage.other.inspect(KEY).await.expect("an answer").holders.is_empty());
    let error = election.start().await.expect_err("for good");
    assert_eq!(error.kind(), ErrorKind::Shutdown);

    let early = stage.election().shutdown_on(std::future::ready(())).build().expect("good");
    assert!(early.start().await.is_err());
    assert_eq!(early.state(), ElectionState::Stopped);
}

#[tokio::test]
async fn dropping_the_handle_releases_and_ends_the_events() {
    let stage = Stage::new();
    let (election, mut events) = stage.leading(stage.election()).await;
    drop(election);
    until(&mut events, |event| matches!(event, Event::Stopped(_))).await;
    assert!(events.next().await.is_none());
    assert!(stage.other.inspect(KEY).await.expect("an answer").holders.is_empty());
    drop(stage.election().build().expect("never started"));
}

#[test]
fn an_election_outlives_its_runtime_without_a_panic() {
    let runtime = || tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let first = runtime();
    let stage = Stage::new();
    let (election, _) = first.block_on(stage.leading(stage.election()));
    let leadership = election.leadership().expect("it leads");
    drop(first);
    assert!(!election.is_leader() && !leadership.is_held());
    assert_eq!(election.state(), ElectionState::Stopped);
    runtime().block_on(async {
        assert!(matches!(leadership.ended().await, Ended::Lost(_)));
        let errors = [
            election.start().await.expect_err("its runtime has ended"),
            election.shutdown(None).await.expect_err("its runtime has ended"),
            election.step_down(None).await.expect_err("its runtime has ended"),
            election.wait_for_leadership(None).await.expect_err("its runtime has ended"),
        ];
        assert!(errors.iter().all(|error| error.kind() == ErrorKind::Shutdown), "{errors:?}");
    });
    drop(election);
}

#[test]
fn without_a_runtime_there_is_no_start() {
    let stage = Stage::new();
    let election = stage.election().build().expect("good settings");
    let error = now_or_never(election.start()).expect("at once").expect_err("no runtime");
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
}

/// Every claim that fails while the store is away ends its task.
#[tokio::test]
async fn failed_claims_leave_no_task_behind() {
    let stage = Stage::new();
    stage.faults.set_down(true);
    let election = stage.election().build().expect("good settings");
    let mut events = election.events();
    election.start().await.expect("started");
    stage.pass(secs(3)).await;
    until(&mut events, |event| matches!(event, Event::Error(_))).await;
    stage.faults.set_down(false);
    drop(events);
    election.shutdown(None).await.expect("stopped");
    drop(election);
    stage.pass(secs(30)).await;
    assert!(now_or_never(stage.client.idle()).is_some(), "a task is left");
}
