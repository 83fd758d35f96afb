//! Compare-and-swap record of a key's holders, for stores with one versioned value per key.
//!
//! This module only decides: from the record, the version at which it was read and a claim it derives the next write.
//! Mutual exclusion comes from the write itself, which is conditional on that version. A decision on an old record
//! costs a refused write and nothing else.

mod decision;
mod fate;
mod known;
mod lineage;

pub use self::decision::{
    CasRecord, HolderObservations, RecordClaim, RecordDecision, RecordHolder, Renewal, StoreTime,
    abandoned_after, is_abandoned,
};
pub use self::fate::WriteFate;
pub use self::known::{KnownRecord, RecordSource, SeenRecord};
pub use self::lineage::{Lineage, LineageMark, StreamState, WentBack};
