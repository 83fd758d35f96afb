//! Wait of a session for a lock: in a place of the server's queue, or standing by for one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tenure_core::Random;
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::JoinHandle;

use super::queue_locks;
use super::session::{Session, SessionClaim};
use super::sql::{ClaimWait, LockSpec};
use super::tag::Tag;
use crate::store::pg::failure;
use crate::{Clock, Result, identity};

/// SQLSTATE of a wait that timed out.
const LOCK_NOT_AVAILABLE: &str = "55P03";

/// Position of a waiting session.
#[derive(Clone, Copy, Debug)]
pub(super) enum WaitPosition {
    /// It has a place in the queue, and blocks there.
    Queued { place: u8 },
    /// It is idle, listens for a call, and polls.
    InReserve { ticket: u32, reserves: u32 },
}

/// A lock that is waited for, and the tag of the session that waits.
pub(super) struct ClaimedLock {
    pub(super) tag: Tag,
    pub(super) spec: LockSpec,
}

/// A task that waits for a lock on a session of its own. Dropping this aborts the task and closes its session.
pub(super) struct LockWait {
    task: JoinHandle<(Session, Result<SessionClaim>)>,
    pub(super) pid: i32,
    /// Start time of the session, as the server prints it.
    pub(super) started: String,
    blocks: Arc<AtomicBool>,
    /// Held until the wait has ended.
    _permit: OwnedSemaphorePermit,
}

impl LockWait {
    /// Starts to wait. `wait` is the maximum time for which one statement blocks.
    pub(super) fn begin(
        session: Session,
        position: WaitPosition,
        claimed: ClaimedLock,
        permit: OwnedSemaphorePermit,
        (clock, wait): (Clock, Duration),
    ) -> Self {
        let ClaimedLock { tag, spec } = claimed;
        let (pid, started) = (session.ident.pid, session.started.clone());
        let blocks = Arc::new(AtomicBool::new(matches!(position, WaitPosition::Queued { .. })));
        let waiter = Waiter { session, tag, spec, clock, wait, blocks: Arc::clone(&blocks) };
        Self { task: tokio::spawn(waiter.run(position)), pid, started, blocks, _permit: permit }
    }

    /// True if the session has a place in the server's queue, and may be blocked.
    pub(super) fn blocks(&self) -> bool {
        self.blocks.load(Ordering::Relaxed)
    }

    pub(super) fn is_finished(&self) -> bool {
        self.task.is_finished()
    }

    /// Session and result of the wait, when it has ended: a grant, or an error.
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time.
    pub(super) async fn ended(
        &mut self,
    ) -> std::result::Result<(Session, Result<SessionClaim>), tokio::task::JoinError> {
        (&mut self.task).await
    }
}

impl Drop for LockWait {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Waiter {
    session: Session,
    tag: Tag,
    spec: LockSpec,
    clock: Clock,
    wait: Duration,
    blocks: Arc<AtomicBool>,
}

impl Waiter {
    async fn run(mut self, mut position: WaitPosition) -> (Session, Result<SessionClaim>) {
        let seed = identity::random().map_or(1, u64::from_be_bytes);
        let mut random = Random::new(seed);
        loop {
            let claimed = match position {
                WaitPosition::Queued { place } => self.block(place).await,
                WaitPosition::InReserve { ticket, reserves } => {
                    self.wait_in_reserve(ticket, reserves, &mut random).await
                }
            };
            position = match claimed {
                Ok(SessionClaim::Entered { place }) => WaitPosition::Queued { place },
                Ok(SessionClaim::InReserve { ticket, reserves }) => {
                    WaitPosition::InReserve { ticket, reserves }
                }
                Err(error)
                    if failure::code(&error) == Some(LOCK_NOT_AVAILABLE)
                        && self.session.is_usable() =>
                {
                    continue;
                }
                ended => return (self.session, ended),
            };
            let blocks = matches!(position, WaitPosition::Queued { .. });
            self.blocks.store(blocks, Ordering::Relaxed);
        }
    }

    /// Blocks in the server's queue. The statement is ended after half the ttl at the latest and sent again, because
    /// only its end proves that the server still answers.
    async fn block(&mut self, place: u8) -> Result<SessionClaim> {
        let bound = self.wait.min(self.spec.ttl / 2);
        let by = self.clock.now() + bound + self.spec.ttl / 4;
        self.session.claim(&self.tag, &self.spec, ClaimWait::Wait { bound, place }, by).await
    }

    /// Waits for a call, or for a poll to find room, and then tries for the lock, or for a place in the queue.
    async fn wait_in_reserve(
        &mut self,
        ticket: u32,
        mut reserves: u32,
        random: &mut Random,
    ) -> Result<SessionClaim> {
        let answer_time = self.spec.ttl / 4;
        self.session.end_after_silence(self.spec.ttl);
        loop {
            let interval = queue_locks::poll_interval(self.spec.ttl, reserves);
            // Jitter: reserves that began together must not poll together.
            let poll = self.clock.now() + interval.mul_f64(0.75 + random.unit() / 4.0);
            tokio::select! {
                called = self.session.called() => {
                    called?;
                    break;
                }
                () = self.clock.sleep_until(poll) => {}
            }
            let by = self.clock.now() + answer_time;
            let (counted, may_enter) = self.session.poll(&self.tag, &self.spec, ticket, by).await?;
            if may_enter {
                break;
            }
            reserves = counted;
        }
        let by = self.clock.now() + answer_time;
        self.session.claim(&self.tag, &self.spec, ClaimWait::EnterAfter { ticket }, by).await
    }
}
