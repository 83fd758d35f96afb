//! Claims of one participant: acquire requests with the settings of the election.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tenure_core::{FencingToken, Key};
use tokio::sync::{mpsc, watch};

use crate::guard::Guard;
use crate::outage::OutageMonitor;
use crate::request::{LockRequest, RequestKind};
use crate::store::{KeySpace, Store};
use crate::{Clock, Error, ErrorKind, Result};

/// Settings of this participant's claims.
#[derive(Debug)]
pub(super) struct Claims {
    pub(super) store: Arc<dyn Store>,
    pub(super) clock: Clock,
    pub(super) at_work: watch::Receiver<()>,
    pub(super) key: Key,
    pub(super) ttl: Duration,
    pub(super) stop_grace: Duration,
    pub(super) factor: u32,
    pub(super) id: Option<String>,
    pub(super) note: Option<String>,
    /// Tries once per claim and leaves the delays to the state machine, instead of waiting at the store.
    pub(super) polls: bool,
    /// Treats a denial by a store that worked before as permanent.
    pub(super) fail_fast: bool,
    /// Outages of the store, over all claims.
    pub(super) outage: OutageMonitor,
}

impl Claims {
    /// Checks the settings of a claim without sending it.
    pub(super) fn check(&self) -> Result<()> {
        self.request().check()
    }

    /// A request that sends the errors of its renewals to `renewals`, once it is granted.
    fn reporting(&self, renewals: mpsc::Sender<Arc<Error>>) -> LockRequest {
        self.request().on_renewal_error_shared(move |error| {
            // If the channel is full, many renewals failed in a row, and the first errors suffice.
            let _ = renewals.try_send(Arc::clone(error));
        })
    }

    fn request(&self) -> LockRequest {
        let Self { store, clock, at_work, key, ttl, stop_grace, factor, id, note, .. } = self;
        let kind = RequestKind::Lock { shared: false };
        let mut request = LockRequest::new(Arc::clone(store), clock.clone(), Ok(key.clone()), kind)
            .tracked_by(at_work.clone())
            .ttl(*ttl)
            .stop_grace(*stop_grace)
            .keep_alive_factor(*factor)
            .class("election")
            .monitored_by(self.outage.clone())
            .fail_on_error();
        if self.fail_fast {
            request = request.fail_fast();
        }
        if let Some(id) = id {
            request = request.id(id);
        }
        if let Some(note) = note {
            request = request.note(note);
        }
        request
    }

    /// Makes one claim.
    pub(super) fn claim(&self, renewals: mpsc::Sender<Arc<Error>>) -> ClaimFuture {
        let request = self.reporting(renewals);
        let polls = self.polls;
        Box::pin(async move {
            let acquired =
                if polls { request.try_acquire().await } else { request.acquire().await };
            acquired.map_or_else(ClaimOutcome::refused, ClaimOutcome::Granted)
        })
    }

    /// Makes one claim within the grace window, after the loss of the hold with the token `lost`.
    pub(super) fn reclaim(
        &self,
        lost: Option<FencingToken>,
        renewals: mpsc::Sender<Arc<Error>>,
    ) -> ClaimFuture {
        let request = self.reporting(renewals);
        let (store, key, fail_fast) = (Arc::clone(&self.store), self.key.clone(), self.fail_fast);
        Box::pin(async move {
            let claimed = request.try_acquire().await;
            let claimed = claimed.map_or_else(ClaimOutcome::refused, ClaimOutcome::Granted);
            match claimed {
                ClaimOutcome::Contended => match explain_contention(lost, &store, &key).await {
                    ClaimOutcome::Failed(error) if fail_fast => {
                        ClaimOutcome::Failed(error.into_permanent())
                    }
                    explained => explained,
                },
                claimed => claimed,
            }
        })
    }
}

/// Determines whether another participant holds the key, or only the remains of our own lost hold at the store.
async fn explain_contention(
    lost: Option<FencingToken>,
    store: &Arc<dyn Store>,
    key: &Key,
) -> ClaimOutcome {
    match store.inspect(key, KeySpace::Lock).await {
        Err(error) => ClaimOutcome::Failed(error),
        // A holder without a token may be another participant: it is not proved to be the remains of our own hold.
        Ok(state)
            if state
                .holders
                .iter()
                .any(|holder| holder.token.is_none() || Some(holder.token) != lost) =>
        {
            ClaimOutcome::Contended
        }
        Ok(_) => {
            let message = "the store has not yet ended the hold that was lost";
            ClaimOutcome::Failed(Error::new(ErrorKind::Unavailable, message))
        }
    }
}

/// Result of a claim.
pub(super) enum ClaimOutcome {
    Granted(Guard),
    Contended,
    Failed(Error),
}

impl ClaimOutcome {
    fn refused(error: Error) -> Self {
        match error.kind() {
            ErrorKind::Timeout => Self::Contended,
            kind if kind.is_held_by_another() => Self::Contended,
            _ => Self::Failed(error),
        }
    }
}

pub(super) type ClaimFuture = Pin<Box<dyn Future<Output = ClaimOutcome> + Send>>;
