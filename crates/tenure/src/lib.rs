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
//! # Guarantees
//!
//! A [`Guard`] is valid until a deadline. The deadline counts from before the granted request was sent, on a clock that
//! includes suspended time. It passes before the store can grant the lock to another process.
//! [`lost`](Guard::lost) resolves at the deadline, whatever the network does.
//!
//! No lock can stop a process that is frozen between its check and its write, and writes late. Only the protected
//! resource can reject that write, by the [fencing token](fence).
//!
//! # Events
//!
//! The library emits [`tracing`](https://docs.rs/tracing) events under stable names. Each event has the fields `key`
//! and `store`, except as noted. No event contains a handle or a password.
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
//! | `tenure.request_failed` | debug | `error`: a claim, a wait or a confirmation failed and is retried |
//! | `tenure.watch_failed` | debug | `error`: the store could not push changes; the key is polled |
//! | `tenure.evicted` | info | `token`, `reason` |
//! | `tenure.clock_jump` | warn | `jump_ms`; no `key`: the clock of the store was changed |
//! | `tenure.job_lost` | warn | `id`, `part`, `token`, `reason`; no `key` |
//! | `tenure.passfile_ignored` | warn | `path`; no `key`: other users can read the password file |
//! | `tenure.best_effort` | warn | `ttl`; no `key`: the bucket has nlock's layout |

#![forbid(unsafe_code)]

mod acquire;
#[cfg(feature = "blocking")]
pub mod blocking;
mod client;
mod clock;
#[cfg(feature = "conformance")]
pub mod conformance;
mod drive;
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
#[cfg(feature = "simulation")]
pub mod simulation;
pub mod store;
mod telemetry;
mod url;

/// Metrics, recorded with the facade [`metrics`](https://docs.rs/metrics). docs/operate.md lists their names.
#[cfg(feature = "metrics")]
pub mod metrics {
    pub use crate::telemetry::{Kind, METRICS, Metric, describe, refresh};
}

/// Doctests of the README and of the book.
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

/// Doctests of the page about PostgreSQL advisory locks.
#[cfg(all(doctest, feature = "postgres"))]
#[doc = include_str!("../../../docs/postgres-advisory.md")]
struct PostgresAdvisory;

/// Doctests of the page about object stores.
#[cfg(all(doctest, feature = "object"))]
#[doc = include_str!("../../../docs/object.md")]
struct ObjectPage;

/// Doctests of the page about jobs.
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
