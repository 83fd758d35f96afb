//! State that a store shares with its holds and watches: conditional writes and reads of records.

use std::fmt;
use std::sync::MutexGuard;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use tenure_core::record::{Lineage, RecordClaim, RecordDecision, RecordSource, SeenRecord};
use tenure_core::{Key, Time};

use super::api::{Api, ApiDeadline, ApiError, KeyWrite, Message, WriteOutcome};
use super::bucket;
use super::format::{KeyRecord, RecordHolder};
use super::keys::{self, KnownKey, KnownKeys};
use super::layout::BucketLayout;
use super::lineage::{self, went_back_error};
use super::options::Options;
use super::settings::{self, SettingsCheck};
use super::stream::{self, StreamInfo};
use super::tickets::{self, TicketQueues};
use super::watches::Watches;
use crate::mutex::Mutex;
use crate::store::{Contended, KeySpace};
use crate::units::in_whole_units;
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
    pub(super) settings_check: SettingsCheck,
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

    /// True if the bucket's layout has keys of this space. nlock's has locks only.
    pub(super) fn has_space(&self, space: KeySpace) -> bool {
        self.layout == BucketLayout::Native || space == KeySpace::Lock
    }

    pub(super) fn now(&self) -> Time {
        self.api.clock.now()
    }

    pub(super) fn lineage(&self) -> MutexGuard<'_, Lineage> {
        self.lineage.lock()
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
                let max_age = in_whole_units(self.settings_check.max_age().unwrap_or_default());
                let bucket = &self.options.bucket;
                let message = format!(
                    "the ttl of {} is not shorter than the {max_age} for which the bucket {bucket} keeps records (max_age): use \
                     a shorter one, or run `nats stream edit KV_{bucket} --max-age=-1`",
                    in_whole_units(requested)
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
        let info = stream::info(&self.api, &self.stream, until).await.map_err(|error| {
            // Always `Unavailable`, whatever the server answered: a restarting server may report that JetStream is off.
            // That says nothing about the bucket, and must not end holds as `Misconfigured` does.
            let message = "the settings of the bucket could not be read";
            Error::new(ErrorKind::Unavailable, message).because(Error::from(error))
        })?;
        self.check_settings(&info, counters)
    }

    /// Refuses a bucket that no longer keeps records safely, or whose layout has changed.
    pub(super) fn check_settings(
        &self,
        info: &StreamInfo,
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
    pub(super) fn check_bucket_ttl(&self, info: &StreamInfo) -> Result<()> {
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
        let refusal = match error {
            ApiError::Refused(refusal) if refusal.is_limit() => refusal,
            error => return Err(error.into()),
        };
        // A limit of the stream refused the write. The server's error does not contain the limit's value, which the
        // operator needs.
        let (kind, error) = (refusal.kind(), Error::from(refusal));
        let Ok(info) = stream::info(&self.api, &self.stream, until).await else {
            return Err(error);
        };
        let message = settings::limit_error(&info, &self.options.bucket, &error.to_string());
        Err(Error::new(kind, message))
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
            let info = stream::info(&self.api, &self.stream, until).await?;
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
        if self.layout == BucketLayout::Native && tickets::is_ticket(&root, &message.subject) {
            // The record is noted before the ticket: the ticket's removal wakes the next waiter, which then decides on
            // the record. In the other order the waiter would find the lock held, and sleep until its next poll.
            if let Some(record_message) = tickets::handed_over_record(&root, message) {
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
    pub(super) async fn refresh_server_time(&self, until: ApiDeadline) -> Result<()> {
        let old = self.lineage().is_server_time_old(self.now());
        if self.layout == BucketLayout::Native && old {
            let counters = self.settings_check.counters_now(self.api.connections());
            let before = self.lineage().mark();
            let info = stream::info(&self.api, &self.stream, until).await?;
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
}

/// Turns an error into `Unknown`: the write may or may not have landed. `Denied` stays, because nothing was written.
pub(super) fn as_unknown(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Unknown | ErrorKind::Denied => error,
        _ => Error::new(ErrorKind::Unknown, error.to_string()).because(error),
    }
}
