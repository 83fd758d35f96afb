//! Claims: granted at once, or in the order of arrival if the claim or the URL requests that.

use std::sync::Arc;
use std::time::Duration;

use tenure_core::record::RecordDecision;

use super::api::ApiDeadline;
use super::grant::{claim_now, granted_before};
use super::inner::NatsInner;
use super::layout::BucketLayout;
use super::place::NatsPlace;
use super::{keys, queue};
use crate::Result;
use crate::store::{Answer, Claim, Contended};

/// One claim in this many removes void tickets when it joins.
const SWEEP_ONE_IN: u128 = 64;

/// Makes one attempt at a claim, through the ticket queue if the claim or the URL requests that.
pub(super) async fn claim(
    inner: &Arc<NatsInner>,
    claim: &Claim,
    limit: Duration,
) -> Result<Answer> {
    let until = inner.api.deadline_after(limit);
    inner.recheck_settings(until).await?;
    inner.check_ttl(claim.ttl)?;
    if inner.layout == BucketLayout::Native && (claim.fair || inner.options.fair) {
        return claim_in_order(inner, claim, until).await;
    }
    claim_now(inner, claim, until).await
}

/// Claims without overtaking a waiter: takes the lock if it is free and the queue is empty, and joins otherwise.
///
/// A claim that must not wait ([`Claim::queue`] is false) is answered [`Answer::Contended`] instead of joining.
async fn claim_in_order(
    inner: &Arc<NatsInner>,
    claim: &Claim,
    until: ApiDeadline,
) -> Result<Answer> {
    let mut place = NatsPlace::new(inner, claim);
    let known = inner.read(&place.subject, until).await?;
    let served = known.record.served;
    let contended = match inner.decide(&known, &place.record_claim()) {
        RecordDecision::AlreadyGranted(_) => {
            let (subject, known) = (place.subject.clone(), known.clone());
            return granted_before(inner, claim, subject, known, until).await;
        }
        RecordDecision::LimitMismatch(_) => return claim_now(inner, claim, until).await,
        // A ticket that is written after this check is overtaken. Its claim arrived at the same time as ours, so
        // that neither is first. The record's conditional write still decides between the two.
        RecordDecision::Write(_)
            if queue::queue_is_empty(inner, &place.prefix, served, until).await? =>
        {
            return claim_now(inner, claim, until).await;
        }
        RecordDecision::Write(_) => {
            Contended { version: keys::version_of(&known, inner.now()), ..Contended::default() }
        }
        RecordDecision::Contended(holder) => inner.contended(&known, holder),
    };
    // A repeated claim is the same claim: if an earlier sending has a ticket, the claim stays queued, even with
    // `queue` false.
    if !claim.queue && !place.has_ticket(served, until).await? {
        return Ok(Answer::Contended(contended));
    }
    // Before the ticket is written. A claim that cannot watch the queue, because the server has no room for another
    // consumer, fails as a claim: nothing was written, and the outage lasts until a claim is answered. If the wait
    // failed instead, each repeated claim would be answered, and the outage would never be reported.
    place.start_watch(until).await?;
    place.join(served, until).await?;
    if claim.id.is_multiple_of(SWEEP_ONE_IN) {
        // Tickets below `served`, and not the ticket at `served`: its holder may still hold the lock, and deletes
        // the ticket on release to wake the next waiter. A purge sends no message, and would leave that waiter to
        // its poll.
        queue::remove_void_tickets(inner, &place.prefix, served, until).await;
    }
    Ok(Answer::Queued(Box::new(place)))
}
