//! Bodies of the fuzz targets in `fuzz/`. The tests of this crate run each of them briefly on seeded inputs.
//!
//! A body takes arbitrary bytes, as a network or a disk might deliver them. It panics if the product panics, and if a
//! value that was read is not the same after it was written and read again.

#![forbid(unsafe_code)]

mod inputs;
mod journal;
mod records;
mod wire;

pub use self::inputs::{Samples, mutate};
pub use self::journal::{journal, journal_samples};
pub use self::records::{
    file_record, file_samples, nats_record, nats_samples, object_record, object_samples,
};
pub use self::wire::{reply_samples, request_samples, wire_replies, wire_requests};

/// Types under the names that the included sources use.
mod store {
    pub(crate) use tenure::store::{Identity, KeySpace, Mode};
}
