//! Sending of a claim: a lock or slot is granted, queued for, or contended.

use std::sync::Arc;

use tenure_core::Time;
use tenure_core::wire::{ClaimId, ExtensionRequest, MAX_SECONDS, MAX_SEMAPHORE_SLOTS, Request};

use super::claim::{ClaimStage, ClaimState};
use super::errors::{refusal_error, unknown_outcome};
use super::hold::grant;
use super::place::ServerPlace;
use super::shared::ServerShared;
use super::wire::{NoReply, Protocol, wire_key};
use super::{inspect, query};
use crate::store::{Answer, Claim, Contended, LeaseStart, Mode};
use crate::{Error, ErrorKind, Result};

/// Sends a claim, or continues one that was sent before, and waits for the answer.
pub(super) async fn join(shared: &Arc<ServerShared>, claim: &Claim, until: Time) -> Result<Answer> {
    check(shared, claim)?;
    let (claim_state, known) = match live_claim(shared, claim) {
        Some(claim_state) => (claim_state, true),
        None => (send_claim(shared, claim, until).await?, false),
    };
    let stage = claim_state.wait_answered(&shared.clock, until).await;
    let (claim_state, stage) = match stage {
        // In the plain protocol, a claim that waits needs another request.
        Some(ClaimStage::Busy)
            if claim.queue
                && !claim_state.has_own_connection()
                && shared.protocol == Protocol::Plain =>
        {
            let claim_state = enqueue(shared, claim, until).await?;
            let stage = claim_state.wait_answered(&shared.clock, until).await;
            (claim_state, stage)
        }
        stage => (claim_state, stage),
    };
    match stage {
        Some(ClaimStage::Held { token, lease }) => {
            if lease < claim.ttl {
                // Dropping the state releases the hold.
                let message =
                    format!("the server's longest lease is {lease:?}: request a shorter ttl");
                return Err(Error::new(ErrorKind::Invalid, message));
            }
            let lease_start = if known { LeaseStart::FromConfirm } else { LeaseStart::FromRequest };
            Ok(Answer::Granted(grant(shared, claim_state, token, lease_start)))
        }
        Some(ClaimStage::Waiting) => Ok(Answer::Queued(Box::new(ServerPlace {
            shared: Arc::clone(shared),
            claim: claim_state,
        }))),
        Some(ClaimStage::Busy) => Ok(Answer::Contended(contended(shared, claim, until).await)),
        Some(ClaimStage::Refused(why)) => Err(refusal_error(&why)),
        Some(ClaimStage::Gone | ClaimStage::Lost(_) | ClaimStage::Unclear) => {
            Err(unknown_outcome(NoReply::Disconnected))
        }
        Some(ClaimStage::Asked) | None => Err(unknown_outcome(NoReply::TimedOut)),
    }
}

fn check(shared: &ServerShared, claim: &Claim) -> Result<()> {
    let longest = shared.greeting.max_lease;
    let refused = match claim.mode {
        Mode::Slot { limit } if limit > MAX_SEMAPHORE_SLOTS => Some((
            ErrorKind::Invalid,
            format!("a semaphore has at most {MAX_SEMAPHORE_SLOTS} slots"),
        )),
        Mode::Shared if shared.protocol == Protocol::Plain => {
            Some((ErrorKind::Unsupported, "this server has no shared locks".to_owned()))
        }
        _ if claim.ttl > longest => {
            Some((ErrorKind::Invalid, format!("the server's longest lease is {longest:?}")))
        }
        _ if claim.detached && shared.protocol == Protocol::Plain => {
            let what = "this server cannot keep a hold without its process".to_owned();
            Some((ErrorKind::Unsupported, what))
        }
        _ => None,
    };
    refused.map_or(Ok(()), |(kind, message)| Err(Error::new(kind, message)))
}

/// State of the claim if it was sent before and can still be granted, or is still held.
fn live_claim(shared: &ServerShared, claim: &Claim) -> Option<Arc<ClaimState>> {
    let state = shared.claims.claim_by_id(claim.id)?;
    let same = state.key == claim.key && state.space == claim.mode.space();
    let live = match state.stage() {
        ClaimStage::Held { .. } if state.detached => true,
        ClaimStage::Asked | ClaimStage::Waiting | ClaimStage::Held { .. } => {
            state.connection().is_open()
        }
        _ => false,
    };
    (same && live).then_some(state)
}

async fn send_claim(shared: &ServerShared, claim: &Claim, until: Time) -> Result<Arc<ClaimState>> {
    let connection = shared.connection(until).await?;
    let state = shared.new_claim(Arc::clone(&connection), claim, false);
    let key = &wire_key(&claim.key)[..];
    let lease = shared.protocol.lease_to_wire(claim.ttl);
    let by = inspect::identity_line(&claim.by);
    let request = match shared.protocol {
        Protocol::Extended => Request::Extended(ExtensionRequest::Claim {
            id: ClaimId(claim.id),
            key,
            mode: claim.mode,
            lease,
            queue: claim.queue,
            detached: claim.detached,
            by: by.as_bytes(),
        }),
        Protocol::Plain => Request::Lock { key, mode: claim.mode, timeout: 0, lease: Some(lease) },
    };
    connection.claim(&request, &state).map_err(unknown_outcome)?;
    Ok(state)
}

/// Joins the queue, on a connection that is used for nothing else.
async fn enqueue(shared: &ServerShared, claim: &Claim, until: Time) -> Result<Arc<ClaimState>> {
    let connection = shared.free_connection(until).await?;
    let state = shared.new_claim(Arc::clone(&connection), claim, true);
    let key = &wire_key(&claim.key)[..];
    let lease = Some(shared.protocol.lease_to_wire(claim.ttl));
    let enqueue = Request::Enqueue { key, mode: claim.mode, lease };
    // A wait that times out at the server loses its place, so it gets the longest timeout. To stop waiting, the
    // client closes the connection.
    let wait = Request::Wait { key, space: claim.mode.space(), timeout: MAX_SECONDS };
    connection.claim_and_wait(&enqueue, &wait, &state).map_err(unknown_outcome)?;
    Ok(state)
}

/// The current holder of a contended key, to name it in errors.
async fn contended(shared: &ServerShared, claim: &Claim, until: Time) -> Contended {
    if shared.protocol == Protocol::Plain {
        return Contended::default();
    }
    match query::state(shared, &claim.key, claim.mode.space(), until).await {
        Ok(state) => {
            let holder = state.holders.into_iter().find_map(|holder| holder.by);
            Contended { holder, version: state.version, retry_after: None, note: None }
        }
        Err(_) => Contended::default(),
    }
}
