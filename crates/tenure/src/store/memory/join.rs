//! Claims: granted, queued or contended.

use std::sync::Arc;

use super::claim::ClaimState;
use super::hold::granted;
use super::place::MemoryPlace;
use super::state::{MemoryAnswer, MemoryShared};
use crate::Result;
use crate::store::{Answer, Claim, LeaseStart};

/// Makes a claim, or repeats the answer to a claim that was made before.
pub(super) fn join(shared: &Arc<MemoryShared>, claim: &Claim) -> Result<Answer> {
    let answer = shared.with(|state, now| match state.repeat_claim(claim, now) {
        Some(owned) => Ok(MemoryAnswer::Entered(owned)),
        None => state.claim(claim, now),
    })?;
    Ok(match answer {
        MemoryAnswer::Entered(owned) => {
            let grant = owned.grant;
            let claim = ClaimState::new(shared, owned);
            match grant {
                Some(grant) => Answer::Granted(granted(claim, grant, LeaseStart::FromRequest)),
                None => Answer::Queued(Box::new(MemoryPlace { claim })),
            }
        }
        MemoryAnswer::Contended(contended) => Answer::Contended(contended),
    })
}
