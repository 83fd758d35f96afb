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
//! # Stores
//!
//! The URL chooses the store. Each store is a crate feature, so that a program builds only what it uses. Lock server,
//! lease rows, NATS and object stores grant a lease; files and advisory locks belong to a process or a session.
//!
//! | URL | feature | shared, semaphores | order of waiters | a killed holder's lock is free | hold without a process |
//! |---|---|---|---|---|---|
//! | `memory:` | | yes, yes | first come | with its guard | yes |
//! | `file:` | `file` (default), on Unix | yes, yes | first come | within milliseconds | no |
//! | `tenure://`, `tenures://` | `server`, `tls` | yes, yes | first come | at once, or when its lease ends | yes |
//! | `postgres://` | `postgres` | yes, yes | fastest client | when its lease ends | yes |
//! | `postgres+advisory://` | `postgres` | yes, no | about first come | within milliseconds | no |
//! | `nats://` | `nats` | yes, yes | fastest client, or first come | when its lease and a margin end | yes |
//! | `gs://`, `s3://`, `az://` | `object` | no, no | one waiter | when its lease and a margin end | yes |
//!
//! On every store: the guard's deadline passes before another process can be granted the lock, fencing tokens grow
//! (except at a dflockd server, which has none), and a claim that is repeated is granted once. The exceptions, by store,
//! are in the chapter "Promises and limits" of the book.
//!
//! Further features: `blocking` (the same API without async), `jobs` (jobs and checkpoints in PostgreSQL), `metrics`,
//! `conformance` (the suite that every store passes, for stores of your own).
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
//! | `tenure.store_away` | warn | `away_ms`, `error`: the store is away, and requests are retried |
//! | `tenure.store_back` | info | `away_ms`: the store answers again |
//! | `tenure.watch_failed` | debug | `error`: the store could not push changes; the key is polled |
//! | `tenure.evicted` | info | `token`, `reason` |
//! | `tenure.clock_jump` | warn | `jump_ms`; no `key`: the clock of the store was changed |
//! | `tenure.leases_ahead_ended` | warn | `jobs`; no `key`: the clock was set back, and leases of dead workers were ended |
//! | `tenure.job_set_aside` | warn | `id`, `reason`; no `key`: the row of a job cannot be read or claimed |
//! | `tenure.job_lost` | warn | `id`, `part`, `token`, `reason`; no `key` |
//! | `tenure.prepare_refused` | warn | `error`; no `key`: statements are no longer prepared |
//! | `tenure.passfile_ignored` | warn | `path`; no `key`: other users can read the password file |
//! | `tenure.best_effort` | warn | `ttl`; no `key`: the bucket has nlock's layout |

#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod acquire;
#[cfg(feature = "blocking")]
pub mod blocking;
mod client;
mod client_builder;
mod client_operations;
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
mod lock_all;
mod mutex;
pub mod once;
mod outage;
mod pending;
#[cfg(feature = "postgres")]
pub mod postgres;
mod process;
mod race;
mod request;
#[cfg(feature = "simulation")]
pub mod simulation;
pub mod store;
mod telemetry;
mod units;
mod url;
mod watch;

/// Metrics, recorded with the facade [`metrics`](https://docs.rs/metrics). The page "Operating tenure" of the book lists their names.
#[cfg(feature = "metrics")]
pub mod metrics {
    pub use crate::telemetry::{Kind, METRICS, Metric, describe, refresh};
}

pub use client::Client;
pub use client_builder::ClientBuilder;
pub use clock::{Clock, ManualClock, Sleep};
pub use election::{Election, ElectionRequest, Leader, Leadership};
pub use error::{Error, ErrorKind, Result};
pub use guard::{Guard, Lost};
pub use lock_all::{LockAllRequest, LockGuards};
pub use outage::StoreOutage;
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
pub use watch::KeyWatch;
