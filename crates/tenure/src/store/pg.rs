//! Shared parts of the stores on PostgreSQL: settings, connections, clock, schema, and the meaning of errors.

pub(crate) mod access;
pub(crate) mod clock;
pub(crate) mod connect;
pub(crate) mod dial;
pub(crate) mod durable;
pub(crate) mod examine;
pub(crate) mod failure;
pub(crate) mod idle;
pub(crate) mod incarnation;
pub(crate) mod listen;
pub(crate) mod migrate;
pub(crate) mod pool;
pub(crate) mod queues;
pub(crate) mod renewer;
pub(crate) mod settings;
pub(crate) mod shape;
#[cfg(unix)]
pub(crate) mod socket;
pub(crate) mod table;
mod tls;
pub(crate) mod watch;
