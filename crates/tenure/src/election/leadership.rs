//! A term of leadership of this process.

use std::fmt;
use std::future::Future;
use std::time::Duration;

use tenure_core::election::Term;
use tokio::sync::watch;

use crate::guard::{Guard, Lost, View};
use crate::race::{Either, race};
use crate::{Error, ErrorKind, FencingToken, Key, Loss, Result};

/// View of the hold by which an [`Election`](super::Election) leads. Cloning is cheap. Keeping a clone does not keep
/// the hold: the election can release it at any time.
///
/// It is valid until a deadline, like a [`Guard`](crate::Guard), and no grace window extends it. A hold that was
/// reacquired within the window is another one, with another token: see
/// [`Election::leadership`](super::Election::leadership).
#[derive(Clone)]
pub struct Leadership {
    view: View,
    /// End of the term as reported by the election. The channel is closed if the election ended with its runtime.
    ended: watch::Receiver<Option<Ended>>,
}

/// Reason for the end of a [`Leadership`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Ended {
    /// The election released the hold: a step-down, or a shutdown.
    Released,
    /// The hold was lost.
    Lost(Lost),
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Released => f.write_str("leadership was given up"),
            Self::Lost(lost) => lost.fmt(f),
        }
    }
}

impl Leadership {
    /// The leadership of this hold, and the sender that ends it.
    pub(super) fn of(guard: &Guard) -> (Self, watch::Sender<Option<Ended>>) {
        let (end, ended) = watch::channel(None);
        (Self { view: guard.view(), ended }, end)
    }

    pub(super) fn term(&self) -> Term {
        self.view.term()
    }

    /// Key of the election.
    pub fn key(&self) -> &Key {
        self.view.key()
    }

    /// Fencing token, which grows with every grant of this key; for the protected resource to check.
    pub fn fencing_token(&self) -> FencingToken {
        self.view.fencing_token()
    }

    /// Revision of the record in a NATS bucket, which renewals raise; `None` on other stores. See
    /// [`Guard::revision`](crate::Guard::revision).
    pub fn revision(&self) -> Option<u64> {
        self.view.revision()
    }

    /// True while this leadership lasts: a local check, no I/O.
    pub fn is_held(&self) -> bool {
        !self.remaining().is_zero()
    }

    /// Time until the local deadline, unless the hold is renewed or ends before; [`Duration::MAX`] if the store keeps
    /// the hold without a lease, and zero if the leadership has ended.
    pub fn remaining(&self) -> Duration {
        let given_up = self.ended.has_changed().is_err() || self.ended.borrow().is_some();
        if given_up { Duration::ZERO } else { self.view.remaining() }
    }

    /// Resolves when this leadership ends: at its deadline, when the store reports a loss, or when the election
    /// releases the hold.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future has no effect; once the leadership has ended, every call resolves at once.
    pub async fn ended(&self) -> Ended {
        let mut ended = self.ended.clone();
        let reported = async {
            let end = ended.wait_for(Option::is_some).await.ok().and_then(|ended| ended.clone());
            // The sender was dropped without a value: the election ended with its runtime.
            end.unwrap_or_else(|| Ended::Lost(self.view.lost_by(Loss::Disconnected)))
        };
        match race(reported, self.view.lost()).await {
            Either::First(ended) => ended,
            Either::Second(lost) => Ended::Lost(lost),
        }
    }

    /// Resolves when the leader's work must begin to stop: [`stop_grace`](super::ElectionRequest::stop_grace) before
    /// the deadline, which renewals extend; or when this leadership has ended.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future has no effect.
    pub async fn ending(&self) {
        race(self.ended(), self.view.ending()).await;
    }

    /// Resolves when a follower waits to lead; never on stores that do not report waiters to holders. Followers that
    /// wait at the store always count. For leaders that hand over as soon as there is a successor.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future has no effect; once a follower waits, every call resolves at once.
    pub async fn handoff_requested(&self) {
        self.view.handoff_requested().await;
    }

    /// A descriptor that keeps the hold; see [`Guard::keep_open`].
    ///
    /// # Errors
    ///
    /// `NotHeld` if the hold has ended; `Unavailable` if the system has no free descriptor.
    #[cfg(unix)]
    pub fn keep_open(&self) -> Result<Option<std::os::fd::OwnedFd>> {
        self.view.keep_open()
    }

    /// Runs `work` and drops it when this leadership ends.
    ///
    /// # Errors
    ///
    /// `Lost` if the hold was lost before `work` finished, `NotHeld` if the election released it.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops `work`; the leadership continues.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        match race(self.ended(), work).await {
            Either::First(Ended::Lost(lost)) => Err(lost.into()),
            Either::First(Ended::Released) => {
                let message = "leadership was given up before the work was done";
                Err(Error::new(ErrorKind::NotHeld, message).on(self.key()))
            }
            Either::Second(output) => Ok(output),
        }
    }

    /// The loss of this hold for a reason that the election has determined.
    pub(super) fn lost_by(&self, reason: Loss) -> Lost {
        self.view.lost_by(reason)
    }
}

impl fmt::Debug for Leadership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leadership")
            .field("key", self.key())
            .field("token", &self.fencing_token())
            .field("remaining", &self.remaining())
            .finish_non_exhaustive()
    }
}
