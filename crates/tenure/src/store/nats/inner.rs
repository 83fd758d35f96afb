//! State that a store shares with its holds and watches: claims, conditional writes and reads of records.

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tenure_core::record::{
    Lineage, LineageMark, RecordClaim, RecordDecision, RecordSource, SeenRecord, WriteFate,
};
use tenure_core::{FencingToken, Key, Time};

use super::api::{Api, ApiDeadline, KeyWrite, Message, WriteOutcome};
use super::bucket;
use super::format::{KeyRecord, RecordHolder};
use super::hold::NatsHold;
use super::keys::{self, KnownKey, KnownKeys};
use super::layout::BucketLayout;
use super::lineage::{self, TokenError, went_back_error};
use super::options::Options;
use super::queue::{self, TicketQueues};
use super::settings::{self, SettingsCheck};
use super::watch::Watches;
use crate::store::{
    Answer, Claim, Contended, Grant, HolderState, KeySpace, KeyState, LeaseStart, Version,
};
use crate::{Error, ErrorKind, Result};

pub(super) struct NatsInner {
    pub(super) api: Api,
    pub(super) options: Options,
    pub(super) stream: String,
    pub(super) layout: BucketLayout,
    pub(super) keys: KnownKeys,
    pub(super) watches: Watches,
    pub(super) queues: TicketQueues,
    /// Largest renewal count that any hold of this store has tried to write.
    ///
    /// It is not kept per hold: a claim can be granted several times, to one hold after another, and a renewal of an
    /// earlier hold may still land.
    pub(super) attempted: AtomicU64,
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
        layout: BucketLayout,
        lineage: Lineage,
        settings_check: SettingsCheck,
    ) -> Self {
        let stream = format!("KV_{}", options.bucket);
        let (keys, watches, queues) =
            (KnownKeys::default(), Watches::default(), TicketQueues::default());
        let (attempted, lineage) = (AtomicU64::new(0), Mutex::new(lineage));
        Self {
            api,
            options,
            stream,
            layout,
            keys,
            watches,
            queues,
            attempted,
            lineage,
            settings_check,
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

    /// Makes one attempt at a claim, through the ticket queue if the claim or the URL requests that.
    pub(super) async fn claim(self: &Arc<Self>, claim: &Claim, limit: Duration) -> Result<Answer> {
        let until = self.api.deadline_after(limit);
        self.recheck_settings(until).await?;
        self.check_ttl(claim.ttl)?;
        if self.layout == BucketLayout::Native && (claim.fair || self.options.fair) {
            return self.claim_in_order(claim, until).await;
        }
        self.claim_now(claim, until).await
    }

    /// Makes one attempt at a claim, without regard to the ticket queue.
    pub(super) async fn claim_now(
        self: &Arc<Self>,
        claim: &Claim,
        until: ApiDeadline,
    ) -> Result<Answer> {
        let subject = self.subject(&claim.key, claim.mode.space());
        let request =
            RecordClaim { id: claim.id, mode: claim.mode, lease: claim.ttl, by: &*claim.by };
        // Optimistic: if a record that was seen recently allows the grant, the grant is written without a read, in a
        // single request. If the record has changed since, the server refuses the write, and the claim continues with a
        // read.
        if let Some(known) = self.keys.known(&subject)
            && known.may_be_overwritten(self.now(), self.api.connections())
            && let RecordDecision::Write(next) = self.decide(&known, &request)
            && let Some(grant) = self.take(claim, &subject, &known, next, until).await?
        {
            return Ok(Answer::Granted(grant));
        }
        self.refresh_server_time(until).await?;
        // Two rounds: the second only if another write came between our read and our write.
        let mut unread_version = Version::default();
        for _ in 0..2 {
            let known = self.read(&subject, until).await?;
            match self.decide(&known, &request) {
                RecordDecision::AlreadyGranted(_) => {
                    return self.granted_before(claim, subject, known, until).await;
                }
                RecordDecision::Contended(holder) => {
                    return Ok(Answer::Contended(self.contended(&known, holder)));
                }
                RecordDecision::LimitMismatch(other) => {
                    let message =
                        format!("the semaphore is in use with {other} slots: use the same number");
                    return Err(Error::new(ErrorKind::Invalid, message));
                }
                RecordDecision::Write(next) => {
                    unread_version = Version(!u128::from(known.sequence));
                    if let Some(grant) = self.take(claim, &subject, &known, next, until).await? {
                        return Ok(Answer::Granted(grant));
                    }
                }
            }
        }
        // Another client was quicker twice, and its record was not read. The complement of a sequence is a version that
        // no state of the key has: a caller that waits for a change from that version is woken at once, and claims
        // again.
        Ok(Answer::Contended(Contended { version: unread_version, ..Contended::default() }))
    }

    /// Refuses a ttl that the bucket cannot keep.
    ///
    /// In nlock's layout the bucket's ttl ends the hold: a holder with a longer lease would continue after that. In
    /// tenure's layout the bucket may remove records by age (`max_age`), and must not do so before the lease ends.
    pub(super) fn check_ttl(&self, requested: Duration) -> Result<()> {
        match self.layout {
            BucketLayout::Nlock { ttl } if requested > ttl => {
                let message = format!(
                    "the ttl of {requested:?} is longer than the bucket's ttl of {ttl:?}: use at most that"
                );
                Err(Error::new(ErrorKind::Invalid, message))
            }
            BucketLayout::Native
                if self.settings_check.max_age().is_some_and(|max_age| requested >= max_age) =>
            {
                let max_age =
                    settings::format_age(self.settings_check.max_age().unwrap_or_default());
                let bucket = &self.options.bucket;
                let message = format!(
                    "the ttl of {} is not shorter than the {max_age} for which the bucket {bucket} keeps records (max_age): use \
                     a shorter one, or run `nats stream edit KV_{bucket} --max-age=-1`",
                    settings::format_age(requested)
                );
                Err(Error::new(ErrorKind::Invalid, message))
            }
            _ => Ok(()),
        }
    }

    /// Reads the settings of the bucket again if there is reason to: after a reconnect, because the bucket may have
    /// been edited or created anew in between, and after a refused write.
    ///
    /// # Errors
    ///
    /// `Misconfigured` if the bucket has become unfit for locks. Each later call then reads the settings again, until
    /// they are repaired. `Unavailable` if they cannot be read.
    pub(super) async fn recheck_settings(&self, until: ApiDeadline) -> Result<()> {
        if !self.settings_check.is_due(self.api.connections()) {
            return Ok(());
        }
        let counters = self.settings_check.counters_now(self.api.connections());
        let info = bucket::info(&self.api, &self.stream, until).await.map_err(|error| {
            // Always `Unavailable`, whatever the server answered: a restarting server may report that JetStream is off.
            // That says nothing about the bucket, and must not end holds as `Misconfigured` does.
            let message = "the settings of the bucket could not be read";
            Error::new(ErrorKind::Unavailable, message).because(Error::from(error))
        })?;
        self.check_settings(&info, counters)
    }

    /// Refuses a bucket that no longer keeps records safely, or whose layout has changed.
    fn check_settings(
        &self,
        info: &bucket::StreamInfo,
        counters: settings::SettingsCounters,
    ) -> Result<()> {
        // `replicas` and `ttl` are compared only when the store is opened: a cluster may be resized while clients run.
        let requested = Options { replicas: None, ttl: None, ..self.options.clone() };
        let same = |layout: BucketLayout| {
            if (layout == BucketLayout::Native) == (self.layout == BucketLayout::Native) {
                return Ok(());
            }
            let bucket = &self.options.bucket;
            let message =
                format!("the bucket {bucket} is refused: its form was changed; connect again");
            Err(Error::new(ErrorKind::Misconfigured, message))
        };
        let checked = bucket::layout_of(&info.config, &requested).and_then(same);
        match checked {
            Ok(()) => self.settings_check.confirm(info, counters, self.now()),
            // The next claim reads the settings again.
            Err(_) => self.settings_check.add_doubt(),
        }
        checked
    }

    /// Refuses a bucket in nlock's layout whose ttl was changed: a shortened ttl ends holds before their lease.
    pub(super) fn check_bucket_ttl(&self, info: &bucket::StreamInfo) -> Result<()> {
        match self.layout {
            BucketLayout::Nlock { ttl } if info.max_age() != ttl => {
                let age = info.max_age();
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
        request: &RecordClaim<'_, crate::store::Identity>,
    ) -> RecordDecision<'a, crate::store::Identity> {
        let now = self.now();
        let server_time = self.lineage().server_time(now);
        // In nlock's layout the server removes an expired record; clients never take over.
        let expired = |holder: &RecordHolder| {
            self.layout == BucketLayout::Native
                && known.may_be_taken_over(holder, now, Some(server_time))
        };
        known.record.claim(request, known.sequence, expired)
    }

    pub(super) fn contended(&self, known: &KnownKey, holder: &RecordHolder) -> Contended {
        Contended {
            holder: Some(holder.by.clone()),
            version: keys::version_of(known, self.now()),
            retry_after: None,
            note: None,
        }
    }

    /// Writes `next`, the record that contains our grant, if the record is still the known one; `None` if another write
    /// came first.
    pub(super) async fn take(
        self: &Arc<Self>,
        claim: &Claim,
        subject: &str,
        known: &KnownKey,
        next: KeyRecord,
        until: ApiDeadline,
    ) -> Result<Option<Grant>> {
        self.recheck_settings(until).await?;
        if known.connection != self.api.connections() {
            // Reconnected since the record was read: `KnownKey::may_be_overwritten` says why that counts as a conflict.
            return Ok(None);
        }
        let before = self.lineage().mark();
        // A claim with a ticket raises `served` to its place in the queue. No other claim changes `served`.
        let place = (next.served > known.record.served).then_some(next.served);
        let put = self.put(subject, known.sequence, next, self.write_deadline(until)).await?;
        let (landed, lease_start, before) = match put {
            (WriteOutcome::Done(_), written) => (written, LeaseStart::FromRequest, before),
            (WriteOutcome::Conflict, _) => return Ok(None),
            (WriteOutcome::Unclear(error), _) => {
                let Ok(found) = self.read(subject, until).await else {
                    return Err(as_unknown(error));
                };
                match found.record.fate_of_grant(claim.id, found.sequence, known.sequence) {
                    // The grant is there, but this or an earlier write may have made it: its age is unknown. The lease
                    // is counted from a confirming renewal instead.
                    WriteFate::Landed => {
                        let before = self.lineage().mark_of_earlier_write();
                        (found, LeaseStart::FromConfirm, before)
                    }
                    WriteFate::Refused => return Ok(None),
                    WriteFate::Unsettled => return Err(as_unknown(error)),
                }
            }
        };
        // The connection may have broken after `write` had checked it. The write was then sent over the next connection,
        // and may have replaced the record of another holder: `KnownKey::may_be_overwritten`.
        if self.api.connections() != known.connection {
            let message = "the connection was replaced while the claim was written";
            let withdrawn = self.withdraw(claim, subject, &landed, until).await;
            return if withdrawn { Ok(None) } else { Err(Error::new(ErrorKind::Unknown, message)) };
        }
        // After the write, the bucket's info is read again in three cases:
        // - The key had no record. The stream may be a new one of the same name, or may have dropped a holder's record.
        // - nlock's layout: another participant may have changed the ttl, which is checked with every grant.
        // - A recheck is due: the settings are doubtful since the last check.
        let due = self.settings_check.is_due(self.api.connections());
        let reread = known.sequence == 0 || self.layout != BucketLayout::Native || due;
        let epoch = match self.epoch_of(claim, &landed, before, reread, until).await {
            Ok(epoch) => epoch,
            Err(error) => return Err(self.undo(claim, subject, &landed, error, until).await),
        };
        match self.granted(claim, subject.to_owned(), landed, epoch, lease_start, place) {
            Answer::Granted(grant) => Ok(Some(grant)),
            _ => Ok(None),
        }
    }

    /// Answers with the grant that an earlier sending of the claim obtained.
    pub(super) async fn granted_before(
        self: &Arc<Self>,
        claim: &Claim,
        subject: String,
        known: KnownKey,
        until: ApiDeadline,
    ) -> Result<Answer> {
        let before = self.lineage().mark_of_earlier_write();
        let epoch = match self.epoch_of(claim, &known, before, true, until).await {
            Ok(epoch) => epoch,
            Err(error) => return Err(self.undo(claim, &subject, &known, error, until).await),
        };
        Ok(self.granted(claim, subject, known, epoch, LeaseStart::FromConfirm, None))
    }

    pub(super) fn granted(
        self: &Arc<Self>,
        claim: &Claim,
        subject: String,
        known: KnownKey,
        epoch: u64,
        lease_start: LeaseStart,
        place: Option<u64>,
    ) -> Answer {
        let KnownKey { sequence, record, connection: known_connection, .. } = known;
        let holder = record.holder(claim.id);
        let number = holder.map_or(sequence, |holder| holder.number(sequence));
        let token = FencingToken::new(epoch, number);
        let age = holder.map(|holder| holder.held_for).unwrap_or_default();
        let hold = NatsHold {
            inner: Arc::clone(self),
            key: claim.key.clone(),
            space: claim.mode.space(),
            subject,
            claim: claim.id,
            token,
            sequence,
            record,
            connection: known_connection,
            held_since: self.now() - age,
            place,
        };
        let hold = Box::new(hold);
        Answer::Granted(Grant { token, lease_start, handoff_requested: false, grants: None, hold })
    }

    /// Undoes a grant that landed and gets no token, if `error` says that none of its tokens can be trusted. Returns
    /// the error for the claim.
    ///
    /// - The stream went back: the token may have been handed out before.
    /// - The bucket was edited, and may have dropped the record of a live holder: the key only looked free.
    ///
    /// The write has landed. So after any other error, and if it cannot be undone, the outcome of the claim is unknown:
    /// "not granted" would leave the hold behind.
    async fn undo(
        &self,
        claim: &Claim,
        subject: &str,
        landed: &KnownKey,
        error: TokenError,
        until: ApiDeadline,
    ) -> Error {
        let error = match error {
            TokenError::WentBack(went_back) => went_back_error(went_back),
            TokenError::Failed(error) => match error.kind() {
                ErrorKind::NotHeld => {
                    return Error::new(ErrorKind::Misconfigured, error.to_string());
                }
                ErrorKind::Misconfigured => error,
                _ => return as_unknown(error),
            },
        };
        if self.withdraw(claim, subject, landed, until).await {
            return error;
        }
        Error::new(ErrorKind::Unknown, error.to_string())
    }

    /// Releases a grant in the record `landed`, which no caller has got. True if the grant is certainly gone.
    async fn withdraw(
        &self,
        claim: &Claim,
        subject: &str,
        landed: &KnownKey,
        until: ApiDeadline,
    ) -> bool {
        let Some(released) = landed.record.release(claim.id, landed.sequence) else { return true };
        let undone = self.put(subject, landed.sequence, released, until).await;
        matches!(undone, Ok((WriteOutcome::Done(_), _)))
    }

    /// Epoch of a grant in the record `landed`. `before` was taken before the write was sent.
    ///
    /// A stream that was deleted and created again counts from 1, under another epoch. A number that was seen before is
    /// a sign of that, and the stream's info is then read. `reread` reads the info in any case: if the key had no
    /// record, the write may have landed in a new stream that is already past the highest sequence seen.
    async fn epoch_of(
        &self,
        claim: &Claim,
        landed: &KnownKey,
        before: LineageMark,
        reread: bool,
        until: ApiDeadline,
    ) -> Result<u64, TokenError> {
        let holder = landed.record.holder(claim.id);
        let number = holder.map_or(landed.sequence, |holder| holder.number(landed.sequence));
        if !self.lineage().doubts(number, before) && !reread {
            return Ok(self.lineage().epoch());
        }
        let before_info = self.lineage().mark();
        let counters = self.settings_check.counters_now(self.api.connections());
        let info = bucket::info(&self.api, &self.stream, until).await.map_err(Error::from)?;
        self.check_bucket_ttl(&info)?;
        // A dropped record looks like a key that was never held. Only the settings show that the bucket drops records.
        self.check_settings(&info, counters)?;
        let mut lineage = self.lineage();
        let now = self.api.clock.now();
        let state = lineage::refresh(&mut lineage, &info, before_info, now)?;
        match (lineage.epoch_of(number, before, Some(state)), self.layout) {
            (Ok(epoch), _) => Ok(epoch),
            // A restart of the server empties memory storage, which is normal in this layout. The server's time becomes
            // a new, larger epoch, so that tokens still grow.
            (Err(_), BucketLayout::Nlock { .. }) => {
                lineage.begin_epoch(info.server_time()?, landed.sequence);
                Ok(lineage.epoch())
            }
            (Err(went_back), BucketLayout::Native) => Err(went_back.into()),
        }
    }

    /// Writes a record if the key's last sequence is still `sequence`, and remembers the record if the write landed.
    pub(super) async fn put(
        &self,
        subject: &str,
        sequence: u64,
        mut record: KeyRecord,
        until: ApiDeadline,
    ) -> Result<(WriteOutcome, KnownKey)> {
        record.epoch = self.lineage().epoch();
        let (sent, connection) = (self.now(), self.api.connections());
        let outcome = self.write(subject, sequence, self.layout.write(&record), until).await?;
        let WriteOutcome::Done(landed) = outcome else { return Ok((outcome, KnownKey::default())) };
        self.lineage().note(landed);
        let (sequence, timestamp) = (landed, None);
        let seen = SeenRecord { sequence, record: record.clone(), timestamp, connection };
        self.keys.note(subject, seen, RecordSource::Notification, (sent, self.now()));
        Ok((outcome, KnownKey { sequence: landed, record, connection, ..KnownKey::default() }))
    }

    /// Writes a value if the key's last sequence is still `sequence`. After a refusal, the bucket's settings are read
    /// before the next grant.
    pub(super) async fn write(
        &self,
        subject: &str,
        sequence: u64,
        write: KeyWrite,
        until: ApiDeadline,
    ) -> Result<WriteOutcome> {
        let error = match self.api.write(subject, sequence, write, until).await {
            Ok(WriteOutcome::Conflict) => {
                self.settings_check.note_conflict(self.now());
                return Ok(WriteOutcome::Conflict);
            }
            Ok(outcome) => return Ok(outcome),
            Err(error) => error,
        };
        self.settings_check.add_doubt();
        if error.kind() != ErrorKind::Misconfigured {
            return Err(error);
        }
        // A limit of the stream refused the write. The server's error does not contain the limit's value, which the
        // operator needs.
        let Ok(info) = bucket::info(&self.api, &self.stream, until).await else {
            return Err(error);
        };
        let message = settings::limit_error(&info, &self.options.bucket, &error.to_string());
        Err(Error::new(ErrorKind::Misconfigured, message))
    }

    /// Reads a record from the leader of the stream.
    ///
    /// # Errors
    ///
    /// `Misconfigured` for a value that is not a record, `Unavailable` if the stream has lost acknowledged writes.
    pub(super) async fn read(&self, subject: &str, until: ApiDeadline) -> Result<KnownKey> {
        // Counted before the request: a reply that comes over a later connection must not pass for one of that.
        let (sent, connection) = (self.now(), self.api.connections());
        let message = self.api.last_message(&self.stream, subject, until).await?;
        let (sequence, record, time) = match message {
            None => (0, KeyRecord::default(), None),
            Some(message) => (message.sequence, self.parse(&message)?, Some(message.timestamp)),
        };
        let before = self.lineage().mark();
        if record.epoch != self.lineage().epoch() && record.epoch != 0 {
            let info = bucket::info(&self.api, &self.stream, until).await?;
            lineage::refresh(&mut self.lineage(), &info, before, self.now())?;
        }
        let checked = self.lineage().check_record(record.epoch, record.fence, sequence);
        checked.map_err(went_back_error)?;
        self.lineage().note(sequence);
        let seen = SeenRecord { sequence, record, timestamp: time, connection };
        Ok(self.keys.note(subject, seen, RecordSource::Leader, (sent, self.now())))
    }

    /// Applies a watch's message about a record or a ticket. `connection` is the number of the connection over which the
    /// watch was started: the message may have arrived long before it is handled here.
    pub(super) fn note_message(&self, message: &Message, connection: u64) {
        let (now, root) = (self.now(), self.root());
        self.lineage().note(message.sequence);
        if self.layout == BucketLayout::Native && queue::is_ticket(&root, &message.subject) {
            // The record is noted before the ticket: the ticket's removal wakes the next waiter, which then decides on
            // the record. In the other order the waiter would find the lock held, and sleep until its next poll.
            if let Some(record_message) = queue::handed_over_record(&root, message) {
                self.note_message(&record_message, connection);
            }
            return self.queues.note_message(message);
        }
        if let Ok(record) = self.layout.read(message) {
            let (sequence, timestamp) = (message.sequence, Some(message.timestamp));
            let seen = SeenRecord { sequence, record, timestamp, connection };
            self.keys.note(&message.subject, seen, RecordSource::Notification, (now, now));
        }
    }

    /// Prefix of all subjects of the bucket.
    pub(super) fn root(&self) -> String {
        format!("$KV.{}.", self.options.bucket)
    }

    fn parse(&self, message: &Message) -> Result<KeyRecord> {
        self.layout.read(message).map_err(|why| {
            let subject = &message.subject;
            let message = format!("cannot use {subject}: {why}; delete it or choose another key");
            Error::new(ErrorKind::Misconfigured, message)
        })
    }

    /// Reads the server's time again if the last reading is old.
    async fn refresh_server_time(&self, until: ApiDeadline) -> Result<()> {
        let old = self.lineage().is_server_time_old(self.now());
        if self.layout == BucketLayout::Native && old {
            let counters = self.settings_check.counters_now(self.api.connections());
            let before = self.lineage().mark();
            let info = bucket::info(&self.api, &self.stream, until).await?;
            self.check_settings(&info, counters)?;
            lineage::refresh(&mut self.lineage(), &info, before, self.now())?;
        }
        Ok(())
    }

    /// Deadline of a write. It leaves enough time to read the write's outcome if no reply comes.
    pub(super) fn write_deadline(&self, until: ApiDeadline) -> ApiDeadline {
        let now = self.now();
        ApiDeadline(now + until.0.since(now).mul_f64(0.7))
    }

    /// State of a key as `inspect` and `list` report it.
    pub(super) fn key_state(&self, key: Key, space: KeySpace, known: &KnownKey) -> KeyState {
        let now = self.now();
        let lineage = *self.lineage();
        let holders = known.holders(now).map(|holder| {
            let number = holder.number(known.sequence);
            let age = known.timestamp.map(|time| lineage.server_time(now).saturating_sub(time));
            let margin = holder.lease.map(tenure_core::lease::margin).unwrap_or_default();
            let end = known.observations.takeover_at(holder.claim) - margin;
            HolderState {
                by: Some(holder.by.clone()),
                token: FencingToken::new(lineage.epoch(), number),
                held_for: age.map(|age| holder.held_for + Duration::from_nanos(age)),
                lease_left: holder.lease.map(|_| end.since(now)),
                revision: Some(known.sequence),
            }
        });
        let holders = holders.collect();
        KeyState { key, space, holders, waiters: Vec::new(), version: keys::version_of(known, now) }
    }
}

/// Turns an error into `Unknown`: the write may or may not have landed. `Denied` stays, because nothing was written.
pub(super) fn as_unknown(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Unknown | ErrorKind::Denied => error,
        _ => Error::new(ErrorKind::Unknown, error.to_string()).because(error),
    }
}
