//! The real command, on the store of this host, in a directory of each test's own.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

mod away;
mod codes;
mod counting;
mod doctor;
mod events;
mod holds;
mod input;
mod killing;
mod leading;
mod own_store;
mod plain;
mod serving;
mod session;
mod several;
mod signals;
#[path = "../../../tenure-server/tests/skip/mod.rs"]
mod skip;
mod support;
mod terminal;
