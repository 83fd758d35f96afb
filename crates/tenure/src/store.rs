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
//! [`KeySpace`] and [`Mode`] are closed: a store with a wildcard arm could grant a mode that it does not know, so a new
//! mode must not compile unnoticed.
//! Traits of this module need [`macro@async_trait`], which is exported here.
//!
//! The new store must pass `tenure::conformance` (feature `conformance`). Two examples are complete stores that do:
//! `examples/custom_store.rs` is the smallest, and `examples/queue_store.rs` has a queue that several processes share.
//! [`ClientBuilder::scheme`](crate::ClientBuilder::scheme) opens a store by a URL, and
//! [`Client::with_store`](crate::Client::with_store) without. The pages of these modules, with the suite and the
//! blocking API, are built by
//!
//! ```sh
//! cargo doc -p tenure --features conformance,blocking --open
//! ```
//!
//! ## Clock
//!
//! One clock decides when a lease ends: that of the store, such as `now()` of a database. It is never the wall clock of
//! a client: the clocks of two machines differ, and each can be set. A store that has no clock of its own judges by
//! observation: each client measures, on its own monotonic clock, for how long a record did not change.
//!
//! Within one host, [`Clock::system`](crate::Clock::system) is such a clock. On Unix its
//! [`Time`](crate::Time) values can be compared between all processes of the host until it restarts, unless a container
//! has a time namespace of its own. After a restart they begin anew: do not keep them on a disk that outlives it.
//!
//! A server that restarts gives every stored hold its whole ttl again: late, but never early.
//!
//! ## Fencing tokens
//!
//! [`FencingToken::new`](crate::FencingToken::new) takes an epoch and a number, and tokens are ordered by the epoch first.
//! A store with one counter per key uses the epoch 0. `FencingToken::epoch` and `number` return the parts, for
//! [`Store::evict`] and for storing them.
//!
//! ## Runtime and blocking drivers
//!
//! The client polls the methods of a store on the tokio runtime of the caller. The client itself uses neither the timers
//! nor the I/O of tokio. If the store uses them, tell its users to enable them, as `#[tokio::main]` does. The runtime
//! behind `tenure::blocking` has both, and a single thread.
//!
//! That thread renews every hold of the process, so no method may block it. Call a driver that blocks by
//! `tokio::task::spawn_blocking`, and make the driver itself give up at the `limit`: dropping the future does not end
//! the closure. `examples/queue_store.rs` does so.
//!
//! ## Range of the ttl
//!
//! The client accepts a ttl from [`Capabilities::min_ttl`] to 366 days, for a claim and for a renewal. A store with a
//! smaller maximum refuses a longer ttl with `Invalid`, and reports the maximum by [`Store::max_ttl`]. That is part of
//! the store, unlike `Harness::longest_ttl` of the conformance suite: a limit of one test setup, such as the ttl of the
//! bucket that the tests made.
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
