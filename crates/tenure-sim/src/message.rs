//! What goes over the wire between a client and a store.

use tenure_core::Time;

/// What a client asks of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    Claim { claim: u64, queue: bool },
    Wait { claim: u64 },
    Renew { token: u64 },
    Release { token: u64 },
    Abandon { claim: u64 },
    Read,
    Write { if_version: Option<u64>, record: Record },
}

/// What a store answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    Granted {
        token: u64,
    },
    Queued,
    Busy,
    Gone,
    Renewed {
        waiter: bool,
    },
    Refused,
    GivenBack,
    /// The connection that the request came over has ended at the store.
    Closed,
    /// The answer to a read, and to a conditional write that was refused.
    Record {
        version: u64,
        record: Record,
    },
    Written {
        version: u64,
    },
}

/// What a compare-and-swap store keeps of a key. Nobody holds it where the claim is 0; its fence outlives its holders.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) claim: u64,
    pub(crate) fence: u64,
    /// The wall clock of the writer, in nanoseconds.
    pub(crate) written: i64,
}

/// A request on its way: over which connection, and the number that its answer will bear.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parcel {
    pub(crate) link: usize,
    pub(crate) number: u32,
    pub(crate) key: usize,
    pub(crate) request: Request,
    /// The end of the limit that its machine gave it, on the client's clock.
    pub(crate) due: Time,
}

/// An answer on its way back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Letter {
    pub(crate) link: usize,
    pub(crate) number: u32,
    pub(crate) reply: Reply,
}
