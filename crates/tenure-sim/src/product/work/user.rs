//! A user: its requests, its pauses, and what it tells the referee.

use std::sync::Arc;
use std::time::Duration;

use tenure::{Client, Clock, Error, ErrorKind, Guard, LockRequest, Loss, Lost};
use tenure_core::Random;
use tokio::sync::Notify;

use super::super::plan::Work;
use super::super::referee::{HoldMode, ProductBreach, Teller};
use super::super::world::{self, WorldEvent};
use super::surroundings::{activity, expect_kind, is_healed, key_name, ttl_base};

/// A user: one task of a client process.
pub(super) struct User {
    pub(super) client: usize,
    pub(super) life: u32,
    pub(super) number: usize,
    pub(super) clock: Clock,
    pub(super) random: Random,
    pub(super) healed: Arc<Notify>,
    pub(super) store: Client,
    /// The present request is renewed while it is held.
    pub(super) renews: bool,
    /// The present request has a maximum time to hold.
    pub(super) limited: bool,
}

impl User {
    pub(super) fn activity(&self, text: impl FnOnce() -> String) {
        activity(self.client, self.number, text);
    }

    pub(super) fn draw_work(&mut self) -> Work {
        let random = &mut self.random;
        world::with(|world| {
            let work = &world.plan.work;
            let mut pick = random.below(work.iter().map(|(_, weight)| weight).sum());
            for (work, weight) in work {
                if pick < *weight {
                    return *work;
                }
                pick -= weight;
            }
            Work::Lock
        })
    }

    pub(super) fn span(&mut self, from: Duration, to: Duration) -> Duration {
        from + to.saturating_sub(from).mul_f64(self.random.unit())
    }

    /// Sleeps, but not beyond the end of the faults.
    pub(super) async fn sleep(&mut self, span: Duration) {
        let until = self.clock.now() + span;
        let healed = Arc::clone(&self.healed);
        let healed = healed.notified();
        if !is_healed() {
            tokio::select! {
                biased;
                () = healed => {}
                () = self.clock.sleep_until(until) => {}
            }
        }
    }

    pub(super) fn draw_key(&mut self) -> String {
        key_name(self.random.below(world::with(|world| world.plan.keys)))
    }

    /// A request for a random key, with a random ttl.
    pub(super) fn request(&mut self, mode: HoldMode) -> LockRequest {
        let key = self.draw_key();
        let request = match mode {
            HoldMode::Exclusive => self.store.lock(key),
            HoldMode::Shared => self.store.lock(key).shared(),
            HoldMode::Slot { limit } => self.store.semaphore(key, limit),
        };
        let ttl = ttl_base();
        let ttl = self.span(ttl, ttl * 4);
        let request = request.ttl(ttl);
        self.renews = self.random.chance(0.5);
        if self.renews { request } else { request.keep_alive(false) }
    }

    /// Tells the referee that this user holds a lock from now on.
    pub(super) fn begin(&self, guard: &Arc<Guard>, mode: HoldMode) -> usize {
        let belief =
            world::with(|world| world.referee.borrow_mut().guard(self.teller(), mode, guard));
        self.activity(|| format!("holds {} with token {}", guard.key(), guard.fencing_token()));
        self.check(belief);
        belief
    }

    pub(super) fn teller(&self) -> Teller {
        world::with(|world| {
            let process = world.process(self.client);
            let (real, local) = (process.real_time(world.now.get()), process.local_time());
            Teller { client: self.client, life: self.life, real, local }
        })
    }

    pub(super) fn check(&self, belief: usize) {
        world::with(|world| {
            world.judged(|referee, eyes| referee.check_token(belief, eyes));
            self.check_overlap(belief);
        });
    }

    /// Lets the referee compare the hold with all others, at the real time of this process.
    pub(super) fn check_overlap(&self, belief: usize) {
        let at = self.real_time();
        world::with(|world| world.schedule(at, WorldEvent::Check { belief }));
    }

    pub(super) fn end(&self, belief: usize) {
        let at = self.real_time();
        world::with(|world| world.referee.borrow_mut().ended(belief, at));
    }

    /// The user was told of a loss. Breaks the run unless a fault, an operator or the request itself explains it.
    pub(super) fn lost(&self, belief: usize, lost: &Lost) {
        self.activity(|| format!("learns of its loss: {}", lost.reason));
        let (teller, client) = (self.teller(), self.client);
        world::with(|world| {
            let mut referee = world.referee.borrow_mut();
            referee.losses += 1;
            let (broken, valid) = (referee.was_broken(belief), referee.relies_on(belief, teller));
            let disturbances = world.disturbances.borrow();
            let disturbed = disturbances.explain(client);
            let explained = match lost.reason {
                Loss::MaxHold => self.limited,
                Loss::Evicted => broken,
                // Only a server that has discarded its holds, and grants nothing meanwhile, denies a hold on which its
                // user may rely.
                Loss::Taken => broken || disturbed && (!valid || disturbances.holds_discarded),
                Loss::Expired => disturbed || !self.renews,
                Loss::Disconnected => disturbed,
                _ => false,
            };
            drop((referee, disturbances));
            if !explained {
                world.breach(ProductBreach::UnexpectedLoss, format!("client {client}: {lost}"));
            }
        });
        self.end(belief);
    }

    /// As [`expect`](Self::expect), for a request that may find its hold ended as the request itself, or an operator,
    /// wanted it.
    pub(super) fn expect_lost(&self, what: &str, error: &Error, kinds: &[ErrorKind]) {
        let ended = !self.renews || self.limited;
        let broken = || world::with(|world| world.referee.borrow().has_broken());
        if error.kind() != ErrorKind::Lost || !ended && !broken() {
            self.expect(what, error, kinds);
        }
    }

    pub(super) fn expect(&self, what: &str, error: &Error, kinds: &[ErrorKind]) {
        expect_kind(self.client, what, error, kinds);
    }

    /// Real time of this process.
    pub(super) fn real_time(&self) -> u64 {
        world::with(|world| world.process(self.client).real_time(world.now.get()))
    }
}
