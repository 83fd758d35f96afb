//! The lock server: bytes → wire protocol → lock table of `tenure-core` → wire protocol → bytes.
//!
//! [`Engine`] is the server without sockets: it takes every decision, in logical time. [`Server`] runs an engine behind
//! a listener, on one thread. [`journal`] is the data directory.

#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(not(target_os = "linux"))]
compile_error!("the lock server needs Linux; clients of it run on other systems too");

pub mod clock;
mod engine;
#[cfg(feature = "http")]
pub mod http;
pub mod journal;
mod mutex;
pub mod network;
#[cfg_attr(
    not(any(
        target_arch = "x86_64",
        target_arch = "aarch64",
        target_arch = "riscv64",
        target_arch = "powerpc64"
    )),
    path = "send_batch/absent.rs"
)]
mod send_batch;
mod server;
mod settings;
mod socket;
mod tls;
mod token_mint;
mod transport;
mod units;

pub use self::engine::{
    AdminOutcome, Counters, Engine, Hangup, HistoryEvent, HistoryEventKind, KeyRow, OutputSegment,
    RowHolder, ServerMetrics,
};
pub use self::server::{Handle, Server};
pub use self::settings::Settings;
pub use self::tls::{TlsError, TlsFiles, TlsSetup};
