//! A hold: a session of the server that has the lock.

use std::fmt;
use std::sync::Arc;
#[cfg(unix)]
use std::sync::Weak;
use std::time::Duration;

use async_trait::async_trait;

use super::claim::{ClaimState, GrantedLock};
#[cfg(unix)]
use crate::store::KeepOpen;
use crate::store::pg::connect::SessionEnd;
use crate::store::{Grant, Handle, Hold, HoldEvent, LeaseStart, Loss, Renewed};
use crate::{Error, ErrorKind, Result};

/// The grant of a claim, with its hold.
pub(super) fn grant(claim: &Arc<ClaimState>, granted: GrantedLock) -> Grant {
    Grant {
        token: granted.token,
        lease_start: LeaseStart::FromRequest,
        handoff_requested: false,
        grants: granted.terms,
        hold: Box::new(AdvisoryHold {
            claim: Arc::clone(claim),
            end: granted.end,
            failed: None,
            #[cfg(unix)]
            keep_open: granted.keep_open,
        }),
    }
}

struct AdvisoryHold {
    claim: Arc<ClaimState>,
    /// Subscription to the end of the session.
    end: SessionEnd,
    /// SQLSTATE of the last failed renewal.
    failed: Option<String>,
    #[cfg(unix)]
    keep_open: Option<Weak<dyn KeepOpen>>,
}

impl AdvisoryHold {
    fn located(&self, error: Error) -> Error {
        error.on(&self.claim.key).at(self.claim.shared())
    }
}

/// Loss that the end of a session means for the holder of its lock.
fn loss(code: Option<&str>) -> Loss {
    match code {
        // Idle for longer than the ttl, by the server's clock.
        Some("57P05") => Loss::Expired,
        // Ended by an administrator: this session alone, or the whole server.
        Some("57P01") => Loss::Evicted,
        _ => Loss::Disconnected,
    }
}

#[async_trait]
impl Hold for AdvisoryHold {
    async fn renew(&mut self, ttl: Duration, limit: Duration) -> Result<Renewed> {
        let by = self.claim.shared().clock.now() + limit;
        match self.claim.renew(ttl, by).await {
            Ok(()) => Ok(Renewed { handoff_requested: false }),
            Err(error) => {
                self.failed = crate::store::pg::failure::code(&error).map(str::to_owned);
                Err(self.located(error))
            }
        }
    }

    async fn check_handoff(&mut self, _: Duration) -> Result<bool> {
        Ok(false)
    }

    async fn event(&mut self) -> HoldEvent {
        // A channel that closed without a code: we aborted the connection ourselves, because a request timed out.
        let code = self.end.wait_for(Option::is_some).await.ok().and_then(|code| code.clone());
        // Idle connections to the same server have probably broken, too. A claim that is sent on one of them fails with
        // an unknown outcome. Settling that outcome claims the lock again, which would count a term in which no process
        // led.
        self.claim.shared().idle.clear();
        HoldEvent::Lost(loss(self.failed.as_deref().or(code.as_deref())))
    }

    async fn release(&mut self, limit: Duration) -> Result<()> {
        let by = self.claim.shared().clock.now() + limit;
        let released = self.claim.release(by).await;
        released.map_err(|error| self.located(error))
    }

    fn handle(&self) -> Option<Handle> {
        None
    }

    async fn detach(&mut self, _limit: Duration) -> Result<()> {
        Ok(())
    }

    #[cfg(unix)]
    fn keep_open(&self) -> Option<Weak<dyn KeepOpen>> {
        self.keep_open.clone()
    }
}

impl fmt::Debug for AdvisoryHold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.claim.fmt(f)
    }
}

/// Error for a handle: a hold of this store cannot outlive its process.
pub(super) fn no_handle() -> Error {
    let message =
        "an advisory lock lives on a connection and has no handle: use lease rows (postgres://)";
    Error::new(ErrorKind::Unsupported, message)
}
