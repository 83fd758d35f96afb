//! The lock server: bytes, the wire protocol, the core's lock table, and back.
//!
//! [`Engine`] is the server without its sockets: it decides everything, in logical time.

mod engine;
mod numbers;
mod settings;

pub use self::engine::{Engine, Hangup, Segment};
pub use self::settings::Settings;
