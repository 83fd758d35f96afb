//! Places and holds at a lock server.

use std::future::pending;
use std::sync::Arc;
#[cfg(unix)]
use std::sync::Weak;
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::wire::{ClaimId, ExtensionRequest, Request};
use tenure_core::{FencingToken, Key, LockToken, Time};

use super::link::{Link, Said, Silence};
use super::seat::{Seat, Stage};
use super::{Dialect, Shared, silent, strange, wire_key};
use crate::store::{
    Grant, Handle, Hold, HoldEvent, KeySpace, LeaseStart, Loss, Place, Renewed, Waited,
};
use crate::{Error, ErrorKind, Result};

/// How long to ask for our place when a wait is over.
const GLANCE: Duration = Duration::from_millis(500);

/// A place in a queue of the server.
#[derive(Debug)]
pub(super) struct ServerPlace(pub(super) Arc<Seat>);

#[async_trait]
impl Place for ServerPlace {
    async fn wait(&mut self, limit: Duration) -> Result<Waited> {
        let seat = &self.0;
        let mut news = seat.watch();
        let over = async {
            let over = |stage: &Stage| !matches!(stage, Stage::Asked | Stage::Waiting);
            let seen = news.wait_for(|state| over(&state.stage)).await;
            seen.map_or(Stage::Unclear, |state| state.stage.clone())
        };
        let clock = &seat.shared().clock;
        let stage = tokio::select! {
            biased;
            stage = over => stage,
            () = clock.sleep_until(clock.now() + limit) => Stage::Waiting,
        };
        match stage {
            Stage::Held { token, .. } => {
                Ok(Waited::Granted(grant(Arc::clone(seat), token, LeaseStart::FromConfirm)))
            }
            Stage::Asked | Stage::Waiting => Ok(Waited::Still { ahead: self.ahead().await }),
            Stage::Unclear => Err(silent(Silence::Cut).on(&seat.key).at(seat.shared())),
            Stage::Busy | Stage::Refused(_) | Stage::Gone | Stage::Lost(_) => Ok(Waited::Gone),
        }
    }

    async fn abandon(&mut self, limit: Duration) -> Result<()> {
        let seat = &self.0;
        let stage = seat.stage();
        let until = seat.shared().clock.now() + limit;
        let abandoned = match (seat.shared().dialect, stage) {
            (_, Stage::Unclear) => Err(silent(Silence::Cut)),
            (Dialect::Extended, Stage::Asked | Stage::Waiting | Stage::Held { .. }) => {
                let request = Request::Extended(ExtensionRequest::Abandon { id: ClaimId(seat.id) });
                match seat.link().ask(&request, until).await {
                    Ok(Said::Done | Said::Error(_)) => Ok(()),
                    Ok(said) => Err(strange(&said)),
                    // What lived on a connection that has ended needs not be given back.
                    Err(Silence::Unsent) if !seat.link().is_open() => Ok(()),
                    Err(silence) => Err(silent(silence)),
                }
            }
            (Dialect::Plain, Stage::Held { token, .. }) => {
                let released = release(seat.link(), &seat.key, seat.space, token, until).await;
                released.map(|_| ())
            }
            (Dialect::Plain, Stage::Asked | Stage::Waiting) => {
                seat.link().leave();
                Ok(())
            }
            _ => Ok(()),
        };
        abandoned.map_err(|error| error.on(&seat.key).at(seat.shared()))?;
        seat.set(Stage::Gone);
        Ok(())
    }
}

impl ServerPlace {
    /// How many are before us, where the server can tell.
    async fn ahead(&self) -> Option<usize> {
        let seat = &self.0;
        if seat.shared().dialect == Dialect::Plain {
            return None;
        }
        let request = Request::Extended(ExtensionRequest::Position { id: ClaimId(seat.id) });
        match seat.link().ask(&request, seat.shared().clock.now() + GLANCE).await {
            Ok(Said::Number(ahead)) => usize::try_from(ahead).ok(),
            _ => None,
        }
    }
}

/// What a seat holds.
pub(super) fn grant(seat: Arc<Seat>, token: LockToken, counts: LeaseStart) -> Grant {
    let hold = ServerHold {
        shared: Arc::clone(seat.shared()),
        key: seat.key.clone(),
        space: seat.space,
        token,
        seat: Some(seat),
    };
    // A number without an order must not reach a resource that compares: it would refuse rightful holders, and admit
    // stale ones.
    let token = if hold.shared.has_order() { token.fencing() } else { FencingToken::NONE };
    let hold = Box::new(hold);
    Grant { token, counts, waiter: false, grants: None, hold }
}

/// A hold at the server.
#[derive(Debug)]
pub(super) struct ServerHold {
    shared: Arc<Shared>,
    key: Key,
    space: KeySpace,
    token: LockToken,
    /// Where it was granted; none where another process was granted it.
    seat: Option<Arc<Seat>>,
}

impl ServerHold {
    pub(super) fn resumed(
        shared: Arc<Shared>,
        key: Key,
        space: KeySpace,
        token: LockToken,
    ) -> Self {
        Self { shared, key, space, token, seat: None }
    }

    /// The connection that the hold lives on; any where it does not live on one.
    async fn link(&self, until: Time) -> Result<Arc<Link>> {
        match &self.seat {
            Some(seat) if !seat.detached => {
                if seat.link().is_open() {
                    Ok(Arc::clone(seat.link()))
                } else {
                    seat.set(Stage::Lost(Loss::Disconnected));
                    Err(not_held("the connection that the hold lived on has ended"))
                }
            }
            _ => self.shared.link(until).await,
        }
    }

    async fn renew_until(&self, ttl: Duration, until: Time) -> Result<Renewed> {
        let link = self.link(until).await?;
        let dialect = self.shared.dialect;
        let (key, space, token) = (&wire_key(&self.key)[..], self.space, Some(self.token));
        let lease = dialect.count(ttl);
        let request = match dialect {
            Dialect::Extended => {
                Request::Extended(ExtensionRequest::Renew { key, space, token, lease })
            }
            Dialect::Plain => Request::Renew { key, space, token, lease: Some(lease) },
        };
        let (lasts, waiters) = match link.ask(&request, until).await {
            Ok(Said::Renewed { lease, waiters }) => (lease, waiters),
            Ok(Said::Number(lease)) => (lease, 0),
            Ok(Said::Error(why)) if why.is_empty() => {
                self.note(Stage::Lost(Loss::Taken));
                return Err(not_held("the hold has ended"));
            }
            Ok(said) => return Err(strange(&said)),
            Err(silence) => return Err(silent(silence)),
        };
        if dialect.span(lasts) < ttl {
            let message = format!("the server keeps a hold for {:?} at most", dialect.span(lasts));
            return Err(Error::new(ErrorKind::Invalid, message));
        }
        if let Some(seat) = self.seat.as_ref().filter(|_| waiters > 0) {
            seat.wanted();
        }
        Ok(Renewed { waiter: waiters > 0 })
    }

    async fn release_until(&self, until: Time) -> Result<()> {
        let link = self.link(until).await?;
        if release(&link, &self.key, self.space, self.token, until).await? {
            self.note(Stage::Gone);
            Ok(())
        } else {
            self.note(Stage::Lost(Loss::Taken));
            Err(not_held("the hold has ended"))
        }
    }

    fn note(&self, stage: Stage) {
        if let Some(seat) = &self.seat
            && matches!(seat.stage(), Stage::Held { .. })
        {
            seat.set(stage);
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

    async fn look(&mut self, limit: Duration) -> Result<bool> {
        let until = self.shared.clock.now() + limit;
        let shown = match self.shared.dialect {
            Dialect::Extended => self.shared.query(&self.key, self.space, until).await,
            Dialect::Plain => self.shared.look_up(&self.key, self.space).await,
        };
        shown
            .map(|state| !state.waiters.is_empty())
            .map_err(|error| error.on(&self.key).at(&self.shared))
    }

    async fn event(&mut self) -> HoldEvent {
        let Some(seat) = &self.seat else { return pending().await };
        let mut state = seat.watch();
        loop {
            if let Stage::Lost(loss) = seat.stage() {
                return HoldEvent::Lost(loss);
            }
            if seat.take_wanted() {
                return HoldEvent::Wanted;
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
        (self.shared.dialect == Dialect::Extended)
            .then(|| Handle::new(format!("{space}{}", self.token)))
    }

    fn leave(self: Box<Self>) {
        if let Some(seat) = &self.seat {
            seat.leave();
        }
    }

    #[cfg(unix)]
    fn keep_open(&self) -> Option<Weak<dyn crate::store::KeepOpen>> {
        let seat = self.seat.as_ref().filter(|seat| !seat.detached)?;
        let seat: Weak<Seat> = Arc::downgrade(seat);
        Some(seat)
    }
}

/// Releases by the token; whether it was held.
async fn release(
    link: &Link,
    key: &Key,
    space: KeySpace,
    token: LockToken,
    until: Time,
) -> Result<bool> {
    let (key, token) = (&wire_key(key)[..], Some(token));
    match link.ask(&Request::Release { key, space, token }, until).await {
        Ok(Said::Done) => Ok(true),
        Ok(Said::Error(why)) if why.is_empty() => Ok(false),
        Ok(said) => Err(strange(&said)),
        Err(silence) => Err(silent(silence)),
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
