//! A stale holder is refused: at the gate, by PostgreSQL, over HTTP.

#![expect(clippy::unwrap_used, reason = "helpers of tests are tests, which clippy cannot see")]

mod gate;
mod holders;
mod http;
#[path = "../services/mod.rs"]
mod services;
mod sql;
