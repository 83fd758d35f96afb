//! Work with plain locks, shared locks and semaphores, in all ways to wait for one and to end a hold.

use std::sync::Arc;
use std::time::Duration;

use tenure::{ErrorKind, Guard};

use super::super::referee::HoldMode;
use super::surroundings::{FAULTS, is_healed, ttl_base};
use super::user::User;

impl User {
    pub(super) async fn lock(&mut self, mode: HoldMode) {
        let request = self.request(mode);
        self.activity(|| format!("requests {request:?}"));
        match request.acquire().await {
            Ok(guard) => self.use_guard(guard, mode).await,
            // A wait without a limit ends with the lock, or with a grant that came too late.
            Err(error) => self.expect_lost("to acquire", &error, &[ErrorKind::Lost]),
        }
    }

    pub(super) async fn try_lock(&mut self) {
        let request = self.request(HoldMode::Exclusive);
        self.activity(|| format!("tries {request:?}"));
        match request.try_acquire().await {
            Ok(guard) => self.use_guard(guard, HoldMode::Exclusive).await,
            Err(error) if error.kind() == ErrorKind::Held => {}
            Err(error) => self.expect_lost("to try", &error, FAULTS),
        }
    }

    pub(super) async fn timed_lock(&mut self) {
        let timeout = ttl_base();
        let timeout = self.span(Duration::ZERO, timeout * 2);
        let request = self.request(HoldMode::Exclusive).timeout(timeout);
        self.activity(|| format!("waits at most {timeout:?} for {request:?}"));
        match request.acquire().await {
            Ok(guard) => self.use_guard(guard, HoldMode::Exclusive).await,
            // The time may end while a grant is on its way, on a slow link without any fault.
            Err(error) if matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Unknown) => {}
            Err(error) => self.expect_lost("to wait", &error, FAULTS),
        }
    }

    pub(super) async fn two_phase(&mut self) {
        let request = self.request(HoldMode::Exclusive);
        self.activity(|| format!("joins the queue: {request:?}"));
        let pending = match request.enqueue().await {
            Ok(pending) => pending,
            Err(error) => return self.expect("to join the queue", &error, &[]),
        };
        let pause = ttl_base() / 4;
        let pause = self.span(Duration::ZERO, pause);
        self.sleep(pause).await;
        self.activity(|| "waits in the queue".to_owned());
        let waited = pending.wait().await;
        match waited {
            Ok(guard) => self.use_guard(guard, HoldMode::Exclusive).await,
            Err(error) => self.expect_lost("to wait in the queue", &error, &[ErrorKind::Lost]),
        }
    }

    pub(super) async fn cancel(&mut self) {
        let request = self.request(HoldMode::Exclusive);
        let patience = ttl_base();
        let patience = self.span(Duration::ZERO, patience);
        self.activity(|| format!("gives up {request:?} after {patience:?}"));
        let until = self.clock.now() + patience;
        let acquired = tokio::select! {
            biased;
            acquired = request.acquire() => Some(acquired),
            () = self.clock.sleep_until(until) => None,
        };
        match acquired {
            Some(Ok(guard)) => self.use_guard(guard, HoldMode::Exclusive).await,
            Some(Err(error)) => self.expect_lost("to acquire", &error, &[ErrorKind::Lost]),
            None => {}
        }
    }

    pub(super) async fn hand_off(&mut self) {
        let request = self.request(HoldMode::Exclusive);
        self.activity(|| format!("requests, for long, {request:?}"));
        let guard = match request.acquire().await {
            Ok(guard) => Arc::new(guard),
            Err(error) => return self.expect_lost("to acquire", &error, &[ErrorKind::Lost]),
        };
        let belief = self.begin(&guard, HoldMode::Exclusive);
        self.activity(|| "holds until a waiter asks".to_owned());
        let long = ttl_base() * 8;
        tokio::select! {
            biased;
            lost = guard.lost() => self.lost(belief, &lost),
            () = guard.handoff_requested() => self.activity(|| "hands off".to_owned()),
            () = self.sleep(long) => {}
        }
        self.release(guard, belief).await;
    }

    pub(super) async fn max_hold(&mut self) {
        let base = ttl_base();
        let most = self.span(base, base * 4);
        let request = self.request(HoldMode::Exclusive).max_hold(most);
        self.limited = true;
        self.activity(|| format!("requests, for at most {most:?}, {request:?}"));
        match request.acquire().await {
            Ok(guard) => {
                let guard = Arc::new(guard);
                let belief = self.begin(&guard, HoldMode::Exclusive);
                self.activity(|| "holds until its maximum".to_owned());
                let lost = guard.lost().await;
                self.lost(belief, &lost);
            }
            Err(error) => self.expect_lost("to acquire", &error, &[ErrorKind::Lost]),
        }
    }

    pub(super) async fn outlast(&mut self) {
        let request = self.request(HoldMode::Exclusive).keep_alive(false);
        self.renews = false;
        self.activity(|| format!("requests, without renewals, {request:?}"));
        match request.acquire().await {
            Ok(guard) => {
                let guard = Arc::new(guard);
                let belief = self.begin(&guard, HoldMode::Exclusive);
                let lost = guard.lost().await;
                self.lost(belief, &lost);
            }
            Err(error) => self.expect_lost("to acquire", &error, &[ErrorKind::Lost]),
        }
    }

    pub(super) async fn inspect(&mut self) {
        for _ in 0..self.random.below(20) {
            self.inspect_once().await;
        }
    }

    async fn inspect_once(&mut self) {
        let key = self.draw_key();
        if let Err(error) = self.store.inspect(&key).await {
            self.expect("to inspect", &error, FAULTS);
        }
        let pause = ttl_base() / 50;
        self.sleep(pause).await;
    }

    /// Asks for holders until the faults end.
    pub(super) async fn chat(&mut self) {
        while !is_healed() {
            self.inspect_once().await;
        }
    }

    /// Uses a guard for a while, then releases it in one of several ways.
    async fn use_guard(&mut self, guard: Guard, mode: HoldMode) {
        let guard = Arc::new(guard);
        let belief = self.begin(&guard, mode);
        let long = ttl_base();
        let long = if self.random.chance(0.5) { long / 4 } else { long * 4 };
        let long = self.span(Duration::ZERO, long);
        tokio::select! {
            biased;
            lost = guard.lost() => return self.lost(belief, &lost),
            () = self.sleep(long) => {}
        }
        if self.random.chance(0.3) {
            self.activity(|| "drops its guard".to_owned());
            self.end(belief);
            drop(guard);
        } else {
            self.release(guard, belief).await;
        }
    }

    async fn release(&mut self, guard: Arc<Guard>, belief: usize) {
        self.activity(|| "releases".to_owned());
        self.end(belief);
        let guard = Arc::into_inner(guard).expect("the referee keeps weak references only");
        if let Err(error) = guard.release().await {
            self.expect_lost("to release", &error, FAULTS);
        }
    }
}
