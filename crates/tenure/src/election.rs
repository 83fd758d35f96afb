//! Leader election: at most one participant holds the key's lock and leads; the rest wait to take over.
//!
//! An [`Election`] is one participant. At most one participant of a key leads at a time, by the same promise as a lock:
//! [`Election::is_leader`] compares the clock with a deadline that passes before another participant can lead. The
//! transition table of the election is printed in the docs; its states are those of [`ElectionState`].
//!
//! ```
//! use std::time::Duration;
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
//! let client = tenure::Client::connect("memory:").await?;
//! let election = client
//!     .election("reports/scheduler")
//!     .ttl(Duration::from_secs(15))
//!     .on_acquired(|leadership| println!("leading with token {}", leadership.fencing_token()))
//!     .on_lost(|lost| eprintln!("{lost}"))
//!     .start()
//!     .await?;
//! if election.wait_for_leadership(Duration::from_secs(10)).await? {
//!     assert!(election.is_leader());
//!     election.step_down(None).await?;
//! }
//! election.shutdown(Duration::from_secs(5)).await?;
//! # Ok(()) }
//! ```

mod builder;
mod callbacks;
mod claims;
mod event;
mod leader;
mod leadership;
mod participant;
mod registration;
mod task;

pub use self::builder::ElectionRequest;
pub use self::callbacks::{AsyncCallback, CallbackOutput, SyncCallback};
pub use self::event::{AcquireFailed, Event, Events, StateChange, StopReason};
pub use self::leader::Leader;
pub use self::leadership::{Ended, Leadership};
pub use self::participant::Election;
pub use tenure_core::election::ElectionState;
