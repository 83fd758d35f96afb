//! The ticket queue: first in, first out, for claims that request it (`fair`).
//!
//! **The queue provides order. Exclusion is provided by the record alone**: every grant is a conditional write of the
//! record. A mistake here costs fairness or time, never a second holder.
//!
//! # Tickets
//!
//! A waiter writes a ticket: a key of its own, `queue.<space>.<key>.<claim>`. The stream sequence of that write is the
//! waiter's *place*. The lock's record carries `served`, the highest place that was granted. A ticket whose place is at
//! or below `served` is void, whether or not it has been removed yet.
//!
//! # Wake-ups
//!
//! A process watches the tickets of a queue that it waits in. A ticket's removal wakes only the waiter directly behind
//! it, so that a release wakes one waiter and not all of them. The releasing holder writes the free record first, and
//! then deletes its ticket with a copy of that record in a header (`hand_over`). The woken waiter can
//! therefore write at once, without a read.
//!
//! The record itself is watched only by waiters that could be granted: the first waiter, and waiters for a shared lock
//! or a semaphore, which can be held beside the claims ahead.
//!
//! # Crashes and lost messages
//!
//! A wake-up that is lost costs time only, because every waiter also polls the record: the first two waiters every
//! `RECORD_POLL_INTERVAL`, the waiters behind them less often.
//!
//! A ticket has no lease, so a waiter that crashed leaves its ticket behind. If the lock stays free, the waiter behind
//! it takes the lock after `TURN_TIMEOUT`, and the `served` that it writes voids the abandoned ticket.

use std::collections::HashMap;
use std::time::Duration;

use serde::Deserialize;
use serde_json::json;
use tenure_core::Key;
use tenure_core::table::KeySpace;

use super::api::{ApiDeadline, ApiError, KeyWrite, REQUEST_TIMEOUT, WriteOutcome};
use super::inner::NatsInner;
use super::keys::KnownKey;
use super::{consumer, format};
use crate::store::WaiterState;
use crate::{Error, Result};

/// True if there is no ticket, or every ticket is void. In the second case the void tickets are removed.
pub(super) async fn queue_is_empty(
    inner: &NatsInner,
    prefix: &str,
    served: u64,
    until: ApiDeadline,
) -> Result<bool> {
    // Usually there are no tickets at all. The list of subjects shows that in one request; a snapshot would need a
    // consumer.
    if ticket_subjects(inner, prefix, until).await?.is_empty() {
        return Ok(true);
    }
    let listed = consumer::snapshot(&inner.api, &inner.stream, &format!("{prefix}.*")).await?;
    if listed.iter().any(|ticket| ticket.value.is_some() && ticket.sequence > served) {
        return Ok(false);
    }
    // Up to the last ticket listed: a ticket that was written since then has a higher sequence and stays.
    if let Some(last) = listed.iter().map(|ticket| ticket.sequence).max() {
        remove_void_tickets(inner, prefix, last + 1, until).await;
    }
    Ok(true)
}

/// Removes the tickets before a sequence, which the caller knows to be void. A void ticket that stays does no harm,
/// so that errors are ignored.
pub(super) async fn remove_void_tickets(
    inner: &NatsInner,
    prefix: &str,
    before: u64,
    until: ApiDeadline,
) {
    // The server reads `seq: 0` as "no limit" and would purge the tickets of live waiters.
    if before == 0 {
        return;
    }
    let body = json!({ "filter": format!("{prefix}.*"), "seq": before });
    let subject = format!("STREAM.PURGE.{}", inner.stream);
    let _: Result<serde_json::Value, _> = inner.api.request(&subject, &body, until).await;
}

/// Subject of a claim's ticket.
pub(super) fn ticket_subject(inner: &NatsInner, key: &Key, space: KeySpace, claim: u128) -> String {
    format!("{}{}.{claim:032x}", inner.root(), format::queue_prefix(key, space))
}

/// Deletes the ticket of a released hold, which wakes the waiter behind it; the deletion carries the free record.
///
/// To be called after the record was written. In the other order the waiter would wake while the lock is still
/// held, and the ticket's only wake-up would be wasted.
///
/// An error is logged and ignored: the waiter behind finds the free lock by its poll.
pub(super) async fn hand_over(
    inner: &NatsInner,
    ticket: &str,
    place: u64,
    released: &KnownKey,
    until: ApiDeadline,
) {
    let free_record = || {
        let text = inner.layout.write(&released.record).value;
        format!("{} {}", released.sequence, String::from_utf8_lossy(&text))
    };
    // While other holders remain (shared lock, semaphore), the next waiter may not be admitted yet. Its watch of
    // the record wakes it later.
    let record_header = released.record.holders.is_empty().then(free_record);
    let operation = Some("DEL");
    let deletion = KeyWrite { operation, record_header, ..KeyWrite::default() };
    // On condition of our own place: a later sequence is the new ticket of a claim that joined again.
    match inner.write(ticket, place, deletion, until).await {
        Ok(WriteOutcome::Done(_) | WriteOutcome::Conflict) => {}
        Ok(WriteOutcome::Unclear(error)) | Err(error) => {
            tracing::debug!(name: "tenure.ticket_left", store = %inner, ticket, %error);
        }
    }
}

/// Subjects of all tickets below a prefix, including void tickets and deletion markers.
async fn ticket_subjects(
    inner: &NatsInner,
    prefix: &str,
    until: ApiDeadline,
) -> Result<Vec<String>> {
    #[derive(Deserialize)]
    struct SubjectsInfo {
        state: SubjectsState,
    }
    #[derive(Deserialize)]
    struct SubjectsState {
        #[serde(default)]
        subjects: Option<HashMap<String, u64>>,
    }
    let body = json!({ "subjects_filter": format!("{prefix}.*") });
    let info: Result<SubjectsInfo, ApiError> =
        inner.api.request(&format!("STREAM.INFO.{}", inner.stream), &body, until).await;
    Ok(info?.state.subjects.unwrap_or_default().into_keys().collect())
}

/// Tests the permission to remove tickets, by purging the ticket of a claim that does not exist.
pub(super) async fn probe_purge(inner: &NatsInner, key: &Key, until: ApiDeadline) -> Result<()> {
    let ticket = format!("{}{}.none", inner.root(), format::queue_prefix(key, KeySpace::Lock));
    let body = json!({ "filter": ticket });
    let subject = format!("STREAM.PURGE.{}", inner.stream);
    let purged: Result<serde_json::Value, ApiError> =
        inner.api.request(&subject, &body, until).await;
    purged.map(|_| ()).map_err(Error::from)
}

/// Waiters in the queue of a key, first to last.
pub(super) async fn waiters(
    inner: &NatsInner,
    key: &Key,
    space: KeySpace,
    known: &KnownKey,
) -> Result<Vec<WaiterState>> {
    let prefix = format!("{}{}", inner.root(), format::queue_prefix(key, space));
    let until = inner.api.deadline_after(REQUEST_TIMEOUT);
    if ticket_subjects(inner, &prefix, until).await?.is_empty() {
        return Ok(Vec::new());
    }
    let mut tickets = consumer::snapshot(&inner.api, &inner.stream, &format!("{prefix}.*")).await?;
    tickets.retain(|ticket| ticket.sequence > known.record.served);
    tickets.sort_by_key(|ticket| ticket.sequence);
    let (now, lineage) = (inner.now(), inner.lineage());
    let shown = tickets.iter().filter_map(|ticket| {
        let by = format::read_ticket(ticket.value.as_ref()?);
        let age = lineage.server_time(now).saturating_sub(ticket.timestamp);
        Some(WaiterState { by: Some(by), waited_for: Some(Duration::from_nanos(age)) })
    });
    Ok(shown.collect())
}
