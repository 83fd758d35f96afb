//! What the lock needs of an object store: reads, and writes that name the version which they replace.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::Time;

use crate::{Error, ErrorKind};

/// What is left of an object that was cleared.
pub(super) const EMPTY_BODY: &[u8] = b"{}";
/// The largest object that is read as a lock.
pub(super) const MAX_LOCK_BYTES: usize = 64 * 1024;

/// A version of an object: its generation or entity tag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ObjectVersion(pub(super) String);

/// What a read showed, with the store's time in the same answer.
#[derive(Debug)]
pub(super) enum ReadResult {
    Absent {
        now: Duration,
    },
    /// Still the version that the reader knows.
    Unchanged {
        now: Duration,
    },
    Present {
        body: Vec<u8>,
        version: ObjectVersion,
        modified: Duration,
        now: Duration,
    },
}

/// What became of a conditional write.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum SwapResult {
    /// It landed.
    Won(WriteReceipt),
    /// It did not: the object is at another version.
    Lost,
}

/// A write that landed, as the reply describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct WriteReceipt {
    pub(super) version: ObjectVersion,
    /// `Last-Modified`, if the reply to a write says it.
    pub(super) modified: Option<Duration>,
    /// `Date` of the reply.
    pub(super) now: Duration,
}

/// Why there is no such answer.
#[derive(Debug)]
pub(super) enum BucketError {
    /// It may have landed all the same.
    Ambiguous(String),
    /// It did not land; nobody was reached.
    Unreachable(String),
    /// It did not land: too many writes for this object, or in all.
    Throttled,
    /// It did not land: credentials or rights are missing.
    Denied(String),
    /// It did not land, and no other try will.
    Permanent(String),
    /// The key can name no object here.
    Unnameable(String),
}

/// The end of the time that a request has.
#[derive(Clone, Copy, Debug)]
pub(super) struct BucketDeadline(pub(super) Time);

/// A bucket of some cloud's. One request a call, never repeated.
#[async_trait]
pub(super) trait Bucket: fmt::Debug + Send + Sync {
    /// Reads an object, unless it is still at this version.
    async fn read(
        &self,
        name: &str,
        unless: Option<&ObjectVersion>,
        until: BucketDeadline,
    ) -> Result<ReadResult, BucketError>;

    /// Writes an object at this version; where there must be none, at `None`.
    async fn swap(
        &self,
        name: &str,
        expected: Option<&ObjectVersion>,
        body: Vec<u8>,
        until: BucketDeadline,
    ) -> Result<SwapResult, BucketError>;

    /// Takes away what an object holds, at this version: removes it, or leaves it [`EMPTY`] where not every server of the
    /// kind conditions removals.
    async fn clear(
        &self,
        name: &str,
        version: &ObjectVersion,
        until: BucketDeadline,
    ) -> Result<(), BucketError>;

    /// Removes an object at this version; whether it did. Who removes what others may write proves first that the server
    /// conditions it.
    async fn remove(
        &self,
        name: &str,
        version: &ObjectVersion,
        until: BucketDeadline,
    ) -> Result<bool, BucketError>;

    /// Removes an object, whatever it is by now: only for what nobody else can have use of.
    async fn erase(&self, name: &str, until: BucketDeadline) -> Result<(), BucketError>;

    /// The names that begin with `prefix` and come after `after`, in order: a page of them, empty after the last.
    async fn list(
        &self,
        prefix: &str,
        after: Option<&str>,
        until: BucketDeadline,
    ) -> Result<Vec<String>, BucketError>;

    /// What the bucket's settings cost or endanger, in words, as far as they can be read.
    async fn settings(&self, until: BucketDeadline) -> Result<Vec<Setting>, BucketError>;

    /// The rights that a lock needs, for the message of who lacks them.
    fn rights(&self) -> &'static str;
}

/// A setting of a bucket, as it is for locks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Setting {
    pub(super) what: &'static str,
    pub(super) good: bool,
    pub(super) detail: String,
    pub(super) advice: &'static str,
}

impl BucketError {
    /// The error of a request that changes nothing, or of which the caller knows what became of it.
    pub(super) fn explain(self, bucket: &dyn Bucket) -> Error {
        match self {
            Self::Ambiguous(what) => Error::new(ErrorKind::Unknown, what),
            Self::Unreachable(what) => Error::new(ErrorKind::Unavailable, what),
            Self::Throttled => {
                let message =
                    "the store takes no more writes of this object now: try again in a second";
                Error::new(ErrorKind::Unavailable, message)
            }
            Self::Denied(what) => {
                let rights = bucket.rights();
                Error::new(ErrorKind::Denied, format!("{what}: a lock needs {rights}"))
            }
            Self::Permanent(what) => Error::new(ErrorKind::Misconfigured, what),
            Self::Unnameable(what) => Error::new(ErrorKind::Invalid, what),
        }
    }

    /// The same for a read: not to hear of it is no unknown outcome.
    pub(super) fn explain_read(self, bucket: &dyn Bucket) -> Error {
        match self {
            Self::Ambiguous(what) => Error::new(ErrorKind::Unavailable, what),
            other => other.explain(bucket),
        }
    }
}
