//! What a store, its holds and its watches share.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tenure_core::record::{RecordClaim, RecordDecision};
use tenure_core::{FencingToken, Key, Time};

use super::api::{Api, Message, Until, Writing, Wrote};
use super::bucket;
use super::form::Form;
use super::format::{Holder, Record};
use super::hold::NatsHold;
use super::keys::{Keys, Known, Source};
use super::lineage::{Lineage, went_back};
use super::options::Options;
use super::queue::{self, Lines};
use super::settings::{self, Adopted};
use super::watch::Watches;
use crate::store::{Answer, Busy, Claim, Grant, HolderState, KeySpace, KeyState, LeaseStart, Seen};
use crate::{Error, ErrorKind, Result};

/// How old what we know of a key may be to write on it without asking. A bucket that was deleted and made anew counts
/// from 1 again: a sequence known from its former life must not be met by chance in the next.
pub(super) const FRESH: Duration = Duration::from_secs(2);

pub(super) struct Inner {
    pub(super) api: Api,
    pub(super) options: Options,
    pub(super) stream: String,
    pub(super) form: Form,
    pub(super) keys: Keys,
    pub(super) watches: Watches,
    pub(super) lines: Lines,
    lineage: Mutex<Lineage>,
    adopted: Adopted,
}

impl fmt::Display for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.options, f)
    }
}

impl Inner {
    pub(super) fn new(
        api: Api,
        options: Options,
        form: Form,
        lineage: Lineage,
        adopted: Adopted,
    ) -> Self {
        let stream = format!("KV_{}", options.bucket);
        let (keys, watches, lines) = (Keys::default(), Watches::default(), Lines::default());
        let lineage = Mutex::new(lineage);
        Self { api, options, stream, form, keys, watches, lines, lineage, adopted }
    }

    pub(super) fn subject(&self, key: &Key, space: KeySpace) -> String {
        format!("$KV.{}.{}", self.options.bucket, self.form.name(key, space))
    }

    pub(super) fn now(&self) -> Time {
        self.api.clock.now()
    }

    pub(super) fn lineage(&self) -> MutexGuard<'_, Lineage> {
        self.lineage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One attempt to be granted.
    pub(super) async fn claim(self: &Arc<Self>, claim: &Claim, limit: Duration) -> Result<Answer> {
        let until = self.api.until(limit);
        self.check_again(until).await?;
        self.check_ttl(claim.ttl)?;
        if self.form == Form::Ours && (claim.fair || self.options.fair) {
            return self.claim_in_line(claim, until).await;
        }
        self.claim_now(claim, until).await
    }

    /// The same, past those who wait in order.
    pub(super) async fn claim_now(self: &Arc<Self>, claim: &Claim, until: Until) -> Result<Answer> {
        let subject = self.subject(&claim.key, claim.mode.space());
        let ask =
            RecordClaim { claim: claim.id, mode: claim.mode, lease: claim.ttl, by: &*claim.by };
        // What we know may let us in with a single request: that is conditional on what we know being true.
        if let Some(known) = self.keys.known(&subject)
            && self.now().since(known.at) < FRESH
            && let RecordDecision::Write(next) = self.decide(&known, &ask)
            && let Some(grant) = self.take(claim, &subject, &known, next, until).await?
        {
            return Ok(Answer::Granted(grant));
        }
        self.refresh_server_time(until).await?;
        // A second look only where somebody wrote between the first and our own write.
        let mut contended = Seen::default();
        for _ in 0..2 {
            let known = self.read(&subject, until).await?;
            match self.decide(&known, &ask) {
                RecordDecision::AlreadyGranted(_) => {
                    return self.granted_before(claim, subject, known, until).await;
                }
                RecordDecision::Contended(holder) => {
                    return Ok(Answer::Busy(self.busy(&known, holder)));
                }
                RecordDecision::LimitMismatch(other) => {
                    let message = format!("the semaphore has {other} slots while it is in use");
                    return Err(Error::new(ErrorKind::Invalid, message));
                }
                RecordDecision::Write(next) => {
                    contended = Seen(!u128::from(known.sequence));
                    if let Some(grant) = self.take(claim, &subject, &known, next, until).await? {
                        return Ok(Answer::Granted(grant));
                    }
                }
            }
        }
        // Whoever was quicker is not known; nothing that is shown of the key equals this, so that a watch ends at once.
        Ok(Answer::Busy(Busy { seen: contended, ..Busy::default() }))
    }

    /// In nlock's form a hold lasts as long as the bucket says: a holder must not think longer of it. In ours a record
    /// that the bucket removes by its age must have outlived its lease.
    pub(super) fn check_ttl(&self, asked: Duration) -> Result<()> {
        match self.form {
            Form::Nlock { ttl } if asked > ttl => {
                let message = format!(
                    "the ttl of {asked:?} is above the bucket's own of {ttl:?}: ask for that at most"
                );
                Err(Error::new(ErrorKind::Invalid, message))
            }
            Form::Ours if self.adopted.kept().is_some_and(|kept| asked >= kept) => {
                let kept = settings::age(self.adopted.kept().unwrap_or_default());
                let bucket = &self.options.bucket;
                let message = format!(
                    "the ttl of {} is not shorter than the {kept} for which the bucket {bucket} keeps records (max_age): ask \
                     for less, or run `nats stream edit KV_{bucket} --max-age=-1`",
                    settings::age(asked)
                );
                Err(Error::new(ErrorKind::Invalid, message))
            }
            _ => Ok(()),
        }
    }

    /// Looks at the settings of the bucket again where there is reason to: after a reconnect, since the bucket may have
    /// been edited or made anew meanwhile, and after a write that was refused.
    ///
    /// Misconfigured where the bucket is unfit now; then each call asks again, until it is mended.
    pub(super) async fn check_again(&self, until: Until) -> Result<()> {
        if !self.adopted.is_due(self.api.connections()) {
            return Ok(());
        }
        let known = self.adopted.now(self.api.connections());
        let info = bucket::info(&self.api, &self.stream, until).await.map_err(|trouble| {
            // A server that restarts may say that JetStream is off. That is no word about the bucket: no hold ends by it.
            let message = "the settings of the bucket could not be read";
            Error::new(ErrorKind::Unavailable, message).because(Error::from(trouble))
        })?;
        self.check_settings(&info, known)
    }

    /// Whether the bucket is still one that keeps records, and of the form that it had.
    fn check_settings(&self, info: &bucket::Info, known: settings::Known) -> Result<()> {
        // The number of replicas is asked for when a bucket is adopted; a cluster may be resized under its clients.
        let asked = Options { replicas: None, ttl: None, ..self.options.clone() };
        let same = |form: Form| {
            if (form == Form::Ours) == (self.form == Form::Ours) {
                return Ok(());
            }
            let bucket = &self.options.bucket;
            let message =
                format!("the bucket {bucket} is refused: its form was changed: connect again");
            Err(Error::new(ErrorKind::Misconfigured, message))
        };
        let checked = bucket::form_of(&info.config, &asked).and_then(same);
        match checked {
            Ok(()) => self.adopted.fit(info, known, self.now()),
            // The next claim asks again.
            Err(_) => self.adopted.doubt(),
        }
        checked
    }

    /// A bucket of nlock's form whose ttl another participant has shortened removes holds before their time.
    pub(super) fn check_age(&self, info: &bucket::Info) -> Result<()> {
        match self.form {
            Form::Nlock { ttl } if info.age() != ttl => {
                let age = info.age();
                let message = format!(
                    "another participant changed the bucket's ttl from {ttl:?} to {age:?}: connect again"
                );
                Err(Error::new(ErrorKind::NotHeld, message))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn decide<'a>(
        &self,
        known: &'a Known,
        ask: &RecordClaim<'_, crate::store::Identity>,
    ) -> RecordDecision<'a, crate::store::Identity> {
        let now = self.now();
        let server = self.lineage().server_time(now);
        let over =
            |holder: &Holder| self.form == Form::Ours && known.over(holder, now, Some(server));
        known.record.claim(ask, known.sequence, over)
    }

    pub(super) fn busy(&self, known: &Known, holder: &Holder) -> Busy {
        Busy {
            holder: Some(holder.by.clone()),
            seen: known.seen(self.now()),
            retry_after: None,
            note: None,
        }
    }

    /// Writes the record that grants; `None` where another was quicker.
    pub(super) async fn take(
        self: &Arc<Self>,
        claim: &Claim,
        subject: &str,
        known: &Known,
        next: Record,
        until: Until,
    ) -> Result<Option<Grant>> {
        self.check_again(until).await?;
        let high = self.lineage().high;
        // Only who has a place in the queue is served there.
        let place = (next.served > known.record.served).then_some(next.served);
        let put = self.put(subject, known.sequence, next, self.part(until)).await?;
        let (landed, counts) = match put {
            (Wrote::Done(_), written) => (written, LeaseStart::FromRequest),
            (Wrote::Conflict, _) => return Ok(None),
            (Wrote::Unclear(error), _) => match self.read(subject, until).await {
                // It may be an earlier write of ours that landed.
                Ok(found) if found.record.holder(claim.id).is_some() => {
                    (found, LeaseStart::FromConfirm)
                }
                Ok(found) if found.sequence > known.sequence => return Ok(None),
                _ => return Err(unknown(error)),
            },
        };
        // Another participant may have changed the ttl of nlock's bucket: it is looked at with every grant.
        // A write that was sent while the connection was down is delivered over the next one: it landed in a bucket that
        // may have been edited since it was last looked at.
        let due = self.adopted.is_due(self.api.connections());
        let fresh = known.sequence == 0 || self.form != Form::Ours || due;
        let epoch = self.epoch_of(landed.sequence, high, fresh, until).await;
        if let Err(error) = &epoch
            && error.kind() == ErrorKind::Misconfigured
            && let Some(free) = landed.record.release(claim.id, landed.sequence)
        {
            // The bucket was edited: that the key had no record may be because a holder's was dropped. What could not be
            // taken back ends with its lease: until then the caller may hold it, and is told that it is not known.
            let freed = self.put(subject, landed.sequence, free, until).await;
            if !matches!(freed, Ok((Wrote::Done(_), _))) {
                return Err(unknown(Error::new(ErrorKind::Unknown, error.to_string())));
            }
        }
        // It is held for us, whatever we could not learn after that.
        let epoch = epoch.map_err(|error| match error.kind() {
            ErrorKind::Unavailable if error.to_string().contains("went back") => error,
            ErrorKind::Misconfigured => error,
            ErrorKind::NotHeld => Error::new(ErrorKind::Misconfigured, error.to_string()),
            _ => unknown(error),
        })?;
        match self.granted(claim, subject.to_owned(), landed, epoch, counts, place) {
            Answer::Granted(grant) => Ok(Some(grant)),
            _ => Ok(None),
        }
    }

    /// What an earlier sending of the claim was granted.
    pub(super) async fn granted_before(
        self: &Arc<Self>,
        claim: &Claim,
        subject: String,
        known: Known,
        until: Until,
    ) -> Result<Answer> {
        let epoch = self.epoch_of(known.sequence, 0, true, until).await?;
        Ok(self.granted(claim, subject, known, epoch, LeaseStart::FromConfirm, None))
    }

    pub(super) fn granted(
        self: &Arc<Self>,
        claim: &Claim,
        subject: String,
        known: Known,
        epoch: u64,
        counts: LeaseStart,
        place: Option<u64>,
    ) -> Answer {
        let Known { sequence, record, .. } = known;
        let holder = record.holder(claim.id);
        let number = holder.map_or(sequence, |holder| holder.number(sequence));
        let token = FencingToken::new(epoch, number);
        let age = holder.map(|holder| holder.held).unwrap_or_default();
        let hold = NatsHold {
            inner: Arc::clone(self),
            key: claim.key.clone(),
            space: claim.mode.space(),
            subject,
            claim: claim.id,
            token,
            sequence,
            record,
            since: self.now() - age,
            place,
        };
        let hold = Box::new(hold);
        Answer::Granted(Grant { token, counts, waiter: false, grants: None, hold })
    }

    /// The epoch of a write that landed as `sequence`, when `high` was the largest known before it was sent.
    ///
    /// A stream that was deleted and made anew counts from 1 again, under another epoch. That shows by a sequence which
    /// is not new, or, where nothing was ever written to the key, only by asking.
    async fn epoch_of(&self, sequence: u64, high: u64, fresh: bool, until: Until) -> Result<u64> {
        if sequence > high && !fresh {
            return Ok(self.lineage().epoch);
        }
        let known = self.adopted.now(self.api.connections());
        let info = bucket::info(&self.api, &self.stream, until).await?;
        self.check_age(&info)?;
        // A record that the bucket dropped looks like a key that was never held: this is where that shows.
        self.check_settings(&info, known)?;
        let mut lineage = self.lineage();
        let before = lineage.epoch;
        lineage.refresh(&info, self.api.clock.now())?;
        if sequence > high || lineage.epoch != before {
            return Ok(lineage.epoch);
        }
        match self.form {
            // Memory forgets with a restart: the best that can be done is another epoch.
            Form::Nlock { .. } => {
                (lineage.epoch, lineage.high) = (info.time()?, sequence);
                Ok(lineage.epoch)
            }
            Form::Ours => Err(went_back(high, sequence)),
        }
    }

    /// Writes a record at a sequence, and notes it where it landed.
    pub(super) async fn put(
        &self,
        subject: &str,
        sequence: u64,
        mut record: Record,
        until: Until,
    ) -> Result<(Wrote, Known)> {
        record.epoch = self.lineage().epoch;
        let sent = self.now();
        let wrote = self.write(subject, sequence, self.form.write(&record), until).await?;
        let Wrote::Done(landed) = wrote else { return Ok((wrote, Known::default())) };
        self.lineage().note(landed);
        let seen = (landed, record.clone(), None);
        self.keys.note(subject, seen, Source::Hearsay, (sent, self.now()));
        Ok((wrote, Known { sequence: landed, record, ..Known::default() }))
    }

    /// Writes a value at a sequence. A refusal is reason to look at the settings of the bucket before the next grant.
    pub(super) async fn write(
        &self,
        subject: &str,
        sequence: u64,
        writing: Writing,
        until: Until,
    ) -> Result<Wrote> {
        let error = match self.api.write(subject, sequence, writing, until).await {
            Ok(Wrote::Conflict) => {
                self.adopted.conflict(self.now());
                return Ok(Wrote::Conflict);
            }
            Ok(wrote) => return Ok(wrote),
            Err(error) => error,
        };
        self.adopted.doubt();
        if error.kind() != ErrorKind::Misconfigured {
            return Err(error);
        }
        // A limit: without its value the server's words alone would have to do.
        let Ok(info) = bucket::info(&self.api, &self.stream, until).await else {
            return Err(error);
        };
        let message = settings::limit_met(&info, &self.options.bucket, &error.to_string());
        Err(Error::new(ErrorKind::Misconfigured, message))
    }

    /// What the leader of the stream says of a key.
    pub(super) async fn read(&self, subject: &str, until: Until) -> Result<Known> {
        let sent = self.now();
        let message = self.api.last(&self.stream, subject, until).await?;
        let (sequence, record, time) = match message {
            None => (0, Record::default(), None),
            Some(message) => (message.sequence, self.parse(&message)?, Some(message.time)),
        };
        let epoch = self.lineage().epoch;
        if record.epoch != epoch && record.epoch != 0 {
            let info = bucket::info(&self.api, &self.stream, until).await?;
            self.lineage().refresh(&info, self.now())?;
        }
        if record.epoch == self.lineage().epoch && record.fence > sequence {
            return Err(went_back(record.fence, sequence));
        }
        self.lineage().note(sequence);
        let seen = (sequence, record, time);
        Ok(self.keys.note(subject, seen, Source::Leader, (sent, self.now())))
    }

    /// What a watch tells of a key or of a ticket.
    pub(super) fn heard(&self, message: &Message) {
        let (now, root) = (self.now(), self.root());
        self.lineage().note(message.sequence);
        if self.form == Form::Ours && queue::is_ticket(&root, &message.subject) {
            // The record first: whoever hears that the ticket is gone goes by it.
            if let Some(record) = queue::passed_on(&root, message) {
                self.heard(&record);
            }
            return self.lines.heard(message);
        }
        if let Ok(record) = self.form.read(message) {
            let seen = (message.sequence, record, Some(message.time));
            self.keys.note(&message.subject, seen, Source::Hearsay, (now, now));
        }
    }

    /// What the subjects of the bucket begin with.
    pub(super) fn root(&self) -> String {
        format!("$KV.{}.", self.options.bucket)
    }

    fn parse(&self, message: &Message) -> Result<Record> {
        self.form.read(message).map_err(|why| {
            let subject = &message.subject;
            let message =
                format!("{subject} is not touched: {why}; delete it or choose another key");
            Error::new(ErrorKind::Misconfigured, message)
        })
    }

    /// Hears of the server's time again, where what we know of it is old.
    async fn refresh_server_time(&self, until: Until) -> Result<()> {
        let old = self.lineage().is_old(self.now());
        if self.form == Form::Ours && old {
            let known = self.adopted.now(self.api.connections());
            let info = bucket::info(&self.api, &self.stream, until).await?;
            self.check_settings(&info, known)?;
            self.lineage().refresh(&info, self.now())?;
        }
        Ok(())
    }

    /// The time for a write whose outcome can still be asked for.
    pub(super) fn part(&self, until: Until) -> Until {
        let now = self.now();
        Until(now + until.0.since(now).mul_f64(0.7))
    }

    /// A key as others see it.
    pub(super) fn show(&self, key: Key, space: KeySpace, known: &Known) -> KeyState {
        let now = self.now();
        let lineage = *self.lineage();
        let holders = known.holders(now).map(|holder| {
            let number = holder.number(known.sequence);
            let age = known.time.map(|time| lineage.server_time(now).saturating_sub(time));
            let margin = holder.lease.map(tenure_core::lease::margin).unwrap_or_default();
            let end = known.watched.takeover_at(holder.claim) - margin;
            HolderState {
                by: Some(holder.by.clone()),
                token: FencingToken::new(lineage.epoch, number),
                held_for: age.map(|age| holder.held + Duration::from_nanos(age)),
                lease_left: holder.lease.map(|_| end.since(now)),
                revision: Some(known.sequence),
            }
        });
        let holders = holders.collect();
        KeyState { key, space, holders, waiters: Vec::new(), seen: known.seen(now) }
    }
}

/// The same failure, after which nobody knows whether it landed.
pub(super) fn unknown(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Unknown | ErrorKind::Denied => error,
        _ => Error::new(ErrorKind::Unknown, error.to_string()).because(error),
    }
}
