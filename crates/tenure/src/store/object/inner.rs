//! State that a store shares with its holds and places: reads of locks and bells, and conditional writes.

use std::fmt;
use std::time::Duration;

use tenure_core::object::takeover::{TakeoverEvidence, WriteStamp};
use tenure_core::object::{MAX_HANDOFF_LEASE, NextHolder};
use tenure_core::{Key, Random, Time};

use super::bucket::{
    Bucket, BucketDeadline, BucketError, EMPTY_BODY, ObjectVersion, ReadResult, SwapResult,
    WriteReceipt,
};
use super::format::{self, Bell, LockRecord, Sight};
use super::observed::Observed;
use super::options::Options;
use crate::store::{Claim, Identity, Version};
use crate::{Clock, Error, ErrorKind, Result};

/// Timeout of requests whose caller gives no limit.
pub(super) const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Time that the place is kept for its waiter after the waiter's last write.
pub(super) const PLACE_LIFE: Duration = Duration::from_secs(15);
/// Largest number of attempts within one request at a write that other writes come before.
pub(super) const MAX_WRITE_TRIES: u32 = 4;
/// Interval in which some stores accept one write per object.
const WRITE_INTERVAL: Duration = Duration::from_secs(1);
/// Suffix of a bell's name.
pub(super) const BELL: &str = ".bell";

#[derive(Debug)]
pub(super) struct ObjectInner {
    pub(super) bucket: Box<dyn Bucket>,
    pub(super) options: Options,
    pub(super) clock: Clock,
    /// Time since which each lock was seen at its version, across all claims of this client.
    pub(super) observed: Observed,
}

/// A lock as it was read, with the times of that on our own clock.
#[derive(Clone, Debug)]
pub(super) struct KnownLock {
    pub(super) sight: Sight,
    pub(super) version: Option<ObjectVersion>,
    /// Arrival of the reply that showed it.
    pub(super) at: Time,
    /// Arrival of the reply that first showed this version.
    pub(super) first: Time,
    /// True if `sight.modified` was reported by the store, and is not our estimate.
    stamped: bool,
}

/// A bell that we rang.
#[derive(Clone, Debug)]
pub(super) struct OwnBell {
    pub(super) version: ObjectVersion,
    /// Times of the write by our clock and the store's, if the store reported them.
    pub(super) stamp: Option<WriteStamp>,
}

/// The result of ringing a bell.
#[derive(Debug)]
pub(super) enum Ring {
    Won(OwnBell),
    Lost,
}

/// A bell as it was read.
#[derive(Debug)]
pub(super) struct BellState {
    pub(super) bell: Option<Bell>,
    pub(super) version: Option<ObjectVersion>,
    /// True while the bell counts as rung.
    pub(super) alive: bool,
    /// True if the bell was cleared.
    pub(super) empty: bool,
    /// Time since its last change.
    pub(super) age: Duration,
}

/// Outcome of a write.
#[derive(Debug)]
pub(super) enum PutResult {
    Won(Box<KnownLock>),
    Lost,
    Throttled,
    /// The write may have landed, with this nonce.
    Unclear(Error, String),
}

impl fmt::Display for ObjectInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.options, f)
    }
}

impl KnownLock {
    /// Evidence for a takeover from reads alone, without a write of ours; `once` if this is the client's only read.
    pub(super) fn watch(&self, once: bool) -> TakeoverEvidence {
        TakeoverEvidence { single_read: once, ..TakeoverEvidence::new(self.first, self.at) }
    }

    /// Present time of the store, extrapolated on our clock.
    pub(super) fn now(&self, now: Time) -> Duration {
        self.sight.date + now.since(self.at)
    }
}

impl ObjectInner {
    pub(super) fn name(&self, key: &Key) -> Result<String> {
        if key.as_str().ends_with(BELL) {
            let message =
                format!("a key must not end with {BELL}, which names the bell of another key");
            return Err(Error::new(ErrorKind::Invalid, message));
        }
        Ok(format!("{}{key}", self.options.prefix))
    }

    pub(super) fn until(&self, limit: Duration) -> BucketDeadline {
        BucketDeadline(self.clock.now() + limit)
    }

    /// Share of the time for one request of several, which leaves enough to read its outcome if no answer comes.
    pub(super) fn request_share(&self, until: BucketDeadline) -> BucketDeadline {
        let now = self.clock.now();
        BucketDeadline(now + until.0.since(now).mul_f64(0.67))
    }

    /// Reads a lock. `known` is an earlier read, whose content need not be sent again if it is unchanged.
    pub(super) async fn read_lock(
        &self,
        name: &str,
        known: Option<&KnownLock>,
        until: BucketDeadline,
    ) -> Result<KnownLock> {
        // "Unchanged" brings no timestamp: a record whose timestamp is only our estimate must be read in full.
        let known = known.filter(|known| known.stamped);
        let unless = known.and_then(|known| known.version.as_ref());
        let sent = self.clock.now();
        let read = self.bucket.read(name, unless, self.request_share(until)).await;
        let read = read.map_err(|error| error.explain_read(&*self.bucket))?;
        // Taken after the reply. Counted from before the request, the version would seem to have been there for as long
        // as the request was in flight, and a live holder could be taken over too early.
        let at = self.clock.now();
        let stamped = true;
        match (read, known) {
            (ReadResult::Absent { now }, _) => {
                self.observed.forget(name);
                let sight = Sight { record: None, modified: Duration::ZERO, date: now };
                Ok(KnownLock { sight, version: None, at, first: at, stamped })
            }
            (ReadResult::Present { body, version, modified, now }, _) => {
                let record = format::read(&body).map_err(|why| {
                    let message = format!(
                        "the object {name} is not a lock and is left alone: {why}; remove it or choose another key"
                    );
                    Error::new(ErrorKind::Misconfigured, message)
                })?;
                let first = self.observed.first_seen(name, &version, sent, at);
                let sight = Sight { record: Some(record), modified, date: now };
                Ok(KnownLock { sight, version: Some(version), at, first, stamped })
            }
            (ReadResult::Unchanged { now }, Some(known)) => {
                let sight = Sight { date: now, ..known.sight.clone() };
                let version = known.version.clone();
                let first = version
                    .as_ref()
                    .map_or(at, |version| self.observed.first_seen(name, version, sent, at));
                Ok(KnownLock { sight, version, at, first, stamped })
            }
            (ReadResult::Unchanged { .. }, None) => {
                let message = "the store reports an object as unchanged that was not read before";
                Err(Error::new(ErrorKind::Unavailable, message))
            }
        }
    }

    /// Writes a record on condition of the version that was read.
    pub(super) async fn put(
        &self,
        name: &str,
        known: &KnownLock,
        mut record: LockRecord,
        until: BucketDeadline,
    ) -> Result<PutResult> {
        record.extra.nonce = nonce()?;
        let nonce = record.extra.nonce.clone();
        let body = format::write(&record);
        let sent = self.clock.now();
        let swap =
            self.bucket.swap(name, known.version.as_ref(), body, self.request_share(until)).await;
        let at = self.clock.now();
        match swap {
            Ok(SwapResult::Won(WriteReceipt { version, modified, .. })) => {
                let now = known.now(at);
                let first = self.observed.first_seen(name, &version, sent, at);
                let (stamped, modified) = (modified.is_some(), modified.unwrap_or(now));
                let sight = Sight { record: Some(record), modified, date: now };
                Ok(PutResult::Won(Box::new(KnownLock {
                    sight,
                    version: Some(version),
                    at,
                    first,
                    stamped,
                })))
            }
            Ok(SwapResult::Lost) => Ok(PutResult::Lost),
            Err(BucketError::Throttled) => Ok(PutResult::Throttled),
            Err(error @ BucketError::Ambiguous(_)) => {
                Ok(PutResult::Unclear(error.explain(&*self.bucket), nonce))
            }
            Err(error) => Err(error.explain(&*self.bucket)),
        }
    }

    /// Reads the bell of a lock.
    pub(super) async fn read_bell(&self, name: &str, until: BucketDeadline) -> Result<BellState> {
        let bell = format!("{name}{BELL}");
        let read = self.bucket.read(&bell, None, self.request_share(until)).await;
        match read.map_err(|error| error.explain_read(&*self.bucket))? {
            ReadResult::Present { body, version, modified, now } => {
                let bell = format::read_bell(&body);
                let slack = self.options.grain.slack();
                let age = now.saturating_sub(modified);
                let alive = bell.as_ref().is_some_and(|bell| age < bell.life + slack);
                Ok(BellState {
                    bell,
                    version: Some(version),
                    alive,
                    empty: body == EMPTY_BODY,
                    age,
                })
            }
            ReadResult::Absent { .. } | ReadResult::Unchanged { .. } => {
                let (bell, version, alive) = (None, None, false);
                Ok(BellState { bell, version, alive, empty: false, age: Duration::ZERO })
            }
        }
    }

    /// Writes our bell on condition of the version that was read, and reads the store's timestamp of that write.
    pub(super) async fn ring(
        &self,
        name: &str,
        over: Option<&ObjectVersion>,
        claim: &Claim,
        until: BucketDeadline,
    ) -> Result<Ring, BucketError> {
        let next_holder = NextHolder { id: format::owner(&claim.by, claim.id), lease: claim.ttl };
        let bell = Bell { next_holder, life: self.place_life(), by: (*claim.by).clone() };
        let nonce = nonce().map_err(|error| BucketError::Permanent(error.to_string()))?;
        let body = format::write_bell(&bell, nonce);
        let bell = format!("{name}{BELL}");
        let sent = self.clock.now();
        match self.bucket.swap(&bell, over, body, self.request_share(until)).await? {
            SwapResult::Won(written) => {
                let replied = self.clock.now();
                let stamp = self.stamp(&bell, &written, sent, replied, until).await;
                Ok(Ring::Won(OwnBell { version: written.version, stamp }))
            }
            SwapResult::Lost => Ok(Ring::Lost),
        }
    }

    /// Times of a write by our clock and the store's. If the reply has no timestamp, the object is read.
    pub(super) async fn stamp(
        &self,
        name: &str,
        written: &WriteReceipt,
        sent: Time,
        replied: Time,
        until: BucketDeadline,
    ) -> Option<WriteStamp> {
        let modified = match written.modified {
            Some(modified) => modified,
            None => match self.bucket.read(name, None, self.request_share(until)).await {
                Ok(ReadResult::Present { version, modified, .. }) if version == written.version => {
                    modified
                }
                // Overwritten, cleared or unreadable: the timestamp of our write cannot be known.
                _ => return None,
            },
        };
        Some(WriteStamp { sent, replied, modified, date: written.now })
    }

    /// Clears a bell. If that fails, the bell expires by itself.
    pub(super) async fn clear_bell(
        &self,
        name: &str,
        version: &ObjectVersion,
        until: BucketDeadline,
    ) {
        let bell = format!("{name}{BELL}");
        if let Err(trouble) = self.bucket.clear(&bell, version, self.request_share(until)).await {
            tracing::debug!(name: "tenure.bell_left", bell, ?trouble);
        }
    }

    /// Time that a place is kept; shorter on stores with finer clocks.
    pub(super) fn place_life(&self) -> Duration {
        PLACE_LIFE.min(self.options.grain.0 * 15)
    }

    /// Pauses after a throttled write, for about the second that the store counts by. False if there is no time for it.
    pub(super) async fn wait_write_interval(&self, until: BucketDeadline) -> bool {
        let now = self.clock.now();
        self.sleep(now + Duration::from_millis(700), 500, until).await
    }

    /// The same for a caller that knows the time of its last write: the rest of that second, if it is not over.
    pub(super) async fn wait_write_interval_since(
        &self,
        wrote: Time,
        until: BucketDeadline,
    ) -> bool {
        let free = wrote + WRITE_INTERVAL;
        if self.clock.now() < free {
            self.sleep(free, 50, until).await
        } else {
            self.wait_write_interval(until).await
        }
    }

    /// Sleeps until `at` and a random number of milliseconds below `spread`. False, without a sleep, if there is no
    /// time for it.
    async fn sleep(&self, at: Time, spread: u64, until: BucketDeadline) -> bool {
        let mut random = Random::new(self.clock.now().as_nanos());
        let at = at + Duration::from_millis(random.below(spread));
        let enough = at < until.0;
        if enough {
            self.clock.sleep_until(at).await;
        }
        enough
    }

    /// Next holder by the bell, if it is rung. Its lease is short, in case the waiter is gone.
    pub(super) fn next_holder(rung: &BellState) -> Option<NextHolder> {
        let bell = rung.bell.as_ref().filter(|_| rung.alive)?;
        Some(NextHolder {
            id: bell.next_holder.id.clone(),
            lease: bell.next_holder.lease.min(MAX_HANDOFF_LEASE),
        })
    }
}

/// Identity of a lock's owner, for display.
pub(super) fn holder_identity(record: &LockRecord) -> Identity {
    let id = format::owner_name(&record.owner).to_owned();
    record.extra.info.clone().unwrap_or(Identity { id, ..Identity::default() })
}

/// Error for a claim that fails if the only place is taken.
pub(super) fn contention_error(known: &KnownLock) -> Error {
    let holder = known.sight.record.as_ref().map(holder_identity);
    let holder = holder.map_or_else(|| "another client".to_owned(), |by| by.to_string());
    let message = format!("held by {holder}, and another waits in the only place");
    Error::new(ErrorKind::Contention, message)
}

/// Version of a key's state: unchanged as long as owner and waiter are.
pub(super) fn version_of(sight: &Sight, bell: Option<&str>) -> Version {
    let record = sight.record.as_ref().filter(|record| !record.expires.is_zero());
    let owner = record.map(|record| (&*record.owner, record.fence));
    let waiter = sight.waiter().map(|waiter| &*waiter.id).or(bell);
    if owner.is_none() && waiter.is_none() {
        return Version::default();
    }
    // FNV, because the hash must be the same in every process and release.
    let text = format!("{owner:?} {waiter:?}");
    let mut hash = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d_u128;
    for byte in text.bytes() {
        hash = (hash ^ u128::from(byte)).wrapping_mul(0x0100_0000_0000_0000_0000_013b);
    }
    Version(hash)
}

/// Turns an error into `Unknown`, after a write that may or may not have landed.
pub(super) fn as_unknown(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Unknown => error,
        _ => Error::new(ErrorKind::Unknown, error.to_string()).because(error),
    }
}

pub(super) fn nonce() -> Result<String> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|error| {
        Error::new(ErrorKind::Unavailable, "the system provides no random numbers").because(error)
    })?;
    Ok(format!("{:032x}", u128::from_be_bytes(bytes)))
}
