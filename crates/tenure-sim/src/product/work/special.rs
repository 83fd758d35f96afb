//! Work beyond plain locks: detached holds, breaking a hold, elections, `once`.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tenure::election::{Election, Ended, Leadership};
use tenure::once::Once;
use tenure::{ErrorKind, FencingToken};
use tenure_core::lease::margin;

use super::super::host;
use super::super::referee::{HoldMode, ProductBreach};
use super::super::world;
use super::surroundings::{FAULTS, breach, is_healed, ttl_base};
use super::user::User;

impl User {
    pub(super) async fn detach(&mut self) {
        let key = self.draw_key();
        let ttl = ttl_base();
        let ttl = self.span(ttl, ttl * 4);
        let request = self.store.lock(&key).ttl(ttl);
        let request = if self.random.chance(0.5) { request.detached() } else { request };
        self.activity(|| format!("requests, to detach, {request:?}"));
        let guard = match request.acquire().await {
            Ok(guard) => Arc::new(guard),
            Err(error) => return self.expect_lost("to acquire", &error, &[ErrorKind::Lost]),
        };
        let belief = self.begin(&guard, HoldMode::Exclusive);
        let pause = self.span(Duration::ZERO, ttl);
        self.sleep(pause).await;
        // The hold lasts as long as the guard has said.
        world::with(|world| world.referee.borrow_mut().detaching(belief));
        let guard = Arc::into_inner(guard).expect("the referee keeps weak references only");
        let handle = match guard.detach().await {
            Ok(handle) => {
                world::with(|world| world.referee.borrow_mut().detached(belief));
                handle
            }
            Err(error) => {
                self.end(belief);
                return self.expect_lost("to detach", &error, FAULTS);
            }
        };
        self.activity(|| format!("has detached {key}"));
        for _ in 0..self.random.below(4) {
            let pause = self.span(Duration::ZERO, ttl);
            self.sleep(pause).await;
            let sent = self.clock.now();
            match self.store.renew(&key, &handle, ttl).await {
                // As a guard would count it.
                Ok(()) => {
                    let deadline = sent + ttl.saturating_sub(margin(ttl));
                    world::with(|world| world.referee.borrow_mut().renewed(belief, deadline));
                    self.check_overlap(belief);
                }
                Err(error) => {
                    let expected = [FAULTS, &[ErrorKind::NotHeld]].concat();
                    self.expect("to renew by handle", &error, &expected);
                    if error.kind() == ErrorKind::NotHeld {
                        return self.end(belief);
                    }
                }
            }
        }
        if self.random.chance(0.7) {
            self.end(belief);
            if let Err(error) = self.store.release(&key, &handle).await {
                let expected = [FAULTS, &[ErrorKind::NotHeld]].concat();
                self.expect("to release by handle", &error, &expected);
            }
        }
    }

    pub(super) async fn break_hold(&mut self) {
        let key = self.draw_key();
        self.activity(|| format!("breaks {key}"));
        let state = match self.store.inspect(&key).await {
            Ok(state) => state,
            Err(error) => return self.expect("to inspect", &error, FAULTS),
        };
        let Some(holder) = state.holders.first() else { return };
        let token = holder.token;
        world::with(|world| {
            world.referee.borrow_mut().broken(token);
        });
        let key = tenure::Key::new(&key).expect("the names of the keys are valid");
        if let Err(error) = self.store.store().evict(&key, token, "simulated").await {
            let expected = [FAULTS, &[ErrorKind::NotHeld]].concat();
            self.expect("to break", &error, &expected);
            // The server has broken nothing, unless its answer is missing.
            if matches!(error.kind(), ErrorKind::NotHeld | ErrorKind::Unavailable) {
                world::with(|world| world.referee.borrow_mut().not_broken(token));
            }
        }
    }

    pub(super) async fn elect(&mut self) {
        let ttl = ttl_base();
        let ttl = self.span(ttl, ttl * 4);
        self.activity(|| format!("takes part in an election with ttl {ttl:?}"));
        let election = match self.store.election("leader").ttl(ttl).start().await {
            Ok(election) => election,
            Err(error) => return self.expect("to start an election", &error, FAULTS),
        };
        let mut term = None;
        for _ in 0..=self.random.below(3) {
            if is_healed() {
                break;
            }
            term = self.lead(&election, ttl, term).await;
        }
        self.activity(|| "ends its election".to_owned());
        if let Some((_, belief)) = term {
            self.end(belief);
        }
        if let Err(error) = election.shutdown(None).await {
            self.expect("to end an election", &error, FAULTS);
        }
    }

    /// Waits for leadership, leads for a while, and perhaps steps down. Takes and returns the present term: its token,
    /// and the belief in it.
    async fn lead(
        &mut self,
        election: &Election,
        ttl: Duration,
        term: Option<(FencingToken, usize)>,
    ) -> Option<(FencingToken, usize)> {
        match election.wait_for_leadership(ttl * 2).await {
            Ok(true) => {}
            Ok(false) => return term,
            Err(error) => {
                self.expect("to be elected", &error, FAULTS);
                return term;
            }
        }
        let leadership = election.leadership().filter(Leadership::is_held)?;
        let token = leadership.fencing_token();
        let belief = match term {
            Some((last, belief)) if last == token => belief,
            _ => self.begin_term(&leadership),
        };
        let long = self.span(Duration::ZERO, ttl * 2);
        tokio::select! {
            biased;
            ended = leadership.ended() => {
                if let Ended::Lost(lost) = ended {
                    self.lost(belief, &lost);
                } else {
                    // Only this user ends its terms, and only below.
                    let what = format!("client {}: {ended}", self.client);
                    breach(ProductBreach::UnexpectedLoss, what);
                }
                return None;
            }
            () = self.sleep(long) => {}
        }
        if self.random.chance(0.3) {
            return Some((token, belief));
        }
        self.activity(|| "steps down".to_owned());
        self.end(belief);
        if let Err(error) = election.step_down(None).await {
            self.expect("to step down", &error, FAULTS);
        }
        None
    }

    /// Tells the referee that this user leads from now on.
    fn begin_term(&self, leadership: &Leadership) -> usize {
        let belief =
            world::with(|world| world.referee.borrow_mut().leadership(self.teller(), leadership));
        self.activity(|| format!("leads with token {}", leadership.fencing_token()));
        self.check(belief);
        belief
    }

    pub(super) async fn once(&mut self) {
        let (since, wrong) = self.wall_time();
        let wall = SystemTime::UNIX_EPOCH + since;
        let period = Duration::from_secs(ttl_base().as_secs() + 1);
        self.activity(|| format!("runs once per {period:?}"));
        let begun = self.teller().real;
        world::with(|world| world.disturbances.borrow_mut().once_begins(begun));
        let answer = self.store.once("task").per(period).at(wall).begin().await;
        let now = self.teller().real;
        world::with(|world| world.disturbances.borrow_mut().once_ends(begun, now));
        match answer {
            Ok(Once::Run(run)) => {
                let slot = format!("{:?}", run.slot());
                self.activity(|| format!("runs {slot}"));
                // A host whose clock was set runs slots at other times than the other hosts.
                if !wrong {
                    world::with(|world| world.referee.borrow_mut().ran(slot));
                }
                let pause = self.span(Duration::ZERO, period);
                self.sleep(pause).await;
                let ended =
                    if self.random.chance(0.8) { run.done().await } else { run.failed().await };
                if let Err(error) = ended {
                    self.expect("to record a run", &error, FAULTS);
                }
            }
            Ok(Once::Ran(_)) => {}
            Err(error) => {
                // A later slot was run: meanwhile its time has come, by the clock of another host that is ahead, or a
                // clock was set.
                let ahead = world::with(|world| {
                    let drift = world.plan.drift;
                    world.disturbances.borrow().once_is_ahead_by(drift, now)
                });
                let later = (self.wall_time().0 + ahead).as_nanos() / period.as_nanos()
                    > since.as_nanos() / period.as_nanos();
                let set = world::with(|world| world.disturbances.borrow().wall_clocks);
                // An earlier run is still going on: a fault kept its process or its store from ending it.
                let clocks: &[ErrorKind] = match (set, later) {
                    (false, false) => &[ErrorKind::Contention],
                    _ => &[ErrorKind::Invalid, ErrorKind::Contention],
                };
                self.expect("to run once", &error, &[FAULTS, clocks].concat());
            }
        }
    }

    /// Time of this host's wall clock since the epoch, and true if the clock was set.
    fn wall_time(&self) -> (Duration, bool) {
        world::with(|world| {
            let process = world.process(self.client);
            let offset = process.wall_offset.get();
            let since = host::WALL_EPOCH + process.real_time(world.now.get());
            (Duration::from_nanos(since.saturating_add_signed(offset)), offset != 0)
        })
    }
}
