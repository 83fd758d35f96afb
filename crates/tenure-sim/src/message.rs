//! What goes over the wire between a client and a store.

use std::time::Duration;

use tenure_core::Time;

/// What a client asks of a store.
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
    /// Rings the bell, unless another does.
    Ring {
        claim: u64,
    },
    /// Takes the own bell away.
    Silence {
        claim: u64,
    },
}

/// What a store answers.
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
    /// The connection that the request came over has ended at the store.
    Closed,
    /// The answer to a read, and to a conditional write that was refused.
    Record {
        version: u64,
        record: Record,
        /// When it was written, and what time it is, by the clocks of the servers that led and that leads.
        stamp: u64,
        now: u64,
    },
    Written {
        version: u64,
    },
    /// The same of a store that tells its time.
    BucketRead(BucketRead),
}

/// What a bucket shows of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BucketRead {
    pub(crate) version: u64,
    pub(crate) record: Record,
    /// When it was last changed, by the clock that stamps records.
    pub(crate) modified: Duration,
    /// What time it is, by the clock that dates answers.
    pub(crate) now: Duration,
    /// The claim that rings, or 0.
    pub(crate) bell: u64,
    /// The stamp of a bell that this request rang.
    pub(crate) rung: Option<Duration>,
}

/// What a compare-and-swap store keeps of a key. Nobody holds it where the claim is 0; its fence outlives its holders.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) claim: u64,
    pub(crate) fence: u64,
    /// The wall clock of the writer, in nanoseconds.
    pub(crate) written: i64,
    /// How long it lasts.
    pub(crate) lease: Duration,
}

/// A request on its way: over which connection, and the number that its answer will bear.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestMessage {
    pub(crate) connection: usize,
    pub(crate) number: u32,
    pub(crate) key: usize,
    pub(crate) request: Request,
    /// The end of the limit that its machine gave it, on the client's clock.
    pub(crate) deadline: Time,
    /// Answered from an old copy, if it is a read.
    pub(crate) stale: bool,
}

/// An answer on its way back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReplyMessage {
    pub(crate) connection: usize,
    pub(crate) number: u32,
    pub(crate) reply: Reply,
}
