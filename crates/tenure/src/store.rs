//! The store traits: the contract that every store implements.
//!
//! A store keeps holds, and answers one request per call. It has no timers, no retries and no knowledge of guards: the
//! state machines of `tenure-core` decide when to claim, renew and release. The same acquire loop and the same keeper
//! drive those machines on every store, and the same suite, `tenure::conformance`, tests every store.
//!
//! # A store of your own
//!
//! Implement [`Store`] and [`Hold`], and [`Place`] if the store has a queue. Four methods are enough:
//! [`Store::claim`], [`Store::inspect`], [`Hold::renew`] and [`Hold::release`], beside
//! [`Store::capabilities`], which says what the store can do. Every other method has a default, for a store that lacks
//! the capability. The types of the contract are `#[non_exhaustive]`: make them by their constructors, then set fields.
//! Traits of this module need [`macro@async_trait`], which is exported here.
//!
//! The new store must pass `tenure::conformance` (feature `conformance`). `examples/custom_store.rs` is a complete store
//! that does. [`ClientBuilder::scheme`](crate::ClientBuilder::scheme) opens it by a URL, and
//! [`Client::with_store`](crate::Client::with_store) without.
//!
//! # Terms
//!
//! - A *key* names a lock, or a semaphore with several slots. Locks and semaphores are two *key spaces*: the lock `a`
//!   and the semaphore `a` are independent.
//! - A *hold* is what a store grants: the possession of a lock, or of one slot, by its *holder*. A *guard* is the value
//!   that represents a hold in the code of the caller.
//! - A *claim* asks a store for a hold. It may be sent several times, under one id. A *grant* is the answer that makes
//!   the claimant the holder.
//! - A *waiter* is a claimant that has no grant yet.
//! - A *place* is the position of a claim in the queue of a key.
//! - The *lease* is the time that a hold lasts without a renewal. The *ttl* is the lease that was requested.
//! - A *session* is the connection or process on which a hold depends. Not every store has sessions.
//! - The *deadline* is the instant from which the holder itself considers the hold lost. It is earlier than the end of
//!   the lease at the store.
//! - The *fencing token* is a public number that grows with every grant of a key. The *handle* is a secret: any process
//!   that has it can renew and release the hold.
//! - A *hand-off request* informs a holder that a waiter has asked for the lock.
//! - The *acquire loop* is the task that claims a key. The *keeper* is the task that renews and releases a hold.

pub use async_trait::async_trait;
pub use capabilities::{Capabilities, Handoff, Liveness, QueueKind};
#[cfg(unix)]
pub use contract::KeepOpen;
pub use contract::{
    Answer, DurableNotes, Grant, Hold, Place, ReleaseInline, Store, Waited, unsupported,
};
pub use finding::{Finding, FindingLevel};
pub use identity::Identity;
pub use request::{Claim, Contended, Handle, HoldEvent, Renewed};
pub use tenure_core::acquire::LeaseStart;
pub use tenure_core::keeper::Loss;
pub use tenure_core::table::{KeySpace, Mode};
pub use view::{HistoryEvent, HolderState, KeyState, Version, WaiterState};

mod capabilities;
mod contract;
pub(crate) mod examine;
#[cfg(all(unix, feature = "file"))]
pub mod file;
mod finding;
mod identity;
pub mod memory;
#[cfg(feature = "nats")]
pub mod nats;
#[cfg(feature = "object")]
pub mod object;
#[cfg(feature = "postgres")]
pub(crate) mod pg;
#[cfg(feature = "postgres")]
pub mod pg_advisory;
#[cfg(feature = "postgres")]
pub mod pg_lease;
mod request;
#[cfg(feature = "server")]
pub mod server;
#[cfg(any(
    all(unix, feature = "file"),
    feature = "nats",
    feature = "object",
    feature = "postgres",
    feature = "server"
))]
pub(crate) mod url_options;
mod view;
