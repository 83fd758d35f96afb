//! Cancellation: dropping any future at any await point leaves nothing behind.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use super::{Fault, Fixture, Op, Outcome, cases};

cases! {
    a_dropped_acquire_leaves_nothing: "an acquire that is dropped after any number of polls leaves the lock free", [];
    a_dropped_wait_leaves_nothing: "a waiting acquire that is dropped after any number of polls leaves the queue", [];
    a_dropped_enqueue_leaves_nothing: "an enqueue, or its wait, that is dropped after any number of polls leaves neither a place nor a hold", [];
    a_dropped_acquire_of_unknown_outcome_leaves_nothing: "an acquire that is dropped after the reply to its claim was lost leaves the lock free", [];
    a_dropped_release_releases: "a release that is dropped after any number of polls still releases the lock", [];
}

type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Polls at most `n` times and returns the output if the future is ready. Between polls other tasks run; in the second
/// half of [`MAX_POLLS`], a request to a server also has the time to complete.
async fn poll_times<T>(future: &mut Boxed<T>, n: usize) -> Option<T> {
    for poll in 0..n {
        if let Poll::Ready(ready) = poll_once(future) {
            return Some(ready);
        }
        if poll < MAX_POLLS / 2 {
            tokio::task::yield_now().await;
        } else {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    None
}

fn poll_once<T>(future: &mut Boxed<T>) -> Poll<T> {
    future.as_mut().poll(&mut Context::from_waker(Waker::noop()))
}

/// Maximum number of polls: more than any future here needs while other tasks run in between.
const MAX_POLLS: usize = 40;

async fn a_dropped_acquire_leaves_nothing(scene: Fixture) {
    let mut done = false;
    for n in 0..MAX_POLLS {
        let mut acquire: Boxed<_> = Box::pin(scene.lock(&scene.one).acquire());
        done |= poll_times(&mut acquire, n).await.is_some();
        drop(acquire);
        scene.wait_until_free().await;
    }
    assert!(done, "the largest number of polls is past the end");
}

async fn a_dropped_wait_leaves_nothing(scene: Fixture) {
    for n in 0..MAX_POLLS {
        let guard = scene.acquire(&scene.two).await;
        let mut acquire: Boxed<_> = Box::pin(scene.lock(&scene.one).acquire());
        assert!(poll_times(&mut acquire, n).await.is_none(), "it is held");
        if n % 2 == 0 {
            drop(acquire);
            scene.wait_until("an empty queue", |state| state.waiters.is_empty()).await;
            guard.release().await.succeeds("Guard::release");
        } else {
            // The grant races with the drop.
            let released = tokio::spawn(guard.release());
            tokio::task::yield_now().await;
            drop(acquire);
            released.await.expect("no panic").succeeds("Guard::release");
        }
        scene.wait_until_free().await;
    }
}

async fn a_dropped_enqueue_leaves_nothing(scene: Fixture) {
    for n in 0..MAX_POLLS {
        let mut enqueue: Boxed<_> = Box::pin(scene.lock(&scene.one).enqueue());
        let pending = poll_times(&mut enqueue, n).await;
        drop(enqueue);
        if let Some(pending) = pending {
            let mut wait: Boxed<_> = Box::pin(pending.succeeds("LockRequest::enqueue").wait());
            drop(poll_times(&mut wait, n % 7).await);
            drop(wait);
        }
        scene.wait_until_free().await;
    }
}

async fn a_dropped_acquire_of_unknown_outcome_leaves_nothing(scene: Fixture) {
    for fault in [Fault::LoseReply, Fault::LoseRequest, Fault::Hang] {
        for n in [1, 2, 5, MAX_POLLS] {
            scene.faults.next(Op::Claim, fault);
            let mut acquire: Boxed<_> = Box::pin(scene.lock(&scene.one).acquire());
            drop(poll_times(&mut acquire, n).await);
            drop(acquire);
            scene.wait_until_free().await;
            // An operation that is still in flight must have released its grant by the time another client holds the
            // lock.
            scene.acquire(&scene.two).await.release().await.succeeds("Guard::release");
            scene.faults.heal();
        }
    }
}

async fn a_dropped_release_releases(scene: Fixture) {
    let mut done = false;
    for n in 0..MAX_POLLS {
        let guard = scene.acquire(&scene.one).await;
        let mut release: Boxed<_> = Box::pin(guard.release());
        done |= poll_times(&mut release, n).await.is_some();
        drop(release);
        scene.wait_until_free().await;
    }
    assert!(done, "the largest number of polls is past the end");
}
