//! Guards in logical time: the store and the holder count on a clock that is moved by hand.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tenure::conformance::{Fault, Faults, Op};
use tenure::retry::{Retry, RetryContext};
use tenure::{Client, Clock, ErrorKind, Guard, Key, Loss, ManualClock, MemoryStore};

/// A ttl of 6 s: margin 1 s, renewal every 2 s, requests within 1.5 s.
const TTL: Duration = Duration::from_secs(6);
const NANO: Duration = Duration::from_nanos(1);

fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

struct World {
    client: Client,
    faults: Faults,
    hand: ManualClock,
}

impl World {
    fn new() -> Self {
        let (clock, hand) = Clock::manual();
        let memory = Arc::new(MemoryStore::with_clock(clock.clone()));
        let (store, faults) = Faults::wrap(memory, clock.clone());
        let client = Client::with_store(Arc::new(store)).with_clock(clock);
        Self { client, faults, hand }
    }

    /// Moves the time on and lets every task do what that brings about.
    async fn pass(&self, span: Duration) {
        self.hand.advance(span);
        settle().await;
    }
}

/// On a runtime of one thread every task that can run has run after this.
async fn settle() {
    for _ in 0..50 {
        tokio::task::yield_now().await;
    }
}

fn ready<T>(future: impl Future<Output = T>) -> Option<T> {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => Some(value),
        Poll::Pending => None,
    }
}

fn loss(guard: &Guard) -> Option<Loss> {
    ready(guard.lost()).map(|lost| lost.reason)
}

#[tokio::test]
async fn a_guard_is_valid_until_its_deadline_and_not_a_moment_longer() {
    let world = World::new();
    let guard = world.client.lock("a").ttl(TTL).keep_alive(false).acquire().await.unwrap();
    assert_eq!(guard.remaining(), secs(5));
    world.pass(secs(5).saturating_sub(NANO)).await;
    assert!(guard.is_held());
    assert_eq!(loss(&guard), None);
    world.hand.advance(NANO);
    assert!(!guard.is_held(), "before any task had a chance to notice");
    settle().await;
    assert_eq!(loss(&guard), Some(Loss::Expired));
}

#[tokio::test]
async fn a_machine_that_slept_past_the_deadline_wakes_up_without_the_lock() {
    let world = World::new();
    let guard = world.client.lock("a").ttl(TTL).acquire().await.unwrap();
    world.hand.advance(secs(3_600));
    assert!(!guard.is_held());
    assert_eq!(guard.remaining(), Duration::ZERO);
    settle().await;
    assert_eq!(loss(&guard), Some(Loss::Expired));
    let error = guard.release().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
}

#[tokio::test]
async fn the_release_of_a_lost_hold_does_not_wait_for_a_store_that_is_away() {
    let world = World::new();
    let guard = world.client.lock("a").ttl(TTL).acquire().await.unwrap();
    world.faults.set_down(true);
    world.pass(secs(6)).await;
    assert_eq!(loss(&guard), Some(Loss::Expired));
    let released = tokio::spawn(guard.release());
    settle().await;
    assert!(released.is_finished(), "no time has passed");
    assert_eq!(released.await.unwrap().unwrap_err().kind(), ErrorKind::Lost);
}

#[tokio::test]
async fn a_release_that_is_seen_only_after_the_deadline_does_not_wait_either() {
    let world = World::new();
    let guard = world.client.lock("a").ttl(TTL).acquire().await.unwrap();
    world.faults.set_down(true);
    let mut release = pin!(guard.release());
    assert!(ready(release.as_mut()).is_none());
    world.pass(secs(6)).await;
    let error = ready(release.as_mut()).expect("no time has passed").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
}

#[tokio::test]
async fn a_release_that_crosses_the_news_of_the_loss_tells_of_the_loss() {
    let world = World::new();
    let guard = world.client.lock("a").ttl(TTL).acquire().await.unwrap();
    settle().await;
    let store = world.client.store();
    store.evict(guard.key(), guard.fencing_token(), "a test").await.unwrap();
    let error = guard.release().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
}

#[tokio::test]
async fn a_grant_that_was_lost_before_anybody_waited_for_it_is_not_returned() {
    let world = World::new();
    let pending = world.client.lock("a").ttl(TTL).enqueue().await.unwrap();
    settle().await;
    world.faults.set_down(true);
    world.pass(secs(60)).await;
    let error = pending.wait().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");

    world.faults.heal();
    let pending = world.client.lock("a").ttl(TTL).enqueue().await.unwrap();
    settle().await;
    world.hand.advance(secs(60));
    let error = pending.wait().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost, "nobody has noticed yet: {error}");
}

/// The keeper's runtime stands still, as one does while its thread is blocked.
#[test]
fn lost_comes_at_the_deadline_although_the_keeper_does_not_run() {
    for max_hold in [None, Some(secs(2))] {
        let (clock, hand) = Clock::manual();
        let store = Arc::new(MemoryStore::with_clock(clock.clone()));
        let client = Client::with_store(store).with_clock(clock);
        let mut request = client.lock("a").ttl(TTL);
        if let Some(max) = max_hold {
            request = request.max_hold(max);
        }
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let guard = runtime.block_on(request.acquire()).unwrap();
        assert_eq!(loss(&guard), None);
        hand.advance(max_hold.unwrap_or(secs(5)));
        assert!(!guard.is_held());
        let reason = if max_hold.is_some() { Loss::MaxHold } else { Loss::Expired };
        assert_eq!(loss(&guard), Some(reason));
    }
}

#[tokio::test]
async fn a_renewal_counts_from_when_it_was_sent() {
    let world = World::new();
    let guard = world.client.lock("a").ttl(TTL).acquire().await.unwrap();
    world.pass(secs(2)).await;
    assert_eq!(guard.remaining(), secs(5), "renewed at 2 s");
    world.faults.next(Op::Renew, Fault::Hang);
    world.pass(secs(2)).await;
    assert_eq!(guard.remaining(), secs(3), "the one at 4 s hangs");
    world.pass(Duration::from_millis(1_500)).await;
    assert_eq!(guard.remaining(), Duration::from_millis(1_500), "and ended without an answer");
    world.pass(Duration::from_millis(250)).await;
    assert_eq!(guard.remaining(), secs(5), "the next one landed");
}

#[tokio::test]
async fn ending_moves_on_with_every_renewal() {
    let world = World::new();
    let request = world.client.lock("a").ttl(TTL).stop_grace(secs(1));
    let guard = request.acquire().await.unwrap();
    let mut ending = pin!(guard.ending());
    let mut poll = || ending.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready();
    for _ in 0..5 {
        assert!(!poll());
        world.pass(secs(2)).await;
    }
    world.faults.set_down(true);
    world.pass(secs(4).saturating_sub(NANO)).await;
    assert!(!poll(), "a moment is left");
    world.pass(NANO).await;
    assert!(poll() && guard.is_held(), "a second before the deadline");
}

#[tokio::test]
async fn a_claim_that_is_repeated_for_a_caller_that_is_gone_does_not_wait() {
    let world = World::new();
    let holder = world.client.lock("a").ttl(TTL).acquire().await.unwrap();
    world.faults.always(Op::Claim, Fault::LoseRequest);
    let client = world.client.clone();
    let waiting = tokio::spawn(async move { client.lock("a").ttl(TTL).acquire().await });
    settle().await;
    waiting.abort();
    settle().await;
    // The outcome of the claim is unknown, so it is repeated: to settle it, not to get the lock.
    world.faults.heal();
    world.pass(secs(1)).await;
    assert_eq!(ready(holder.handoff_requested()), None, "it joined the queue");
}

#[tokio::test]
async fn a_grant_that_ended_before_it_was_confirmed_is_claimed_again() {
    let world = World::new();
    let holder = world.client.lock("a").ttl(TTL).acquire().await.unwrap();
    let client = world.client.clone();
    let waiting = tokio::spawn(async move { client.lock("a").ttl(TTL).acquire().await });
    settle().await;
    world.faults.next(Op::Renew, Fault::Delay);
    holder.release().await.unwrap();
    settle().await;
    let granted = world.client.inspect("a").await.unwrap().holders.remove(0).token;
    let key = Key::new("a").unwrap();
    world.client.store().evict(&key, granted, "before it is confirmed").await.unwrap();
    // The confirmation arrives after half of its time limit, and is refused.
    world.pass(secs(1)).await;
    world.pass(secs(1)).await;
    assert!(waiting.is_finished(), "it waits for a hold that has ended");
    assert!(waiting.await.unwrap().unwrap().fencing_token() > granted);
}

#[tokio::test]
async fn a_callback_that_panics_harms_nothing() {
    let world = World::new();
    let calls = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&calls);
    let request = world.client.lock("a").ttl(TTL).on_renewal_error(move |_| {
        count.fetch_add(1, Ordering::SeqCst);
        panic!("on purpose");
    });
    let guard = request.on_handoff_requested(|| panic!("on purpose")).acquire().await.unwrap();
    world.faults.next(Op::Renew, Fault::LoseRequest);
    let waiter = world.client.lock("a").enqueue().await.unwrap();
    world.pass(secs(2)).await;
    world.pass(secs(1)).await;
    assert_eq!(calls.load(Ordering::SeqCst), 1);
    assert!(guard.is_held() && ready(guard.handoff_requested()).is_some());
    guard.release().await.unwrap();
    drop(waiter);
}

#[tokio::test]
async fn a_strategy_of_the_users_decides_and_sees_the_error() {
    #[derive(Debug)]
    struct Twice(Arc<Mutex<Vec<String>>>);
    impl Retry for Twice {
        fn next_delay(&mut self, context: &RetryContext<'_>, _random: f64) -> Option<Duration> {
            let error = context.last_error.map(ToString::to_string).unwrap_or_default();
            self.0.lock().unwrap().push(error);
            (context.attempt < 3).then_some(Duration::ZERO)
        }
        fn reset(&mut self) {}
    }
    let world = World::new();
    world.faults.set_down(true);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let error = world.client.lock("a").retry(Twice(Arc::clone(&seen))).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let seen = seen.lock().unwrap();
    assert_eq!(seen.len(), 3);
    assert!(seen[0].contains("the store is unavailable"), "{seen:?}");
}

#[test]
fn a_guard_outlives_its_runtime_without_a_panic() {
    let runtime = || tokio::runtime::Builder::new_current_thread().build().unwrap();
    let client = Client::with_store(Arc::new(MemoryStore::new()));
    let take = |client: &Client| {
        let runtime = runtime();
        let guard = runtime.block_on(client.lock("a").acquire()).unwrap();
        assert!(guard.is_held());
        guard
    };
    let guard = take(&client);
    assert!(!guard.is_held(), "nobody renews it any more");
    assert!(ready(guard.lost()).is_some());
    drop(guard);
    let error = ready(take(&client).release()).unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Shutdown, "{error}");
    runtime().block_on(client.lock("a").try_acquire()).expect("freed with its runtime").key();
}

#[test]
fn a_lock_outside_a_runtime_is_refused_with_what_to_do() {
    let client = Client::with_store(Arc::new(MemoryStore::new()));
    let error = ready(client.lock("a").acquire()).expect("at once").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("tokio runtime"), "{error}");
}
