//! The lock server: bytes, the wire protocol, the core's lock table, and back.

pub mod journal;
