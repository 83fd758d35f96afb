//! The pure machines of tenure: everything that decides, and nothing that acts.
//!
//! No clock, no I/O, no threads, no async runtime, no dependencies. A machine is told what happened and when
//! (`handle(input, now)`, `handle_timeout(now)`), says what to do next (`poll_*`) and when it wants to be called again
//! (`poll_timeout`). The crate `tenure` drives these machines against real stores, `tenure-server` drives the table
//! behind sockets, and the simulator drives them in logical time.

#![forbid(unsafe_code)]
#![deny(clippy::iter_over_hash_type)]

pub mod acquire;
pub mod election;
pub mod jobs;
pub mod keeper;
pub mod key;
pub mod lease;
pub mod object;
pub mod observe;
pub mod once;
pub mod random;
pub mod record;
pub mod retry;
pub mod rules;
pub mod table;
pub mod time;
pub mod token;
pub mod wire;

pub use election::Election;
pub use key::{Key, KeyError};
pub use random::Random;
pub use rules::Rules;
pub use table::LockTable;
pub use time::Time;
pub use token::{FencingToken, LockToken, TokenError};
