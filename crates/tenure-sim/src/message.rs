//! Messages between a client and a store.

mod stream;

use std::time::Duration;

use tenure_core::Time;
use tenure_core::record::StreamState;

pub(crate) use self::stream::{StreamMessage, StreamRecord};

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
    /// Reads the state of a stream.
    StreamInfo,
    /// Reads the last message of the key in a stream.
    StreamRead,
    /// Writes a record to a stream, if the key's last sequence is `over`.
    StreamWrite {
        over: Option<u64>,
        record: StreamRecord,
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
    Written {
        version: u64,
    },
    /// Reply of a bucket to a read, and to a conditional write that was refused.
    BucketRead(BucketRead),
    StreamInfo(StreamState),
    StreamRecord(Option<StreamMessage>),
    /// The write landed in the stream, at this sequence.
    Landed {
        sequence: u64,
    },
    /// The key is at another sequence.
    Conflict,
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

/// Record of a key in a bucket. A claim of 0 means that the key is free. The fence survives releases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) claim: u64,
    pub(crate) fence: u64,
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
    /// Number of the client's connection to a stream. A crash of the stream's server ends it.
    pub(crate) stream_connection: u64,
}

/// A reply in flight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReplyMessage {
    pub(crate) connection: usize,
    pub(crate) number: u32,
    pub(crate) reply: Reply,
}
