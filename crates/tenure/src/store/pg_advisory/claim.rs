//! Client-side state of a claim: waiting for a session, blocked in the server's queue, or holding the lock on a
//! session.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, MutexGuard, Weak};
use std::time::Duration;

use tenure_core::{FencingToken, Random, Time};
use tokio::sync::{Mutex, OwnedSemaphorePermit};
use tokio::task::JoinHandle;

use super::pair::Pair;
use super::session::{Session, SessionClaim};
use super::shared::AdvisoryShared;
use super::sql::{self, ClaimWait, LockSpec};
use super::tag::Tag;
#[cfg(unix)]
use crate::mutex;
use crate::store::KeepOpen;
use crate::store::pg::connect::SessionEnd;
use crate::store::pg::failure;
use crate::store::{Claim, Mode};
use crate::{Error, ErrorKind, Key, Result, identity};

/// Time that the answer of a blocking statement may take beyond the end of its wait.
const WAIT_ANSWER_GRACE: Duration = Duration::from_secs(5);
/// Pause between two checks whether a wait has begun.
const WAIT_CHECK_PAUSE: Duration = Duration::from_millis(1);
/// SQLSTATE of a wait that timed out.
const LOCK_NOT_AVAILABLE: &str = "55P03";

/// State of a claim, shared by its place and its hold. When the last of them is dropped, the session is closed, which
/// releases the lock or leaves the queue.
pub(super) struct ClaimState {
    shared: Arc<AdvisoryShared>,
    known: Arc<AdvisoryClaims>,
    id: u128,
    pub(super) key: Key,
    spec: LockSpec,
    tag: Tag,
    stage: Mutex<AdvisoryStage>,
}

enum AdvisoryStage {
    /// No session of this claim is at the server.
    Idle,
    /// A session of ours blocks in the server's queue.
    Blocked(Blocked),
    /// A wait timed out. The lock may have been granted at that moment; the next statement on the session finds out.
    BetweenWaits(Session, OwnedSemaphorePermit),
    Held(HeldSession),
    /// The claim was released or abandoned.
    Released,
}

/// Answer of the server to a claim.
pub(super) enum AdvisoryAnswer {
    Granted(GrantedLock),
    Queued,
    /// Another session holds the lock, and the claim does not queue.
    Busy,
}

/// Result of a wait.
pub(super) enum AdvisoryWaited {
    Granted(GrantedLock),
    StillQueued,
    Gone,
}

/// A granted lock, for its hold.
pub(super) struct GrantedLock {
    pub(super) token: FencingToken,
    pub(super) terms: Option<u64>,
    /// Subscription to the end of the session.
    pub(super) end: SessionEnd,
    #[cfg(unix)]
    pub(super) keep_open: Option<Weak<dyn KeepOpen>>,
}

/// A held lock and its session.
struct HeldSession {
    session: Session,
    token: FencingToken,
    terms: Option<u64>,
    tag: Tag,
}

impl HeldSession {
    fn granted(&self) -> GrantedLock {
        GrantedLock {
            token: self.token,
            terms: self.terms,
            end: self.session.end(),
            #[cfg(unix)]
            keep_open: self.session.keep_open(),
        }
    }
}

/// A task that blocks at the server. Dropping this aborts the task and closes its session.
struct Blocked {
    task: JoinHandle<(Session, Result<SessionClaim>)>,
    pid: i32,
    started: String,
    permit: Option<OwnedSemaphorePermit>,
}

impl Drop for Blocked {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl ClaimState {
    pub(super) fn new(
        shared: &Arc<AdvisoryShared>,
        known: &Arc<AdvisoryClaims>,
        claim: &Claim,
    ) -> Result<Arc<Self>> {
        let shared_lock = match claim.mode {
            Mode::Exclusive => false,
            Mode::Shared => true,
            Mode::Slot { .. } => {
                let message = "advisory locks do not support semaphores: use another store";
                return Err(Error::new(ErrorKind::Unsupported, message));
            }
        };
        let pair = Pair::of(&claim.key)?;
        let state = Arc::new(Self {
            shared: Arc::clone(shared),
            known: Arc::clone(known),
            id: claim.id,
            key: claim.key.clone(),
            spec: LockSpec { pair, shared: shared_lock, ttl: claim.ttl },
            tag: Tag::of(claim),
            stage: Mutex::new(AdvisoryStage::Idle),
        });
        known.register(claim.id, &state);
        Ok(state)
    }

    pub(super) fn shared(&self) -> &Arc<AdvisoryShared> {
        &self.shared
    }

    /// Claims the lock, or repeats the answer of an earlier sending.
    pub(super) async fn ask(&self, queue: bool, by: Time) -> Result<AdvisoryAnswer> {
        let mut stage = self.stage.lock().await;
        match &*stage {
            AdvisoryStage::Held(held) if held.session.is_usable() => {
                return Ok(AdvisoryAnswer::Granted(held.granted()));
            }
            AdvisoryStage::Blocked(_) | AdvisoryStage::BetweenWaits(..) => {
                return Ok(AdvisoryAnswer::Queued);
            }
            AdvisoryStage::Idle | AdvisoryStage::Held(_) | AdvisoryStage::Released => {
                *stage = AdvisoryStage::Idle;
            }
        }
        let permits = queue.then(|| self.shared.wait_permits_of(self.spec.pair));
        let permit = permits.and_then(|permits| permits.try_acquire_owned().ok());
        let mut session = self.shared.session(by).await.map_err(failure::nothing_done)?;
        let wait = ClaimWait::Try { park: permit.is_none() };
        match session.claim(&self.tag, &self.spec, wait, by).await? {
            SessionClaim::Granted { token, at, terms } => {
                let held = HeldSession { session, token, terms, tag: self.tag.clone().granted(at) };
                let granted = held.granted();
                *stage = AdvisoryStage::Held(held);
                Ok(AdvisoryAnswer::Granted(granted))
            }
            SessionClaim::Busy => {
                let Some(permit) = permit else {
                    self.shared.idle.put(session);
                    return Ok(if queue { AdvisoryAnswer::Queued } else { AdvisoryAnswer::Busy });
                };
                let blocked = self.block(session, permit);
                self.wait_until_queued(&blocked, by).await;
                *stage = AdvisoryStage::Blocked(blocked);
                Ok(AdvisoryAnswer::Queued)
            }
        }
    }

    fn block(&self, mut session: Session, permit: OwnedSemaphorePermit) -> Blocked {
        let (pid, started) = (session.ident.pid, session.started.clone());
        let (tag, spec, clock) = (self.tag.clone(), self.spec, self.shared.clock.clone());
        // Jitter: waiters that began together must not all time out and queue again together.
        let seed = identity::random().map_or(1, u64::from_be_bytes);
        let bound = self.shared.wait.mul_f64(0.75 + Random::new(seed).unit() / 4.0);
        let task = tokio::spawn(async move {
            let by = clock.now() + bound + WAIT_ANSWER_GRACE;
            let claimed = session.claim(&tag, &spec, ClaimWait::Wait { bound }, by).await;
            (session, claimed)
        });
        Blocked { task, pid, started, permit: Some(permit) }
    }

    /// Resolves when the server shows the wait, or the wait is over. A claim that is made after this is behind it in
    /// the queue. If the check fails, the wait goes on without it.
    async fn wait_until_queued(&self, blocked: &Blocked, by: Time) {
        let clock = &self.shared.clock;
        while !blocked.task.is_finished() && clock.now() < by {
            let statement = |_: &Session| sql::is_waiting(blocked.pid);
            match self.shared.query(by, statement, |rows| !rows.is_empty()).await {
                Ok(false) => clock.sleep_until(clock.now() + WAIT_CHECK_PAUSE).await,
                Ok(true) => return,
                Err(error) => {
                    tracing::debug!(name: "tenure.look_failed", key = %self.key, store = %self.shared, %error);
                    return;
                }
            }
        }
    }

    pub(super) async fn wait(&self, limit: Duration) -> Result<AdvisoryWaited> {
        let clock = &self.shared.clock;
        let by = clock.now() + limit;
        let mut stage = self.stage.lock().await;
        loop {
            match &mut *stage {
                AdvisoryStage::Released => return Ok(AdvisoryWaited::Gone),
                AdvisoryStage::Held(held) if held.session.is_usable() => {
                    return Ok(AdvisoryWaited::Granted(held.granted()));
                }
                AdvisoryStage::Held(_) => {
                    *stage = AdvisoryStage::Idle;
                    return Ok(AdvisoryWaited::Gone);
                }
                AdvisoryStage::Blocked(blocked) => {
                    let (session, claimed) = tokio::select! {
                        biased;
                        ended = &mut blocked.task => match ended {
                            Ok(ended) => ended,
                            Err(error) => {
                                *stage = AdvisoryStage::Idle;
                                let message = "the task that waited for the lock was ended with its runtime";
                                return Err(Error::new(ErrorKind::Shutdown, message).because(error));
                            }
                        },
                        () = clock.sleep_until(by) => return Ok(AdvisoryWaited::StillQueued),
                    };
                    let permit = blocked.permit.take();
                    // Set before `next_stage`, whose error returns early: a wait that failed is over, and the next one
                    // starts from the beginning.
                    *stage = AdvisoryStage::Idle;
                    *stage = self.next_stage(session, permit, claimed)?;
                    if let AdvisoryStage::BetweenWaits(..) = &*stage {
                        return Ok(AdvisoryWaited::StillQueued);
                    }
                }
                AdvisoryStage::BetweenWaits(..) => {
                    let before = std::mem::replace(&mut *stage, AdvisoryStage::Idle);
                    if let AdvisoryStage::BetweenWaits(session, permit) = before {
                        *stage = AdvisoryStage::Blocked(self.block(session, permit));
                    }
                }
                AdvisoryStage::Idle => {
                    let permits = self.shared.wait_permits_of(self.spec.pair);
                    let permit = tokio::select! {
                        biased;
                        permit = permits.acquire_owned() => match permit {
                            Ok(permit) => permit,
                            Err(_) => return Ok(AdvisoryWaited::Gone),
                        },
                        () = clock.sleep_until(by) => return Ok(AdvisoryWaited::StillQueued),
                    };
                    let opened = self.shared.session(clock.now() + WAIT_ANSWER_GRACE).await;
                    let session = opened.map_err(failure::nothing_done)?;
                    *stage = AdvisoryStage::Blocked(self.block(session, permit));
                }
            }
        }
    }

    /// Stage after the end of a wait.
    fn next_stage(
        &self,
        session: Session,
        permit: Option<OwnedSemaphorePermit>,
        claimed: Result<SessionClaim>,
    ) -> Result<AdvisoryStage> {
        match (claimed, permit) {
            (Ok(SessionClaim::Granted { token, at, terms }), _) => {
                Ok(AdvisoryStage::Held(HeldSession {
                    session,
                    token,
                    terms,
                    tag: self.tag.clone().granted(at),
                }))
            }
            (Err(error), Some(permit))
                if failure::code(&error) == Some(LOCK_NOT_AVAILABLE) && session.is_usable() =>
            {
                Ok(AdvisoryStage::BetweenWaits(session, permit))
            }
            (Err(error), _) => Err(error),
            (Ok(SessionClaim::Busy), _) => Err(Error::new(
                ErrorKind::Unavailable,
                "the server ended the wait without a reason",
            )),
        }
    }

    pub(super) async fn abandon(&self, limit: Duration) -> Result<()> {
        let by = self.shared.clock.now() + limit;
        let mut stage = self.stage.lock().await;
        match std::mem::replace(&mut *stage, AdvisoryStage::Released) {
            // A lock that was granted at the last moment is freed with its session, which is closed here.
            AdvisoryStage::Blocked(blocked) => {
                let statement = |_: &Session| sql::cancel(blocked.pid, &blocked.started);
                if let Err(error) = self.shared.query(by, statement, |_| ()).await {
                    // The server then ends the wait when it notices that the connection is closed: it checks once per
                    // second.
                    tracing::debug!(name: "tenure.cancel_failed", key = %self.key, store = %self.shared, %error);
                }
                Ok(())
            }
            AdvisoryStage::Held(held) => self.release_session(held.session, by).await,
            AdvisoryStage::Idle | AdvisoryStage::BetweenWaits(..) | AdvisoryStage::Released => {
                Ok(())
            }
        }
    }

    pub(super) async fn renew(&self, ttl: Duration, by: Time) -> Result<()> {
        let mut stage = self.stage.lock().await;
        let AdvisoryStage::Held(HeldSession { session, tag, .. }) = &mut *stage else {
            return Err(not_held());
        };
        if !session.is_usable() {
            return Err(not_held());
        }
        session.renew(tag, ttl, by).await
    }

    pub(super) async fn release(&self, by: Time) -> Result<()> {
        let mut stage = self.stage.lock().await;
        match std::mem::replace(&mut *stage, AdvisoryStage::Released) {
            AdvisoryStage::Held(HeldSession { session, .. }) if session.is_usable() => {
                self.release_session(session, by).await
            }
            _ => Err(not_held()),
        }
    }

    /// Releases the lock, and keeps the session for the next claim. A session that does not answer is closed, which
    /// frees the lock as well.
    async fn release_session(&self, mut session: Session, by: Time) -> Result<()> {
        let LockSpec { pair, shared, .. } = self.spec;
        if !session.release(pair, shared, by).await? {
            return Err(not_held());
        }
        self.shared.idle.put(session);
        Ok(())
    }
}

fn not_held() -> Error {
    Error::new(ErrorKind::NotHeld, "the session that held the lock has ended, or has released it")
}

impl Drop for ClaimState {
    fn drop(&mut self) {
        self.known.unregister(self.id);
    }
}

impl fmt::Debug for ClaimState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}) on {}", self.key, self.spec.pair, self.shared)
    }
}

/// Claims of a store that were sent. A claim that is sent again continues with its state.
#[derive(Debug, Default)]
pub(super) struct AdvisoryClaims(mutex::Mutex<HashMap<u128, Weak<ClaimState>>>);

impl AdvisoryClaims {
    /// State of a claim that was sent before.
    pub(super) fn claim_by_id(&self, id: u128) -> Option<Arc<ClaimState>> {
        self.lock().get(&id).and_then(Weak::upgrade)
    }

    fn register(&self, id: u128, state: &Arc<ClaimState>) {
        self.lock().insert(id, Arc::downgrade(state));
    }

    fn unregister(&self, id: u128) {
        let mut claims = self.lock();
        // The same claim may have been sent again meanwhile, and have a new state: that entry must stay.
        if claims.get(&id).is_some_and(|state| state.strong_count() == 0) {
            claims.remove(&id);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u128, Weak<ClaimState>>> {
        self.0.lock()
    }
}
