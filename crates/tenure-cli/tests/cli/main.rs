//! The real command, on the store of this host, in a directory of each test's own.

mod codes;
mod counting;
mod events;
mod holds;
mod input;
mod killing;
mod signals;
mod support;
mod terminal;
