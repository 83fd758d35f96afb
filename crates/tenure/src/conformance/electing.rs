//! Elections: one leader at a time, hand-over, loss and re-election, and the order of events.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::outcome::grant;
use super::{Fault, Fixture, Op, Outcome, cases};
use crate::election::{
    Election, ElectionRequest, ElectionState, Ended, Event, Events, StateChange,
};
use crate::store::QueueKind;
use crate::{Client, ErrorKind, FencingToken};

cases! {
    one_leads_among_three: "of three participants one leads at a time, and each new leader has a larger token", [];
    an_evicted_leader_is_succeeded: "a leader whose hold an operator breaks is notified of the loss, and another participant leads", [EVICT];
    a_leader_is_lost_before_the_next_leads: "a leader that cannot renew stops leading before another begins", [LEASE];
    step_down_hands_over: "a leader that steps down makes way for another, and claims nothing during its cool-down", [];
    shutdown_releases: "a shutdown releases the hold, stops the election, and reports both in this order", [];
    dropping_an_election_releases: "dropping an election frees the key", [];
    a_dead_leader_is_succeeded: "a leader that dies without a release is succeeded", [];
    terms_begin_and_end_in_turn: "over many terms, each acquired is followed by exactly one released or lost", [EVICT];
    waiting_for_leadership: "a wait for leadership returns true when leading, false at its timeout, and an error once stopped", [];
    observer_sees_the_current_leader: "an observer sees each change of leader without taking part", [IDENTITIES];
    an_outage_is_a_loss_and_then_a_new_term: "an outage longer than the lease ends the term, and a new term begins after it", [LEASE];
    a_loss_within_the_grace_is_not_reported: "a hold that is reacquired within the grace window is not reported as lost, but does not lead meanwhile", [LEASE, IDENTITIES];
    a_follower_rides_out_an_outage: "a follower whose store is unavailable receives errors, and leads once the store is available again", [];
}

/// Names of the callbacks that ran, in order.
#[derive(Clone, Default)]
struct CallbackLog(Arc<Mutex<Vec<String>>>);

impl CallbackLog {
    fn note(&self, what: impl Into<String>) {
        self.0.lock().expect("no panic").push(what.into());
    }

    fn all(&self) -> Vec<String> {
        self.0.lock().expect("no panic").clone()
    }

    fn attach(&self, request: ElectionRequest) -> ElectionRequest {
        let [one, two, three, four] = [(); 4].map(|()| self.clone());
        request
            .on_acquired(move |_| one.note("acquired"))
            .on_released(move || two.note("released"))
            .on_lost(move |_| three.note("lost"))
            .on_stopped(move |_| four.note("stopped"))
    }
}

impl Fixture {
    fn election(&self, client: &Client, id: &str) -> ElectionRequest {
        client.election(self.key()).ttl(self.ttl()).id(id).cool_down(self.ttl())
    }

    async fn leading(&self, client: &Client, id: &str) -> Election {
        let election = self.election(client, id).start().await.succeeds("ElectionRequest::start");
        self.leads(&election).await;
        election
    }

    /// A participant that waits to lead.
    async fn following(&self, client: &Client, id: &str) -> Election {
        let (client, requests) = self.counted(client);
        let election = self.election(&client, id).start().await.succeeds("ElectionRequest::start");
        if self.can().queue == QueueKind::None {
            self.wait_for("a follower's claim", || requests.ended(Op::Claim) > 0).await;
        } else {
            self.wait_until("a follower in the queue", |state| !state.waiters.is_empty()).await;
        }
        assert!(!election.is_leader());
        election
    }

    async fn leads(&self, election: &Election) -> FencingToken {
        let led = election
            .wait_for_leadership(self.max_wait())
            .await
            .succeeds("Election::wait_for_leadership");
        assert!(led, "does not lead after {:?}: {election:?}", self.max_wait());
        election.fencing_token().expect("it leads")
    }

    async fn evict(&self, token: FencingToken) {
        self.two.store().evict(&self.key(), token, "a test").await.succeeds("Store::evict");
    }

    /// Reads events up to the first that matches, and returns them all.
    async fn wait_for_event(
        &self,
        events: &mut Events,
        wanted: impl Fn(&Event) -> bool,
    ) -> Vec<Event> {
        let mut received = Vec::new();
        let reading = async {
            loop {
                let event = events.next().await.expect("the election is there");
                let found = wanted(&event);
                received.push(event);
                if found {
                    break;
                }
            }
        };
        let read = tokio::time::timeout(self.max_wait(), reading).await;
        assert!(read.is_ok(), "the event did not come within {:?}: {received:?}", self.max_wait());
        received
    }
}

async fn one_leads_among_three(scene: Fixture) {
    let three = Client::with_store(scene.harness.open().await);
    let mut running = Vec::new();
    for (client, id) in [(&scene.one, "one"), (&scene.two, "two"), (&three, "three")] {
        running.push(scene.election(client, id).start().await.succeeds("ElectionRequest::start"));
    }
    let mut last = None;
    while !running.is_empty() {
        let waits = running.iter().map(|election| Box::pin(scene.leads(election)));
        let (token, at) = first(waits.collect()).await;
        if let Some(before) = last.replace(token) {
            scene.check_order(before, token);
        }
        let leaders = running.iter().filter(|election| election.is_leader()).count();
        assert_eq!(leaders, 1, "{running:?}");
        running.remove(at).shutdown(scene.max_wait()).await.succeeds("Election::shutdown");
    }
    scene.wait_until_free().await;
}

/// Output of the first future that is ready, and its index.
async fn first<F: Future + Unpin>(mut futures: Vec<F>) -> (F::Output, usize) {
    std::future::poll_fn(|cx| {
        for (at, future) in futures.iter_mut().enumerate() {
            if let std::task::Poll::Ready(output) = std::pin::Pin::new(future).poll(cx) {
                return std::task::Poll::Ready((output, at));
            }
        }
        std::task::Poll::Pending
    })
    .await
}

async fn an_evicted_leader_is_succeeded(scene: Fixture) {
    let one = scene.leading(&scene.one, "one").await;
    let mut events = one.events();
    let two = scene.following(&scene.two, "two").await;
    let leadership = one.leadership().expect("it leads");
    scene.evict(leadership.fencing_token()).await;
    assert!(matches!(leadership.ended().await, Ended::Lost(_)));
    assert!(!leadership.is_held());
    let received = scene.wait_for_event(&mut events, |event| matches!(event, Event::Lost(_))).await;
    let before = received.iter().rev().nth(1);
    assert!(matches!(before, Some(Event::Error(_))), "the cause comes first: {received:?}");
    scene.check_order(leadership.fencing_token(), scene.leads(&two).await);
    assert!(!one.is_leader());
    two.shutdown(scene.max_wait()).await.succeeds("Election::shutdown");
    scene.leads(&one).await;
}

async fn a_leader_is_lost_before_the_next_leads(scene: Fixture) {
    let one = scene.leading(&scene.one, "one").await;
    let leadership = one.leadership().expect("it leads");
    let two = scene.following(&scene.two, "two").await;
    // Not the claims of the lost leader either: on a store without a queue, it could lead again before the other does.
    for op in [Op::Renew, Op::Release, Op::Claim] {
        scene.faults.always(op, Fault::Hang);
    }
    let lost = async {
        leadership.ended().await;
        assert!(!one.is_leader());
        scene.clock.now()
    };
    let next = async {
        scene.leads(&two).await;
        scene.clock.now()
    };
    let (lost, next) = tokio::join!(lost, next);
    assert!(lost <= next, "lost at {lost:?}, the next from {next:?}");
}

async fn step_down_hands_over(scene: Fixture) {
    let log = CallbackLog::default();
    let cool_down = scene.ttl() * 2;
    let request = scene.election(&scene.one, "one").cool_down(cool_down);
    let one = log.attach(request).start().await.succeeds("ElectionRequest::start");
    let token = scene.leads(&one).await;
    let leadership = one.leadership().expect("it leads");
    let two = scene.following(&scene.two, "two").await;
    one.step_down(scene.max_wait()).await.succeeds("Election::step_down");
    let stepped = scene.clock.now();
    assert!(!one.is_leader() && !leadership.is_held());
    assert_eq!(leadership.ended().await, Ended::Released);
    scene.check_order(token, scene.leads(&two).await);
    two.shutdown(scene.max_wait()).await.succeeds("Election::shutdown");
    scene.leads(&one).await;
    let waited = scene.clock.now().since(stepped);
    // The cool-down began shortly before step_down returned.
    assert!(waited + scene.ttl() / 4 >= cool_down, "claimed again after {waited:?}");
    one.shutdown(scene.max_wait()).await.succeeds("Election::shutdown");
    assert_eq!(log.all(), ["acquired", "released", "acquired", "released", "stopped"]);
}

async fn shutdown_releases(scene: Fixture) {
    let log = CallbackLog::default();
    let request = log.attach(scene.election(&scene.one, "one"));
    let one = request.start().await.succeeds("ElectionRequest::start");
    scene.leads(&one).await;
    one.shutdown(scene.max_wait()).await.succeeds("Election::shutdown");
    assert_eq!(
        log.all(),
        ["acquired", "released", "stopped"],
        "callbacks run before shutdown returns"
    );
    assert_eq!((one.state(), one.is_leader()), (ElectionState::Stopped, false));
    one.shutdown(scene.max_wait()).await.succeeds("Election::shutdown");
    scene.wait_until_free().await;

    let held = scene.acquire(&scene.two).await;
    one.start().await.succeeds("Election::start");
    one.shutdown(scene.max_wait()).await.succeeds("Election::shutdown");
    scene.wait_until("an empty queue", |state| state.waiters.is_empty()).await;
    held.release().await.succeeds("Guard::release");
    scene.wait_until_free().await;
    assert_eq!(log.all().len(), 4, "only stopped: {:?}", log.all());
}

async fn dropping_an_election_releases(scene: Fixture) {
    let one = scene.leading(&scene.one, "one").await;
    let leadership = one.leadership().expect("it leads");
    drop(one);
    assert_eq!(leadership.ended().await, Ended::Released);
    scene.wait_until_free().await;
    let held = scene.acquire(&scene.two).await;
    drop(scene.following(&scene.one, "one").await);
    scene.wait_until("an empty queue", |state| state.waiters.is_empty()).await;
    held.release().await.succeeds("Guard::release");
    scene.wait_until_free().await;
}

async fn a_dead_leader_is_succeeded(scene: Fixture) {
    let store = scene.two.store();
    let grant = grant(&**store, &scene.claim(1)).await;
    let token = grant.token;
    let one = scene.following(&scene.one, "one").await;
    drop(grant);
    let began = scene.clock.now();
    scene.check_order(token, scene.leads(&one).await);
    let took = scene.clock.now().since(began);
    let bound = scene.ttl() * 2 + Duration::from_secs(5);
    assert!(took < bound, "a dead leader was succeeded only after {took:?}");
}

async fn terms_begin_and_end_in_turn(scene: Fixture) {
    let log = CallbackLog::default();
    let request = scene.election(&scene.one, "one").cool_down(Duration::ZERO);
    let one = log.attach(request).start().await.succeeds("ElectionRequest::start");
    let mut events = one.events();
    for term in 0..6 {
        let token = scene.leads(&one).await;
        if term % 2 == 0 {
            one.step_down(scene.max_wait()).await.succeeds("Election::step_down");
        } else {
            scene.evict(token).await;
            scene.wait_for_event(&mut events, |event| matches!(event, Event::Lost(_))).await;
        }
    }
    one.shutdown(scene.max_wait()).await.succeeds("Election::shutdown");
    let mut log = log.all();
    assert_eq!(log.pop().as_deref(), Some("stopped"));
    assert!(log.len() >= 12 && log.len() % 2 == 0, "{log:?}");
    for (term, pair) in log.chunks(2).enumerate() {
        let end = if term % 2 == 0 { "released" } else { "lost" };
        assert!(pair[0] == "acquired" && (pair[1] == end || term >= 6), "{term} in {log:?}");
    }
}

async fn waiting_for_leadership(scene: Fixture) {
    let one = scene.election(&scene.one, "one").build().expect("good settings");
    let waited = one.wait_for_leadership(None).await;
    waited.fails(ErrorKind::Shutdown, "Election::wait_for_leadership before Election::start");
    one.start().await.succeeds("Election::start");
    scene.leads(&one).await;
    assert!(
        one.wait_for_leadership(Duration::ZERO).await.succeeds("Election::wait_for_leadership")
    );

    let two = scene.following(&scene.two, "two").await;
    let began = scene.clock.now();
    let timeout = Duration::from_millis(50);
    assert!(!two.wait_for_leadership(timeout).await.succeeds("Election::wait_for_leadership"));
    assert!(scene.clock.now().since(began) >= timeout);
    let (waited, stopped) =
        tokio::join!(two.wait_for_leadership(None), two.shutdown(scene.max_wait()));
    stopped.succeeds("Election::shutdown");
    waited.fails(ErrorKind::Shutdown, "Election::wait_for_leadership after Election::shutdown");
}

async fn observer_sees_the_current_leader(scene: Fixture) {
    let mut leader = scene.two.leader(scene.key()).expect("a good key");
    assert_eq!(leader.changed().await.succeeds("Leader::changed"), None, "no leader yet");
    let request = scene.election(&scene.one, "web-1").note("deploy 42");
    let one = request.start().await.succeeds("ElectionRequest::start");
    let token = scene.leads(&one).await;
    let led = leader.changed().await.succeeds("Leader::changed").expect("there is a leader");
    assert_eq!(led.token, token);
    if let Some(by) = &led.by {
        assert_eq!((&*by.id, &*by.note), ("web-1", "deploy 42"));
    }
    assert_eq!(
        leader.current().await.succeeds("Leader::current").map(|led| led.token),
        Some(token)
    );

    let two = scene.following(&scene.two, "web-2").await;
    one.shutdown(scene.max_wait()).await.succeeds("Election::shutdown");
    let second = scene.leads(&two).await;
    loop {
        match leader.changed().await.succeeds("Leader::changed") {
            None => {}
            Some(led) if led.token == second => break,
            Some(led) => panic!("reported twice: {led:?}"),
        }
    }
    two.shutdown(scene.max_wait()).await.succeeds("Election::shutdown");
    assert_eq!(
        leader.changed().await.succeeds("Leader::changed"),
        None,
        "no leader after the shutdown"
    );
}

async fn an_outage_is_a_loss_and_then_a_new_term(scene: Fixture) {
    let log = CallbackLog::default();
    let request = log.attach(scene.election(&scene.one, "one"));
    let one = request.start().await.succeeds("ElectionRequest::start");
    let token = scene.leads(&one).await;
    let mut events = one.events();
    scene.faults.set_down(true);
    scene.wait_for_event(&mut events, |event| matches!(event, Event::Lost(_))).await;
    assert!(!one.is_leader());
    scene.faults.heal();
    scene.check_order(token, scene.leads(&one).await);
    one.shutdown(scene.max_wait()).await.succeeds("Election::shutdown");
    assert_eq!(log.all(), ["acquired", "lost", "acquired", "released", "stopped"]);
}

async fn a_loss_within_the_grace_is_not_reported(scene: Fixture) {
    let log = CallbackLog::default();
    let request = scene.election(&scene.one, "one").reconnect_grace(scene.max_wait());
    let one = log.attach(request).start().await.succeeds("ElectionRequest::start");
    let token = scene.leads(&one).await;
    let leadership = one.leadership().expect("it leads");
    let mut events = one.events();
    scene.faults.set_down(true);
    assert!(matches!(leadership.ended().await, Ended::Lost(_)), "the window delays callbacks only");
    assert!(!one.is_leader() && !leadership.is_held());
    let opened = |to| move |event: &Event| matches!(event, Event::StateChange(StateChange { to: now, .. }) if *now == to);
    scene.wait_for_event(&mut events, opened(ElectionState::Reconnecting)).await;
    scene.faults.heal();
    scene.wait_for_event(&mut events, opened(ElectionState::Leader)).await;
    scene.check_order(token, one.fencing_token().expect("it leads again"));
    one.shutdown(scene.max_wait()).await.succeeds("Election::shutdown");
    assert_eq!(log.all(), ["acquired", "released", "stopped"]);
}

async fn a_follower_rides_out_an_outage(scene: Fixture) {
    let held = scene.acquire(&scene.two).await;
    scene.faults.set_down(true);
    let one = scene.election(&scene.one, "one").build().expect("good settings");
    let mut events = one.events();
    one.start().await.succeeds("Election::start");
    let received =
        scene.wait_for_event(&mut events, |event| matches!(event, Event::Error(_))).await;
    assert!(
        !received.iter().any(|event| matches!(event, Event::Lost(_))),
        "never led: {received:?}"
    );
    scene.faults.heal();
    held.release().await.succeeds("Guard::release");
    scene.leads(&one).await;
}
