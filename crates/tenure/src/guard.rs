//! The guard that a user keeps, and the task that keeps the hold behind it.

mod keep;

use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tenure_core::election::Term;
use tenure_core::keeper::Loss;
use tenure_core::lease::Lease;
use tenure_core::{FencingToken, Key, Time};
use tokio::sync::{oneshot, watch};

pub(crate) use keep::Keep;

use crate::request::shut_down_error;
#[cfg(unix)]
use crate::store::KeepOpen;
use crate::store::{Handle, ReleaseInline, Store};
use crate::telemetry::Labels;
use crate::{Clock, Error, ErrorKind, Result};

/// A held lock. Dropping it releases the lock, in the background.
///
/// It is valid until a deadline that every confirmed renewal moves on: [`is_held`](Self::is_held) compares the clock
/// with it and asks nobody. [`lost`](Self::lost) resolves at that deadline, or at once when the store says that the
/// hold is over.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
/// # let client = tenure::Client::connect("memory:guard-doc").await?;
/// let guard = client.lock("reports").acquire().await?;
/// tokio::select! {
///     () = async { /* the work */ } => {}
///     why = guard.lost() => eprintln!("stopping: {why}"),
/// }
/// guard.release().await?;
/// # Ok(()) }
/// ```
#[must_use = "dropping a guard releases the lock"]
pub struct Guard {
    view: View,
    handle: Option<Handle>,
    release_inline: Option<Weak<dyn ReleaseInline>>,
    requests: oneshot::Sender<KeeperRequest>,
}

impl Guard {
    /// A look at the hold that keeps nothing.
    pub(crate) fn view(&self) -> View {
        self.view.clone()
    }

    /// The key that is held.
    pub fn key(&self) -> &Key {
        &self.view.about.key
    }

    /// The number that grows with every grant of this key, to be checked by the protected resource;
    /// [`FencingToken::NONE`] where the store has [no order](crate::store::Capabilities::ordered_tokens).
    pub fn fencing_token(&self) -> FencingToken {
        self.view.about.token
    }

    /// The revision of the record that says that we hold it, where the store is a bucket of NATS; `None` on other stores.
    ///
    /// Every renewal writes the record and so raises it, as nlock's keep-alive raises what its `Revision()` returns. In a
    /// bucket that is shared with nlock's participants a protected resource checks this number, which they have as well;
    /// [`fencing_token`](Self::fencing_token) is for resources that only tenure's holders write to. All writes under one
    /// hold may bear the revision that was read first: those of the next holder are larger.
    pub fn revision(&self) -> Option<u64> {
        self.view.revision()
    }

    /// The secret that renews and releases the hold from elsewhere; `None` where a hold cannot outlive its process.
    pub fn handle(&self) -> Option<&Handle> {
        self.handle.as_ref()
    }

    /// A descriptor, closed on exec, that keeps the hold as long as it is open in any process, should this one be killed;
    /// `None` on stores whose holds do not live on a descriptor. A release ends the hold whoever has it open.
    ///
    /// For a guardian that cleans up after a killed process before the lock is free: it lets go by ending.
    ///
    /// # Errors
    ///
    /// `NotHeld` where the hold has ended; `Unavailable` where the system has no descriptor left.
    #[cfg(unix)]
    pub fn keep_open(&self) -> Result<Option<std::os::fd::OwnedFd>> {
        self.view.keep_open()
    }

    /// Whether the lock is held at this moment.
    pub fn is_held(&self) -> bool {
        !self.remaining().is_zero()
    }

    /// How long the lock is held for certain, unless it is renewed or lost before; [`Duration::MAX`] where the store
    /// keeps it without a lease, and zero where it is not held.
    pub fn remaining(&self) -> Duration {
        self.view.remaining()
    }

    /// Resolves when the hold has ended against our will: at its deadline, or when the store says so.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses nothing; the next call resolves at once.
    pub async fn lost(&self) -> Lost {
        self.view.lost().await
    }

    /// Resolves when somebody waits for this lock; never on stores whose holders cannot tell.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses nothing; the next call resolves at once.
    pub async fn handoff_requested(&self) {
        self.view.handoff_requested().await;
    }

    /// Resolves when it is time to stop the protected work: [`kill_after`](crate::LockRequest::kill_after) before the
    /// deadline, unless a renewal moves that on; or when the hold is lost.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses nothing.
    pub async fn ending(&self) {
        self.view.ending().await;
    }

    /// Runs `work`, and drops it when the hold is lost.
    ///
    /// # Errors
    ///
    /// `Lost` where the hold ended before `work` did.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops `work`; the lock stays held.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        tokio::select! {
            biased;
            lost = self.lost() => Err(lost.into()),
            output = work => Ok(output),
        }
    }

    /// Releases the lock and says how that went. The next waiter has it before this resolves, or soon after.
    ///
    /// # Errors
    ///
    /// `Lost` where it was lost before; `Unknown` where no clear answer came until its lease was over.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future releases all the same, in the background.
    pub async fn release(self) -> Result<()> {
        match self.release_inline.as_ref().and_then(Weak::upgrade) {
            Some(hold) if self.is_held() => self.release_inline(&*hold),
            _ => self.send_request(KeeperRequest::Release).await,
        }
    }

    /// Stops renewing and leaves the hold to its ttl; whoever has the handle can renew or release it.
    ///
    /// # Errors
    ///
    /// `Unsupported` where a hold cannot outlive its process: it is released then. `Lost` where it was lost before.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future forgets all the same.
    pub async fn detach(self) -> Result<Handle> {
        self.send_request(KeeperRequest::Detach).await
    }

    /// Stops renewing and leaves the hold to its ttl, and does not wait for that.
    pub(crate) fn detach_in_background(self) {
        // A keeper that has ended needs no word.
        drop(self.requests.send(KeeperRequest::Detach(oneshot::channel().0)));
    }

    /// The guard, unless it came too late: a grant past its own deadline is released, not returned.
    pub(crate) fn ensure_held(self) -> Result<Self> {
        if self.is_held() {
            return Ok(self);
        }
        let KeeperState { lost, at_deadline, .. } = *self.view.state.borrow();
        Err(self.view.lost_by(lost.unwrap_or(at_deadline)).into())
    }

    /// Releases without the keeper, which is only told.
    fn release_inline(self, hold: &dyn ReleaseInline) -> Result<()> {
        let Self { view: View { about, .. }, requests: orders, .. } = self;
        // Before it is so: a renewal that is refused because of this is no loss.
        about.released.store(true, Ordering::Release);
        let ours = hold.release_now();
        // A keeper that has ended needs no word.
        drop(orders.send(KeeperRequest::ReleasedInline));
        if ours { Ok(()) } else { Err(about.lost(Loss::Taken).into()) }
    }

    async fn send_request<T>(
        self,
        order: impl FnOnce(oneshot::Sender<Result<T>>) -> KeeperRequest,
    ) -> Result<T> {
        let Self { view: View { about, state, .. }, requests: orders, .. } = self;
        if std::process::id() != about.pid {
            return Err(Error::new(ErrorKind::NotHeld, FORKED_COPY_MESSAGE)
                .on(&about.key)
                .at(&about.store));
        }
        let (reply, answer) = oneshot::channel();
        // An order that nobody takes any more is dropped, and its reply with it.
        drop(orders.send(order(reply)));
        answer.await.unwrap_or_else(|_| {
            // The keeper has ended: with the loss of the hold, or with its runtime.
            let reason = state.borrow().lost;
            Err(match reason {
                Some(reason) => about.lost(reason).into(),
                None => shut_down_error(&about.key).at(&about.store),
            })
        })
    }
}

const FORKED_COPY_MESSAGE: &str =
    "this is a forked copy of the process that holds the lock: only that one can use or release it";

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard")
            .field("key", self.key())
            .field("token", &self.fencing_token())
            .field("remaining", &self.remaining())
            .finish_non_exhaustive()
    }
}

/// A look at a hold by somebody who does not keep it. It shows the keeper's word and the clock, until the keeper ends.
#[derive(Clone)]
pub(crate) struct View {
    about: Arc<HoldContext>,
    state: watch::Receiver<KeeperState>,
    #[cfg(unix)]
    keep_open: Option<Weak<dyn KeepOpen>>,
}

impl View {
    pub(crate) fn key(&self) -> &Key {
        &self.about.key
    }

    pub(crate) fn fencing_token(&self) -> FencingToken {
        self.about.token
    }

    /// The revision of the record, as it was last written or seen by the keeper.
    pub(crate) fn revision(&self) -> Option<u64> {
        self.state.borrow().revision
    }

    /// The hold as a term of an election.
    pub(crate) fn term(&self) -> Term {
        Term { token: self.about.token, grants: self.about.grants }
    }

    pub(crate) fn deadline(&self) -> Time {
        self.state.borrow().deadline
    }

    pub(crate) fn remaining(&self) -> Duration {
        let state = *self.state.borrow();
        let kept = self.state.has_changed().is_ok() && !self.about.released.load(Ordering::Acquire);
        if !kept || state.lost.is_some() || std::process::id() != self.about.pid {
            return Duration::ZERO;
        }
        match state.deadline {
            Time::MAX => Duration::MAX,
            deadline => deadline.since(self.about.clock.now()),
        }
    }

    /// Resolves when the hold was lost, or when its keeper has ended.
    pub(crate) async fn lost(&self) -> Lost {
        let mut state = self.state.clone();
        loop {
            let KeeperState { deadline, at_deadline, lost, .. } = *state.borrow_and_update();
            if let Some(reason) = lost {
                return self.lost_by(reason);
            }
            // A timer of our own: the keeper may be on a runtime that nobody drives, or behind a store that blocks.
            tokio::select! {
                biased;
                changed = state.changed() => if changed.is_err() {
                    // A keeper that ended without a word went down with its runtime.
                    let reason = state.borrow().lost;
                    return self.lost_by(reason.unwrap_or(Loss::Disconnected));
                },
                () = self.about.clock.sleep_until(deadline) => return self.lost_by(at_deadline),
            }
        }
    }

    /// Resolves when somebody waits.
    pub(crate) async fn handoff_requested(&self) {
        let mut state = self.state.clone();
        if state.wait_for(|state| state.handoff_requested).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Resolves when the deadline has moved, or the hold is lost: with how it was.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses no news.
    pub(crate) async fn changed(&mut self) -> Option<Loss> {
        match self.state.changed().await {
            Ok(()) => self.state.borrow_and_update().lost,
            Err(_) => Some(self.state.borrow().lost.unwrap_or(Loss::Disconnected)),
        }
    }

    /// Resolves when it is time to stop the protected work, or when the hold is lost.
    pub(crate) async fn ending(&self) {
        let View { about, state, .. } = self;
        let mut state = state.clone();
        loop {
            let KeeperState { deadline, lost, .. } = *state.borrow_and_update();
            if lost.is_some() {
                return;
            }
            // A renewal first: the end that it moved may have come before anybody looked.
            tokio::select! {
                biased;
                changed = state.changed() => if changed.is_err() { return },
                () = about.clock.sleep_until(deadline - about.lease.stop_grace()) => return,
            }
        }
    }

    #[cfg(unix)]
    pub(crate) fn keep_open(&self) -> Result<Option<std::os::fd::OwnedFd>> {
        let at = |error: Error| error.on(&self.about.key).at(&self.about.store);
        let Some(keep_open) = &self.keep_open else { return Ok(None) };
        if std::process::id() != self.about.pid {
            return Err(at(Error::new(ErrorKind::NotHeld, FORKED_COPY_MESSAGE)));
        }
        let Some(hold) = keep_open.upgrade() else {
            return Err(at(Error::new(ErrorKind::NotHeld, "the hold has ended")));
        };
        hold.keep_open().map(Some).map_err(|error| {
            let message = "cannot copy the descriptor of the hold";
            at(Error::new(ErrorKind::Unavailable, message).because(error))
        })
    }

    /// The loss of this hold for a reason that is known elsewhere.
    pub(crate) fn lost_by(&self, reason: Loss) -> Lost {
        self.about.lost(reason)
    }
}

/// Why a hold ended against our will.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lost {
    /// The key that was held.
    pub key: Key,
    /// The token that it was held with.
    pub token: FencingToken,
    /// What happened.
    pub reason: Loss,
    store: String,
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, token, reason, store } = self;
        match *token {
            FencingToken::NONE => write!(f, "lost {key} on {store}: {reason}"),
            token => write!(f, "lost {key} (token {token}) on {store}: {reason}"),
        }
    }
}

impl std::error::Error for Lost {}

impl From<Lost> for Error {
    fn from(lost: Lost) -> Self {
        let message = match lost.token {
            FencingToken::NONE => "the hold was lost".to_owned(),
            token => format!("the hold with token {token} was lost"),
        };
        Self::new(ErrorKind::Lost, message).on(&lost.key).at(&lost.store).because(lost)
    }
}

/// What surrounds a hold.
pub(crate) struct HoldContext {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) key: Key,
    pub(crate) token: FencingToken,
    /// How many grants of the key there were with this one, where the store counts them.
    pub(crate) grants: Option<u64>,
    pub(crate) lease: Lease,
    pub(crate) clock: Clock,
    pub(crate) callbacks: HoldCallbacks,
    /// The process that asked for the hold: a forked copy of it has none.
    pub(crate) pid: u32,
    /// The guard has released it, and the keeper need not know yet.
    pub(crate) released: AtomicBool,
    /// What it is called in metrics.
    pub(crate) labels: Labels,
}

impl HoldContext {
    fn lost(&self, reason: Loss) -> Lost {
        let store = self.store.to_string();
        Lost { key: self.key.clone(), token: self.token, reason, store }
    }
}

/// Whom to call about a hold.
#[derive(Default)]
pub(crate) struct HoldCallbacks {
    pub(crate) handoff_requested: Vec<Arc<OnHandoffRequested>>,
    pub(crate) renewal_error: Vec<Arc<OnRenewalError>>,
}

type OnHandoffRequested = dyn Fn() + Send + Sync;
type OnRenewalError = dyn Fn(&Arc<Error>) + Send + Sync;

/// What the keeper publishes and the guard reads.
#[derive(Clone, Copy, Debug)]
struct KeeperState {
    deadline: Time,
    /// What it means that the deadline passes.
    at_deadline: Loss,
    lost: Option<Loss>,
    handoff_requested: bool,
    /// The revision of the record, on stores that have one.
    revision: Option<u64>,
}

/// What the guard tells the keeper; dropping the guard tells it to release.
enum KeeperRequest {
    Release(oneshot::Sender<Result<()>>),
    /// The guard does that itself.
    ReleasedInline,
    Detach(oneshot::Sender<Result<Handle>>),
}

impl KeeperRequest {
    fn refuse(self, error: Error) {
        // A reply that cannot be sent is one that nobody waits for.
        match self {
            Self::Release(reply) => drop(reply.send(Err(error))),
            Self::ReleasedInline => {}
            Self::Detach(reply) => drop(reply.send(Err(error))),
        }
    }
}
