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
//! then deletes its ticket with a copy of that record in a header ([`NatsInner::hand_over`]). The woken waiter can
//! therefore write at once, without a read.
//!
//! The record itself is watched only by waiters that could be granted: the first waiter, and waiters for a shared lock
//! or a semaphore, which can be held beside the claims ahead.
//!
//! # Crashes and lost messages
//!
//! A wake-up that is lost costs time only, because every waiter also polls the record: the first two waiters every
//! [`RECORD_POLL_INTERVAL`], the waiters behind them less often.
//!
//! A ticket has no lease, so a waiter that crashed leaves its ticket behind. If the lock stays free, the waiter behind
//! it takes the lock after [`TURN_TIMEOUT`], and the `served` that it writes voids the abandoned ticket.

mod place;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::Deserialize;
use serde_json::json;
use tenure_core::Key;
use tenure_core::record::RecordDecision;
use tenure_core::table::KeySpace;
use tokio::sync::Notify;

use self::place::NatsPlace;
use super::api::{ApiDeadline, ApiError, KeyWrite, Message, WriteOutcome};
use super::format;
use super::inner::NatsInner;
use super::keys::{self, KnownKey};
use super::watch;
use crate::store::{Answer, Claim, Contended, WaiterState};
use crate::{Error, Result};

/// Time that the first waiter has to take a free lock before the waiter behind it may take it.
const TURN_TIMEOUT: Duration = Duration::from_secs(2);
/// One claim in this many removes void tickets when it joins.
const SWEEP_ONE_IN: u128 = 64;
/// Interval at which the first two waiters read the record, in case a notification was lost.
const RECORD_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Tickets of the queues that this process watches, as far as notifications have arrived.
#[derive(Default)]
pub(super) struct TicketQueues(Mutex<HashMap<String, TicketQueue>>);

#[derive(Default)]
struct TicketQueue {
    /// Waiting claims by place.
    tickets: BTreeMap<u64, String>,
    /// Waiters of this process, by claim.
    local_waiters: HashMap<String, Arc<Notify>>,
}

impl TicketQueue {
    fn place(&self, claim: &str) -> Option<u64> {
        self.tickets.iter().find(|(_, waiting)| *waiting == claim).map(|(place, _)| *place)
    }

    /// Wakes the waiter directly behind a place, if it waits in this process.
    fn wake_behind(&self, place: u64) {
        let next = self.tickets.range(place + 1..).next();
        if let Some(next) = next.and_then(|(_, claim)| self.local_waiters.get(claim)) {
            next.notify_one();
        }
    }
}

/// Position of a claim in its queue, by the tickets that this process knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct QueuePosition {
    place: u64,
    /// Number of earlier tickets that are not void.
    ahead: usize,
}

impl TicketQueues {
    /// Applies a message about a ticket: written, rewritten or removed.
    pub(super) fn note_message(&self, message: &Message) {
        let Some((prefix, claim)) = message.subject.rsplit_once('.') else { return };
        let mut queues = self.lock();
        let queue = queues.entry(prefix.to_owned()).or_default();
        let old_place = queue.place(claim);
        if let Some(old_place) = old_place {
            queue.tickets.remove(&old_place);
        }
        if message.value.is_some() {
            queue.tickets.insert(message.sequence, claim.to_owned());
            // A waiter does nothing until its own ticket arrives here: before that, it cannot know how many are ahead.
            if let Some(own) = queue.local_waiters.get(claim) {
                own.notify_one();
            }
        }
        if let Some(old_place) = old_place {
            queue.wake_behind(old_place);
        }
    }

    /// Forgets the tickets of a queue whose watch is about to start.
    ///
    /// A new consumer delivers every ticket that exists, but says nothing of tickets that were purged while no consumer
    /// ran. If such a ticket were kept from the previous watch, it would count as a waiter ahead until its turn timed
    /// out.
    pub(super) fn watch_starting(&self, filter: &str) {
        if let Some(prefix) = filter.strip_suffix(".*") {
            self.lock().entry(prefix.to_owned()).or_default().tickets.clear();
        }
    }

    /// Wakes the waiters of a queue whose watch has ended, so that they start another.
    ///
    /// `restarted`: another watch of the queue runs already, and still needs the queue's state.
    pub(super) fn watch_ended(&self, filter: &str, restarted: bool) {
        let Some(prefix) = filter.strip_suffix(".*") else { return };
        let mut queues = self.lock();
        let Some(queue) = queues.get(prefix) else { return };
        queue.local_waiters.values().for_each(|waiter| waiter.notify_one());
        if queue.local_waiters.is_empty() && !restarted {
            queues.remove(prefix);
        }
    }

    /// Registers a waiter of this process.
    fn join(&self, prefix: &str, claim: &str, wake: &Arc<Notify>) {
        let mut queues = self.lock();
        let queue = queues.entry(prefix.to_owned()).or_default();
        queue.local_waiters.insert(claim.to_owned(), Arc::clone(wake));
    }

    /// Removes a waiter of this process.
    ///
    /// A repeated claim has the same id. Its new place may register before its old place is dropped. The comparison of
    /// `wake` keeps the old place from removing the new one.
    fn leave(&self, prefix: &str, claim: &str, wake: &Arc<Notify>) {
        let mut queues = self.lock();
        let Some(queue) = queues.get_mut(prefix) else { return };
        if queue.local_waiters.get(claim).is_some_and(|known| Arc::ptr_eq(known, wake)) {
            queue.local_waiters.remove(claim);
        }
    }

    /// Position of a claim when `served` is the last place granted; `None` if no ticket of the claim is known or it is
    /// void.
    fn position(&self, prefix: &str, claim: &str, served: u64) -> Option<QueuePosition> {
        let mut queues = self.lock();
        let queue = queues.get_mut(prefix)?;
        queue.tickets.retain(|place, _| *place > served);
        let place = queue.place(claim)?;
        Some(QueuePosition { place, ahead: queue.tickets.range(..place).count() })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, TicketQueue>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// True if the subject, in the bucket with this root, is that of a ticket.
pub(super) fn is_ticket(root: &str, subject: &str) -> bool {
    subject.strip_prefix(root).is_some_and(|name| name.starts_with("queue."))
}

/// Copy of the lock's record that a ticket's removal carries, as a message of the record's own subject.
///
/// Like any notification the copy may be outdated. A waiter that acts on it names its sequence in the write, and the
/// server refuses the write if the record has changed since.
pub(super) fn handed_over_record(root: &str, message: &Message) -> Option<Message> {
    let name = message.subject.strip_prefix(root)?.strip_prefix("queue.")?;
    let (sequence, record) = message.record_header.as_deref()?.split_once(' ')?;
    Some(Message {
        subject: format!("{root}{}", name.rsplit_once('.')?.0),
        // The record was written before the ticket's removal, so that its sequence is lower. Any other sequence is
        // corrupt, or from an earlier stream of the same name. If it were noted, it would hide the record's real state
        // from this process.
        sequence: sequence.parse().ok().filter(|sequence| *sequence < message.sequence)?,
        timestamp: message.timestamp,
        record_header: None,
        value: Some(record.as_bytes().to_vec()),
    })
}

impl NatsInner {
    /// Claims without overtaking a waiter: takes the lock if it is free and the queue is empty, and joins otherwise.
    ///
    /// A claim that must not wait ([`Claim::queue`] is false) is answered [`Answer::Contended`] instead of joining.
    pub(super) async fn claim_in_order(
        self: &Arc<Self>,
        claim: &Claim,
        until: ApiDeadline,
    ) -> Result<Answer> {
        let mut place = NatsPlace::new(self, claim);
        let known = self.read(&place.subject, until).await?;
        let served = known.record.served;
        let contended = match self.decide(&known, &place.record_claim()) {
            RecordDecision::AlreadyGranted(_) => {
                let (subject, known) = (place.subject.clone(), known.clone());
                return self.granted_before(claim, subject, known, until).await;
            }
            RecordDecision::LimitMismatch(_) => return self.claim_now(claim, until).await,
            // A ticket that is written after this check is overtaken. Its claim arrived at the same time as ours, so
            // that neither is first. The record's conditional write still decides between the two.
            RecordDecision::Write(_)
                if self.queue_is_empty(&place.prefix, served, until).await? =>
            {
                return self.claim_now(claim, until).await;
            }
            RecordDecision::Write(_) => {
                Contended { version: keys::version_of(&known, self.now()), ..Contended::default() }
            }
            RecordDecision::Contended(holder) => self.contended(&known, holder),
        };
        // A repeated claim is the same claim: if an earlier sending has a ticket, the claim stays queued, even with
        // `queue` false.
        if !claim.queue && !place.has_ticket(served, until).await? {
            return Ok(Answer::Contended(contended));
        }
        place.join(served, until).await?;
        if claim.id.is_multiple_of(SWEEP_ONE_IN) {
            // Tickets below `served`, and not the ticket at `served`: its holder may still hold the lock, and deletes
            // the ticket on release to wake the next waiter. A purge sends no message, and would leave that waiter to
            // its poll.
            self.remove_void_tickets(&place.prefix, served, until).await;
        }
        Ok(Answer::Queued(Box::new(place)))
    }

    /// True if there is no ticket, or every ticket is void. In the second case the void tickets are removed.
    async fn queue_is_empty(
        self: &Arc<Self>,
        prefix: &str,
        served: u64,
        until: ApiDeadline,
    ) -> Result<bool> {
        // Usually there are no tickets at all. The list of subjects shows that in one request; a snapshot would need a
        // consumer.
        if self.ticket_subjects(prefix, until).await?.is_empty() {
            return Ok(true);
        }
        let listed = watch::snapshot(self, &format!("{prefix}.*")).await?;
        if listed.iter().any(|ticket| ticket.value.is_some() && ticket.sequence > served) {
            return Ok(false);
        }
        // Up to the last ticket listed: a ticket that was written since then has a higher sequence and stays.
        if let Some(last) = listed.iter().map(|ticket| ticket.sequence).max() {
            self.remove_void_tickets(prefix, last + 1, until).await;
        }
        Ok(true)
    }

    /// Removes the tickets before a sequence, which the caller knows to be void. A void ticket that stays does no harm,
    /// so that errors are ignored.
    async fn remove_void_tickets(&self, prefix: &str, before: u64, until: ApiDeadline) {
        // The server reads `seq: 0` as "no limit" and would purge the tickets of live waiters.
        if before == 0 {
            return;
        }
        let body = json!({ "filter": format!("{prefix}.*"), "seq": before });
        let subject = format!("STREAM.PURGE.{}", self.stream);
        let _: Result<serde_json::Value, _> = self.api.request(&subject, &body, until).await;
    }

    /// Subject of a claim's ticket.
    pub(super) fn ticket_subject(&self, key: &Key, space: KeySpace, claim: u128) -> String {
        format!("{}{}.{claim:032x}", self.root(), format::queue_prefix(key, space))
    }

    /// Deletes the ticket of a released hold, which wakes the waiter behind it; the deletion carries the free record.
    ///
    /// To be called after the record was written. In the other order the waiter would wake while the lock is still
    /// held, and the ticket's only wake-up would be wasted.
    ///
    /// An error is logged and ignored: the waiter behind finds the free lock by its poll.
    pub(super) async fn hand_over(
        &self,
        ticket: &str,
        place: u64,
        released: &KnownKey,
        until: ApiDeadline,
    ) {
        let free_record = || {
            let text = self.layout.write(&released.record).value;
            format!("{} {}", released.sequence, String::from_utf8_lossy(&text))
        };
        // While other holders remain (shared lock, semaphore), the next waiter may not be admitted yet. Its watch of
        // the record wakes it later.
        let record_header = released.record.holders.is_empty().then(free_record);
        let operation = Some("DEL");
        let deletion = KeyWrite { operation, record_header, ..KeyWrite::default() };
        // On condition of our own place: a later sequence is the new ticket of a claim that joined again.
        match self.write(ticket, place, deletion, until).await {
            Ok(WriteOutcome::Done(_) | WriteOutcome::Conflict) => {}
            Ok(WriteOutcome::Unclear(error)) | Err(error) => {
                tracing::debug!(name: "tenure.ticket_left", store = %self, ticket, %error);
            }
        }
    }

    /// Subjects of all tickets below a prefix, including void tickets and deletion markers.
    async fn ticket_subjects(&self, prefix: &str, until: ApiDeadline) -> Result<Vec<String>> {
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
            self.api.request(&format!("STREAM.INFO.{}", self.stream), &body, until).await;
        Ok(info?.state.subjects.unwrap_or_default().into_keys().collect())
    }

    /// Tests the permission to remove tickets, by purging the ticket of a claim that does not exist.
    pub(super) async fn probe_purge(&self, key: &Key, until: ApiDeadline) -> Result<()> {
        let ticket = format!("{}{}.none", self.root(), format::queue_prefix(key, KeySpace::Lock));
        let body = json!({ "filter": ticket });
        let subject = format!("STREAM.PURGE.{}", self.stream);
        let purged: Result<serde_json::Value, ApiError> =
            self.api.request(&subject, &body, until).await;
        purged.map(|_| ()).map_err(Error::from)
    }

    /// Waiters in the queue of a key, first to last.
    pub(super) async fn waiters(
        self: &Arc<Self>,
        key: &Key,
        space: KeySpace,
        known: &KnownKey,
    ) -> Result<Vec<WaiterState>> {
        let prefix = format!("{}{}", self.root(), format::queue_prefix(key, space));
        let until = self.api.deadline_after(super::REQUEST_TIMEOUT);
        if self.ticket_subjects(&prefix, until).await?.is_empty() {
            return Ok(Vec::new());
        }
        let mut tickets = watch::snapshot(self, &format!("{prefix}.*")).await?;
        tickets.retain(|ticket| ticket.sequence > known.record.served);
        tickets.sort_by_key(|ticket| ticket.sequence);
        let (now, lineage) = (self.now(), self.lineage());
        let shown = tickets.iter().filter_map(|ticket| {
            let by = format::read_ticket(ticket.value.as_ref()?);
            let age = lineage.server_time(now).saturating_sub(ticket.timestamp);
            Some(WaiterState { by: Some(by), waited_for: Some(Duration::from_nanos(age)) })
        });
        Ok(shown.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: &str = "$KV.locks.";
    const QUEUE: &str = "$KV.locks.queue.lock.a/b";

    fn ticket_message(
        claim: &str,
        sequence: u64,
        value: Option<&str>,
        record_header: Option<&str>,
    ) -> Message {
        Message {
            subject: format!("{QUEUE}.{claim}"),
            sequence,
            timestamp: 5,
            record_header: record_header.map(str::to_owned),
            value: value.map(Into::into),
        }
    }

    #[test]
    fn a_removed_ticket_carries_the_record_that_was_written_before_it() {
        let removed = |record_header| ticket_message("7", 9, None, record_header);
        let record = handed_over_record(ROOT, &removed(Some("8 {\"tenure\": 1}"))).unwrap();
        assert_eq!((record.subject.as_str(), record.sequence), ("$KV.locks.lock.a/b", 8));
        assert_eq!(record.value.as_deref(), Some(&b"{\"tenure\": 1}"[..]));
        for header in [None, Some(""), Some("8"), Some("x {}"), Some("9 {}"), Some("10 {}")] {
            assert!(handed_over_record(ROOT, &removed(header)).is_none(), "{header:?}");
        }
        assert!(is_ticket(ROOT, &removed(None).subject));
        assert!(!is_ticket(ROOT, "$KV.locks.lock.queue.a"));
    }

    /// True if the waiter was woken since the last call.
    fn woken(wake: &Arc<Notify>) -> bool {
        let mut notified = std::pin::pin!(wake.notified());
        notified.as_mut().enable()
    }

    #[test]
    fn a_waiter_is_woken_by_the_ticket_before_its_own_and_by_no_other() {
        let queues = TicketQueues::default();
        queues.watch_starting(&format!("{QUEUE}.*"));
        let wakes: Vec<_> = (2..=4).map(|_| Arc::new(Notify::new())).collect();
        for (claim, wake) in (2..=4).zip(&wakes) {
            queues.join(QUEUE, &claim.to_string(), wake);
        }
        for claim in 1..=5 {
            queues.note_message(&ticket_message(&claim.to_string(), claim, Some("x"), None));
        }
        assert!(wakes.iter().all(woken), "each is woken by its own ticket");
        assert_eq!(queues.position(QUEUE, "3", 0), Some(QueuePosition { place: 3, ahead: 2 }));
        assert_eq!(queues.position(QUEUE, "3", 1), Some(QueuePosition { place: 3, ahead: 1 }));
        assert!(!wakes.iter().any(woken));
        // A claim that leaves, and the index of the waiter that its departure wakes.
        for (gone, next) in [("5", None), ("2", Some(1)), ("3", Some(2)), ("1", None)] {
            queues.note_message(&ticket_message(gone, 9, None, None));
            let woken: Vec<_> = wakes.iter().map(woken).collect();
            let expected: Vec<_> = (0..3).map(|at| Some(at) == next).collect();
            assert_eq!(woken, expected, "{gone} is gone");
        }
        assert_eq!(queues.position(QUEUE, "4", 0), Some(QueuePosition { place: 4, ahead: 0 }));
        queues.watch_ended(&format!("{QUEUE}.*"), false);
        assert!(wakes.iter().all(woken), "every waiter starts another watch");
        queues.watch_starting(&format!("{QUEUE}.*"));
        assert_eq!(queues.position(QUEUE, "4", 0), None, "not known until delivered again");
        for (claim, wake) in (2..=4).zip(&wakes) {
            queues.leave(QUEUE, &claim.to_string(), &Arc::default());
            assert!(
                queues.lock()[QUEUE].local_waiters.contains_key(&claim.to_string()),
                "joined again"
            );
            queues.leave(QUEUE, &claim.to_string(), wake);
        }
        queues.watch_ended(&format!("{QUEUE}.*"), true);
        assert!(!queues.lock().is_empty(), "another watch needs it");
        queues.watch_ended(&format!("{QUEUE}.*"), false);
        assert!(queues.lock().is_empty());
    }
}
