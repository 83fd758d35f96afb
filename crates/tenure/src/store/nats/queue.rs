//! The queue in order of arrival, for who asks for it.
//!
//! Who waits writes a ticket, a key of its own below the lock's name; its sequence is its place. The record of the lock
//! says which place was served last: that ticket and those before it are void, so that no grant has to take a ticket
//! away. Everybody in the queue is told of tickets and of the record, and only the first of them tries. A first that does
//! not come forward while the lock is free is passed over after [`TURN`], by the next, which thereby is served.
//!
//! The queue gives order, not exclusion: that is the record's alone.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use serde::Deserialize;
use serde_json::json;
use tenure_core::record::{Ask, Claimed};
use tenure_core::table::Space;
use tenure_core::{Key, Time};

use super::api::{Message, Trouble, Until, Writing, Wrote};
use super::format;
use super::inner::{Inner, unknown};
use super::keys::Known;
use super::watch;
use crate::store::{Answer, Busy, Claim, Counts, Identity, Place, Waited, WaiterState};
use crate::{Error, ErrorKind, Result};

/// How long the first of the queue may leave a free lock alone before the next takes its turn.
const TURN: Duration = Duration::from_secs(2);
/// How often the first looks at the lock, in case it was not told.
const BACKSTOP: Duration = Duration::from_secs(1);

/// What this process has been told of queues: tickets by their place.
#[derive(Default)]
pub(super) struct Lines(Mutex<HashMap<String, Line>>);

/// The claims that wait, by their place.
type Line = BTreeMap<u64, String>;

impl Lines {
    /// Notes what a message says, where it is one of a queue.
    pub(super) fn heard(&self, root: &str, message: &Message) -> bool {
        let Some(name) = message.subject.strip_prefix(root) else { return false };
        let Some((_, claim)) = name.strip_prefix("queue.").and_then(|name| name.rsplit_once('.'))
        else {
            return false;
        };
        let prefix = message.subject.len() - claim.len() - 1;
        let mut lines = self.lock();
        let line = lines.entry(message.subject[..prefix].to_owned()).or_default();
        line.retain(|_, waiting| waiting != claim);
        if message.value.is_some() {
            line.insert(message.sequence, claim.to_owned());
        }
        true
    }

    pub(super) fn forget(&self, prefix: &str) {
        self.lock().remove(prefix);
    }

    /// The place of a claim, and how many places before it are not void.
    fn place(&self, prefix: &str, claim: &str, served: u64) -> Option<(u64, usize)> {
        let mut lines = self.lock();
        let line = lines.get_mut(prefix)?;
        line.retain(|place, _| *place > served);
        let (place, _) = line.iter().find(|(_, waiting)| *waiting == claim)?;
        Some((*place, line.range(..place).count()))
    }

    /// How many wait after a place.
    fn after(&self, prefix: &str, place: u64) -> usize {
        self.lock().get(prefix).map_or(0, |line| line.range(place + 1..).count())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Line>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// A claim that passes nobody who waits in order.
    pub(super) async fn claim_in_line(
        self: &Arc<Self>,
        claim: &Claim,
        until: Until,
    ) -> Result<Answer> {
        let mut place = InLine::new(self, claim);
        let known = self.read(&place.subject, until).await?;
        let claimed = self.decide(&known, &place.ask());
        match claimed {
            Claimed::Before(_) => {
                return self.granted_before(claim, place.subject, known, until).await;
            }
            Claimed::OtherSize(_) => return self.claim_now(claim, until).await,
            Claimed::Busy(_) | Claimed::Write(_) => {}
        }
        let waiting = self.tickets(&place.line, until).await?;
        let ours = waiting.iter().any(|subject| *subject == place.ticket());
        if waiting.is_empty()
            && let Claimed::Write(_) = claimed
        {
            return self.claim_now(claim, until).await;
        }
        if !claim.queue && !ours {
            let busy = match claimed {
                Claimed::Busy(holder) => self.busy(&known, holder),
                _ => Busy { seen: known.seen(self.now()), ..Busy::default() },
            };
            return Ok(Answer::Busy(busy));
        }
        place.join(known.record.served, until).await?;
        Ok(Answer::Queued(Box::new(place)))
    }

    /// The subjects of the tickets below a prefix, void ones among them.
    async fn tickets(&self, line: &str, until: Until) -> Result<Vec<String>> {
        #[derive(Deserialize)]
        struct Info {
            state: State,
        }
        #[derive(Deserialize)]
        struct State {
            #[serde(default)]
            subjects: Option<HashMap<String, u64>>,
        }
        let ask = json!({ "subjects_filter": format!("{line}.*") });
        let info: Result<Info, Trouble> =
            self.api.ask(&format!("STREAM.INFO.{}", self.stream), &ask, until).await;
        Ok(info?.state.subjects.unwrap_or_default().into_keys().collect())
    }

    /// Whether we may take tickets away: takes one that no claim has.
    pub(super) async fn purge_nothing(&self, key: &Key, until: Until) -> Result<()> {
        let ticket = format!("{}{}.none", self.root(), format::line(key, Space::Lock));
        let ask = json!({ "filter": ticket });
        let subject = format!("STREAM.PURGE.{}", self.stream);
        let purged: Result<serde_json::Value, Trouble> = self.api.ask(&subject, &ask, until).await;
        purged.map(|_| ()).map_err(Error::from)
    }

    /// Who waits in order, the next one first.
    pub(super) async fn waiters(
        self: &Arc<Self>,
        key: &Key,
        space: Space,
        known: &Known,
    ) -> Result<Vec<WaiterState>> {
        let line = format!("{}{}", self.root(), format::line(key, space));
        let until = self.api.until(super::LIMIT);
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

/// A place in the queue.
struct InLine {
    inner: Arc<Inner>,
    claim: Claim,
    /// The subject of the record.
    subject: String,
    /// The prefix of the tickets.
    line: String,
    name: String,
    /// The sequence of our ticket.
    place: u64,
    /// The first of the queue while the lock is free, and since when.
    idle: Option<(usize, Time)>,
}

impl InLine {
    fn new(inner: &Arc<Inner>, claim: &Claim) -> Self {
        let space = claim.mode.space();
        Self {
            inner: Arc::clone(inner),
            claim: claim.clone(),
            subject: inner.subject(&claim.key, space),
            line: format!("{}{}", inner.root(), format::line(&claim.key, space)),
            name: format!("{:032x}", claim.id),
            place: u64::MAX,
            idle: None,
        }
    }

    fn ticket(&self) -> String {
        format!("{}.{}", self.line, self.name)
    }

    fn ask(&self) -> Ask<'_, Identity> {
        let Claim { id, mode, ttl, .. } = self.claim;
        Ask { claim: id, mode, lease: ttl, by: &self.claim.by }
    }

    /// Writes the ticket, unless there is one; one that is void is written anew, for a place at the end.
    async fn join(&mut self, served: u64, until: Until) -> Result<()> {
        let inner = Arc::clone(&self.inner);
        let (api, ticket) = (&inner.api, self.ticket());
        let writing =
            || Writing { value: format::write_ticket(&self.claim.by), ..Writing::default() };
        let wrote = match api.write(&ticket, 0, writing(), until).await? {
            Wrote::Conflict => {
                let found = api.last(&inner.stream, &ticket, until).await?;
                let sequence = found.as_ref().map_or(0, |found| found.sequence);
                if found.is_some_and(|found| found.value.is_some()) && sequence > served {
                    self.place = sequence;
                    return Ok(());
                }
                api.write(&ticket, sequence, writing(), until).await?
            }
            wrote => wrote,
        };
        match wrote {
            Wrote::Done(sequence) => {
                self.place = sequence;
                Ok(())
            }
            Wrote::Conflict => {
                let message = "our ticket was written to meanwhile";
                Err(Error::new(ErrorKind::Unknown, message))
            }
            Wrote::Unclear(error) => Err(unknown(error)),
        }
    }

    /// Waits for our turn, and takes it.
    async fn turn(&mut self, end: Time) -> Result<Waited> {
        let inner = Arc::clone(&self.inner);
        let mut tickets = inner.watches.of(&inner, &format!("{}.*", self.line)).await?;
        let mut record = inner.watches.of(&inner, &self.subject).await?;
        let mut joined = false;
        loop {
            tickets.borrow_and_update();
            record.borrow_and_update();
            let now = inner.now();
            let known = inner.keys.known(&self.subject).unwrap_or_default();
            if known.record.holder(self.claim.id).is_some() {
                return self.granted().await;
            }
            let place = inner.lines.place(&self.line, &self.name, known.record.served);
            joined |= place.is_some();
            // Somebody after us was served, or took our ticket away.
            if place.is_none() && joined || known.record.served >= self.place {
                return Ok(Waited::Gone);
            }
            let ahead = place.map(|(_, ahead)| ahead);
            let due = match (place, inner.decide(&known, &self.ask())) {
                (Some((place, ahead)), Claimed::Write(mut next)) => {
                    let due = self.patience(ahead, now);
                    if now >= due {
                        next.served = next.served.max(place);
                        if let Some(waited) = self.take(&known, next, place).await? {
                            return Ok(waited);
                        }
                        continue;
                    }
                    due
                }
                (Some((_, 0)), _) => known.watched.next(now).min(now + BACKSTOP),
                _ => {
                    self.idle = None;
                    known.watched.next(now)
                }
            };
            if now >= end {
                return Ok(Waited::Still { ahead });
            }
            let ended = |_| Error::new(ErrorKind::Unavailable, "the watch has ended");
            tokio::select! {
                news = tickets.changed() => news.map_err(ended)?,
                news = record.changed() => news.map_err(ended)?,
                () = inner.api.clock.sleep_until(due.min(end)) => {
                    if ahead == Some(0) {
                        inner.read(&self.subject, inner.api.until(BACKSTOP)).await?;
                    }
                }
            }
        }
    }

    /// When to take a free lock with so many ahead of us who do not: at once where there are none.
    fn patience(&mut self, ahead: usize, now: Time) -> Time {
        if ahead == 0 {
            return now;
        }
        let since = match self.idle {
            Some((known, since)) if known == ahead => since,
            _ => now,
        };
        self.idle = Some((ahead, since));
        since + TURN * u32::try_from(ahead).unwrap_or(u32::MAX)
    }

    /// Takes the lock at what is known of it; `None` where that was not so any more.
    async fn take(
        &mut self,
        known: &Known,
        next: format::Record,
        place: u64,
    ) -> Result<Option<Waited>> {
        let until = self.inner.api.until(self.claim.ttl / 4);
        let grant = self.inner.take(&self.claim, &self.subject, known, next, until).await?;
        let Some(grant) = grant else {
            self.inner.read(&self.subject, until).await?;
            return Ok(None);
        };
        if self.inner.lines.after(&self.line, place) == 0 {
            self.tidy(place + 1, until).await;
        }
        Ok(Some(Waited::Granted(grant)))
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
                Ok(Waited::Granted(crate::store::Grant { counts: Counts::FromConfirm, ..grant }))
            }
            _ => Ok(Waited::Gone),
        }
    }

    /// Removes the tickets before a sequence, all of them void. One that stays does no harm.
    async fn tidy(&self, before: u64, until: Until) {
        let ask = json!({ "filter": format!("{}.*", self.line), "seq": before });
        let subject = format!("STREAM.PURGE.{}", self.inner.stream);
        let _: Result<serde_json::Value, _> = self.inner.api.ask(&subject, &ask, until).await;
    }

    /// Takes the ticket away, so that those behind it learn of it.
    async fn leave(&self, until: Until) -> Result<()> {
        let (api, ticket) = (&self.inner.api, self.ticket());
        let Some(found) = api.last(&self.inner.stream, &ticket, until).await? else {
            return Ok(());
        };
        if found.value.is_some() {
            let gone = Writing { operation: Some("DEL"), ..Writing::default() };
            if let Wrote::Unclear(error) = api.write(&ticket, found.sequence, gone, until).await? {
                return Err(error);
            }
        }
        let ask = json!({ "filter": ticket });
        let subject = format!("STREAM.PURGE.{}", self.inner.stream);
        let _: Result<serde_json::Value, _> = api.ask(&subject, &ask, until).await;
        Ok(())
    }
}

#[async_trait]
impl Place for InLine {
    async fn wait(&mut self, limit: Duration) -> Result<Waited> {
        let end = self.inner.now() + limit;
        let waited = self.turn(end).await;
        waited.map_err(|error| error.on(&self.claim.key).at(&*self.inner))
    }

    async fn abandon(&mut self, limit: Duration) -> Result<()> {
        let until = self.inner.api.until(limit);
        let left = async {
            self.leave(until).await?;
            let known = self.inner.read(&self.subject, until).await?;
            match known.record.release(self.claim.id, known.sequence) {
                None => Ok(()),
                Some(free) => {
                    match self.inner.put(&self.subject, known.sequence, free, until).await? {
                        (Wrote::Done(_), _) => Ok(()),
                        (Wrote::Conflict, _) => {
                            let message = "the record was written to meanwhile: try again";
                            Err(Error::new(ErrorKind::Unavailable, message))
                        }
                        (Wrote::Unclear(error), _) => Err(error),
                    }
                }
            }
        };
        let left = left.await;
        left.map_err(|error: Error| error.on(&self.claim.key).at(&*self.inner))
    }
}

impl fmt::Debug for InLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InLine").field("key", &self.claim.key).finish_non_exhaustive()
    }
}
