//! A place in a queue of the lock server.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::wire::{ClaimId, ExtensionRequest, Request};

use super::claim::{ClaimStage, ClaimState};
use super::errors::{unexpected_reply, unknown_outcome};
use super::hold::{grant, release};
use super::shared::ServerShared;
use super::wire::{NoReply, OwnedReply, Protocol};
use crate::Result;
use crate::store::{LeaseStart, Loss, Place, Waited};

/// Time limit of the request for the position in the queue, which is sent when a wait ends without a grant.
const POSITION_TIMEOUT: Duration = Duration::from_millis(500);

/// A place in a queue of the server.
#[derive(Debug)]
pub(super) struct ServerPlace {
    pub(super) shared: Arc<ServerShared>,
    pub(super) claim: Arc<ClaimState>,
}

#[async_trait]
impl Place for ServerPlace {
    async fn wait(&mut self, limit: Duration) -> Result<Waited> {
        let Self { shared, claim } = self;
        let mut news = claim.watch();
        let over = async {
            let over =
                |stage: &ClaimStage| !matches!(stage, ClaimStage::Asked | ClaimStage::Waiting);
            let seen = news.wait_for(|state| over(&state.stage)).await;
            seen.map_or(ClaimStage::Unclear, |state| state.stage.clone())
        };
        let clock = &shared.clock;
        let stage = tokio::select! {
            biased;
            stage = over => stage,
            () = clock.sleep_until(clock.now() + limit) => ClaimStage::Waiting,
        };
        match stage {
            ClaimStage::Held { token, .. } => Ok(Waited::Granted(grant(
                shared,
                Arc::clone(claim),
                token,
                LeaseStart::FromConfirm,
            ))),
            ClaimStage::Asked | ClaimStage::Waiting => {
                Ok(Waited::StillQueued { ahead: self.ahead().await })
            }
            ClaimStage::Unclear => {
                Err(unknown_outcome(NoReply::Disconnected).on(&claim.key).at(shared))
            }
            ClaimStage::Busy | ClaimStage::Refused(_) | ClaimStage::Gone | ClaimStage::Lost(_) => {
                Ok(Waited::Gone)
            }
        }
    }

    async fn abandon(&mut self, limit: Duration) -> Result<()> {
        let Self { shared, claim } = self;
        let stage = claim.stage();
        let until = shared.clock.now() + limit;
        let abandoned = match (shared.protocol, stage) {
            (_, ClaimStage::Unclear) => Err(unknown_outcome(NoReply::Disconnected)),
            (
                Protocol::Extended,
                ClaimStage::Asked | ClaimStage::Waiting | ClaimStage::Held { .. },
            ) => {
                let request =
                    Request::Extended(ExtensionRequest::Abandon { id: ClaimId(claim.id) });
                match claim.connection().ask(&request, until).await {
                    Ok(OwnedReply::Done | OwnedReply::Error(_)) => Ok(()),
                    Ok(reply) => Err(unexpected_reply(&reply)),
                    // A detached grant outlives the connection, and so does every grant of a server with a data
                    // directory.
                    Err(NoReply::Unsent) if !claim.connection().is_open() => {
                        Err(unknown_outcome(NoReply::Disconnected))
                    }
                    Err(no_reply) => Err(unknown_outcome(no_reply)),
                }
            }
            (Protocol::Extended, ClaimStage::Lost(Loss::Disconnected)) => {
                Err(unknown_outcome(NoReply::Disconnected))
            }
            (Protocol::Plain, ClaimStage::Held { token, .. }) => {
                let released =
                    release(claim.connection(), &claim.key, claim.space, token, until).await;
                released.map(|_| ())
            }
            (Protocol::Plain, ClaimStage::Asked | ClaimStage::Waiting) => {
                claim.connection().close();
                Ok(())
            }
            _ => Ok(()),
        };
        abandoned.map_err(|error| error.on(&claim.key).at(shared))?;
        claim.set_stage(ClaimStage::Gone);
        Ok(())
    }
}

impl ServerPlace {
    /// Number of waiters ahead of this one; `None` if the server does not report it.
    async fn ahead(&self) -> Option<usize> {
        let Self { shared, claim } = self;
        if shared.protocol == Protocol::Plain {
            return None;
        }
        let request = Request::Extended(ExtensionRequest::Position { id: ClaimId(claim.id) });
        match claim.connection().ask(&request, shared.clock.now() + POSITION_TIMEOUT).await {
            Ok(OwnedReply::Number(ahead)) => usize::try_from(ahead).ok(),
            _ => None,
        }
    }
}
