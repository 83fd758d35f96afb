//! `tenure serve`, the real command on real sockets: as its users run it, and as nobody should use it.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

mod command;
mod hostile;
mod interop;
mod manager;
mod support;
mod trust;
mod waiting;
