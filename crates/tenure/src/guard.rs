//! The guard that a caller owns. Its keeper task renews the hold; its view reads what the keeper publishes.

mod keep;
mod view;

use std::fmt;
use std::future::Future;
use std::sync::Weak;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tenure_core::keeper::{Granted, Loss};
use tenure_core::{FencingToken, Key};
use tokio::sync::oneshot;

pub(crate) use self::keep::Keep;
use self::keep::KeeperRequest;
pub use self::view::Lost;
use self::view::{FORKED_COPY_MESSAGE, KeeperState};
pub(crate) use self::view::{HoldCallbacks, HoldContext, View};
use crate::race::{Either, race};
use crate::store::{Handle, Hold, ReleaseInline};
use crate::telemetry::Labels;
use crate::{Error, ErrorKind, Result};

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
    /// Returns the guard of a hold that was just granted, and the keeper of the hold, which the caller runs.
    pub(crate) fn new(
        context: HoldContext,
        granted: Granted,
        hold: Box<dyn Hold>,
        labels: Labels,
    ) -> (Self, Keep) {
        let (handle, release_inline) = (hold.handle(), hold.release_inline());
        let (view, requests, keep) = Keep::new(context, granted, hold, labels);
        (Self { view, handle, release_inline, requests }, keep)
    }

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
                None => Error::task_ended(&about.key).at(&about.store),
            })
        })
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard")
            .field("key", self.key())
            .field("token", &self.fencing_token())
            .field("remaining", &self.remaining())
            .finish_non_exhaustive()
    }
}
