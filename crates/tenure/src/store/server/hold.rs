//! A hold at a lock server.

use std::future::pending;
use std::sync::Arc;
#[cfg(unix)]
use std::sync::Weak;
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::wire::{ClaimId, ExtensionRequest, Request};
use tenure_core::{FencingToken, Key, LockToken, Time};

use super::claim::{ClaimStage, ClaimState, ServerConnection};
use super::errors::{unexpected_reply, unknown_outcome};
use super::query;
use super::shared::ServerShared;
use super::wire::{OwnedReply, Protocol, wire_key};
use crate::store::{Grant, Handle, Hold, HoldEvent, KeySpace, LeaseStart, Loss, Renewed};
use crate::{Error, ErrorKind, Result};

/// The grant of a claim that is held.
pub(super) fn grant(
    shared: &Arc<ServerShared>,
    claim: Arc<ClaimState>,
    token: LockToken,
    lease_start: LeaseStart,
) -> Grant {
    let hold = ServerHold {
        shared: Arc::clone(shared),
        key: claim.key.clone(),
        space: claim.space,
        token,
        claim: Some(claim),
    };
    // An unordered number must not reach a resource that compares tokens: it would refuse current holders and admit
    // stale ones.
    let token = if hold.shared.has_ordered_tokens() { token.fencing() } else { FencingToken::NONE };
    let hold = Box::new(hold);
    Grant { token, lease_start, handoff_requested: false, grants: None, hold }
}

/// A hold at the server.
#[derive(Debug)]
pub(super) struct ServerHold {
    shared: Arc<ServerShared>,
    key: Key,
    space: KeySpace,
    token: LockToken,
    /// State of the claim that was granted; `None` if the claim was granted to another process.
    claim: Option<Arc<ClaimState>>,
}

impl ServerHold {
    pub(super) fn resumed(
        shared: Arc<ServerShared>,
        key: Key,
        space: KeySpace,
        token: LockToken,
    ) -> Self {
        Self { shared, key, space, token, claim: None }
    }

    /// The connection that the hold is bound to; the shared connection if it is not bound to one.
    async fn connection(&self, until: Time) -> Result<Arc<ServerConnection>> {
        match &self.claim {
            Some(claim) if !claim.detached => {
                if claim.connection().is_open() {
                    Ok(Arc::clone(claim.connection()))
                } else {
                    claim.set_stage(ClaimStage::Lost(Loss::Disconnected));
                    Err(not_held("the connection of the hold has ended"))
                }
            }
            _ => self.shared.connection(until).await,
        }
    }

    async fn renew_until(&self, ttl: Duration, until: Time) -> Result<Renewed> {
        let connection = self.connection(until).await?;
        let protocol = self.shared.protocol;
        let (key, space, token) = (&wire_key(&self.key)[..], self.space, Some(self.token));
        let lease = protocol.lease_to_wire(ttl);
        let request = match protocol {
            Protocol::Extended => {
                Request::Extended(ExtensionRequest::Renew { key, space, token, lease })
            }
            Protocol::Plain => Request::Renew { key, space, token, lease: Some(lease) },
        };
        let (lasts, waiters) = match connection.ask(&request, until).await {
            Ok(OwnedReply::Renewed { lease, waiters }) => (lease, waiters),
            Ok(OwnedReply::Number(lease)) => (lease, 0),
            Ok(OwnedReply::Error(why)) if why.is_empty() => {
                self.set_stage(ClaimStage::Lost(Loss::Taken));
                return Err(not_held("the hold has ended"));
            }
            Ok(reply) => return Err(unexpected_reply(&reply)),
            Err(no_reply) => return Err(unknown_outcome(no_reply)),
        };
        if protocol.lease_from_wire(lasts) < ttl {
            let message =
                format!("the server's longest lease is {:?}", protocol.lease_from_wire(lasts));
            return Err(Error::new(ErrorKind::Invalid, message));
        }
        if let Some(claim) = self.claim.as_ref().filter(|_| waiters > 0) {
            claim.handle_handoff_request();
        }
        Ok(Renewed { handoff_requested: waiters > 0 })
    }

    async fn release_until(&self, until: Time) -> Result<()> {
        let connection = self.connection(until).await?;
        if release(&connection, &self.key, self.space, self.token, until).await? {
            self.set_stage(ClaimStage::Gone);
            Ok(())
        } else {
            self.set_stage(ClaimStage::Lost(Loss::Taken));
            Err(not_held("the hold has ended"))
        }
    }

    /// Unbinds the hold from its connection. Without the server's reply it is not known whether the end of the
    /// connection will end the hold.
    async fn detach_until(&self, claim: &ClaimState, until: Time) -> Result<()> {
        let request = Request::Extended(ExtensionRequest::Detach { id: ClaimId(claim.id) });
        match self.connection(until).await?.ask(&request, until).await {
            Ok(OwnedReply::Done) => Ok(()),
            Ok(OwnedReply::Error(why)) if why.is_empty() => {
                self.set_stage(ClaimStage::Lost(Loss::Taken));
                Err(not_held("the hold has ended"))
            }
            Ok(reply) => Err(unexpected_reply(&reply)),
            Err(no_reply) => Err(unknown_outcome(no_reply)),
        }
    }

    fn set_stage(&self, stage: ClaimStage) {
        if let Some(claim) = &self.claim
            && matches!(claim.stage(), ClaimStage::Held { .. })
        {
            claim.set_stage(stage);
        }
    }
}

#[async_trait]
impl Hold for ServerHold {
    async fn renew(&mut self, ttl: Duration, limit: Duration) -> Result<Renewed> {
        let until = self.shared.clock.now() + limit;
        let renewed = self.renew_until(ttl, until).await;
        renewed.map_err(|error| error.on(&self.key).at(&self.shared))
    }

    async fn check_handoff(&mut self, limit: Duration) -> Result<bool> {
        let until = self.shared.clock.now() + limit;
        let shown = query::state(&self.shared, &self.key, self.space, until).await;
        shown
            .map(|state| !state.waiters.is_empty())
            .map_err(|error| error.on(&self.key).at(&self.shared))
    }

    async fn event(&mut self) -> HoldEvent {
        let Some(claim) = &self.claim else { return pending().await };
        let mut state = claim.watch();
        loop {
            if let ClaimStage::Lost(loss) = claim.stage() {
                return HoldEvent::Lost(loss);
            }
            if claim.take_handoff_request() {
                return HoldEvent::HandoffRequested;
            }
            if state.changed().await.is_err() {
                return pending().await;
            }
        }
    }

    async fn release(&mut self, limit: Duration) -> Result<()> {
        let until = self.shared.clock.now() + limit;
        let released = self.release_until(until).await;
        released.map_err(|error| error.on(&self.key).at(&self.shared))
    }

    fn handle(&self) -> Option<Handle> {
        let space = match self.space {
            KeySpace::Lock => 'l',
            KeySpace::Semaphore => 's',
        };
        (self.shared.protocol == Protocol::Extended)
            .then(|| Handle::new(format!("{space}{}", self.token)))
    }

    async fn detach(&mut self, limit: Duration) -> Result<()> {
        let Some(claim) = &self.claim else { return Ok(()) };
        let until = self.shared.clock.now() + limit;
        let detached = if claim.detached { Ok(()) } else { self.detach_until(claim, until).await };
        detached.map_err(|error| error.on(&self.key).at(&self.shared))?;
        claim.set_detached();
        Ok(())
    }

    #[cfg(unix)]
    fn keep_open(&self) -> Option<Weak<dyn crate::store::KeepOpen>> {
        let bound =
            |claim: &&Arc<ClaimState>| !claim.detached && claim.connection().has_descriptor();
        let claim = self.claim.as_ref().filter(bound)?;
        let claim: Weak<ClaimState> = Arc::downgrade(claim);
        Some(claim)
    }
}

/// Releases a hold by its token; true if it was held.
pub(super) async fn release(
    connection: &ServerConnection,
    key: &Key,
    space: KeySpace,
    token: LockToken,
    until: Time,
) -> Result<bool> {
    let (key, token) = (&wire_key(key)[..], Some(token));
    match connection.ask(&Request::Release { key, space, token }, until).await {
        Ok(OwnedReply::Done) => Ok(true),
        Ok(OwnedReply::Error(why)) if why.is_empty() => Ok(false),
        Ok(reply) => Err(unexpected_reply(&reply)),
        Err(no_reply) => Err(unknown_outcome(no_reply)),
    }
}

/// Key space and token of a handle.
pub(super) fn parse_handle(handle: &Handle) -> Option<(KeySpace, LockToken)> {
    let (space, token) = handle.expose().split_at_checked(1)?;
    let space = match space {
        "l" => KeySpace::Lock,
        "s" => KeySpace::Semaphore,
        _ => return None,
    };
    Some((space, token.parse().ok()?))
}

fn not_held(message: &str) -> Error {
    Error::new(ErrorKind::NotHeld, message)
}
