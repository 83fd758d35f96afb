//! Messages between a client and a store.

use std::time::Duration;

use tenure_core::Time;

/// Request of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    Claim {
        claim: u64,
        queue: bool,
    },
    Wait {
        claim: u64,
    },
    Renew {
        token: u64,
    },
    Release {
        token: u64,
    },
    Abandon {
        claim: u64,
    },
    Read,
    Write {
        if_version: Option<u64>,
        record: Record,
    },
    /// Rings the bell, unless another claim rings it.
    Ring {
        claim: u64,
    },
    /// Removes the claim's own bell.
    Silence {
        claim: u64,
    },
}

/// Reply of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    Granted {
        token: u64,
    },
    Queued,
    Contended,
    NotQueued,
    Renewed {
        handoff_requested: bool,
    },
    Refused,
    Released,
    /// The store has closed the connection of the request.
    Closed,
    /// Reply to a read, and to a conditional write that was refused.
    Record {
        version: u64,
        record: Record,
        /// Time of the write, by the clock of the server that led then.
        stamp: u64,
        /// Present time, by the clock of the server that leads.
        now: u64,
    },
    Written {
        version: u64,
    },
    /// Like `Record`, from a bucket.
    BucketRead(BucketRead),
}

/// State of a key in a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BucketRead {
    pub(crate) version: u64,
    pub(crate) record: Record,
    /// Time of the last change, by the clock that stamps records.
    pub(crate) modified: Duration,
    /// Present time, by the clock that dates replies.
    pub(crate) now: Duration,
    /// Claim that rings the bell, or 0.
    pub(crate) bell: u64,
    /// Timestamp of the bell, if this request rang it.
    pub(crate) rung: Option<Duration>,
}

/// Record of a key in a compare-and-swap store. A claim of 0 means that the key is free. The fence survives releases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) claim: u64,
    pub(crate) fence: u64,
    /// The wall clock of the writer, in nanoseconds.
    pub(crate) written: i64,
    pub(crate) lease: Duration,
}

/// A request in flight. Its reply has the same connection and number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestMessage {
    pub(crate) connection: usize,
    pub(crate) number: u32,
    pub(crate) key: usize,
    pub(crate) request: Request,
    /// Deadline that the client's state machine set, on the client's clock.
    pub(crate) deadline: Time,
    /// True if a read is answered from an old copy.
    pub(crate) stale: bool,
}

/// A reply in flight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReplyMessage {
    pub(crate) connection: usize,
    pub(crate) number: u32,
    pub(crate) reply: Reply,
}
