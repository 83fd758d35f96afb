//! `tenure serve`, the real command on real sockets, with ordinary and with hostile clients.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

mod command;
mod hostile;
mod interop;
mod manager;
#[path = "../../../tenure-server/tests/skip/mod.rs"]
mod skip;
mod support;
mod trust;
mod waiting;
