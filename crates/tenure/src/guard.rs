//! The guard that a caller owns, and its channels to the keeper task that renews the hold.

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

use crate::drive::{Either, before, race};
use crate::request::shut_down_error;
#[cfg(unix)]
use crate::store::KeepOpen;
use crate::store::{Handle, ReleaseInline, Store};
use crate::{Clock, Error, ErrorKind, Result};

/// Held lock. Dropping it releases the lock in the background.
///
/// A guard is valid until its deadline. Every confirmed renewal moves the deadline. [`is_held`](Self::is_held) compares
/// the deadline with the local clock: no I/O. [`lost`](Self::lost) resolves at the deadline, or at once when the store
/// reports that the hold has ended.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
/// # let client = tenure::Client::connect("memory:guard-doc").await?;
/// let guard = client.lock("reports").acquire().await?;
/// match guard.run(async { /* the work */ }).await {
///     Ok(()) => guard.release().await?,
///     Err(lost) => eprintln!("stopped: {lost}"),
/// }
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
    /// Returns a read-only view of the hold. A view does not keep the lock held.
    pub(crate) fn view(&self) -> View {
        self.view.clone()
    }

    /// Key of the lock.
    pub fn key(&self) -> &Key {
        &self.view.context.key
    }

    /// Fencing token: a number that grows with every grant of this key, for the protected resource to check.
    ///
    /// [`FencingToken::NONE`] if the store has no [ordered tokens](crate::store::Capabilities::ordered_tokens).
    pub fn fencing_token(&self) -> FencingToken {
        self.view.context.token
    }

    /// Revision of the record that represents the hold, on NATS; `None` on other stores.
    ///
    /// Every renewal writes the record, which raises its revision. `Revision()` of the Go package nlock returns the
    /// same number, and nlock's keep-alive raises it too. If clients of nlock share the bucket, let the protected
    /// resource check the revision, because those clients have a revision too. If only tenure's holders write to the
    /// resource, use [`fencing_token`](Self::fencing_token).
    ///
    /// All writes under one hold may use the first revision that was read: the revisions of the next holder are larger
    /// than every revision of this hold.
    pub fn revision(&self) -> Option<u64> {
        self.view.revision()
    }

    /// Secret that lets another process renew and release the hold; `None` if a hold cannot outlive its process on this
    /// store.
    pub fn handle(&self) -> Option<&Handle> {
        self.handle.as_ref()
    }

    /// Returns a descriptor that keeps the lock held while any process has it open, even if this process is killed;
    /// `None` on stores whose holds do not depend on a descriptor.
    ///
    /// The descriptor is closed on exec. A release ends the hold even if the descriptor is still open. A hold with a
    /// lease also ends with its lease, unless it is renewed.
    ///
    /// The descriptor is for a guardian process, which cleans up after a killed holder. The lock becomes free only when
    /// the guardian exits.
    ///
    /// # Errors
    ///
    /// `NotHeld` if the hold has ended; `Unavailable` if the system has no descriptor left.
    #[cfg(unix)]
    pub fn keep_open(&self) -> Result<Option<std::os::fd::OwnedFd>> {
        self.view.keep_open()
    }

    /// True while the lock is held. A local clock check: no I/O.
    pub fn is_held(&self) -> bool {
        !self.remaining().is_zero()
    }

    /// Time until the deadline. The lock is held for that time even without a further renewal, unless the store ends
    /// the hold earlier.
    ///
    /// [`Duration::MAX`] if the store keeps the hold without a lease, and zero if the lock is not held. No I/O.
    pub fn remaining(&self) -> Duration {
        self.view.remaining()
    }

    /// Resolves when the hold has ended without a release: at its deadline, or when the store reports the end.
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time. After a loss every further call resolves at once.
    pub async fn lost(&self) -> Lost {
        self.view.lost().await
    }

    /// Resolves when a waiter has asked for this lock; never on stores without [hand-off](crate::store::Handoff).
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time. After a request every further call resolves at once.
    pub async fn handoff_requested(&self) {
        self.view.handoff_requested().await;
    }

    /// Resolves when it is time to stop the protected work: when only [`stop_grace`](crate::LockRequest::stop_grace) is
    /// left until the deadline, or when the hold is lost. A renewal in time moves the deadline.
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time.
    pub async fn ending(&self) {
        self.view.ending().await;
    }

    /// Runs `work`, and drops it if the hold is lost.
    ///
    /// # Errors
    ///
    /// `Lost` if the hold ended before `work` completed.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops `work`; the lock stays held.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        match race(self.lost(), work).await {
            Either::First(lost) => Err(lost.into()),
            Either::Second(output) => Ok(output),
        }
    }

    /// Releases the lock and waits for the result. The next waiter is granted the lock before the future resolves, or
    /// soon after.
    ///
    /// # Errors
    ///
    /// `Lost` if the hold was lost before. `Unknown` if the store gave no clear answer until the lease ended.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the release continues in the background.
    pub async fn release(self) -> Result<()> {
        match self.release_inline.as_ref().and_then(Weak::upgrade) {
            Some(hold) if self.is_held() => self.release_inline(&*hold),
            _ => self.send_request(KeeperRequest::Release).await,
        }
    }

    /// Stops renewing without a release: the hold lasts until its lease ends. Any process that has the returned handle
    /// can renew or release the hold.
    ///
    /// # Errors
    ///
    /// `Unsupported` if a hold cannot outlive its process on this store: the lock is released. `Lost` if the hold was
    /// lost before. `Unknown` if the store gave no clear answer: the hold is released, or ends with its lease. After any
    /// other error of the store the hold is released.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the hold is detached in the background.
    pub async fn detach(self) -> Result<Handle> {
        self.send_request(KeeperRequest::Detach).await
    }

    /// Detaches the hold without waiting for the keeper.
    pub(crate) fn detach_in_background(self) {
        // A send fails only if the keeper has ended: then nothing is renewed.
        drop(self.requests.send(KeeperRequest::Detach(oneshot::channel().0)));
    }

    /// Returns the guard if the lock is still held. Otherwise drops the guard, which releases the hold: a grant past
    /// its own deadline is never returned.
    pub(crate) fn ensure_held(self) -> Result<Self> {
        if self.is_held() {
            return Ok(self);
        }
        let KeeperState { lost, loss_at_deadline: at_deadline, .. } = *self.view.state.borrow();
        Err(self.view.lost_by(lost.unwrap_or(at_deadline)).into())
    }

    /// Releases the hold without a request to the keeper, and notifies the keeper afterwards.
    fn release_inline(self, hold: &dyn ReleaseInline) -> Result<()> {
        let Self { view: View { context: about, .. }, requests, .. } = self;
        // Set before the release: a renewal in flight is refused as soon as the hold has ended. If the flag were set
        // afterwards, the keeper could take that refusal for a loss.
        about.released.store(true, Ordering::Release);
        let ours = hold.release_now();
        // A send fails only if the keeper has ended: then there is nothing to notify.
        drop(requests.send(KeeperRequest::ReleasedInline));
        if ours { Ok(()) } else { Err(about.lost(Loss::Taken).into()) }
    }

    async fn send_request<T>(
        self,
        request: impl FnOnce(oneshot::Sender<Result<T>>) -> KeeperRequest,
    ) -> Result<T> {
        let Self { view: View { context: about, state, .. }, requests, .. } = self;
        if std::process::id() != about.pid {
            return Err(Error::new(ErrorKind::NotHeld, FORKED_COPY_MESSAGE)
                .on(&about.key)
                .at(&about.store));
        }
        let (reply, answer) = oneshot::channel();
        // If the keeper has ended, the request is dropped, and with it the sender of its reply.
        drop(requests.send(request(reply)));
        answer.await.unwrap_or_else(|_| {
            // The keeper ends without a reply if the hold was lost or the runtime was shut down.
            let reason = state.borrow().lost;
            Err(match reason {
                Some(reason) => about.lost(reason).into(),
                None => shut_down_error(&about.key).at(&about.store),
            })
        })
    }
}

const FORKED_COPY_MESSAGE: &str =
    "this is a fork of the process that holds the lock: only the original can use or release it";

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard")
            .field("key", self.key())
            .field("token", &self.fencing_token())
            .field("remaining", &self.remaining())
            .finish_non_exhaustive()
    }
}

/// Read-only view of a hold: the state that its keeper publishes, compared with the clock. When the keeper has ended,
/// the lock is not held.
#[derive(Clone)]
pub(crate) struct View {
    context: Arc<HoldContext>,
    state: watch::Receiver<KeeperState>,
    #[cfg(unix)]
    keep_open: Option<Weak<dyn KeepOpen>>,
}

impl View {
    pub(crate) fn key(&self) -> &Key {
        &self.context.key
    }

    pub(crate) fn fencing_token(&self) -> FencingToken {
        self.context.token
    }

    /// Revision of the record that the keeper last wrote or read.
    pub(crate) fn revision(&self) -> Option<u64> {
        self.state.borrow().revision
    }

    /// Returns the hold as a term of an election.
    pub(crate) fn term(&self) -> Term {
        Term { token: self.context.token, grants: self.context.grants }
    }

    pub(crate) fn deadline(&self) -> Time {
        self.state.borrow().deadline
    }

    pub(crate) fn remaining(&self) -> Duration {
        let state = *self.state.borrow();
        let kept =
            self.state.has_changed().is_ok() && !self.context.released.load(Ordering::Acquire);
        if !kept || state.lost.is_some() || std::process::id() != self.context.pid {
            return Duration::ZERO;
        }
        match state.deadline {
            Time::MAX => Duration::MAX,
            deadline => deadline.since(self.context.clock.now()),
        }
    }

    /// Resolves when the hold is lost, or when its keeper has ended.
    pub(crate) async fn lost(&self) -> Lost {
        let mut state = self.state.clone();
        loop {
            let KeeperState { deadline, loss_at_deadline: at_deadline, lost, .. } =
                *state.borrow_and_update();
            if let Some(reason) = lost {
                return self.lost_by(reason);
            }
            // A timer of its own, not the keeper's: the keeper may be blocked in a store, or on a runtime that is not
            // being polled. Even then, the loss must be reported at the deadline.
            match before(&self.context.clock, deadline, state.changed()).await {
                None => return self.lost_by(at_deadline),
                Some(Err(_)) => {
                    // A keeper that ended without publishing a loss was dropped with its runtime.
                    let reason = state.borrow().lost;
                    return self.lost_by(reason.unwrap_or(Loss::Disconnected));
                }
                Some(Ok(())) => {}
            }
        }
    }

    /// Resolves when a waiter has asked for the lock.
    pub(crate) async fn handoff_requested(&self) {
        let mut state = self.state.clone();
        if state.wait_for(|state| state.handoff_requested).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Resolves with `None` when the deadline has moved, and with the reason when the hold is lost.
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time: no change is missed.
    pub(crate) async fn changed(&mut self) -> Option<Loss> {
        match self.state.changed().await {
            Ok(()) => self.state.borrow_and_update().lost,
            Err(_) => Some(self.state.borrow().lost.unwrap_or(Loss::Disconnected)),
        }
    }

    /// Resolves when it is time to stop the protected work, or when the hold is lost.
    pub(crate) async fn ending(&self) {
        let View { context: about, state, .. } = self;
        let mut state = state.clone();
        loop {
            let KeeperState { deadline, lost, .. } = *state.borrow_and_update();
            if lost.is_some() {
                return;
            }
            // Changes are polled first. A renewal and the timer can be ready at the same time, and then the timer
            // belongs to a deadline that the renewal has moved.
            let end = deadline - about.lease.stop_grace();
            if !matches!(before(&about.clock, end, state.changed()).await, Some(Ok(()))) {
                return;
            }
        }
    }

    #[cfg(unix)]
    pub(crate) fn keep_open(&self) -> Result<Option<std::os::fd::OwnedFd>> {
        let at = |error: Error| error.on(&self.context.key).at(&self.context.store);
        let Some(keep_open) = &self.keep_open else { return Ok(None) };
        if std::process::id() != self.context.pid {
            return Err(at(Error::new(ErrorKind::NotHeld, FORKED_COPY_MESSAGE)));
        }
        let Some(hold) = keep_open.upgrade() else {
            return Err(at(Error::new(ErrorKind::NotHeld, "the hold has ended")));
        };
        hold.keep_open().map(Some).map_err(|error| {
            let message = "cannot duplicate the descriptor of the hold";
            at(Error::new(ErrorKind::Unavailable, message).because(error))
        })
    }

    /// Describes the loss of this hold for the given reason.
    pub(crate) fn lost_by(&self, reason: Loss) -> Lost {
        self.context.lost(reason)
    }
}

/// Loss of a hold: it ended without a release.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lost {
    /// Key of the lock.
    pub key: Key,
    /// Fencing token of the hold.
    pub token: FencingToken,
    /// Cause of the loss.
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
        let Lost { key, token, reason, store } = lost;
        // Without `because(lost)`: the source would repeat the key, the store and the token.
        let message = match token {
            FencingToken::NONE => format!("the hold was lost: {reason}"),
            token => format!("the hold with token {token} was lost: {reason}"),
        };
        Self::new(ErrorKind::Lost, message).on(&key).at(store)
    }
}

/// Context of a hold: immutable facts that the guard, its views and the keeper share.
pub(crate) struct HoldContext {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) key: Key,
    pub(crate) token: FencingToken,
    /// Number of grants of the key so far, including this one; `None` on stores that do not count every grant.
    pub(crate) grants: Option<u64>,
    pub(crate) lease: Lease,
    pub(crate) clock: Clock,
    pub(crate) callbacks: HoldCallbacks,
    /// Process that the hold was granted to. A forked copy of the process has no hold.
    pub(crate) pid: u32,
    /// True once the guard has released the hold inline. The keeper may not have been notified yet.
    pub(crate) released: AtomicBool,
}

impl HoldContext {
    fn lost(&self, reason: Loss) -> Lost {
        let store = self.store.to_string();
        Lost { key: self.key.clone(), token: self.token, reason, store }
    }
}

/// Callbacks of the caller for events of a hold.
#[derive(Default)]
pub(crate) struct HoldCallbacks {
    pub(crate) handoff_requested: Vec<Arc<OnHandoffRequested>>,
    pub(crate) renewal_error: Vec<Arc<OnRenewalError>>,
}

type OnHandoffRequested = dyn Fn() + Send + Sync;
type OnRenewalError = dyn Fn(&Arc<Error>) + Send + Sync;

/// State of a hold that the keeper publishes and the guard reads.
#[derive(Clone, Copy, Debug)]
struct KeeperState {
    deadline: Time,
    /// Cause of the loss if the deadline passes.
    loss_at_deadline: Loss,
    lost: Option<Loss>,
    handoff_requested: bool,
    /// Revision of the record, on stores that have one.
    revision: Option<u64>,
}

/// Request of the guard to the keeper. Dropping the guard without a request releases the hold.
enum KeeperRequest {
    Release(oneshot::Sender<Result<()>>),
    /// The guard has released the hold itself.
    ReleasedInline,
    Detach(oneshot::Sender<Result<Handle>>),
}

impl KeeperRequest {
    fn refuse(self, error: Error) {
        // A reply cannot be sent if the caller dropped its future: then no caller waits for it.
        match self {
            Self::Release(reply) => drop(reply.send(Err(error))),
            Self::ReleasedInline => {}
            Self::Detach(reply) => drop(reply.send(Err(error))),
        }
    }
}

#[cfg(all(test, unix, feature = "file"))]
mod tests {
    use super::*;
    use crate::Client;

    #[tokio::test]
    async fn a_view_of_a_released_hold_is_not_held_even_before_its_keeper_has_ended() {
        let folder = tempfile::tempdir().expect("a folder");
        let url = format!("file:{}", folder.path().display());
        let client = Client::connect(&url).await.expect("a folder of its own");
        let guard = client.lock("key").acquire().await.expect("free");
        let view = guard.view();
        assert!(!view.remaining().is_zero());
        // The hold is released inline: this thread has not run the keeper since.
        guard.release().await.expect("held");
        assert!(view.state.has_changed().is_ok(), "the keeper has not ended");
        assert_eq!(view.remaining(), Duration::ZERO);
    }
}
