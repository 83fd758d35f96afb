//! A place in the ticket queue: waits for its turn, and takes the lock.
//!
//! The wait is a loop over local state: the record and the tickets that this process has been notified of. Each pass
//! decides from that state what is due: write the record, read it, or sleep. A decision on outdated state is safe,
//! because the write that follows names the sequence that it was decided on. So the loop has to guarantee one thing
//! only: that it never sleeps through the moment at which it could be granted.

use std::fmt;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::json;
use tenure_core::Time;
use tenure_core::lease::Lease;
use tenure_core::record::{RecordClaim, RecordDecision};
use tenure_core::table::Mode;
use tokio::sync::Notify;
use tokio::sync::watch::Receiver;

use super::api::{ApiDeadline, KeyWrite, WriteOutcome};
use super::inner::{NatsInner, as_unknown};
use super::keys::KnownKey;
use super::watch::subscribe;
use super::{format, grant};
use crate::store::{Answer, Claim, Grant, Identity, LeaseStart, Place, Waited};
use crate::{Error, ErrorKind, Result};

/// Time that the first waiter has to take a free lock before the waiter behind it may take it.
const TURN_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval at which the first two waiters read the record, in case a notification was lost.
const RECORD_POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Number of turns after which the time allowed for the waiters ahead no longer grows.
const MAX_TURNS: u32 = 60;

/// Place of a claim in the ticket queue of its key.
pub(super) struct NatsPlace {
    inner: Arc<NatsInner>,
    claim: Claim,
    /// Subject of the lock's record.
    pub(super) subject: String,
    /// Prefix of the queue's tickets.
    pub(super) prefix: String,
    /// Name of our ticket below the prefix: the claim's id.
    name: String,
    /// Sequence of our ticket.
    place: u64,
    /// Notified when our own ticket arrives, when the ticket before it is removed, and when the watch of tickets ends.
    wake: Arc<Notify>,
    /// Watch of the tickets: it runs while it has receivers.
    ticket_watch: Option<Receiver<u64>>,
    /// Watch of the record, from the time at which we could be granted.
    record_watch: Option<Receiver<u64>>,
    /// Time of our last read or notification of the record.
    record_seen_at: Time,
    /// Lock that we could take and that the waiters ahead have not taken yet, and since when.
    idle: Option<(IdleLock, Time)>,
}

/// A lock that we could take, and the number of waiters ahead that could take it first.
#[derive(Clone, Copy, PartialEq, Eq)]
struct IdleLock {
    /// Sequence of the record if it has no holder. 0 if it has holders, beside which we could be granted.
    sequence: u64,
    ahead: usize,
}

impl NatsPlace {
    pub(super) fn new(inner: &Arc<NatsInner>, claim: &Claim) -> Self {
        let space = claim.mode.space();
        Self {
            inner: Arc::clone(inner),
            claim: claim.clone(),
            subject: inner.subject(&claim.key, space),
            prefix: format!("{}{}", inner.root(), format::queue_prefix(&claim.key, space)),
            name: format!("{:032x}", claim.id),
            place: u64::MAX,
            wake: Arc::new(Notify::new()),
            ticket_watch: None,
            record_watch: None,
            record_seen_at: inner.now(),
            idle: None,
        }
    }

    fn ticket_subject(&self) -> String {
        format!("{}.{}", self.prefix, self.name)
    }

    pub(super) fn record_claim(&self) -> RecordClaim<'_, Identity> {
        let Claim { id, mode, ttl, .. } = self.claim;
        RecordClaim { id, mode, lease: ttl, by: &self.claim.by }
    }

    /// True if the claim has a ticket that is not void.
    pub(super) async fn has_ticket(&self, served: u64, until: ApiDeadline) -> Result<bool> {
        let found =
            self.inner.api.last_message(&self.inner.stream, &self.ticket_subject(), until).await?;
        Ok(found.is_some_and(|found| found.value.is_some() && found.sequence > served))
    }

    /// Writes the ticket, unless the claim has one already. A void or deleted ticket is rewritten, for a place at the
    /// end.
    ///
    /// # Errors
    ///
    /// `Unknown` if the ticket may or may not have been written. A repeated claim finds a ticket that was written.
    pub(super) async fn join(&mut self, served: u64, until: ApiDeadline) -> Result<()> {
        // The subject follows from the claim's id, and each write is conditional. A repeated sending of the claim
        // therefore finds the ticket of the first sending, and cannot get a second place or lose the first.
        let inner = Arc::clone(&self.inner);
        let (api, ticket) = (&inner.api, self.ticket_subject());
        let new_ticket =
            || KeyWrite { value: format::write_ticket(&self.claim.by), ..KeyWrite::default() };
        let outcome = match inner.write(&ticket, 0, new_ticket(), until).await? {
            WriteOutcome::Conflict => {
                let found = api.last_message(&inner.stream, &ticket, until).await?;
                let sequence = found.as_ref().map_or(0, |found| found.sequence);
                if found.is_some_and(|found| found.value.is_some()) && sequence > served {
                    self.place = sequence;
                    return Ok(());
                }
                inner.write(&ticket, sequence, new_ticket(), until).await?
            }
            outcome => outcome,
        };
        match outcome {
            WriteOutcome::Done(sequence) => {
                self.place = sequence;
                Ok(())
            }
            WriteOutcome::Conflict => {
                let message = "the ticket in the queue was changed by a concurrent write";
                Err(Error::new(ErrorKind::Unknown, message))
            }
            WriteOutcome::Unclear(error) => Err(as_unknown(error)),
        }
    }

    /// Waits for our turn until `end`, and takes the lock.
    async fn wait_for_turn(&mut self, end: Time) -> Result<Waited> {
        let inner = Arc::clone(&self.inner);
        // True once our own ticket was delivered. Until then its absence means that the watch has not reached it yet;
        // from then on it means that the ticket is gone.
        let mut delivered = false;
        loop {
            // This call comes before any state is read. `wake` keeps a notification that arrives while this pass runs,
            // and the call marks the record's notifications so far as seen. So every change after this line ends the
            // sleep below.
            self.watch_tickets().await?;
            let now = inner.now();
            let known = inner.keys.known(&self.subject).unwrap_or_default();
            if known.record.holder(self.claim.id).is_some() {
                return self.granted().await;
            }
            let position = inner.queues.position(&self.prefix, &self.name, known.record.served);
            delivered |= position.is_some();
            // A waiter behind us was granted and voided our ticket, or the ticket was removed. Our place is lost: the
            // waiters behind no longer count us. The claim has to be sent again, for a new place.
            if position.is_none() && delivered || known.record.served >= self.place {
                return Ok(Waited::Gone);
            }
            // Before our own ticket is delivered, an unknown number is ahead. To assume 0 would overtake the queue.
            let ahead = position.map(|position| position.ahead);
            let next_step_at = match self.next_step(&known, ahead.unwrap_or(usize::MAX), now) {
                WaiterStep::Take(next) => match self.take(&known, next).await? {
                    Some(waited) => return Ok(waited),
                    None => continue,
                },
                WaiterStep::Read => {
                    self.read_record().await?;
                    continue;
                }
                WaiterStep::SleepUntil(time) => time,
            };
            if now >= end {
                return Ok(Waited::StillQueued { ahead });
            }
            if ahead.is_some_and(|ahead| self.could_be_granted(ahead))
                && self.record_watch.is_none()
            {
                match subscribe(&inner, &self.subject).await {
                    Ok(watch) => {
                        self.record_watch = Some(watch);
                        // Another pass, and no sleep. A watch that other waiters share may have delivered the free
                        // record already, and will not deliver it again.
                        continue;
                    }
                    // The server has no room for another consumer, say. The poll finds what the watch would have
                    // delivered. If the store is away, the poll fails, and the machine waits and reports.
                    Err(error) if error.kind() == ErrorKind::Unavailable => {
                        let key = &self.claim.key;
                        tracing::debug!(name: "tenure.watch_failed", %key, store = %inner, %error);
                    }
                    Err(error) => return Err(error),
                }
            }
            // Our predecessor's release wakes us by its ticket. The poll covers the cases without a message: a
            // predecessor that crashed with the lock, a purged ticket, a consumer that died with its server.
            let poll_at = self.record_seen_at + ahead.map_or(RECORD_POLL_INTERVAL, poll_pause);
            tokio::select! {
                () = self.wake.notified() => {}
                changed = record_changed(self.record_watch.as_mut()) => {
                    changed?;
                    self.record_seen_at = inner.now();
                }
                () = inner.api.clock.sleep_until(next_step_at.min(poll_at).min(end)) => {
                    if inner.now() >= poll_at {
                        self.read_record().await?;
                    }
                }
            }
        }
    }

    /// Starts the watch of tickets, until a deadline.
    ///
    /// # Errors
    ///
    /// `Unavailable` if it cannot be started: the server does not answer, or has no room for another consumer.
    pub(super) async fn start_watch(&mut self, until: ApiDeadline) -> Result<()> {
        let clock = self.inner.api.clock.clone();
        tokio::select! {
            biased;
            started = self.watch_tickets() => started,
            // A consumer that the server creates nevertheless ends by itself: it has no subscriber.
            () = clock.sleep_until(until.0) => {
                let message = "the watch of the queue did not start in time";
                Err(Error::new(ErrorKind::Unavailable, message))
            }
        }
    }

    /// Starts the watch of tickets unless it runs, and marks the record's notifications so far as seen.
    ///
    /// # Errors
    ///
    /// `Unavailable` if the watch has ended: its consumer is gone, and the tickets that this process knows are no
    /// longer kept up to date.
    async fn watch_tickets(&mut self) -> Result<()> {
        let ended = || Error::new(ErrorKind::Unavailable, "the watch has ended");
        match &self.ticket_watch {
            None => {
                // Registered before the watch starts. Otherwise the notification of our own ticket, which may be the
                // first message, would be lost.
                self.inner.queues.join(&self.prefix, &self.name, &self.wake);
                let filter = format!("{}.*", self.prefix);
                self.ticket_watch = Some(subscribe(&self.inner, &filter).await?);
            }
            Some(watch) => watch.has_changed().map(|_| ()).map_err(|_| ended())?,
        }
        if let Some(watch) = &mut self.record_watch {
            watch.borrow_and_update();
        }
        Ok(())
    }

    /// True if we could be granted when the record changes, with `ahead` waiters before us. An exclusive claim cannot
    /// be granted before the waiters ahead; a shared claim or a slot can be granted beside them.
    fn could_be_granted(&self, ahead: usize) -> bool {
        ahead == 0 || self.claim.mode != Mode::Exclusive
    }

    /// Next step for the record as it is known, with `ahead` waiters before us.
    fn next_step(&mut self, known: &KnownKey, ahead: usize, now: Time) -> WaiterStep {
        let old = !known.may_be_overwritten(now, self.inner.api.connections());
        if self.record_watch.is_none() && old && ahead > 0 {
            // We do not watch the record, and the known one is outdated: there is nothing to decide before the next
            // poll.
            return WaiterStep::SleepUntil(Time::MAX);
        }
        let RecordDecision::Write(mut next) = self.inner.decide(known, &self.record_claim()) else {
            // Held. The next step is due when a holder that does not renew may be taken over.
            self.idle = None;
            return WaiterStep::SleepUntil(known.observations.next_takeover(now));
        };
        let take_at = self.take_at(known, ahead, now);
        if now < take_at {
            return WaiterStep::SleepUntil(take_at);
        }
        // Its sequence may by now be that of another record: our write would replace a record that we never saw.
        if old {
            return WaiterStep::Read;
        }
        // `served` is raised in the same write as the grant. If it were written later, a crash in between would leave
        // our ticket valid, although its claim was already granted; and a waiter that we pass over would not learn that
        // its place is lost.
        next.served = next.served.max(self.place);
        WaiterStep::Take(next)
    }

    /// Time at which to take a lock that is free for us, with `ahead` waiters before us: at once if there are none.
    ///
    /// Each waiter ahead has [`TURN_TIMEOUT`] to take the lock. So the waiters behind a crashed waiter try one after
    /// another, nearest first, and do not all write at once.
    fn take_at(&mut self, known: &KnownKey, ahead: usize, now: Time) -> Time {
        if ahead == 0 {
            return now;
        }
        let free = known.record.holders.is_empty();
        let idle = IdleLock { sequence: if free { known.sequence } else { 0 }, ahead };
        let since = match self.idle {
            Some((known_idle, since)) if known_idle == idle => since,
            _ => {
                // A free record shows by the server's timestamp how long it has been free, also before we first saw it.
                // A lock with holders does not: its record changes with every renewal.
                let server_time = self.inner.lineage().server_time(now);
                let age =
                    known.timestamp.filter(|_| free).map(|time| server_time.saturating_sub(time));
                now - Duration::from_nanos(age.unwrap_or_default())
            }
        };
        self.idle = Some((idle, since));
        since + time_for_turns(ahead)
    }

    async fn read_record(&mut self) -> Result<()> {
        self.inner.read(&self.subject, self.inner.api.deadline_after(RECORD_POLL_INTERVAL)).await?;
        self.record_seen_at = self.inner.now();
        Ok(())
    }

    /// Takes the lock if the record is still the known one; `None` if another write came first.
    async fn take(&mut self, known: &KnownKey, next: format::KeyRecord) -> Result<Option<Waited>> {
        let until = self.inner.api.deadline_after(Lease::request_limit_of(self.claim.ttl));
        let sent = self.inner.now();
        let grant =
            grant::take(&self.inner, &self.claim, &self.subject, known, next, until).await?;
        let Some(grant) = grant else {
            self.read_record().await?;
            return Ok(None);
        };
        let lease_start = match grant.lease_start {
            // `FromRequest` would mean the call of `wait`, perhaps hours ago: the hold would count as over at once. The
            // lease cannot have begun before this write was sent.
            LeaseStart::FromRequest => LeaseStart::Since(sent),
            lease_start => lease_start,
        };
        Ok(Some(Waited::Granted(Grant { lease_start, ..grant })))
    }

    /// Answers with a grant that an earlier write of this claim obtained.
    ///
    /// The leader is read first: the notification that showed the grant may be outdated.
    async fn granted(&self) -> Result<Waited> {
        let until = self.inner.api.deadline_after(Lease::request_limit_of(self.claim.ttl));
        let known = self.inner.read(&self.subject, until).await?;
        if known.record.holder(self.claim.id).is_none() {
            return Ok(Waited::Gone);
        }
        let subject = self.subject.clone();
        match grant::granted_before(&self.inner, &self.claim, subject, known, until).await? {
            Answer::Granted(grant) => {
                Ok(Waited::Granted(Grant { lease_start: LeaseStart::FromConfirm, ..grant }))
            }
            _ => Ok(Waited::Gone),
        }
    }

    /// Deletes the ticket, and purges what is left of it.
    ///
    /// The deletion comes first: it is a message, which wakes the waiter behind. A purge sends no message. The purge
    /// then removes the deletion marker; if that fails, the marker stays until a later claim sweeps the queue.
    async fn remove_ticket(&self, until: ApiDeadline) -> Result<()> {
        let (api, ticket) = (&self.inner.api, self.ticket_subject());
        let Some(found) = api.last_message(&self.inner.stream, &ticket, until).await? else {
            return Ok(());
        };
        if found.value.is_some() {
            let deletion = KeyWrite { operation: Some("DEL"), ..KeyWrite::default() };
            if let WriteOutcome::Unclear(error) =
                api.write(&ticket, found.sequence, deletion, until).await?
            {
                return Err(error);
            }
        }
        let body = json!({ "filter": ticket });
        let subject = format!("STREAM.PURGE.{}", self.inner.stream);
        let _: Result<serde_json::Value, _> = api.request(&subject, &body, until).await;
        Ok(())
    }
}

/// Next step of a waiter.
enum WaiterStep {
    /// Write this record, which contains our grant: it is our turn.
    Take(format::KeyRecord),
    /// Read the record: the known one is too old to be the condition of a write.
    Read,
    /// Do nothing before this time.
    SleepUntil(Time),
}

/// Time allowed for this many turns.
fn time_for_turns(count: usize) -> Duration {
    TURN_TIMEOUT * u32::try_from(count).unwrap_or(u32::MAX).min(MAX_TURNS)
}

/// Pause between two reads of the record, with `ahead` waiters before us.
fn poll_pause(ahead: usize) -> Duration {
    if ahead <= 1 { RECORD_POLL_INTERVAL } else { time_for_turns(ahead) }
}

/// Resolves with the next notification of the record; never if there is no watch.
async fn record_changed(watch: Option<&mut Receiver<u64>>) -> Result<()> {
    let Some(watch) = watch else { return pending().await };
    let ended = |_| Error::new(ErrorKind::Unavailable, "the watch has ended");
    watch.changed().await.map_err(ended)
}

#[async_trait]
impl Place for NatsPlace {
    async fn wait(&mut self, limit: Duration) -> Result<Waited> {
        let end = self.inner.now() + limit;
        let waited = self.wait_for_turn(end).await;
        waited.map_err(|error| error.on(&self.claim.key).at(&*self.inner))
    }

    async fn abandon(&mut self, limit: Duration) -> Result<()> {
        let until = self.inner.api.deadline_after(limit);
        let abandoning = async {
            // The ticket is removed before a grant is undone. If only one of the two succeeds, it should be the ticket:
            // a grant that arrived meanwhile ends with its lease, but a ticket has no lease, and would delay the
            // waiters behind it.
            self.remove_ticket(until).await?;
            let known = self.inner.read(&self.subject, until).await?;
            match known.record.release(self.claim.id, known.sequence) {
                None => Ok(()),
                Some(released) => {
                    match self.inner.put(&self.subject, known.sequence, released, until).await? {
                        (WriteOutcome::Done(_), _) => Ok(()),
                        (WriteOutcome::Conflict, _) => {
                            let message = "the record was changed by a concurrent write: try again";
                            Err(Error::new(ErrorKind::Unavailable, message))
                        }
                        (WriteOutcome::Unclear(error), _) => Err(error),
                    }
                }
            }
        };
        let abandoned = abandoning.await;
        abandoned.map_err(|error: Error| error.on(&self.claim.key).at(&*self.inner))
    }
}

impl fmt::Debug for NatsPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NatsPlace").field("key", &self.claim.key).finish_non_exhaustive()
    }
}

impl Drop for NatsPlace {
    fn drop(&mut self) {
        self.inner.queues.leave(&self.prefix, &self.name, &self.wake);
    }
}
