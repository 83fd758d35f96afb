//! The work of users: what each user of a client process does, as the seed decides.

mod probe;
mod special;

use std::sync::Arc;
use std::time::Duration;

use tenure::{Client, Clock, Error, ErrorKind, Guard, LockRequest, LockServerStore, Loss, Lost};
use tenure_core::Random;
use tokio::sync::Notify;

use super::host::SECRET;
use super::plan::Work;
use super::process::connect;
use super::referee::{HoldMode, ProductBreach, Teller};
use super::world::{self, WorldEvent, note};

/// Slots of the semaphores.
const SLOTS: u32 = 2;

/// A user: one task of a client process.
struct User {
    client: usize,
    life: u32,
    number: usize,
    clock: Clock,
    random: Random,
    healed: Arc<Notify>,
    store: Client,
    /// The present request is renewed while it is held.
    renews: bool,
    /// The present request has a maximum time to hold.
    limited: bool,
}

/// Runs a client process: connects, runs its users, and cleans up.
pub(super) async fn run_client(client: usize, life: u32, clock: Clock, seed: u64) {
    let url = format!("tenure://:{SECRET}@server:1");
    let store = loop {
        let opened =
            LockServerStore::with_connections(&url, clock.clone(), move |_, _| connect(client));
        match opened.await {
            Ok(store) => break store,
            Err(error) => {
                expect_kind(client, "to connect", &error, &[ErrorKind::Unavailable]);
                clock.sleep_until(clock.now() + Duration::from_millis(50)).await;
            }
        }
    };
    let store = Client::with_store(Arc::new(store)).with_clock(clock.clone());
    let (users, chatty, healed) = world::with(|world| {
        let healed = Arc::clone(&world.process(client).healed);
        (world.plan.users, world.plan.chatty, healed)
    });
    let mut tasks = Vec::new();
    for number in 0..users + usize::from(chatty) {
        let mut user = User {
            client,
            life,
            number,
            clock: clock.clone(),
            random: Random::new(seed ^ (number as u64) << 32),
            healed: Arc::clone(&healed),
            store: store.clone(),
            renews: true,
            limited: false,
        };
        tasks.push(tokio::spawn(async move {
            if number < users { user.run().await } else { user.chat().await }
        }));
    }
    for task in tasks {
        // A user that panicked has broken the run already.
        if let Err(error) = task.await {
            breach(ProductBreach::UnexpectedError, format!("a user of client {client}: {error}"));
        }
    }
    store.idle().await;
    world::with(|world| {
        world.process(client).done.set(true);
        note!(world, &format!("client {client}"), "has finished");
    });
    if client == 0 {
        probe::probe(client, &store, &clock).await;
    }
}

/// True once all faults have ended.
fn is_healed() -> bool {
    world::with(|world| world.healed.get())
}

/// Shortest ttl of the plan.
fn ttl_base() -> Duration {
    world::with(|world| world.plan.ttl)
}

fn key_name(number: u64) -> String {
    format!("k{number}")
}

fn breach(breach: ProductBreach, what: String) {
    world::with(|world| world.breach(breach, what));
}

fn activity(client: usize, user: usize, text: impl FnOnce() -> String) {
    world::with(|world| {
        let text = text();
        note!(world, &format!("client {client}"), "user {user} {text}");
        world.process(client).set_activity(user, text);
    });
}

/// Breaks the run unless the error is one of these kinds, and a fault that has struck explains it.
fn expect_kind(client: usize, what: &str, error: &Error, kinds: &[ErrorKind]) {
    let explained = world::with(|world| {
        note!(world, &format!("client {client}"), "fails {what}: {error}");
        !FAULTS.contains(&error.kind()) || world.disturbances.borrow().explain(client)
    });
    if !explained || !kinds.contains(&error.kind()) {
        let what = format!("client {client} fails {what}: {:?}: {error}", error.kind());
        breach(ProductBreach::UnexpectedError, what);
    }
}

/// Errors that only faults explain.
const FAULTS: &[ErrorKind] = &[ErrorKind::Unavailable, ErrorKind::Unknown, ErrorKind::Lost];

impl User {
    async fn run(&mut self) {
        while !is_healed() {
            let pause = self.span(Duration::ZERO, ttl_base() / 2);
            self.sleep(pause).await;
            let work = self.draw_work();
            (self.renews, self.limited) = (true, false);
            match work {
                Work::Lock => self.lock(HoldMode::Exclusive).await,
                Work::Share => self.lock(HoldMode::Shared).await,
                Work::Slot => self.lock(HoldMode::Slot { limit: SLOTS }).await,
                Work::TryLock => self.try_lock().await,
                Work::TimedLock => self.timed_lock().await,
                Work::TwoPhase => self.two_phase().await,
                Work::Cancel => self.cancel().await,
                Work::HandOff => self.hand_off().await,
                Work::MaxHold => self.max_hold().await,
                Work::Detach => self.detach().await,
                Work::Break => self.break_hold().await,
                Work::Elect => self.elect().await,
                Work::Once => self.once().await,
                Work::Inspect => self.inspect().await,
                Work::Outlast => self.outlast().await,
            }
            let (client, number) = (self.client, self.number);
            world::with(|world| {
                world.process(client).set_activity(number, String::new());
                world.counts.borrow_mut().worked(work);
            });
        }
    }

    fn activity(&self, text: impl FnOnce() -> String) {
        activity(self.client, self.number, text);
    }

    fn draw_work(&mut self) -> Work {
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

    fn span(&mut self, from: Duration, to: Duration) -> Duration {
        from + to.saturating_sub(from).mul_f64(self.random.unit())
    }

    /// Sleeps, but not beyond the end of the faults.
    async fn sleep(&mut self, span: Duration) {
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

    fn draw_key(&mut self) -> String {
        key_name(self.random.below(world::with(|world| world.plan.keys)))
    }

    /// A request for a random key, with a random ttl.
    fn request(&mut self, mode: HoldMode) -> LockRequest {
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

    async fn lock(&mut self, mode: HoldMode) {
        let request = self.request(mode);
        self.activity(|| format!("requests {request:?}"));
        match request.acquire().await {
            Ok(guard) => self.use_guard(guard, mode).await,
            // A wait without a limit ends with the lock, or with a grant that came too late.
            Err(error) => self.expect_lost("to acquire", &error, &[ErrorKind::Lost]),
        }
    }

    async fn try_lock(&mut self) {
        let request = self.request(HoldMode::Exclusive);
        self.activity(|| format!("tries {request:?}"));
        match request.try_acquire().await {
            Ok(guard) => self.use_guard(guard, HoldMode::Exclusive).await,
            Err(error) if error.kind() == ErrorKind::Held => {}
            Err(error) => self.expect_lost("to try", &error, FAULTS),
        }
    }

    async fn timed_lock(&mut self) {
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

    async fn two_phase(&mut self) {
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

    async fn cancel(&mut self) {
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

    async fn hand_off(&mut self) {
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

    async fn max_hold(&mut self) {
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

    async fn outlast(&mut self) {
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

    async fn inspect(&mut self) {
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
    async fn chat(&mut self) {
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

    /// Tells the referee that this user holds a lock from now on.
    fn begin(&self, guard: &Arc<Guard>, mode: HoldMode) -> usize {
        let belief =
            world::with(|world| world.referee.borrow_mut().guard(self.teller(), mode, guard));
        self.activity(|| format!("holds {} with token {}", guard.key(), guard.fencing_token()));
        self.check(belief);
        belief
    }

    fn teller(&self) -> Teller {
        world::with(|world| {
            let process = world.process(self.client);
            let (real, local) = (process.real_time(world.now.get()), process.local_time());
            Teller { client: self.client, life: self.life, real, local }
        })
    }

    fn check(&self, belief: usize) {
        world::with(|world| {
            world.judged(|referee, eyes| referee.check_token(belief, eyes));
            self.check_overlap(belief);
        });
    }

    /// Lets the referee compare the hold with all others, at the real time of this process.
    fn check_overlap(&self, belief: usize) {
        let at = self.real_time();
        world::with(|world| world.schedule(at, WorldEvent::Check { belief }));
    }

    fn end(&self, belief: usize) {
        let at = self.real_time();
        world::with(|world| world.referee.borrow_mut().ended(belief, at));
    }

    /// The user was told of a loss. Breaks the run unless a fault, an operator or the request itself explains it.
    fn lost(&self, belief: usize, lost: &Lost) {
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
    fn expect_lost(&self, what: &str, error: &Error, kinds: &[ErrorKind]) {
        let ended = !self.renews || self.limited;
        let broken = || world::with(|world| world.referee.borrow().has_broken());
        if error.kind() != ErrorKind::Lost || !ended && !broken() {
            self.expect(what, error, kinds);
        }
    }

    fn expect(&self, what: &str, error: &Error, kinds: &[ErrorKind]) {
        expect_kind(self.client, what, error, kinds);
    }

    /// Real time of this process.
    fn real_time(&self) -> u64 {
        world::with(|world| world.process(self.client).real_time(world.now.get()))
    }
}
