//! The grace window, the cool-down, polling and the ends of waits, with real sessions.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tenure::election::{Election, ElectionRequest, ElectionState};
use tenure::retry::FixedInterval;
use tenure::{ErrorKind, PgAdvisoryStore};

use crate::link::{Link, Mode};
use crate::services;
use crate::support::{TTL, advisory, client, pair, stranger, until};

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

/// A table of terms that no other test uses. The test that creates it removes it.
struct Terms(String);

impl Terms {
    async fn make(url: &str) -> Self {
        let table = format!("tenure_terms_{:08x}", getrandom::u32().unwrap());
        let terms = Self(format!("?terms={table}"));
        PgAdvisoryStore::open(&terms.at(&advisory(url))).unwrap().apply_schema().await.unwrap();
        terms
    }

    fn at(&self, url: &str) -> String {
        format!("{url}{}", self.0)
    }

    async fn remove(self, url: &str) {
        let table = self.0.trim_start_matches("?terms=");
        stranger(url).await.batch_execute(&format!("DROP TABLE {table}")).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_within_the_grace_window_is_not_told() {
    let Some(url) = services::postgres() else { return };
    let terms = Terms::make(&url).await;
    for options in ["", terms.0.as_str()] {
        let (key, ..) = pair();
        let link = Link::to(&url).await;
        let heard = Heard::default();
        let ours = client(&format!("{}{options}", link.url));
        let request = ours.election(&key).ttl(TTL).reconnect_grace(Duration::from_secs(5));
        let election = heard.listen(request).start().await.unwrap();
        leads(&election).await;
        let before = election.fencing_token().unwrap();
        link.set(Mode::Cut);
        until("the loss", async || election.state() == ElectionState::Reconnecting).await;
        assert!(!election.is_leader(), "the window saves callbacks, not leadership");
        tokio::time::sleep(Duration::from_secs(1)).await;
        link.set(Mode::Open);
        leads(&election).await;
        assert!(election.fencing_token().unwrap() > before);
        election.shutdown(None).await.unwrap();
        until("the end", async || heard.all().contains(&"released")).await;
        assert_eq!(heard.all(), ["acquired", "released"], "{options:?}");
    }
    terms.remove(&url).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_in_which_another_led_and_went_is_told_where_terms_are_counted() {
    let Some(url) = services::postgres() else { return };
    let terms = Terms::make(&url).await;
    for (options, expected) in [
        ("", &["acquired", "released"][..]),
        (terms.0.as_str(), &["acquired", "lost", "acquired", "released"][..]),
    ] {
        let (key, ..) = pair();
        let link = Link::to(&url).await;
        let heard = Heard::default();
        let ours = client(&format!("{}{options}", link.url));
        let request = ours.election(&key).ttl(TTL).reconnect_grace(Duration::from_secs(60));
        let election = heard.listen(request).start().await.unwrap();
        leads(&election).await;
        link.set(Mode::Cut);
        until("the loss", async || election.state() == ElectionState::Reconnecting).await;
        let other = client(&terms.at(&url)).lock(&key).ttl(TTL).timeout(TTL * 10).acquire().await;
        other.unwrap().release().await.unwrap();
        link.set(Mode::Open);
        leads(&election).await;
        election.shutdown(None).await.unwrap();
        until("the end", async || heard.all().contains(&"released")).await;
        assert_eq!(heard.all(), expected, "{options:?}");
    }
    terms.remove(&url).await;
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

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_that_is_over_is_a_timeout_whatever_its_statements_did() {
    let Some(url) = services::postgres() else { return };
    let (key, ..) = pair();
    let guard = client(&url).lock(&key).ttl(TTL).acquire().await.unwrap();
    // Several statements end within the one wait: that is no end of it, and no failed claim.
    let ours = client(&format!("{url}?wait=100ms"));
    let time = Duration::from_millis(700);
    let error = ours.lock(&key).ttl(TTL).timeout(time).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    let pending = ours.lock(&key).ttl(TTL).timeout(time).enqueue().await.unwrap();
    assert_eq!(pending.wait().await.unwrap_err().kind(), ErrorKind::Timeout);
    let failed = Arc::new(Mutex::new(0));
    let count = Arc::clone(&failed);
    let request = ours.election(&key).ttl(TTL);
    let request = request.on_acquire_failed(move |_| *count.lock().unwrap() += 1);
    let election = request.start().await.unwrap();
    assert!(!election.wait_for_leadership(time).await.unwrap(), "false, and no error");
    assert_eq!(election.state(), ElectionState::Acquiring, "it waits on");
    assert_eq!(*failed.lock().unwrap(), 0);
    election.shutdown(None).await.unwrap();
    let stopped = election.wait_for_leadership(time).await.unwrap_err();
    assert_eq!(stopped.kind(), ErrorKind::Shutdown, "{stopped}");
    until("an empty queue", async || ours.inspect(&key).await.unwrap().waiters.is_empty()).await;
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_on_a_silent_link_ends_in_time_and_says_that_it_is_not_clear() {
    let Some(url) = services::postgres() else { return };
    let (key, ..) = pair();
    let link = Link::to(&url).await;
    let election = client(&link.url).election(&key).ttl(TTL * 5).start().await.unwrap();
    leads(&election).await;
    link.set(Mode::Silent);
    let begun = std::time::Instant::now();
    let error = election.shutdown(Duration::from_millis(300)).await.unwrap_err();
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    assert_eq!(error.kind(), ErrorKind::Unknown, "{error}");
    assert!(error.may_be_held_for().is_some_and(|left| left <= TTL * 5), "{error:?}");
    until("the end", async || election.state() == ElectionState::Stopped).await;
}
