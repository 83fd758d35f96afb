//! Places and holds at a lock server.

use std::future::pending;
use std::sync::Arc;
#[cfg(unix)]
use std::sync::Weak;
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::wire::{ClaimId, ExtensionRequest, Request};
use tenure_core::{FencingToken, Key, LockToken, Time};

use super::claim::{ClaimStage, ClaimState};
use super::connection::{Connection, NoReply, OwnedReply};
use super::{Protocol, ServerShared, unexpected_reply, unknown_outcome, wire_key};
use crate::store::{
    Grant, Handle, Hold, HoldEvent, KeySpace, LeaseStart, Loss, Place, Renewed, Waited,
};
use crate::{Error, ErrorKind, Result};

/// How long to ask for our place when a wait is over.
const POSITION_TIMEOUT: Duration = Duration::from_millis(500);

/// A place in a queue of the server.
#[derive(Debug)]
pub(super) struct ServerPlace(pub(super) Arc<ClaimState>);

#[async_trait]
impl Place for ServerPlace {
    async fn wait(&mut self, limit: Duration) -> Result<Waited> {
        let seat = &self.0;
        let mut news = seat.watch();
        let over = async {
            let over =
                |stage: &ClaimStage| !matches!(stage, ClaimStage::Asked | ClaimStage::Waiting);
            let seen = news.wait_for(|state| over(&state.stage)).await;
            seen.map_or(ClaimStage::Unclear, |state| state.stage.clone())
        };
        let clock = &seat.shared().clock;
        let stage = tokio::select! {
            biased;
            stage = over => stage,
            () = clock.sleep_until(clock.now() + limit) => ClaimStage::Waiting,
        };
        match stage {
            ClaimStage::Held { token, .. } => {
                Ok(Waited::Granted(grant(Arc::clone(seat), token, LeaseStart::FromConfirm)))
            }
            ClaimStage::Asked | ClaimStage::Waiting => {
                Ok(Waited::Still { ahead: self.ahead().await })
            }
            ClaimStage::Unclear => {
                Err(unknown_outcome(NoReply::Disconnected).on(&seat.key).at(seat.shared()))
            }
            ClaimStage::Busy | ClaimStage::Refused(_) | ClaimStage::Gone | ClaimStage::Lost(_) => {
                Ok(Waited::Gone)
            }
        }
    }

    async fn abandon(&mut self, limit: Duration) -> Result<()> {
        let seat = &self.0;
        let stage = seat.stage();
        let until = seat.shared().clock.now() + limit;
        let abandoned = match (seat.shared().protocol, stage) {
            (_, ClaimStage::Unclear) => Err(unknown_outcome(NoReply::Disconnected)),
            (
                Protocol::Extended,
                ClaimStage::Asked | ClaimStage::Waiting | ClaimStage::Held { .. },
            ) => {
                let request = Request::Extended(ExtensionRequest::Abandon { id: ClaimId(seat.id) });
                match seat.connection().ask(&request, until).await {
                    Ok(OwnedReply::Done | OwnedReply::Error(_)) => Ok(()),
                    Ok(said) => Err(unexpected_reply(&said)),
                    // What lived on a connection that has ended needs not be given back.
                    Err(NoReply::Unsent) if !seat.connection().is_open() => Ok(()),
                    Err(silence) => Err(unknown_outcome(silence)),
                }
            }
            (Protocol::Plain, ClaimStage::Held { token, .. }) => {
                let released =
                    release(seat.connection(), &seat.key, seat.space, token, until).await;
                released.map(|_| ())
            }
            (Protocol::Plain, ClaimStage::Asked | ClaimStage::Waiting) => {
                seat.connection().close();
                Ok(())
            }
            _ => Ok(()),
        };
        abandoned.map_err(|error| error.on(&seat.key).at(seat.shared()))?;
        seat.set_stage(ClaimStage::Gone);
        Ok(())
    }
}

impl ServerPlace {
    /// How many are before us, where the server can tell.
    async fn ahead(&self) -> Option<usize> {
        let seat = &self.0;
        if seat.shared().protocol == Protocol::Plain {
            return None;
        }
        let request = Request::Extended(ExtensionRequest::Position { id: ClaimId(seat.id) });
        match seat.connection().ask(&request, seat.shared().clock.now() + POSITION_TIMEOUT).await {
            Ok(OwnedReply::Number(ahead)) => usize::try_from(ahead).ok(),
            _ => None,
        }
    }
}

/// What a seat holds.
pub(super) fn grant(seat: Arc<ClaimState>, token: LockToken, counts: LeaseStart) -> Grant {
    let hold = ServerHold {
        shared: Arc::clone(seat.shared()),
        key: seat.key.clone(),
        space: seat.space,
        token,
        claim: Some(seat),
    };
    // A number without an order must not reach a resource that compares: it would refuse rightful holders, and admit
    // stale ones.
    let token = if hold.shared.has_ordered_tokens() { token.fencing() } else { FencingToken::NONE };
    let hold = Box::new(hold);
    Grant { token, lease_start: counts, handoff_requested: false, grants: None, hold }
}

/// A hold at the server.
#[derive(Debug)]
pub(super) struct ServerHold {
    shared: Arc<ServerShared>,
    key: Key,
    space: KeySpace,
    token: LockToken,
    /// Where it was granted; none where another process was granted it.
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

    /// The connection that the hold lives on; any where it does not live on one.
    async fn connection(&self, until: Time) -> Result<Arc<Connection>> {
        match &self.claim {
            Some(seat) if !seat.detached => {
                if seat.connection().is_open() {
                    Ok(Arc::clone(seat.connection()))
                } else {
                    seat.set_stage(ClaimStage::Lost(Loss::Disconnected));
                    Err(not_held("the connection that the hold lived on has ended"))
                }
            }
            _ => self.shared.connection(until).await,
        }
    }

    async fn renew_until(&self, ttl: Duration, until: Time) -> Result<Renewed> {
        let link = self.connection(until).await?;
        let dialect = self.shared.protocol;
        let (key, space, token) = (&wire_key(&self.key)[..], self.space, Some(self.token));
        let lease = dialect.lease_to_wire(ttl);
        let request = match dialect {
            Protocol::Extended => {
                Request::Extended(ExtensionRequest::Renew { key, space, token, lease })
            }
            Protocol::Plain => Request::Renew { key, space, token, lease: Some(lease) },
        };
        let (lasts, waiters) = match link.ask(&request, until).await {
            Ok(OwnedReply::Renewed { lease, waiters }) => (lease, waiters),
            Ok(OwnedReply::Number(lease)) => (lease, 0),
            Ok(OwnedReply::Error(why)) if why.is_empty() => {
                self.set_stage(ClaimStage::Lost(Loss::Taken));
                return Err(not_held("the hold has ended"));
            }
            Ok(said) => return Err(unexpected_reply(&said)),
            Err(silence) => return Err(unknown_outcome(silence)),
        };
        if dialect.lease_from_wire(lasts) < ttl {
            let message =
                format!("the server keeps a hold for {:?} at most", dialect.lease_from_wire(lasts));
            return Err(Error::new(ErrorKind::Invalid, message));
        }
        if let Some(seat) = self.claim.as_ref().filter(|_| waiters > 0) {
            seat.handle_handoff_request();
        }
        Ok(Renewed { handoff_requested: waiters > 0 })
    }

    async fn release_until(&self, until: Time) -> Result<()> {
        let link = self.connection(until).await?;
        if release(&link, &self.key, self.space, self.token, until).await? {
            self.set_stage(ClaimStage::Gone);
            Ok(())
        } else {
            self.set_stage(ClaimStage::Lost(Loss::Taken));
            Err(not_held("the hold has ended"))
        }
    }

    fn set_stage(&self, stage: ClaimStage) {
        if let Some(seat) = &self.claim
            && matches!(seat.stage(), ClaimStage::Held { .. })
        {
            seat.set_stage(stage);
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
        let shown = match self.shared.protocol {
            Protocol::Extended => self.shared.query(&self.key, self.space, until).await,
            Protocol::Plain => self.shared.inspect_plain(&self.key, self.space).await,
        };
        shown
            .map(|state| !state.waiters.is_empty())
            .map_err(|error| error.on(&self.key).at(&self.shared))
    }

    async fn event(&mut self) -> HoldEvent {
        let Some(seat) = &self.claim else { return pending().await };
        let mut state = seat.watch();
        loop {
            if let ClaimStage::Lost(loss) = seat.stage() {
                return HoldEvent::Lost(loss);
            }
            if seat.take_handoff_request() {
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

    fn detach(self: Box<Self>) {
        if let Some(seat) = &self.claim {
            seat.detach();
        }
    }

    #[cfg(unix)]
    fn keep_open(&self) -> Option<Weak<dyn crate::store::KeepOpen>> {
        let seat = self.claim.as_ref().filter(|seat| !seat.detached)?;
        let seat: Weak<ClaimState> = Arc::downgrade(seat);
        Some(seat)
    }
}

/// Releases by the token; whether it was held.
async fn release(
    link: &Connection,
    key: &Key,
    space: KeySpace,
    token: LockToken,
    until: Time,
) -> Result<bool> {
    let (key, token) = (&wire_key(key)[..], Some(token));
    match link.ask(&Request::Release { key, space, token }, until).await {
        Ok(OwnedReply::Done) => Ok(true),
        Ok(OwnedReply::Error(why)) if why.is_empty() => Ok(false),
        Ok(said) => Err(unexpected_reply(&said)),
        Err(silence) => Err(unknown_outcome(silence)),
    }
}

/// The space and the token that a handle is made of.
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
