//! Simulator that drives the real state machines of `tenure-core` through faults in logical time.
//!
//! Several clients, each with a drifting clock, claim one or two keys of one of four [store models](StoreKind) over a
//! network that delays and loses messages. Clients are paused, suspended, partitioned and killed. A checker that knows
//! the real time checks the contract at every step that could break it. The simulator only carries messages and time;
//! every decision is taken by the state machines of the core.
//!
//! A run is a function of its seed and its [`Setup`]. [`Rules`](tenure_core::Rules) are part of the setup: with one
//! rule disabled, a breach must occur. That shows that the rule is needed, and that the simulator detects breaches.

#![forbid(unsafe_code)]

mod ablation;
mod client;
mod clock;
mod contract;
mod driver;
mod faults;
mod in_flight;
mod message;
pub mod model;
mod notifications;
pub mod product;
mod requests;
mod setup;
mod shrink;
mod simulate;
mod soak;
mod store;
mod task;
mod violation;
mod world;

pub use ablation::Ablation;
pub use contract::Breach;
pub use model::SmallWorld;
pub use setup::{FaultKind, Faults, Setup, StoreKind};
pub use shrink::{SeededSetup, Shrunk, shrink, shrink_run};
pub use simulate::simulate;
pub use soak::{Summary, soak};
pub use violation::{Stats, Violation};
