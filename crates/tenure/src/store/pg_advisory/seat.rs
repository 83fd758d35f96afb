//! One claim's stay at the server: in line, blocked in the server's queue, or with the lock on a session of its own.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::{FencingToken, Random, Time};
use tokio::sync::{Mutex, OwnedSemaphorePermit};
use tokio::task::JoinHandle;

use super::hold::AdvisoryHold;
use super::pair::Pair;
use super::session::{Claimed, Session};
use super::shared::Shared;
use super::sql::{self, How, Wanted};
use super::tag::Tag;
use crate::store::pg::failure;
use crate::store::{Answer, Claim, Grant, LeaseStart, Mode, Place, Waited};
use crate::{Error, ErrorKind, Key, Result, identity};

/// How long past the end of its wait a statement is waited for.
const PATIENCE: Duration = Duration::from_secs(5);
/// The pause between two looks at whether a wait has begun.
const GLANCE: Duration = Duration::from_millis(1);
/// The SQLSTATE of a wait that took too long.
const LOCK_NOT_AVAILABLE: &str = "55P03";

/// When the last who sits here goes, so does the session, and with it what the claim had.
pub(super) struct Seat {
    shared: Arc<Shared>,
    id: u128,
    pub(super) key: Key,
    wanted: Wanted,
    tag: Tag,
    stage: Mutex<Stage>,
}

enum Stage {
    /// Nothing is under way at the server.
    Away,
    /// A session of ours blocks there.
    Blocked(Blocked),
    /// A wait ended without the lock, so far as we know: the next one finds out.
    Between(Session, OwnedSemaphorePermit),
    Held(Held),
    /// It was given back.
    Over,
}

/// A lock, and the session that it lives on.
pub(super) struct Held {
    session: Session,
    token: FencingToken,
    terms: Option<u64>,
    tag: Tag,
}

/// A task that blocks, and ends with whoever waits for it.
struct Blocked {
    task: JoinHandle<(Session, Result<Claimed>)>,
    pid: i32,
    started: String,
    permit: Option<OwnedSemaphorePermit>,
}

impl Drop for Blocked {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Seat {
    pub(super) fn new(shared: &Arc<Shared>, claim: &Claim) -> Result<Arc<Self>> {
        let shared_lock = match claim.mode {
            Mode::Exclusive => false,
            Mode::Shared => true,
            Mode::Slot { .. } => {
                let message = "advisory locks are no semaphores: choose another store";
                return Err(Error::new(ErrorKind::Unsupported, message));
            }
        };
        let pair = Pair::of(&claim.key)?;
        let seat = Arc::new(Self {
            shared: Arc::clone(shared),
            id: claim.id,
            key: claim.key.clone(),
            wanted: Wanted { pair, shared: shared_lock, ttl: claim.ttl },
            tag: Tag::of(claim),
            stage: Mutex::new(Stage::Away),
        });
        shared.admit(claim.id, &seat);
        Ok(seat)
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// What this claim has, or else what it can get now; `None` where another holds it and nobody is to wait.
    pub(super) async fn ask(self: &Arc<Self>, queue: bool, by: Time) -> Result<Option<Answer>> {
        let mut stage = self.stage.lock().await;
        match &*stage {
            Stage::Held(held) if held.session.is_usable() => {
                return Ok(Some(Answer::Granted(self.grant(held))));
            }
            Stage::Blocked(_) | Stage::Between(..) => return Ok(Some(self.queued())),
            Stage::Away | Stage::Held(_) | Stage::Over => *stage = Stage::Away,
        }
        let line = queue.then(|| self.shared.line(self.wanted.pair));
        let permit = line.and_then(|line| line.try_acquire_owned().ok());
        let mut session = self.shared.session(by).await.map_err(failure::nothing_done)?;
        let how = How::Try { park: permit.is_none() };
        match session.claim(&self.tag, &self.wanted, how, by).await? {
            Claimed::Granted { token, at, terms } => {
                let held = Held { session, token, terms, tag: self.tag.clone().granted(at) };
                let grant = self.grant(&held);
                *stage = Stage::Held(held);
                Ok(Some(Answer::Granted(grant)))
            }
            Claimed::Busy => {
                let Some(permit) = permit else {
                    self.shared.idle.put(session);
                    return Ok(queue.then(|| self.queued()));
                };
                let blocked = self.block(session, permit);
                self.until_it_waits(&blocked, by).await;
                *stage = Stage::Blocked(blocked);
                Ok(Some(self.queued()))
            }
        }
    }

    fn queued(self: &Arc<Self>) -> Answer {
        Answer::Queued(Box::new(AdvisoryPlace(Arc::clone(self))))
    }

    fn grant(self: &Arc<Self>, held: &Held) -> Grant {
        Grant {
            token: held.token,
            counts: LeaseStart::FromRequest,
            waiter: false,
            grants: held.terms,
            hold: Box::new(AdvisoryHold::new(Arc::clone(self), &held.session)),
        }
    }

    fn block(&self, mut session: Session, permit: OwnedSemaphorePermit) -> Blocked {
        let (pid, started) = (session.own.pid, session.started.clone());
        let (tag, wanted, clock) = (self.tag.clone(), self.wanted, self.shared.clock.clone());
        // Who came together does not come back together.
        let seed = identity::random().map_or(1, u64::from_be_bytes);
        let bound = self.shared.wait.mul_f64(0.75 + Random::new(seed).unit() / 4.0);
        let task = tokio::spawn(async move {
            let by = clock.now() + bound + PATIENCE;
            let claimed = session.claim(&tag, &wanted, How::Wait { bound }, by).await;
            (session, claimed)
        });
        Blocked { task, pid, started, permit: Some(permit) }
    }

    /// Resolves when the server shows the wait, or it is over: who comes after this comes after it. That no one could
    /// look is no reason not to wait.
    async fn until_it_waits(&self, blocked: &Blocked, by: Time) {
        let clock = &self.shared.clock;
        while !blocked.task.is_finished() && clock.now() < by {
            let statement = |_: &Session| sql::waits(blocked.pid);
            match self.shared.look(by, statement, |rows| !rows.is_empty()).await {
                Ok(false) => clock.sleep_until(clock.now() + GLANCE).await,
                Ok(true) => return,
                Err(error) => {
                    tracing::debug!(name: "tenure.look_failed", key = %self.key, store = %self.shared, %error);
                    return;
                }
            }
        }
    }

    async fn wait(self: &Arc<Self>, limit: Duration) -> Result<Waited> {
        let clock = &self.shared.clock;
        let by = clock.now() + limit;
        let mut stage = self.stage.lock().await;
        loop {
            match &mut *stage {
                Stage::Over => return Ok(Waited::Gone),
                Stage::Held(held) if held.session.is_usable() => {
                    return Ok(Waited::Granted(self.grant(held)));
                }
                Stage::Held(_) => {
                    *stage = Stage::Away;
                    return Ok(Waited::Gone);
                }
                Stage::Blocked(blocked) => {
                    let (session, claimed) = tokio::select! {
                        biased;
                        ended = &mut blocked.task => match ended {
                            Ok(ended) => ended,
                            Err(error) => {
                                *stage = Stage::Away;
                                let message = "the task that waited has ended";
                                return Err(Error::new(ErrorKind::Shutdown, message).because(error));
                            }
                        },
                        () = clock.sleep_until(by) => return Ok(Waited::Still { ahead: None }),
                    };
                    let permit = blocked.permit.take();
                    // A wait that failed is over, too: the next one begins anew.
                    *stage = Stage::Away;
                    *stage = self.after(session, permit, claimed)?;
                    if let Stage::Between(..) = &*stage {
                        return Ok(Waited::Still { ahead: None });
                    }
                }
                Stage::Between(..) => {
                    let before = std::mem::replace(&mut *stage, Stage::Away);
                    if let Stage::Between(session, permit) = before {
                        *stage = Stage::Blocked(self.block(session, permit));
                    }
                }
                Stage::Away => {
                    let line = self.shared.line(self.wanted.pair);
                    let permit = tokio::select! {
                        biased;
                        permit = line.acquire_owned() => match permit {
                            Ok(permit) => permit,
                            Err(_) => return Ok(Waited::Gone),
                        },
                        () = clock.sleep_until(by) => return Ok(Waited::Still { ahead: None }),
                    };
                    let opened = self.shared.session(clock.now() + PATIENCE).await;
                    let session = opened.map_err(failure::nothing_done)?;
                    *stage = Stage::Blocked(self.block(session, permit));
                }
            }
        }
    }

    /// What follows from the end of a wait.
    fn after(
        &self,
        session: Session,
        permit: Option<OwnedSemaphorePermit>,
        claimed: Result<Claimed>,
    ) -> Result<Stage> {
        match (claimed, permit) {
            (Ok(Claimed::Granted { token, at, terms }), _) => {
                Ok(Stage::Held(Held { session, token, terms, tag: self.tag.clone().granted(at) }))
            }
            (Err(error), Some(permit))
                if failure::code(&error) == Some(LOCK_NOT_AVAILABLE) && session.is_usable() =>
            {
                Ok(Stage::Between(session, permit))
            }
            (Err(error), _) => Err(error),
            (Ok(Claimed::Busy), _) => {
                Err(Error::new(ErrorKind::Unavailable, "the server ended a wait without a reason"))
            }
        }
    }

    async fn abandon(&self, limit: Duration) -> Result<()> {
        let by = self.shared.clock.now() + limit;
        let mut stage = self.stage.lock().await;
        match std::mem::replace(&mut *stage, Stage::Over) {
            // What it got at the last moment goes with its session.
            Stage::Blocked(blocked) => {
                let statement = |_: &Session| sql::cancel(blocked.pid, &blocked.started);
                if let Err(error) = self.shared.look(by, statement, |_| ()).await {
                    // Then it ends when the server looks for who asked: once a second.
                    tracing::debug!(name: "tenure.cancel_failed", key = %self.key, store = %self.shared, %error);
                }
                Ok(())
            }
            Stage::Held(held) => self.give_back(held.session, by).await,
            Stage::Away | Stage::Between(..) | Stage::Over => Ok(()),
        }
    }

    pub(super) async fn renew(&self, ttl: Duration, by: Time) -> Result<()> {
        let mut stage = self.stage.lock().await;
        let Stage::Held(Held { session, tag, .. }) = &mut *stage else { return Err(not_held()) };
        if !session.is_usable() {
            return Err(not_held());
        }
        session.renew(tag, ttl, by).await
    }

    pub(super) async fn release(&self, by: Time) -> Result<()> {
        let mut stage = self.stage.lock().await;
        match std::mem::replace(&mut *stage, Stage::Over) {
            Stage::Held(Held { session, .. }) if session.is_usable() => {
                self.give_back(session, by).await
            }
            _ => Err(not_held()),
        }
    }

    /// Unlocks, and keeps the session for the next. One that does not answer is closed, which frees the lock as well.
    async fn give_back(&self, mut session: Session, by: Time) -> Result<()> {
        let Wanted { pair, shared, .. } = self.wanted;
        if !session.release(pair, shared, by).await? {
            return Err(not_held());
        }
        self.shared.idle.put(session);
        Ok(())
    }
}

fn not_held() -> Error {
    Error::new(ErrorKind::NotHeld, "the session that held the lock has ended, or gave it back")
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.shared.dismiss(self.id);
    }
}

impl fmt::Debug for Seat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}) on {}", self.key, self.wanted.pair, self.shared)
    }
}

/// A place in the server's queue, or in the line before it.
#[derive(Debug)]
struct AdvisoryPlace(Arc<Seat>);

#[async_trait]
impl Place for AdvisoryPlace {
    async fn wait(&mut self, limit: Duration) -> Result<Waited> {
        let waited = self.0.wait(limit).await;
        waited.map_err(|error| error.on(&self.0.key).at(&self.0.shared))
    }

    async fn abandon(&mut self, limit: Duration) -> Result<()> {
        let left = self.0.abandon(limit).await;
        left.map_err(|error| error.on(&self.0.key).at(&self.0.shared))
    }
}
