//! What the stores on PostgreSQL share: where the server is, how to reach it, and what its errors mean.

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
pub(crate) mod settings;
pub(crate) mod shape;
#[cfg(unix)]
pub(crate) mod socket;
pub(crate) mod table;
mod tls;
pub(crate) mod watch;
