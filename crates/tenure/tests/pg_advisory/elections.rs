//! The grace window, the cool-down and polling, with real sessions.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tenure::election::{Election, ElectionRequest, State};
use tenure::retry::FixedInterval;

use crate::link::{Link, Mode};
use crate::services;
use crate::support::{TTL, client, pair, until};

/// What callbacks heard, in order.
#[derive(Clone, Default)]
struct Heard(Arc<Mutex<Vec<&'static str>>>);

impl Heard {
    fn listen(&self, request: ElectionRequest) -> ElectionRequest {
        let [one, two, three] = [(); 3].map(|()| self.clone());
        request
            .on_acquired(move |_| one.0.lock().unwrap().push("acquired"))
            .on_lost(move |_| two.0.lock().unwrap().push("lost"))
            .on_released(move || three.0.lock().unwrap().push("released"))
    }

    fn all(&self) -> Vec<&'static str> {
        self.0.lock().unwrap().clone()
    }
}

async fn leads(election: &Election) {
    assert!(election.wait_for_leadership(TTL * 10).await.unwrap(), "{election:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_within_the_grace_window_is_not_told() {
    let Some(url) = services::postgres() else { return };
    let (key, ..) = pair();
    let link = Link::to(&url).await;
    let heard = Heard::default();
    let request = client(&link.url).election(&key).ttl(TTL).reconnect_grace(Duration::from_secs(5));
    let election = heard.listen(request).start().await.unwrap();
    leads(&election).await;
    let before = election.fencing_token().unwrap();
    link.set(Mode::Cut);
    until("the loss", async || election.state() == State::Reconnecting).await;
    assert!(!election.is_leader(), "the window saves callbacks, not leadership");
    tokio::time::sleep(Duration::from_secs(1)).await;
    link.set(Mode::Open);
    leads(&election).await;
    assert!(election.fencing_token().unwrap() > before);
    election.shutdown(None).await.unwrap();
    until("the end", async || heard.all().contains(&"released")).await;
    assert_eq!(heard.all(), ["acquired", "released"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_in_which_another_leads_is_told() {
    let Some(url) = services::postgres() else { return };
    let (key, ..) = pair();
    let link = Link::to(&url).await;
    let heard = Heard::default();
    let request = client(&link.url).election(&key).ttl(TTL).reconnect_grace(Duration::from_secs(5));
    let election = heard.listen(request).start().await.unwrap();
    leads(&election).await;
    let other = client(&url).election(&key).ttl(TTL).start().await.unwrap();
    link.set(Mode::Cut);
    leads(&other).await;
    link.set(Mode::Open);
    until("the word of it", async || heard.all() == ["acquired", "lost"]).await;
    other.shutdown(None).await.unwrap();
    leads(&election).await;
    until("the new term", async || heard.all() == ["acquired", "lost", "acquired"]).await;
    election.shutdown(None).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_follower_that_polls_holds_nothing_up_and_leads_in_the_end() {
    let Some(url) = services::postgres() else { return };
    let (key, ..) = pair();
    let first = client(&url).election(&key).ttl(TTL).start().await.unwrap();
    leads(&first).await;
    let polls = client(&url);
    let failed = Arc::new(Mutex::new(0));
    let count = Arc::clone(&failed);
    let second = polls
        .election(&key)
        .ttl(TTL)
        .retry(FixedInterval { interval: Duration::from_millis(50) })
        .on_acquire_failed(move |_| *count.lock().unwrap() += 1)
        .start()
        .await
        .unwrap();
    until("several polls", async || *failed.lock().unwrap() > 3).await;
    let shown = polls.inspect(&key).await.unwrap();
    assert!(shown.waiters.is_empty(), "it polls: {shown:?}");
    first.step_down(None).await.unwrap();
    leads(&second).await;
    second.shutdown(None).await.unwrap();
    first.shutdown(None).await.unwrap();
}
