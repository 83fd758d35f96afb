//! Locks, leases, leader election and jobs on the store you already run.
//!
//! ```
//! use std::time::Duration;
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
//! let client = tenure::Client::connect("memory:").await?;
//! let guard = client
//!     .lock("reports/nightly")
//!     .ttl(Duration::from_secs(30))
//!     .timeout(Duration::from_secs(10))
//!     .acquire()
//!     .await?;
//! println!("held as {}", guard.fencing_token());
//! guard.run(async { /* dropped if the hold is lost */ }).await?;
//! guard.release().await?;
//! # Ok(()) }
//! ```
//!
//! # What is promised
//!
//! A [`Guard`] is valid until a deadline that is counted from before the request that the store granted was sent, on a
//! clock that counts suspended time, and that ends before the store can give the lock to another. `lost` fires at that
//! deadline whatever the network does. What no lock can promise: a process that is frozen between its check and its
//! write acts late. Only the resource can refuse that, by the [fencing token](fence).
//!
//! # Events
//!
//! The library tells what it does by [`tracing`](https://docs.rs/tracing), under names that stay. Each has `key` and
//! `store`; no event ever holds a handle or a password.
//!
//! | name | level | more fields |
//! |---|---|---|
//! | `tenure.acquired` | debug | `token` |
//! | `tenure.waiting` | trace | `ahead` |
//! | `tenure.renewed` | trace | |
//! | `tenure.renew_failed` | warn | `error` |
//! | `tenure.handoff_requested` | debug | `token` |
//! | `tenure.lost` | warn | `token`, `reason` |
//! | `tenure.release_failed` | warn | `error` |
//! | `tenure.ended` | debug | `token`, `end` |
//! | `tenure.request_failed` | debug | `error`: a claim, a wait or a confirmation failed and is tried again |
//! | `tenure.watch_failed` | debug | `error`: the store cannot tell of changes; the key is polled |
//! | `tenure.evicted` | info | `token`, `reason` |
//! | `tenure.clock_jump` | warn | `jump_ms`; no `key`: the clock of the store was set |
//! | `tenure.job_lost` | warn | `id`, `part`, `token`, `reason`; no `key` |
//! | `tenure.passfile_ignored` | warn | `path`; no `key`: others may read the file of passwords |
//! | `tenure.best_effort` | warn | `ttl`; no `key`: the bucket has nlock's form |

#![forbid(unsafe_code)]

mod acquire;
#[cfg(feature = "blocking")]
pub mod blocking;
mod client;
mod clock;
#[cfg(feature = "conformance")]
pub mod conformance;
pub mod election;
mod error;
pub mod fence;
mod guard;
mod identity;
#[cfg(feature = "jobs")]
pub mod jobs;
pub mod once;
mod pending;
mod process;
mod request;
pub mod store;
mod telemetry;
mod url;

/// Counts and durations, recorded by the facade [`metrics`](https://docs.rs/metrics): see docs/operate.md for the names.
#[cfg(feature = "metrics")]
pub mod metrics {
    pub use crate::telemetry::{Kind, METRICS, Metric, describe, refresh};
}

/// The code in the README and in the book runs.
#[cfg(doctest)]
mod book {
    macro_rules! pages {
        ($($name:ident: $page:literal,)*) => {$(
            #[doc = include_str!(concat!("../../../", $page))]
            struct $name;
        )*};
    }

    pages! {
        Readme: "README.md",
        Elections: "docs/elections.md",
        Fencing: "docs/fencing.md",
        HandOff: "docs/handoff.md",
        Nats: "docs/nats.md",
        Start: "docs/start.md",
        Testing: "docs/testing.md",
    }
}

/// And so does that in the page of this store.
#[cfg(all(doctest, feature = "postgres"))]
#[doc = include_str!("../../../docs/postgres-advisory.md")]
struct PostgresAdvisory;

/// And of this one.
#[cfg(all(doctest, feature = "object"))]
#[doc = include_str!("../../../docs/object.md")]
struct ObjectPage;

/// So does that of the page about jobs.
#[cfg(all(doctest, feature = "jobs"))]
#[doc = include_str!("../../../docs/jobs.md")]
struct JobsPage;

pub use client::Client;
pub use clock::{Clock, ManualClock, Sleep};
pub use election::{Election, ElectionRequest, Leader, Leadership};
pub use error::{Error, ErrorKind, Result};
pub use guard::{Guard, Lost};
pub use pending::Pending;
pub use request::LockRequest;
#[cfg(all(unix, feature = "file"))]
pub use store::file::FileStore;
pub use store::memory::MemoryStore;
#[cfg(feature = "nats")]
pub use store::nats::NatsStore;
#[cfg(feature = "object")]
pub use store::object::BucketStore;
#[cfg(feature = "postgres")]
pub use store::pg_advisory::PgAdvisoryStore;
#[cfg(feature = "postgres")]
pub use store::pg_lease::PgLeaseStore;
#[cfg(feature = "server")]
pub use store::server::LockServerStore;
pub use store::{Handle, Store};
pub use tenure_core::keeper::Loss;
pub use tenure_core::{FencingToken, Key, KeyError, Time, retry};
