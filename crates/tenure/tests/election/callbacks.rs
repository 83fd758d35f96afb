//! Callbacks and events: in order, and never in the way.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tenure::conformance::{Fault, Op};
use tenure::election::{Election, ElectionState, Ended, Event};
use tenure::{ErrorKind, Leadership, Loss};

use super::{Heard, Stage, now_or_never, secs, told, until};

fn fails(_: Leadership) {
    panic!("a sync one");
}

async fn fails_later(_: Leadership) {
    panic!("an async one");
}

#[tokio::test]
async fn a_callback_that_never_ends_delays_no_renewal_and_no_loss() {
    let stage = Stage::new();
    let request = stage.election().on_acquired(|_| std::future::pending::<()>());
    let (election, mut events) = stage.leading(request).await;
    stage.pass(secs(30)).await;
    assert!(election.is_leader(), "renewed");
    let leadership = election.leadership().expect("it leads");
    stage.faults.always(Op::Renew, Fault::Hang);
    stage.pass(secs(13)).await;
    assert!(
        matches!(now_or_never(leadership.ended()), Some(Ended::Lost(lost)) if lost.reason == Loss::Expired)
    );
    assert!(told(&mut events).contains(&"lost"));
}

#[tokio::test]
async fn blocking_callback_does_not_delay_renewals() {
    let stage = Stage::new();
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let (wait, heard) = (Mutex::new(wait), Heard::default());
    let note = heard.clone();
    let request = stage
        .election()
        .on_acquired(move |_| wait.lock().expect("no panic").recv().expect("the test says when"))
        .on_acquired(move |_| note.note("second"));
    let (election, _) = stage.leading(request).await;
    stage.pass(secs(30)).await;
    assert!(election.is_leader());
    assert_eq!(heard.all(), [""; 0], "in order: the first has not returned");
    go.send(()).expect("it waits");
    election.shutdown(secs(5)).await.expect("released");
    assert_eq!(heard.all(), ["second"]);
}

#[tokio::test]
async fn callbacks_come_in_the_order_of_registration_and_of_events() {
    let stage = Stage::new();
    let heard = Heard::default();
    let note = |what: &'static str| {
        let heard = heard.clone();
        move || heard.note(what)
    };
    let later = |what: &'static str| {
        let heard = heard.clone();
        move || {
            let heard = heard.clone();
            async move {
                tokio::task::yield_now().await;
                heard.note(what);
            }
        }
    };
    let (one, two, three) = (note("acquired 1"), later("acquired 2"), note("acquired 3"));
    let changes = heard.clone();
    let request = stage
        .election()
        .on_state_change(move |change| changes.note(format!("{} > {}", change.from, change.to)))
        .on_acquired(move |_| one())
        .on_acquired(move |_| two())
        .on_acquired(move |_| three())
        .on_released(later("released 1"))
        .on_released(note("released 2"));
    let stopped = note("stopped");
    let (election, _) = stage.leading(request.on_stopped(move |_| stopped())).await;
    election.shutdown(None).await.expect("released");
    let expected = [
        "stopped > follower",
        "follower > acquiring",
        "acquiring > leader",
        "acquired 1",
        "acquired 2",
        "acquired 3",
        "leader > releasing",
        "releasing > stopped",
        "released 1",
        "released 2",
        "stopped",
    ];
    assert_eq!(heard.all(), expected);
}

#[tokio::test]
async fn a_callback_that_panics_is_reported_and_ends_nothing() {
    let stage = Stage::new();
    let heard = Heard::default();
    let (errors, after) = (heard.clone(), heard.clone());
    let request = stage
        .election()
        .on_acquired(fails)
        .on_acquired(fails_later)
        .on_acquired(move |_| after.note("the next one"))
        .on_error(|error| assert_ne!(error.kind(), ErrorKind::Panicked, "an error over an error"))
        .on_error(move |error| errors.note(format!("{:?}: {error}", error.kind())));
    let (election, mut events) = stage.leading(request).await;
    let is_panic =
        |event: &Event| matches!(event, Event::Error(error) if error.kind() == ErrorKind::Panicked);
    until(&mut events, is_panic).await;
    stage.pass(secs(30)).await;
    assert!(election.is_leader());
    election.shutdown(None).await.expect("released");
    assert_eq!(
        heard.all(),
        [
            "the next one",
            "Panicked: on_acquired panicked: a sync one",
            "Panicked: on_acquired panicked: an async one",
        ]
    );
}

#[tokio::test]
async fn a_callback_may_shut_its_own_election_down() {
    let stage = Stage::new();
    let shared: Arc<Mutex<Option<Arc<Election>>>> = Arc::default();
    let (inside, (done, is_done)) = (Arc::clone(&shared), tokio::sync::oneshot::channel());
    let done = Mutex::new(Some(done));
    let request = stage.election().on_released(|| {}).on_acquired(move |_| {
        let election = inside.lock().expect("no panic").clone().expect("it was started");
        let done = done.lock().expect("no panic").take().expect("one term");
        async move {
            // Were it to wait for its own end, no time would pass to end that.
            let stopped = election.shutdown(secs(60)).await;
            done.send(stopped).expect("the test waits");
        }
    });
    let election = Arc::new(request.build().expect("good settings"));
    *shared.lock().expect("no panic") = Some(Arc::clone(&election));
    election.start().await.expect("started");
    is_done.await.expect("the callback ran").expect("released");
    assert_eq!(election.state(), ElectionState::Stopped);
    shared.lock().expect("no panic").take();
}

#[tokio::test]
async fn a_reader_that_is_too_slow_is_told_how_much_it_missed() {
    let stage = Stage::new();
    let (election, mut events) = stage.leading(stage.election()).await;
    for _ in 0..50 {
        election.shutdown(None).await.expect("released");
        election.start().await.expect("a new run");
        assert!(election.wait_for_leadership(None).await.expect("it runs"));
    }
    let first = events.next().await.expect("the election is there");
    assert!(matches!(first, Event::Missed(missed) if missed > 0), "{first:?}");
    let mut kept = 0;
    while let Some(Some(_)) = now_or_never(events.next()) {
        kept += 1;
    }
    assert_eq!(kept, 256);
}

#[tokio::test]
async fn callbacks_that_fall_behind_are_told_of_whole_terms() {
    let stage = Stage::new();
    let heard = Heard::default();
    let (acquired, released) = (heard.clone(), heard.clone());
    let (go, gate) = tokio::sync::watch::channel(false);
    let request = stage.election().on_acquired(move |_| {
        let (mut gate, heard) = (gate.clone(), acquired.clone());
        async move {
            gate.wait_for(|open| *open).await.expect("the test opens it");
            heard.note("acquired");
        }
    });
    let request = request.on_released(move || released.note("released")).cool_down(Duration::ZERO);
    let (election, _) = stage.leading(request).await;
    for _ in 0..1_500 {
        election.step_down(None).await.expect("released");
        assert!(election.wait_for_leadership(None).await.expect("it runs"));
    }
    go.send(true).expect("a callback waits");
    election.shutdown(None).await.expect("released");
    let heard = heard.all();
    assert!(heard.len() > 100 && heard.len() < 2_000, "{}", heard.len());
    for (at, what) in heard.iter().enumerate() {
        assert_eq!(what, if at % 2 == 0 { "acquired" } else { "released" }, "at {at}");
    }
}

#[tokio::test]
async fn an_error_that_a_callback_returns_is_reported_to_on_error() {
    let stage = Stage::new();
    let heard = Heard::default();
    let note = heard.clone();
    let request = stage
        .election()
        .on_acquired(|_| Err::<(), _>(std::io::Error::other("no disk")))
        .on_acquired(|_| async { Err::<(), _>("no network") })
        .on_error(move |error| note.note(format!("{:?}: {}", error.kind(), error.chain())))
        .on_error(|_| Err::<(), _>("not reported again"));
    let (election, mut events) = stage.leading(request).await;
    election.shutdown(secs(5)).await.expect("released");
    let reported = [
        "CallbackFailed: on_acquired returned an error: no disk",
        "CallbackFailed: on_acquired returned an error: no network",
    ];
    assert_eq!(heard.all(), reported);
    let told = told(&mut events);
    assert_eq!(told.iter().filter(|told| **told == "error").count(), 2, "{told:?}");
}

#[tokio::test]
async fn callbacks_that_are_added_after_the_start_get_later_events() {
    let stage = Stage::new();
    let heard = Heard::default();
    let (early, late, end) = (heard.clone(), heard.clone(), heard.clone());
    let request = stage.election().cool_down(secs(1)).on_acquired(move |_| early.note("first"));
    let (election, _) = stage.leading(request).await;
    election.on_acquired(move |_| late.note("second"));
    election.on_stopped(move |why| end.note(why.to_string()));
    election.step_down(None).await.expect("released");
    stage.pass(secs(3)).await;
    assert!(election.is_leader());
    election.shutdown(secs(5)).await.expect("released");
    assert_eq!(heard.all(), ["first", "first", "second", "a stop was requested"]);
}
