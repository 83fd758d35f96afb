//! What a store, its holds and its watches share.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tenure_core::record::{RecordClaim, RecordDecision};
use tenure_core::{FencingToken, Key, Time};

use super::api::{Api, ApiDeadline, KeyWrite, Message, WriteOutcome};
use super::bucket;
use super::format::{KeyRecord, RecordHolder};
use super::hold::NatsHold;
use super::keys::{Keys, KnownKey, ReadSource};
use super::layout::BucketLayout;
use super::lineage::{Lineage, went_back};
use super::options::Options;
use super::queue::{self, TicketQueues};
use super::settings::{self, SettingsCheck};
use super::watch::Watches;
use crate::store::{
    Answer, Claim, Contended, Grant, HolderState, KeySpace, KeyState, LeaseStart, Version,
};
use crate::{Error, ErrorKind, Result};

/// How old what we know of a key may be to write on it without asking. A bucket that was deleted and made anew counts
/// from 1 again: a sequence known from its former life must not be met by chance in the next.
pub(super) const MAX_KNOWN_AGE: Duration = Duration::from_secs(2);

pub(super) struct NatsInner {
    pub(super) api: Api,
    pub(super) options: Options,
    pub(super) stream: String,
    pub(super) layout: BucketLayout,
    pub(super) keys: Keys,
    pub(super) watches: Watches,
    pub(super) queues: TicketQueues,
    lineage: Mutex<Lineage>,
    settings_check: SettingsCheck,
}

impl fmt::Display for NatsInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.options, f)
    }
}

impl NatsInner {
    pub(super) fn new(
        api: Api,
        options: Options,
        form: BucketLayout,
        lineage: Lineage,
        adopted: SettingsCheck,
    ) -> Self {
        let stream = format!("KV_{}", options.bucket);
        let (keys, watches, lines) = (Keys::default(), Watches::default(), TicketQueues::default());
        let lineage = Mutex::new(lineage);
        Self {
            api,
            options,
            stream,
            layout: form,
            keys,
            watches,
            queues: lines,
            lineage,
            settings_check: adopted,
        }
    }

    pub(super) fn subject(&self, key: &Key, space: KeySpace) -> String {
        format!("$KV.{}.{}", self.options.bucket, self.layout.name(key, space))
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
        self.recheck_settings(until).await?;
        self.check_ttl(claim.ttl)?;
        if self.layout == BucketLayout::Native && (claim.fair || self.options.fair) {
            return self.claim_in_order(claim, until).await;
        }
        self.claim_now(claim, until).await
    }

    /// The same, past those who wait in order.
    pub(super) async fn claim_now(
        self: &Arc<Self>,
        claim: &Claim,
        until: ApiDeadline,
    ) -> Result<Answer> {
        let subject = self.subject(&claim.key, claim.mode.space());
        let ask =
            RecordClaim { claim: claim.id, mode: claim.mode, lease: claim.ttl, by: &*claim.by };
        // What we know may let us in with a single request: that is conditional on what we know being true.
        if let Some(known) = self.keys.known(&subject)
            && self.now().since(known.at) < MAX_KNOWN_AGE
            && let RecordDecision::Write(next) = self.decide(&known, &ask)
            && let Some(grant) = self.take(claim, &subject, &known, next, until).await?
        {
            return Ok(Answer::Granted(grant));
        }
        self.refresh_server_time(until).await?;
        // A second look only where somebody wrote between the first and our own write.
        let mut contended = Version::default();
        for _ in 0..2 {
            let known = self.read(&subject, until).await?;
            match self.decide(&known, &ask) {
                RecordDecision::AlreadyGranted(_) => {
                    return self.granted_before(claim, subject, known, until).await;
                }
                RecordDecision::Contended(holder) => {
                    return Ok(Answer::Contended(self.contended(&known, holder)));
                }
                RecordDecision::LimitMismatch(other) => {
                    let message = format!("the semaphore has {other} slots while it is in use");
                    return Err(Error::new(ErrorKind::Invalid, message));
                }
                RecordDecision::Write(next) => {
                    contended = Version(!u128::from(known.sequence));
                    if let Some(grant) = self.take(claim, &subject, &known, next, until).await? {
                        return Ok(Answer::Granted(grant));
                    }
                }
            }
        }
        // Whoever was quicker is not known; nothing that is shown of the key equals this, so that a watch ends at once.
        Ok(Answer::Contended(Contended { version: contended, ..Contended::default() }))
    }

    /// In nlock's form a hold lasts as long as the bucket says: a holder must not think longer of it. In ours a record
    /// that the bucket removes by its age must have outlived its lease.
    pub(super) fn check_ttl(&self, asked: Duration) -> Result<()> {
        match self.layout {
            BucketLayout::Nlock { ttl } if asked > ttl => {
                let message = format!(
                    "the ttl of {asked:?} is above the bucket's own of {ttl:?}: ask for that at most"
                );
                Err(Error::new(ErrorKind::Invalid, message))
            }
            BucketLayout::Native
                if self.settings_check.max_age().is_some_and(|kept| asked >= kept) =>
            {
                let kept = settings::age(self.settings_check.max_age().unwrap_or_default());
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
    pub(super) async fn recheck_settings(&self, until: ApiDeadline) -> Result<()> {
        if !self.settings_check.is_due(self.api.connections()) {
            return Ok(());
        }
        let known = self.settings_check.basis_now(self.api.connections());
        let info = bucket::info(&self.api, &self.stream, until).await.map_err(|trouble| {
            // A server that restarts may say that JetStream is off. That is no word about the bucket: no hold ends by it.
            let message = "the settings of the bucket could not be read";
            Error::new(ErrorKind::Unavailable, message).because(Error::from(trouble))
        })?;
        self.check_settings(&info, known)
    }

    /// Whether the bucket is still one that keeps records, and of the form that it had.
    fn check_settings(
        &self,
        info: &bucket::StreamInfo,
        known: settings::SettingsBasis,
    ) -> Result<()> {
        // The number of replicas is asked for when a bucket is adopted; a cluster may be resized under its clients.
        let asked = Options { replicas: None, ttl: None, ..self.options.clone() };
        let same = |form: BucketLayout| {
            if (form == BucketLayout::Native) == (self.layout == BucketLayout::Native) {
                return Ok(());
            }
            let bucket = &self.options.bucket;
            let message =
                format!("the bucket {bucket} is refused: its form was changed: connect again");
            Err(Error::new(ErrorKind::Misconfigured, message))
        };
        let checked = bucket::layout_of(&info.config, &asked).and_then(same);
        match checked {
            Ok(()) => self.settings_check.confirm(info, known, self.now()),
            // The next claim asks again.
            Err(_) => self.settings_check.doubt(),
        }
        checked
    }

    /// A bucket of nlock's form whose ttl another participant has shortened removes holds before their time.
    pub(super) fn check_age(&self, info: &bucket::StreamInfo) -> Result<()> {
        match self.layout {
            BucketLayout::Nlock { ttl } if info.age() != ttl => {
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
        known: &'a KnownKey,
        ask: &RecordClaim<'_, crate::store::Identity>,
    ) -> RecordDecision<'a, crate::store::Identity> {
        let now = self.now();
        let server = self.lineage().server_time(now);
        let over = |holder: &RecordHolder| {
            self.layout == BucketLayout::Native
                && known.may_be_taken_over(holder, now, Some(server))
        };
        known.record.claim(ask, known.sequence, over)
    }

    pub(super) fn contended(&self, known: &KnownKey, holder: &RecordHolder) -> Contended {
        Contended {
            holder: Some(holder.by.clone()),
            version: known.version(self.now()),
            retry_after: None,
            note: None,
        }
    }

    /// Writes the record that grants; `None` where another was quicker.
    pub(super) async fn take(
        self: &Arc<Self>,
        claim: &Claim,
        subject: &str,
        known: &KnownKey,
        next: KeyRecord,
        until: ApiDeadline,
    ) -> Result<Option<Grant>> {
        self.recheck_settings(until).await?;
        let high = self.lineage().high;
        // Only who has a place in the queue is served there.
        let place = (next.served > known.record.served).then_some(next.served);
        let put = self.put(subject, known.sequence, next, self.request_share(until)).await?;
        let (landed, counts) = match put {
            (WriteOutcome::Done(_), written) => (written, LeaseStart::FromRequest),
            (WriteOutcome::Conflict, _) => return Ok(None),
            (WriteOutcome::Unclear(error), _) => match self.read(subject, until).await {
                // It may be an earlier write of ours that landed.
                Ok(found) if found.record.holder(claim.id).is_some() => {
                    (found, LeaseStart::FromConfirm)
                }
                Ok(found) if found.sequence > known.sequence => return Ok(None),
                _ => return Err(as_unknown(error)),
            },
        };
        // Another participant may have changed the ttl of nlock's bucket: it is looked at with every grant.
        // A write that was sent while the connection was down is delivered over the next one: it landed in a bucket that
        // may have been edited since it was last looked at.
        let due = self.settings_check.is_due(self.api.connections());
        let fresh = known.sequence == 0 || self.layout != BucketLayout::Native || due;
        let epoch = self.epoch_of(landed.sequence, high, fresh, until).await;
        if let Err(error) = &epoch
            && error.kind() == ErrorKind::Misconfigured
            && let Some(free) = landed.record.release(claim.id, landed.sequence)
        {
            // The bucket was edited: that the key had no record may be because a holder's was dropped. What could not be
            // taken back ends with its lease: until then the caller may hold it, and is told that it is not known.
            let freed = self.put(subject, landed.sequence, free, until).await;
            if !matches!(freed, Ok((WriteOutcome::Done(_), _))) {
                return Err(as_unknown(Error::new(ErrorKind::Unknown, error.to_string())));
            }
        }
        // It is held for us, whatever we could not learn after that.
        let epoch = epoch.map_err(|error| match error.kind() {
            ErrorKind::Unavailable if error.to_string().contains("went back") => error,
            ErrorKind::Misconfigured => error,
            ErrorKind::NotHeld => Error::new(ErrorKind::Misconfigured, error.to_string()),
            _ => as_unknown(error),
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
        known: KnownKey,
        until: ApiDeadline,
    ) -> Result<Answer> {
        let epoch = self.epoch_of(known.sequence, 0, true, until).await?;
        Ok(self.granted(claim, subject, known, epoch, LeaseStart::FromConfirm, None))
    }

    pub(super) fn granted(
        self: &Arc<Self>,
        claim: &Claim,
        subject: String,
        known: KnownKey,
        epoch: u64,
        counts: LeaseStart,
        place: Option<u64>,
    ) -> Answer {
        let KnownKey { sequence, record, .. } = known;
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
        Answer::Granted(Grant {
            token,
            lease_start: counts,
            handoff_requested: false,
            grants: None,
            hold,
        })
    }

    /// The epoch of a write that landed as `sequence`, when `high` was the largest known before it was sent.
    ///
    /// A stream that was deleted and made anew counts from 1 again, under another epoch. That shows by a sequence which
    /// is not new, or, where nothing was ever written to the key, only by asking.
    async fn epoch_of(
        &self,
        sequence: u64,
        high: u64,
        fresh: bool,
        until: ApiDeadline,
    ) -> Result<u64> {
        if sequence > high && !fresh {
            return Ok(self.lineage().epoch);
        }
        let known = self.settings_check.basis_now(self.api.connections());
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
        match self.layout {
            // Memory forgets with a restart: the best that can be done is another epoch.
            BucketLayout::Nlock { .. } => {
                (lineage.epoch, lineage.high) = (info.time()?, sequence);
                Ok(lineage.epoch)
            }
            BucketLayout::Native => Err(went_back(high, sequence)),
        }
    }

    /// Writes a record at a sequence, and notes it where it landed.
    pub(super) async fn put(
        &self,
        subject: &str,
        sequence: u64,
        mut record: KeyRecord,
        until: ApiDeadline,
    ) -> Result<(WriteOutcome, KnownKey)> {
        record.epoch = self.lineage().epoch;
        let sent = self.now();
        let wrote = self.write(subject, sequence, self.layout.write(&record), until).await?;
        let WriteOutcome::Done(landed) = wrote else { return Ok((wrote, KnownKey::default())) };
        self.lineage().note(landed);
        let seen = (landed, record.clone(), None);
        self.keys.note(subject, seen, ReadSource::Notification, (sent, self.now()));
        Ok((wrote, KnownKey { sequence: landed, record, ..KnownKey::default() }))
    }

    /// Writes a value at a sequence. A refusal is reason to look at the settings of the bucket before the next grant.
    pub(super) async fn write(
        &self,
        subject: &str,
        sequence: u64,
        writing: KeyWrite,
        until: ApiDeadline,
    ) -> Result<WriteOutcome> {
        let error = match self.api.write(subject, sequence, writing, until).await {
            Ok(WriteOutcome::Conflict) => {
                self.settings_check.conflict(self.now());
                return Ok(WriteOutcome::Conflict);
            }
            Ok(wrote) => return Ok(wrote),
            Err(error) => error,
        };
        self.settings_check.doubt();
        if error.kind() != ErrorKind::Misconfigured {
            return Err(error);
        }
        // A limit: without its value the server's words alone would have to do.
        let Ok(info) = bucket::info(&self.api, &self.stream, until).await else {
            return Err(error);
        };
        let message = settings::limit_error(&info, &self.options.bucket, &error.to_string());
        Err(Error::new(ErrorKind::Misconfigured, message))
    }

    /// What the leader of the stream says of a key.
    pub(super) async fn read(&self, subject: &str, until: ApiDeadline) -> Result<KnownKey> {
        let sent = self.now();
        let message = self.api.last(&self.stream, subject, until).await?;
        let (sequence, record, time) = match message {
            None => (0, KeyRecord::default(), None),
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
        Ok(self.keys.note(subject, seen, ReadSource::Leader, (sent, self.now())))
    }

    /// What a watch tells of a key or of a ticket.
    pub(super) fn note_message(&self, message: &Message) {
        let (now, root) = (self.now(), self.root());
        self.lineage().note(message.sequence);
        if self.layout == BucketLayout::Native && queue::is_ticket(&root, &message.subject) {
            // The record first: whoever hears that the ticket is gone goes by it.
            if let Some(record) = queue::handed_over_record(&root, message) {
                self.note_message(&record);
            }
            return self.queues.note_message(message);
        }
        if let Ok(record) = self.layout.read(message) {
            let seen = (message.sequence, record, Some(message.time));
            self.keys.note(&message.subject, seen, ReadSource::Notification, (now, now));
        }
    }

    /// What the subjects of the bucket begin with.
    pub(super) fn root(&self) -> String {
        format!("$KV.{}.", self.options.bucket)
    }

    fn parse(&self, message: &Message) -> Result<KeyRecord> {
        self.layout.read(message).map_err(|why| {
            let subject = &message.subject;
            let message =
                format!("{subject} is not touched: {why}; delete it or choose another key");
            Error::new(ErrorKind::Misconfigured, message)
        })
    }

    /// Hears of the server's time again, where what we know of it is old.
    async fn refresh_server_time(&self, until: ApiDeadline) -> Result<()> {
        let old = self.lineage().is_old(self.now());
        if self.layout == BucketLayout::Native && old {
            let known = self.settings_check.basis_now(self.api.connections());
            let info = bucket::info(&self.api, &self.stream, until).await?;
            self.check_settings(&info, known)?;
            self.lineage().refresh(&info, self.now())?;
        }
        Ok(())
    }

    /// The time for a write whose outcome can still be asked for.
    pub(super) fn request_share(&self, until: ApiDeadline) -> ApiDeadline {
        let now = self.now();
        ApiDeadline(now + until.0.since(now).mul_f64(0.7))
    }

    /// A key as others see it.
    pub(super) fn key_state(&self, key: Key, space: KeySpace, known: &KnownKey) -> KeyState {
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
        KeyState { key, space, holders, waiters: Vec::new(), version: known.version(now) }
    }
}

/// The same failure, after which nobody knows whether it landed.
pub(super) fn as_unknown(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Unknown | ErrorKind::Denied => error,
        _ => Error::new(ErrorKind::Unknown, error.to_string()).because(error),
    }
}
