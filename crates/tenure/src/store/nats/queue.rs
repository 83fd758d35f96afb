//! The queue in order of arrival, for who asks for it.
//!
//! Who waits writes a ticket, a key of its own below the lock's name; its sequence is its place. The record of the lock
//! says which place was served last: that ticket and those before it are void.
//!
//! A process that waits is told of tickets, and of those each waiter is woken by the one before its own alone: whoever
//! lets go of the lock takes its ticket away and says there what the record is by then, so that the next one can write at
//! once. Of the record only those are told who could do something about it: who has nobody before it, and who could
//! hold the lock beside the one before it.
//!
//! A first that does not come forward while the lock is free is passed over after [`TURN`], by the next, which thereby
//! is served. To see that, everybody looks at the record now and then, the less often the further behind.
//!
//! The queue gives order, not exclusion: that is the record's alone.

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
use super::keys::KnownKey;
use super::watch;
use crate::store::{Answer, Claim, Contended, WaiterState};
use crate::{Error, Result};

/// How long the first of the queue may leave a free lock alone before the next takes its turn.
const TURN_TIMEOUT: Duration = Duration::from_secs(2);
/// One in so many who come removes void tickets.
const SWEEP_ONE_IN: u128 = 64;
/// How often the first looks at the lock, in case it was not told.
const RECORD_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// What this process has been told of queues.
#[derive(Default)]
pub(super) struct TicketQueues(Mutex<HashMap<String, TicketQueue>>);

#[derive(Default)]
struct TicketQueue {
    /// The claims that wait, by their place.
    tickets: BTreeMap<u64, String>,
    /// Those of them that wait here.
    local_waiters: HashMap<String, Arc<Notify>>,
}

impl TicketQueue {
    fn place(&self, claim: &str) -> Option<u64> {
        self.tickets.iter().find(|(_, waiting)| *waiting == claim).map(|(place, _)| *place)
    }

    /// Wakes the one who waits behind a place, if it is ours.
    fn wake_behind(&self, place: u64) {
        let next = self.tickets.range(place + 1..).next();
        if let Some(next) = next.and_then(|(_, claim)| self.local_waiters.get(claim)) {
            next.notify_one();
        }
    }
}

/// A claim's place in the queue, as this process was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct QueuePosition {
    place: u64,
    /// How many places before it are not void.
    ahead: usize,
}

impl TicketQueues {
    /// Notes what a message says of a ticket.
    pub(super) fn note_message(&self, message: &Message) {
        let Some((prefix, claim)) = message.subject.rsplit_once('.') else { return };
        let mut lines = self.lock();
        let line = lines.entry(prefix.to_owned()).or_default();
        let before = line.place(claim);
        if let Some(before) = before {
            line.tickets.remove(&before);
        }
        if message.value.is_some() {
            line.tickets.insert(message.sequence, claim.to_owned());
            // It may be the first that we hear of our own.
            if let Some(own) = line.local_waiters.get(claim) {
                own.notify_one();
            }
        }
        if let Some(before) = before {
            line.wake_behind(before);
        }
    }

    /// A watch begins: what was told of its line before is as good as the one that told it.
    pub(super) fn begin(&self, filter: &str) {
        if let Some(prefix) = filter.strip_suffix(".*") {
            self.lock().entry(prefix.to_owned()).or_default().tickets.clear();
        }
    }

    /// A watch has ended: who waits in its line looks for another. `again`: there is one already.
    pub(super) fn end(&self, filter: &str, again: bool) {
        let Some(prefix) = filter.strip_suffix(".*") else { return };
        let mut lines = self.lock();
        let Some(line) = lines.get(prefix) else { return };
        line.local_waiters.values().for_each(|waiter| waiter.notify_one());
        if line.local_waiters.is_empty() && !again {
            lines.remove(prefix);
        }
    }

    /// Somebody waits here, to be woken by this.
    fn join(&self, prefix: &str, claim: &str, wake: &Arc<Notify>) {
        let mut lines = self.lock();
        let line = lines.entry(prefix.to_owned()).or_default();
        line.local_waiters.insert(claim.to_owned(), Arc::clone(wake));
    }

    /// It waits here no more, unless it has joined anew.
    fn leave(&self, prefix: &str, claim: &str, wake: &Arc<Notify>) {
        let mut lines = self.lock();
        let Some(line) = lines.get_mut(prefix) else { return };
        if line.local_waiters.get(claim).is_some_and(|known| Arc::ptr_eq(known, wake)) {
            line.local_waiters.remove(claim);
        }
    }

    /// Where a claim stands, with that place served last.
    fn position(&self, prefix: &str, claim: &str, served: u64) -> Option<QueuePosition> {
        let mut lines = self.lock();
        let line = lines.get_mut(prefix)?;
        line.tickets.retain(|place, _| *place > served);
        let place = line.place(claim)?;
        Some(QueuePosition { place, ahead: line.tickets.range(..place).count() })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, TicketQueue>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a subject below the bucket's root is that of a ticket.
pub(super) fn is_ticket(root: &str, subject: &str) -> bool {
    subject.strip_prefix(root).is_some_and(|name| name.starts_with("queue."))
}

/// The record that whoever took its ticket away speaks of, as if the record itself had been told.
pub(super) fn handed_over_record(root: &str, message: &Message) -> Option<Message> {
    let name = message.subject.strip_prefix(root)?.strip_prefix("queue.")?;
    let (sequence, record) = message.about.as_deref()?.split_once(' ')?;
    Some(Message {
        subject: format!("{root}{}", name.rsplit_once('.')?.0),
        // It was written before.
        sequence: sequence.parse().ok().filter(|sequence| *sequence < message.sequence)?,
        time: message.time,
        about: None,
        value: Some(record.as_bytes().to_vec()),
    })
}

impl NatsInner {
    /// A claim that passes nobody who waits in order.
    pub(super) async fn claim_in_order(
        self: &Arc<Self>,
        claim: &Claim,
        until: ApiDeadline,
    ) -> Result<Answer> {
        let mut place = NatsPlace::new(self, claim);
        let known = self.read(&place.subject, until).await?;
        let served = known.record.served;
        let busy = match self.decide(&known, &place.ask()) {
            RecordDecision::AlreadyGranted(_) => {
                let (subject, known) = (place.subject.clone(), known.clone());
                return self.granted_before(claim, subject, known, until).await;
            }
            RecordDecision::LimitMismatch(_) => return self.claim_now(claim, until).await,
            RecordDecision::Write(_)
                if self.queue_is_empty(&place.prefix, served, until).await? =>
            {
                return self.claim_now(claim, until).await;
            }
            RecordDecision::Write(_) => {
                Contended { version: known.version(self.now()), ..Contended::default() }
            }
            RecordDecision::Contended(holder) => self.contended(&known, holder),
        };
        if !claim.queue && !place.has_ticket(served, until).await? {
            return Ok(Answer::Contended(busy));
        }
        place.join(served, until).await?;
        if claim.id.is_multiple_of(SWEEP_ONE_IN) {
            // Not the last one served: it may hold, and then its ticket wakes the next.
            self.remove_void_tickets(&place.prefix, served, until).await;
        }
        Ok(Answer::Queued(Box::new(place)))
    }

    /// Whether there is no ticket but void ones, which are removed then.
    async fn queue_is_empty(
        self: &Arc<Self>,
        line: &str,
        served: u64,
        until: ApiDeadline,
    ) -> Result<bool> {
        if self.tickets(line, until).await?.is_empty() {
            return Ok(true);
        }
        let listed = watch::snapshot(self, &format!("{line}.*")).await?;
        if listed.iter().any(|ticket| ticket.value.is_some() && ticket.sequence > served) {
            return Ok(false);
        }
        if let Some(last) = listed.iter().map(|ticket| ticket.sequence).max() {
            self.remove_void_tickets(line, last + 1, until).await;
        }
        Ok(true)
    }

    /// Removes the tickets before a sequence, all of them void. One that stays does no harm.
    async fn remove_void_tickets(&self, line: &str, before: u64, until: ApiDeadline) {
        // To the server no sequence means all of them.
        if before == 0 {
            return;
        }
        let ask = json!({ "filter": format!("{line}.*"), "seq": before });
        let subject = format!("STREAM.PURGE.{}", self.stream);
        let _: Result<serde_json::Value, _> = self.api.ask(&subject, &ask, until).await;
    }

    /// The ticket of a claim.
    pub(super) fn ticket(&self, key: &Key, space: KeySpace, claim: u128) -> String {
        format!("{}{}.{claim:032x}", self.root(), format::queue_prefix(key, space))
    }

    /// Takes the ticket of a hold that has ended away, and says what the record is now. Who waits behind it and is not
    /// told finds out by itself.
    pub(super) async fn hand_over(
        &self,
        ticket: &str,
        place: u64,
        now: &KnownKey,
        until: ApiDeadline,
    ) {
        let record = || {
            let text = self.layout.write(&now.record).value;
            format!("{} {}", now.sequence, String::from_utf8_lossy(&text))
        };
        // Where others hold it still, the next has nothing to write.
        let about = now.record.holders.is_empty().then(record);
        let gone = KeyWrite { operation: Some("DEL"), about, ..KeyWrite::default() };
        match self.write(ticket, place, gone, until).await {
            Ok(WriteOutcome::Done(_) | WriteOutcome::Conflict) => {}
            Ok(WriteOutcome::Unclear(error)) | Err(error) => {
                tracing::debug!(name: "tenure.ticket_left", store = %self, ticket, %error);
            }
        }
    }

    /// The subjects of the tickets below a prefix, void ones and their ends among them.
    async fn tickets(&self, line: &str, until: ApiDeadline) -> Result<Vec<String>> {
        #[derive(Deserialize)]
        struct SubjectsInfo {
            state: SubjectsState,
        }
        #[derive(Deserialize)]
        struct SubjectsState {
            #[serde(default)]
            subjects: Option<HashMap<String, u64>>,
        }
        let ask = json!({ "subjects_filter": format!("{line}.*") });
        let info: Result<SubjectsInfo, ApiError> =
            self.api.ask(&format!("STREAM.INFO.{}", self.stream), &ask, until).await;
        Ok(info?.state.subjects.unwrap_or_default().into_keys().collect())
    }

    /// Whether we may take tickets away: takes one that no claim has.
    pub(super) async fn probe_purge(&self, key: &Key, until: ApiDeadline) -> Result<()> {
        let ticket = format!("{}{}.none", self.root(), format::queue_prefix(key, KeySpace::Lock));
        let ask = json!({ "filter": ticket });
        let subject = format!("STREAM.PURGE.{}", self.stream);
        let purged: Result<serde_json::Value, ApiError> = self.api.ask(&subject, &ask, until).await;
        purged.map(|_| ()).map_err(Error::from)
    }

    /// Who waits in order, the next one first.
    pub(super) async fn waiters(
        self: &Arc<Self>,
        key: &Key,
        space: KeySpace,
        known: &KnownKey,
    ) -> Result<Vec<WaiterState>> {
        let line = format!("{}{}", self.root(), format::queue_prefix(key, space));
        let until = self.api.until(super::REQUEST_TIMEOUT);
        if self.tickets(&line, until).await?.is_empty() {
            return Ok(Vec::new());
        }
        let mut tickets = watch::snapshot(self, &format!("{line}.*")).await?;
        tickets.retain(|ticket| ticket.sequence > known.record.served);
        tickets.sort_by_key(|ticket| ticket.sequence);
        let (now, server) = (self.now(), self.lineage());
        let shown = tickets.iter().filter_map(|ticket| {
            let by = format::read_ticket(ticket.value.as_ref()?);
            let age = server.server_time(now).saturating_sub(ticket.time);
            Some(WaiterState { by: Some(by), waited_for: Some(Duration::from_nanos(age)) })
        });
        Ok(shown.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: &str = "$KV.locks.";
    const LINE: &str = "$KV.locks.queue.lock.a/b";

    fn told(claim: &str, sequence: u64, value: Option<&str>, about: Option<&str>) -> Message {
        let (subject, value) = (format!("{LINE}.{claim}"), value.map(Into::into));
        Message { subject, sequence, time: 5, about: about.map(str::to_owned), value }
    }

    #[test]
    fn a_ticket_passes_the_record_on_that_was_written_before_it() {
        let ended = |about| told("7", 9, None, about);
        let record = handed_over_record(ROOT, &ended(Some("8 {\"tenure\": 1}"))).unwrap();
        assert_eq!((record.subject.as_str(), record.sequence), ("$KV.locks.lock.a/b", 8));
        assert_eq!(record.value.as_deref(), Some(&b"{\"tenure\": 1}"[..]));
        for about in [None, Some(""), Some("8"), Some("x {}"), Some("9 {}"), Some("10 {}")] {
            assert!(handed_over_record(ROOT, &ended(about)).is_none(), "{about:?}");
        }
        assert!(is_ticket(ROOT, &ended(None).subject));
        assert!(!is_ticket(ROOT, "$KV.locks.lock.queue.a"));
    }

    /// Whether that woke it.
    fn woken(wake: &Arc<Notify>) -> bool {
        let mut notified = std::pin::pin!(wake.notified());
        notified.as_mut().enable()
    }

    #[test]
    fn a_waiter_is_woken_by_the_ticket_before_its_own_and_by_no_other() {
        let lines = TicketQueues::default();
        lines.begin(&format!("{LINE}.*"));
        let wakes: Vec<_> = (2..=4).map(|_| Arc::new(Notify::new())).collect();
        for (claim, wake) in (2..=4).zip(&wakes) {
            lines.join(LINE, &claim.to_string(), wake);
        }
        for claim in 1..=5 {
            lines.note_message(&told(&claim.to_string(), claim, Some("x"), None));
        }
        assert!(wakes.iter().all(woken), "each hears of its own ticket");
        assert_eq!(lines.position(LINE, "3", 0), Some(QueuePosition { place: 3, ahead: 2 }));
        assert_eq!(lines.position(LINE, "3", 1), Some(QueuePosition { place: 3, ahead: 1 }));
        assert!(!wakes.iter().any(woken));
        // The one that leaves, and who is woken by that.
        for (gone, next) in [("5", None), ("2", Some(1)), ("3", Some(2)), ("1", None)] {
            lines.note_message(&told(gone, 9, None, None));
            let woken: Vec<_> = wakes.iter().map(woken).collect();
            let expected: Vec<_> = (0..3).map(|at| Some(at) == next).collect();
            assert_eq!(woken, expected, "{gone} is gone");
        }
        assert_eq!(lines.position(LINE, "4", 0), Some(QueuePosition { place: 4, ahead: 0 }));
        lines.end(&format!("{LINE}.*"), false);
        assert!(wakes.iter().all(woken), "whoever waits begins another watch");
        lines.begin(&format!("{LINE}.*"));
        assert_eq!(lines.position(LINE, "4", 0), None, "to be told anew");
        for (claim, wake) in (2..=4).zip(&wakes) {
            lines.leave(LINE, &claim.to_string(), &Arc::default());
            assert!(
                lines.lock()[LINE].local_waiters.contains_key(&claim.to_string()),
                "joined anew"
            );
            lines.leave(LINE, &claim.to_string(), wake);
        }
        lines.end(&format!("{LINE}.*"), true);
        assert!(!lines.lock().is_empty(), "another watch tells of it");
        lines.end(&format!("{LINE}.*"), false);
        assert!(lines.lock().is_empty());
    }
}
