//! Claims: granted, queued or contended.

use std::sync::Arc;
use std::time::Duration;

use tenure_core::{Key, Time};

use super::claim::{AdvisoryAnswer, AdvisoryClaims, ClaimState};
use super::hold::grant;
use super::inspect;
use super::place::AdvisoryPlace;
use super::shared::AdvisoryShared;
use crate::store::pg::failure;
use crate::store::{Answer, Claim, Contended};
use crate::{Error, ErrorKind, Result};

/// Longest ttl: the maximum of `idle_session_timeout`.
pub(super) const MAX_TTL: Duration = Duration::from_millis(i32::MAX as u64);

/// Sends a claim, or continues one that was sent before.
pub(super) async fn claim(
    shared: &Arc<AdvisoryShared>,
    known: &Arc<AdvisoryClaims>,
    claim: &Claim,
    by: Time,
) -> Result<Answer> {
    if claim.ttl > MAX_TTL {
        let message = format!("a ttl of {:?} is too long: the maximum is {MAX_TTL:?}", claim.ttl);
        return Err(Error::new(ErrorKind::Invalid, message));
    }
    let state = match known.claim_by_id(claim.id) {
        Some(state) => state,
        None => ClaimState::new(shared, known, claim)?,
    };
    match state.ask(claim.queue, by).await? {
        AdvisoryAnswer::Granted(granted) => Ok(Answer::Granted(grant(&state, granted))),
        AdvisoryAnswer::Queued => Ok(Answer::Queued(Box::new(AdvisoryPlace(state)))),
        AdvisoryAnswer::Busy => {
            let contended = contended(shared, &claim.key).await;
            contended.map(Answer::Contended).map_err(failure::nothing_done)
        }
    }
}

/// Current holder and version of a contended key.
async fn contended(shared: &AdvisoryShared, key: &Key) -> Result<Contended> {
    let sessions = shared.sessions_of(key).await?;
    let holder =
        sessions.iter().find(|session| session.granted).map(|session| session.by().clone());
    let version = inspect::version_of(&sessions);
    Ok(Contended { holder, version, retry_after: None, note: None })
}
