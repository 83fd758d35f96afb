//! One hold of the key by which this process leads.

use std::fmt;
use std::future::Future;
use std::time::Duration;

use tenure_core::election::Term;
use tokio::sync::watch;

use crate::guard::{Guard, Lost, View};
use crate::{Error, ErrorKind, FencingToken, Key, Loss, Result};

/// A look at one hold by which an [`Election`](super::Election) leads. Cloning is cheap, and keeping one keeps nothing:
/// the election gives the hold up when it likes.
///
/// It is valid until a deadline, like a [`Guard`](crate::Guard), and no grace window makes it last longer. A hold that
/// came back within the window is another one, with another token: ask
/// [`Election::leadership`](super::Election::leadership) for it.
#[derive(Clone)]
pub struct Leadership {
    view: View,
    /// How the election ended it. Closed where the election went down with its runtime.
    ended: watch::Receiver<Option<Ended>>,
}

/// How a [`Leadership`] ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The election gave it up: a step-down, or a shutdown.
    Released,
    /// It ended against our will.
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
    /// The leadership by this hold, and the word that ends it.
    pub(super) fn of(guard: &Guard) -> (Self, watch::Sender<Option<Ended>>) {
        let (end, ended) = watch::channel(None);
        (Self { view: guard.view(), ended }, end)
    }

    pub(super) fn term(&self) -> Term {
        self.view.term()
    }

    /// The key that is led.
    pub fn key(&self) -> &Key {
        self.view.key()
    }

    /// The number that grows with every grant of this key, to be checked by the protected resource.
    pub fn fencing_token(&self) -> FencingToken {
        self.view.fencing_token()
    }

    /// The revision of the record in a bucket of NATS, which renewals raise; `None` on other stores. See
    /// [`Guard::revision`](crate::Guard::revision).
    pub fn revision(&self) -> Option<u64> {
        self.view.revision()
    }

    /// Whether this leadership counts at this moment.
    pub fn is_held(&self) -> bool {
        !self.remaining().is_zero()
    }

    /// How long it counts for certain, unless it is renewed or ended before; [`Duration::MAX`] where the store keeps it
    /// without a lease, and zero where it is over.
    pub fn remaining(&self) -> Duration {
        let given_up = self.ended.has_changed().is_err() || self.ended.borrow().is_some();
        if given_up { Duration::ZERO } else { self.view.remaining() }
    }

    /// Resolves when this leadership is over: at its deadline, when the store says so, or when the election gives it up.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses nothing; the next call resolves at once.
    pub async fn ended(&self) -> Ended {
        let mut ended = self.ended.clone();
        let told = async {
            let told = ended.wait_for(Option::is_some).await.ok().and_then(|ended| ended.clone());
            // An election that ended without a word went down with its runtime.
            told.unwrap_or_else(|| Ended::Lost(self.view.lost_by(Loss::Disconnected)))
        };
        tokio::select! {
            biased;
            ended = told => ended,
            lost = self.view.lost() => Ended::Lost(lost),
        }
    }

    /// Resolves when it is time to stop the leader's work: [`kill_after`](super::ElectionRequest::kill_after) before the
    /// deadline, unless a renewal moves that on; or when this leadership is over.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses nothing.
    pub async fn ending(&self) {
        tokio::select! {
            biased;
            _ = self.ended() => {}
            () = self.view.ending() => {}
        }
    }

    /// Resolves when somebody waits to lead; never on stores whose holders cannot tell. Followers that wait at the store
    /// always do: it is for who wants to hand over as soon as there is somebody to hand over to.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses nothing; the next call resolves at once.
    pub async fn handoff_requested(&self) {
        self.view.handoff_requested().await;
    }

    /// A descriptor that keeps the hold, as [`Guard::keep_open`] gives it.
    ///
    /// # Errors
    ///
    /// `NotHeld` where the hold has ended; `Unavailable` where the system has no descriptor left.
    #[cfg(unix)]
    pub fn keep_open(&self) -> Result<Option<std::os::fd::OwnedFd>> {
        self.view.keep_open()
    }

    /// Runs `work`, and drops it when this leadership is over.
    ///
    /// # Errors
    ///
    /// `Lost` where the hold was lost before `work` was done, `NotHeld` where the election gave it up.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops `work`; the leadership stays.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        tokio::select! {
            biased;
            ended = self.ended() => Err(match ended {
                Ended::Lost(lost) => lost.into(),
                Ended::Released => {
                    let message = "leadership was given up before the work was done";
                    Error::new(ErrorKind::NotHeld, message).on(self.key())
                }
            }),
            output = work => Ok(output),
        }
    }

    /// The loss of this hold for a reason that the election knows.
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
