//! Pure state machines that make all decisions of tenure.
//!
//! No clock, no I/O, no threads, no async runtime, no dependencies. The driver passes each event and the current time
//! to a machine (`handle(input, now)`, `handle_timeout(now)`). The machine returns its commands (`poll_*`) and the
//! instant at which it must be called again (`poll_timeout`); [`Machine`] is that interface. The crate `tenure` drives
//! these machines against real stores, `tenure-server` drives the lock table behind sockets, and the simulator drives
//! all of them in logical time.
//!
//! "Contract 4" in a comment is rule 4 of the promises that `docs/promise.md` lists.

#![forbid(unsafe_code)]
#![deny(clippy::iter_over_hash_type)]

pub mod acquire;
pub mod election;
pub mod escape;
pub mod hex;
pub mod jobs;
pub mod keeper;
pub mod key;
pub mod lease;
pub mod machine;
pub mod object;
pub mod observe;
pub mod once;
pub mod outage;
pub mod primaries;
pub mod random;
pub mod record;
pub mod retry;
pub mod rules;
pub mod table;
pub mod time;
pub mod token;
pub mod trace_parent;
pub mod wire;

pub use election::Election;
pub use key::{Key, KeyError};
pub use machine::Machine;
pub use random::Random;
pub use rules::Rules;
pub use table::LockTable;
pub use time::Time;
pub use token::{FencingToken, LockToken, TokenError};
pub use trace_parent::TraceParent;
