//! Observers, which do not take part in an election.

use tenure::ErrorKind;

use super::{KEY, Stage, now_or_never, secs};

#[tokio::test]
async fn an_observer_is_told_once_per_leader() {
    let stage = Stage::new();
    let mut leader = stage.other.leader(KEY).expect("a good key");
    assert_eq!(leader.changed().await.expect("an answer"), None);
    assert!(now_or_never(leader.changed()).is_none(), "nothing has changed");
    let (election, _) = stage.leading(stage.election().id("one")).await;
    let led = leader.changed().await.expect("an answer").expect("somebody leads");
    assert_eq!(Some(led.token), election.fencing_token());
    assert_eq!(led.by.map(|by| by.id).as_deref(), Some("one"));
    // A waiter is a change of the key, and none of its leader.
    let waiter = stage.other.lock(KEY).enqueue().await.expect("queued");
    let mut changed = std::pin::pin!(leader.changed());
    for _ in 0..10 {
        assert!(now_or_never(changed.as_mut()).is_none());
        stage.pass(secs(1)).await;
    }
    drop(waiter);
    drop(election);
    assert_eq!(changed.await.expect("an answer"), None);
}

#[tokio::test]
async fn an_observer_is_told_of_errors_and_asks_again_after_a_pause() {
    let stage = Stage::new();
    let mut leader = stage.client.leader(KEY).expect("a good key").poll_every(secs(2));
    stage.faults.set_down(true);
    let error = leader.changed().await.expect_err("the store is away");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert_eq!(error.key().map(ToString::to_string).as_deref(), Some(KEY));
    stage.faults.heal();
    let mut changed = std::pin::pin!(leader.changed());
    assert!(now_or_never(changed.as_mut()).is_none(), "not at once");
    stage.pass(secs(2)).await;
    assert_eq!(changed.await.expect("an answer"), None);
}
