//! A place in a queue.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::claim::{AdvisoryWaited, ClaimState};
use super::hold::grant;
use crate::Result;
use crate::store::{Place, Waited};

/// A place in the server's queue, or among the local waiters for a session in that queue.
#[derive(Debug)]
pub(super) struct AdvisoryPlace(pub(super) Arc<ClaimState>);

#[async_trait]
impl Place for AdvisoryPlace {
    async fn wait(&mut self, limit: Duration) -> Result<Waited> {
        let waited = self.0.wait(limit).await;
        let waited = waited.map_err(|error| error.on(&self.0.key).at(self.0.shared()))?;
        Ok(match waited {
            AdvisoryWaited::Granted(granted) => Waited::Granted(grant(&self.0, granted)),
            AdvisoryWaited::StillQueued => Waited::StillQueued { ahead: None },
            AdvisoryWaited::Gone => Waited::Gone,
        })
    }

    async fn abandon(&mut self, limit: Duration) -> Result<()> {
        let left = self.0.abandon(limit).await;
        left.map_err(|error| error.on(&self.0.key).at(self.0.shared()))
    }
}
