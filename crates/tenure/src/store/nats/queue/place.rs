//! A place in the queue: waits for its turn, and takes it.

use std::fmt;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::json;
use tenure_core::Time;
use tenure_core::record::{RecordClaim, RecordDecision};
use tenure_core::table::Mode;
use tokio::sync::Notify;
use tokio::sync::watch::Receiver;

use super::super::api::{ApiDeadline, KeyWrite, WriteOutcome};
use super::super::format;
use super::super::inner::{MAX_KNOWN_AGE, NatsInner, as_unknown};
use super::super::keys::KnownKey;
use super::{RECORD_POLL_INTERVAL, TURN_TIMEOUT};
use crate::store::{Answer, Claim, Grant, Identity, LeaseStart, Place, Waited};
use crate::{Error, ErrorKind, Result};

/// The most turns that are waited for between two looks.
const MAX_TURNS: u32 = 60;

/// A place in the queue.
pub(super) struct NatsPlace {
    inner: Arc<NatsInner>,
    claim: Claim,
    /// The subject of the record.
    pub(super) subject: String,
    /// The prefix of the tickets.
    pub(super) prefix: String,
    name: String,
    /// The sequence of our ticket.
    place: u64,
    /// Tells that the ticket before ours is gone, or that the watch of tickets has ended.
    wake: Arc<Notify>,
    /// Keeps the watch of tickets up.
    tickets: Option<Receiver<u64>>,
    /// News of the record, where we can do something about it.
    record: Option<Receiver<u64>>,
    /// When we last looked at the record, or were told of it.
    last_read: Time,
    /// The free record that those before us leave alone, or 0 where it is not free to all, how many they are, and since
    /// when.
    idle: Option<((u64, usize), Time)>,
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
            tickets: None,
            record: None,
            last_read: inner.now(),
            idle: None,
        }
    }

    fn ticket(&self) -> String {
        format!("{}.{}", self.prefix, self.name)
    }

    pub(super) fn ask(&self) -> RecordClaim<'_, Identity> {
        let Claim { id, mode, ttl, .. } = self.claim;
        RecordClaim { claim: id, mode, lease: ttl, by: &self.claim.by }
    }

    /// Whether we have a ticket that is not void.
    pub(super) async fn has_ticket(&self, served: u64, until: ApiDeadline) -> Result<bool> {
        let found = self.inner.api.last(&self.inner.stream, &self.ticket(), until).await?;
        Ok(found.is_some_and(|found| found.value.is_some() && found.sequence > served))
    }

    /// Writes the ticket, unless there is one; one that is void is written anew, for a place at the end.
    pub(super) async fn join(&mut self, served: u64, until: ApiDeadline) -> Result<()> {
        let inner = Arc::clone(&self.inner);
        let (api, ticket) = (&inner.api, self.ticket());
        let writing =
            || KeyWrite { value: format::write_ticket(&self.claim.by), ..KeyWrite::default() };
        let wrote = match inner.write(&ticket, 0, writing(), until).await? {
            WriteOutcome::Conflict => {
                let found = api.last(&inner.stream, &ticket, until).await?;
                let sequence = found.as_ref().map_or(0, |found| found.sequence);
                if found.is_some_and(|found| found.value.is_some()) && sequence > served {
                    self.place = sequence;
                    return Ok(());
                }
                inner.write(&ticket, sequence, writing(), until).await?
            }
            wrote => wrote,
        };
        match wrote {
            WriteOutcome::Done(sequence) => {
                self.place = sequence;
                Ok(())
            }
            WriteOutcome::Conflict => {
                let message = "our ticket was written to meanwhile";
                Err(Error::new(ErrorKind::Unknown, message))
            }
            WriteOutcome::Unclear(error) => Err(as_unknown(error)),
        }
    }

    /// Waits for our turn, and takes it.
    async fn turn(&mut self, end: Time) -> Result<Waited> {
        let inner = Arc::clone(&self.inner);
        let mut joined = false;
        loop {
            self.subscribe().await?;
            let now = inner.now();
            let known = inner.keys.known(&self.subject).unwrap_or_default();
            if known.record.holder(self.claim.id).is_some() {
                return self.granted().await;
            }
            let standing = inner.queues.position(&self.prefix, &self.name, known.record.served);
            joined |= standing.is_some();
            // Somebody after us was served, or took our ticket away.
            if standing.is_none() && joined || known.record.served >= self.place {
                return Ok(Waited::Gone);
            }
            // Until we are told of our own ticket we do not know who is before it.
            let ahead = standing.map(|standing| standing.ahead);
            let due = match self.due(&known, ahead.unwrap_or(usize::MAX), now) {
                Due::Now(next) => match self.take(&known, next).await? {
                    Some(waited) => return Ok(waited),
                    None => continue,
                },
                Due::Read => {
                    self.read_record().await?;
                    continue;
                }
                Due::At(due) => due,
            };
            if now >= end {
                return Ok(Waited::Still { ahead });
            }
            if ahead.is_some_and(|ahead| self.needs_record(ahead)) && self.record.is_none() {
                self.record = Some(inner.watches.of(&inner, &self.subject).await?);
                continue;
            }
            let look = self.last_read + ahead.map_or(RECORD_POLL_INTERVAL, poll_pause);
            tokio::select! {
                () = self.wake.notified() => {}
                news = record_changed(self.record.as_mut()) => {
                    news?;
                    self.last_read = inner.now();
                }
                () = inner.api.clock.sleep_until(due.min(look).min(end)) => {
                    if inner.now() >= look {
                        self.read_record().await?;
                    }
                }
            }
        }
    }

    /// Sees to it that we are told of tickets, and takes notice of what was told until now.
    async fn subscribe(&mut self) -> Result<()> {
        let ended = || Error::new(ErrorKind::Unavailable, "the watch has ended");
        match &self.tickets {
            None => {
                self.inner.queues.join(&self.prefix, &self.name, &self.wake);
                let filter = format!("{}.*", self.prefix);
                self.tickets = Some(self.inner.watches.of(&self.inner, &filter).await?);
            }
            Some(tickets) => tickets.has_changed().map(|_| ()).map_err(|_| ended())?,
        }
        if let Some(record) = &mut self.record {
            record.borrow_and_update();
        }
        Ok(())
    }

    /// Whether we can do something about the record with so many ahead of us. Who would be alone with the lock cannot as
    /// long as there is one.
    fn needs_record(&self, ahead: usize) -> bool {
        ahead == 0 || self.claim.mode != Mode::Exclusive
    }

    /// When to do something about what is known of the record, with so many ahead of us.
    fn due(&mut self, known: &KnownKey, ahead: usize, now: Time) -> Due {
        let old = now.since(known.at) >= MAX_KNOWN_AGE;
        if self.record.is_none() && old && ahead > 0 {
            // Nobody tells us of it: the next look does.
            return Due::At(Time::MAX);
        }
        let RecordDecision::Write(mut next) = self.inner.decide(known, &self.ask()) else {
            self.idle = None;
            return Due::At(known.watched.next_takeover(now));
        };
        let due = self.take_at(known, ahead, now);
        if now < due {
            return Due::At(due);
        }
        if old {
            return Due::Read;
        }
        next.served = next.served.max(self.place);
        Due::Now(next)
    }

    /// When to take a free lock with so many ahead of us who do not: at once where there are none.
    fn take_at(&mut self, known: &KnownKey, ahead: usize, now: Time) -> Time {
        if ahead == 0 {
            return now;
        }
        let free = known.record.holders.is_empty();
        let what = (if free { known.sequence } else { 0 }, ahead);
        let since = match self.idle {
            Some((idle, since)) if idle == what => since,
            _ => {
                let server = self.inner.lineage().server_time(now);
                let age = known.time.filter(|_| free).map(|time| server.saturating_sub(time));
                now - Duration::from_nanos(age.unwrap_or_default())
            }
        };
        self.idle = Some((what, since));
        since + turns(ahead)
    }

    async fn read_record(&mut self) -> Result<()> {
        self.inner.read(&self.subject, self.inner.api.until(RECORD_POLL_INTERVAL)).await?;
        self.last_read = self.inner.now();
        Ok(())
    }

    /// Takes the lock at what is known of it; `None` where that was not so any more.
    async fn take(&mut self, known: &KnownKey, next: format::KeyRecord) -> Result<Option<Waited>> {
        let until = self.inner.api.until(self.claim.ttl / 4);
        let sent = self.inner.now();
        let grant = self.inner.take(&self.claim, &self.subject, known, next, until).await?;
        let Some(grant) = grant else {
            self.read_record().await?;
            return Ok(None);
        };
        let counts = match grant.lease_start {
            // It was ours from this write on, not from some moment of the wait.
            LeaseStart::FromRequest => LeaseStart::Since(sent),
            counts => counts,
        };
        Ok(Some(Waited::Granted(Grant { lease_start: counts, ..grant })))
    }

    /// A grant that was ours already.
    async fn granted(&self) -> Result<Waited> {
        let until = self.inner.api.until(self.claim.ttl / 4);
        let known = self.inner.read(&self.subject, until).await?;
        if known.record.holder(self.claim.id).is_none() {
            return Ok(Waited::Gone);
        }
        let subject = self.subject.clone();
        match self.inner.granted_before(&self.claim, subject, known, until).await? {
            Answer::Granted(grant) => {
                Ok(Waited::Granted(Grant { lease_start: LeaseStart::FromConfirm, ..grant }))
            }
            _ => Ok(Waited::Gone),
        }
    }

    /// Takes the ticket away, so that those behind it learn of it.
    async fn remove_ticket(&self, until: ApiDeadline) -> Result<()> {
        let (api, ticket) = (&self.inner.api, self.ticket());
        let Some(found) = api.last(&self.inner.stream, &ticket, until).await? else {
            return Ok(());
        };
        if found.value.is_some() {
            let gone = KeyWrite { operation: Some("DEL"), ..KeyWrite::default() };
            if let WriteOutcome::Unclear(error) =
                api.write(&ticket, found.sequence, gone, until).await?
            {
                return Err(error);
            }
        }
        let ask = json!({ "filter": ticket });
        let subject = format!("STREAM.PURGE.{}", self.inner.stream);
        let _: Result<serde_json::Value, _> = api.ask(&subject, &ask, until).await;
        Ok(())
    }
}

/// What to do about the record.
enum Due {
    /// Write this: it is our turn.
    Now(format::KeyRecord),
    /// Look at it: what is known is old.
    Read,
    /// Nothing before that.
    At(Time),
}

/// How long so many turns may take.
fn turns(many: usize) -> Duration {
    TURN_TIMEOUT * u32::try_from(many).unwrap_or(u32::MAX).min(MAX_TURNS)
}

/// How long to go without a look with so many ahead of us.
fn poll_pause(ahead: usize) -> Duration {
    if ahead <= 1 { RECORD_POLL_INTERVAL } else { turns(ahead) }
}

/// Resolves with news, where there can be any.
async fn record_changed(from: Option<&mut Receiver<u64>>) -> Result<()> {
    let Some(from) = from else { return pending().await };
    let ended = |_| Error::new(ErrorKind::Unavailable, "the watch has ended");
    from.changed().await.map_err(ended)
}

#[async_trait]
impl Place for NatsPlace {
    async fn wait(&mut self, limit: Duration) -> Result<Waited> {
        let end = self.inner.now() + limit;
        let waited = self.turn(end).await;
        waited.map_err(|error| error.on(&self.claim.key).at(&*self.inner))
    }

    async fn abandon(&mut self, limit: Duration) -> Result<()> {
        let until = self.inner.api.until(limit);
        let left = async {
            self.remove_ticket(until).await?;
            let known = self.inner.read(&self.subject, until).await?;
            match known.record.release(self.claim.id, known.sequence) {
                None => Ok(()),
                Some(free) => {
                    match self.inner.put(&self.subject, known.sequence, free, until).await? {
                        (WriteOutcome::Done(_), _) => Ok(()),
                        (WriteOutcome::Conflict, _) => {
                            let message = "the record was written to meanwhile: try again";
                            Err(Error::new(ErrorKind::Unavailable, message))
                        }
                        (WriteOutcome::Unclear(error), _) => Err(error),
                    }
                }
            }
        };
        let left = left.await;
        left.map_err(|error: Error| error.on(&self.claim.key).at(&*self.inner))
    }
}

impl fmt::Debug for NatsPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InLine").field("key", &self.claim.key).finish_non_exhaustive()
    }
}

impl Drop for NatsPlace {
    fn drop(&mut self) {
        self.inner.queues.leave(&self.prefix, &self.name, &self.wake);
    }
}
