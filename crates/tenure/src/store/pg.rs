//! Shared parts of the stores on PostgreSQL: settings, connections, clock, schema, and the meaning of errors.

pub(crate) mod access;
mod channel_binding;
pub(crate) mod clock;
pub(crate) mod column_map;
pub(crate) mod connect;
pub(crate) mod denial;
pub(crate) mod dial;
pub(crate) mod durable;
pub(crate) mod examine;
pub(crate) mod failure;
pub(crate) mod idle;
pub(crate) mod incarnation;
pub(crate) mod job_columns;
pub(crate) mod listed;
pub(crate) mod listen;
mod login;
pub(crate) mod migrate;
pub(crate) mod pool;
pub(crate) mod pooler;
pub(crate) mod primaries;
pub(crate) mod probe;
pub(crate) mod queues;
pub(crate) mod renewer;
pub(crate) mod role;
pub(crate) mod settings;
pub(crate) mod shape;
#[cfg(unix)]
pub(crate) mod socket;
pub(crate) mod table;
mod tls;
pub(crate) mod version;
pub(crate) mod watch;
