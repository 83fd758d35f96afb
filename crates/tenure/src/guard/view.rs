//! The view of a hold: the state that its keeper publishes, and the facts that never change.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tenure_core::election::Term;
use tenure_core::keeper::Loss;
use tenure_core::lease::Lease;
use tenure_core::{FencingToken, Key, Time};
use tokio::sync::watch;

use crate::race::before;
#[cfg(unix)]
use crate::store::KeepOpen;
use crate::store::Store;
use crate::{Clock, Error, ErrorKind};

/// Read-only view of a hold: the state that its keeper publishes, compared with the clock. When the keeper has ended,
/// the lock is not held.
#[derive(Clone)]
pub(crate) struct View {
    pub(super) context: Arc<HoldContext>,
    pub(super) state: watch::Receiver<KeeperState>,
    #[cfg(unix)]
    pub(super) keep_open: Option<std::sync::Weak<dyn KeepOpen>>,
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
    pub(crate) fn keep_open(&self) -> crate::Result<Option<std::os::fd::OwnedFd>> {
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

pub(super) const FORKED_COPY_MESSAGE: &str =
    "this is a fork of the process that holds the lock: only the original can use or release it";

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
    pub(super) fn lost(&self, reason: Loss) -> Lost {
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
pub(super) struct KeeperState {
    pub(super) deadline: Time,
    /// Cause of the loss if the deadline passes.
    pub(super) loss_at_deadline: Loss,
    pub(super) lost: Option<Loss>,
    pub(super) handoff_requested: bool,
    /// Revision of the record, on stores that have one.
    pub(super) revision: Option<u64>,
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
