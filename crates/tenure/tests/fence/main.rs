//! A stale holder is refused: at the gate, over HTTP.

#![expect(clippy::unwrap_used, reason = "helpers of tests are tests, which clippy cannot see")]

mod gate;
mod holders;
mod http;
