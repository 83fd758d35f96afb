//! The operations that locks need of an object store: reads, and writes on condition of a version.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::Time;

use crate::{Error, ErrorKind};

/// Content of a cleared object.
pub(super) const EMPTY_BODY: &[u8] = b"{}";
/// Size of the largest object that is read as a lock.
pub(super) const MAX_LOCK_BYTES: usize = 64 * 1024;

/// A version of an object: its generation or entity tag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ObjectVersion(pub(super) String);

/// Result of a read, with the store's time in the same reply.
#[derive(Debug)]
pub(super) enum ReadResult {
    Absent {
        now: Duration,
    },
    /// The object still has the version that the reader knows.
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

/// Outcome of a conditional write.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum SwapResult {
    /// The write landed.
    Won(WriteReceipt),
    /// The write was refused: the object is at another version.
    Lost,
}

/// A write that landed, as the reply describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct WriteReceipt {
    pub(super) version: ObjectVersion,
    /// `Last-Modified`, if the reply to a write has it.
    pub(super) modified: Option<Duration>,
    /// `Date` of the reply.
    pub(super) now: Duration,
}

/// Failure of a request, by its effect on the store.
#[derive(Debug)]
pub(super) enum BucketError {
    /// The request may have taken effect.
    Ambiguous(String),
    /// No effect: the store was not reached.
    Unreachable(String),
    /// No effect: too many writes of this object, or in total.
    Throttled,
    /// No effect: credentials or permissions are missing.
    Denied(String),
    /// No effect, and a retry will not succeed.
    Permanent(String),
    /// The key cannot be the name of an object on this store.
    Unnameable(String),
}

/// Deadline of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct BucketDeadline(pub(super) Time);

/// A bucket of a cloud. Each call is one attempt, never retried.
#[async_trait]
pub(super) trait Bucket: fmt::Debug + Send + Sync {
    /// Reads an object, unless it still has the version `unless`.
    async fn read(
        &self,
        name: &str,
        unless: Option<&ObjectVersion>,
        until: BucketDeadline,
    ) -> Result<ReadResult, BucketError>;

    /// Writes an object on condition of its version; with `None`, on condition that it does not exist.
    async fn swap(
        &self,
        name: &str,
        expected: Option<&ObjectVersion>,
        body: Vec<u8>,
        until: BucketDeadline,
    ) -> Result<SwapResult, BucketError>;

    /// Clears an object on condition of its version: removes it, or overwrites it with [`EMPTY_BODY`] for protocols
    /// whose servers do not all support conditional removal.
    async fn clear(
        &self,
        name: &str,
        version: &ObjectVersion,
        until: BucketDeadline,
    ) -> Result<(), BucketError>;

    /// Removes an object on condition of its version. True if it was removed.
    ///
    /// Some servers ignore the condition. Before removing an object that other clients may write, the caller must
    /// verify that this one does not.
    async fn remove(
        &self,
        name: &str,
        version: &ObjectVersion,
        until: BucketDeadline,
    ) -> Result<bool, BucketError>;

    /// Removes an object at any version: only for objects that no other client uses.
    async fn erase(&self, name: &str, until: BucketDeadline) -> Result<(), BucketError>;

    /// Lists a page of the names that begin with `prefix` and come after `after`, in order; empty after the last.
    async fn list(
        &self,
        prefix: &str,
        after: Option<&str>,
        until: BucketDeadline,
    ) -> Result<Vec<String>, BucketError>;

    /// Settings of the bucket that cost or endanger something, as far as they can be read.
    async fn settings(&self, until: BucketDeadline) -> Result<Vec<Setting>, BucketError>;

    /// Permissions that a lock needs, for the error message of a client without them.
    fn rights(&self) -> &'static str;
}

/// A setting of a bucket, rated for locks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Setting {
    pub(super) what: &'static str,
    pub(super) good: bool,
    pub(super) detail: String,
    pub(super) advice: &'static str,
}

impl BucketError {
    /// Converts the failure of a write into an error.
    pub(super) fn explain(self, bucket: &dyn Bucket) -> Error {
        match self {
            Self::Ambiguous(what) => Error::new(ErrorKind::Unknown, what),
            Self::Unreachable(what) => Error::new(ErrorKind::Unavailable, what),
            Self::Throttled => {
                let message = "the store throttles writes of this object: try again in a second";
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

    /// Converts the failure of a read, which has no effect: without an answer it is `Unavailable`, not `Unknown`.
    pub(super) fn explain_read(self, bucket: &dyn Bucket) -> Error {
        match self {
            Self::Ambiguous(what) => Error::new(ErrorKind::Unavailable, what),
            other => other.explain(bucket),
        }
    }
}
