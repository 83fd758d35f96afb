//! Client-side state of a claim: waiting for a permit, waiting at the server, or holding the lock on a session.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, MutexGuard, Weak};
use std::time::Duration;

use tenure_core::{FencingToken, Time};
use tokio::sync::{Mutex, OwnedSemaphorePermit};

use super::lock_id::LockId;
use super::session::{Session, SessionClaim};
use super::shared::{AdvisoryShared, REQUEST_TIMEOUT};
use super::sql::{self, ClaimWait, LockSpec};
use super::tag::Tag;
use super::wait::{ClaimedLock, LockWait, WaitPosition};
use crate::mutex;
#[cfg(unix)]
use crate::store::KeepOpen;
use crate::store::pg::connect::SessionEnd;
use crate::store::pg::failure;
use crate::store::{Claim, Mode};
use crate::{Error, ErrorKind, Key, Result};

/// Pause between two checks whether a wait has begun.
const WAIT_CHECK_PAUSE: Duration = Duration::from_millis(1);

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
    /// A session of ours waits at the server.
    Waiting(LockWait),
    Held(Box<HeldSession>),
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

impl AdvisoryStage {
    fn granted(&self) -> Option<GrantedLock> {
        match self {
            Self::Held(held) => Some(held.granted()),
            Self::Idle | Self::Waiting(_) | Self::Released => None,
        }
    }
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
        let lock = LockId::of(shared.form, &claim.key)?;
        let state = Arc::new(Self {
            shared: Arc::clone(shared),
            known: Arc::clone(known),
            id: claim.id,
            key: claim.key.clone(),
            spec: LockSpec { lock, shared: shared_lock, ttl: claim.ttl, queue: shared.queue },
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
            AdvisoryStage::Waiting(_) => return Ok(AdvisoryAnswer::Queued),
            AdvisoryStage::Idle | AdvisoryStage::Held(_) | AdvisoryStage::Released => {
                *stage = AdvisoryStage::Idle;
            }
        }
        let permits = queue.then(|| self.shared.wait_permits_of(self.spec.lock));
        let permit = permits.and_then(|permits| permits.try_acquire_owned().ok());
        let mut session = self.shared.session(by).await.map_err(failure::nothing_done)?;
        let Some(permit) = permit else {
            let claimed = session.claim(&self.tag, &self.spec, ClaimWait::Try, by).await?;
            if let SessionClaim::Busy = claimed {
                self.shared.idle.put(session);
                return Ok(if queue { AdvisoryAnswer::Queued } else { AdvisoryAnswer::Busy });
            }
            *stage = self.held(session, claimed)?;
            return stage.granted().ok_or_else(no_reason).map(AdvisoryAnswer::Granted);
        };
        *stage = self.enter(session, permit, by).await?;
        if let AdvisoryStage::Waiting(wait) = &*stage {
            self.wait_until_queued(wait, by).await;
        }
        Ok(stage.granted().map_or(AdvisoryAnswer::Queued, AdvisoryAnswer::Granted))
    }

    /// Tries for the lock, then for a place in the queue, and then stands by.
    async fn enter(
        &self,
        mut session: Session,
        permit: OwnedSemaphorePermit,
        by: Time,
    ) -> Result<AdvisoryStage> {
        let mut claimed = session.claim(&self.tag, &self.spec, ClaimWait::Enter, by).await?;
        if let SessionClaim::Busy = claimed {
            claimed = session.claim(&self.tag, &self.spec, ClaimWait::JoinReserve, by).await?;
        }
        let position = match claimed {
            SessionClaim::Entered { place } => WaitPosition::Queued { place },
            SessionClaim::InReserve { ticket, reserves } => {
                WaitPosition::InReserve { ticket, reserves }
            }
            SessionClaim::Granted { .. } | SessionClaim::Busy => {
                return self.held(session, claimed);
            }
        };
        let claimed = ClaimedLock { tag: self.tag.clone(), spec: self.spec };
        let pace = (self.shared.clock.clone(), self.shared.wait);
        Ok(AdvisoryStage::Waiting(LockWait::begin(session, position, claimed, permit, pace)))
    }

    /// Stage after a grant, which is the only answer that ends a try or a wait without an error.
    fn held(&self, session: Session, claimed: SessionClaim) -> Result<AdvisoryStage> {
        let SessionClaim::Granted { token, at, terms } = claimed else { return Err(no_reason()) };
        let tag = self.tag.clone().granted(at);
        Ok(AdvisoryStage::Held(Box::new(HeldSession { session, token, terms, tag })))
    }

    /// Resolves when the server shows the wait, or the wait is over, or the session stands by. A claim that is made
    /// after this is behind it in the queue. If the check fails, the wait goes on without it.
    async fn wait_until_queued(&self, wait: &LockWait, by: Time) {
        let clock = &self.shared.clock;
        while wait.blocks() && !wait.is_finished() && clock.now() < by {
            let statement = |_: &Session| sql::is_waiting(wait.pid, self.shared.form);
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
                AdvisoryStage::Waiting(wait) => {
                    let ended = tokio::select! {
                        biased;
                        ended = wait.ended() => ended,
                        () = clock.sleep_until(by) => return Ok(AdvisoryWaited::StillQueued),
                    };
                    // Set before the result is used, whose error returns early: a wait that failed is over, and the
                    // next one starts from the beginning.
                    *stage = AdvisoryStage::Idle;
                    let (session, claimed) = ended.map_err(|error| {
                        let message =
                            "the task that waited for the lock was ended with its runtime";
                        Error::new(ErrorKind::Shutdown, message).because(error)
                    })?;
                    *stage = self.held(session, claimed?)?;
                }
                AdvisoryStage::Idle => {
                    let permits = self.shared.wait_permits_of(self.spec.lock);
                    let permit = tokio::select! {
                        biased;
                        permit = permits.acquire_owned() => match permit {
                            Ok(permit) => permit,
                            Err(_) => return Ok(AdvisoryWaited::Gone),
                        },
                        () = clock.sleep_until(by) => return Ok(AdvisoryWaited::StillQueued),
                    };
                    let by = clock.now() + REQUEST_TIMEOUT;
                    let session = self.shared.session(by).await.map_err(failure::nothing_done)?;
                    *stage = self.enter(session, permit, by).await?;
                }
            }
        }
    }

    pub(super) async fn abandon(&self, limit: Duration) -> Result<()> {
        let by = self.shared.clock.now() + limit;
        let mut stage = self.stage.lock().await;
        match std::mem::replace(&mut *stage, AdvisoryStage::Released) {
            // A lock that was granted at the last moment is freed with its session, which is closed here. The server
            // notices the end of an idle connection at once, but not that of a statement that blocks.
            AdvisoryStage::Waiting(wait) if wait.blocks() => {
                let statement = |_: &Session| sql::cancel(wait.pid, &wait.started);
                if let Err(error) = self.shared.query(by, statement, |_| ()).await {
                    // The server then ends the wait when it notices that the connection is closed: it checks once per
                    // second.
                    tracing::debug!(name: "tenure.cancel_failed", key = %self.key, store = %self.shared, %error);
                }
                Ok(())
            }
            AdvisoryStage::Held(held) => self.release_session(held.session, by).await,
            AdvisoryStage::Idle | AdvisoryStage::Waiting(_) | AdvisoryStage::Released => Ok(()),
        }
    }

    pub(super) async fn renew(&self, ttl: Duration, by: Time) -> Result<()> {
        let mut stage = self.stage.lock().await;
        let AdvisoryStage::Held(held) = &mut *stage else { return Err(not_held()) };
        let HeldSession { session, tag, .. } = &mut **held;
        if !session.is_usable() {
            return Err(not_held());
        }
        session.renew(tag, &self.spec, ttl, by).await
    }

    pub(super) async fn release(&self, by: Time) -> Result<()> {
        let mut stage = self.stage.lock().await;
        match std::mem::replace(&mut *stage, AdvisoryStage::Released) {
            AdvisoryStage::Held(held) if held.session.is_usable() => {
                self.release_session(held.session, by).await
            }
            _ => Err(not_held()),
        }
    }

    /// Releases the lock, and keeps the session for the next claim. A session that does not answer is closed, which
    /// frees the lock as well.
    async fn release_session(&self, mut session: Session, by: Time) -> Result<()> {
        let LockSpec { lock, shared, .. } = self.spec;
        if !session.release(lock, shared, by).await? {
            return Err(not_held());
        }
        self.shared.idle.put(session);
        Ok(())
    }
}

fn no_reason() -> Error {
    Error::new(ErrorKind::Unavailable, "the server ended the wait without a reason")
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
        write!(f, "{} ({}) on {}", self.key, self.spec.lock, self.shared)
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
