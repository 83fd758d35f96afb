//! Reports to operators: metrics, rows of keys, outcomes of actions.

use std::time::Duration;

use tenure_core::table::{KeySpace, TableSizes, TableStats};

/// Event counters of the engine, beside those of the table. Not atomic: the engine runs on one thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Requests, served and refused.
    pub requests: u64,
    /// Connections accepted.
    pub connections: u64,
    /// Connections rejected.
    pub connections_rejected: u64,
    /// Claims that did not wait and found the key held.
    pub contended: u64,
    /// Waits that timed out.
    pub timeouts: u64,
    /// Claims refused because of a limit.
    pub refused: u64,
    /// Renewals refused because the token had no hold.
    pub renewals_refused: u64,
    /// Authentication failures.
    pub auth_failures: u64,
}

/// Metrics of a server at one moment.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "the flags are independent")]
pub struct ServerMetrics {
    /// Event counters of the engine.
    pub counters: Counters,
    /// Event counters of the table.
    pub stats: TableStats,
    /// Numbers of keys, holds and waiters in the table.
    pub sizes: TableSizes,
    /// Age of the oldest waiter.
    pub oldest_wait: Option<Duration>,
    /// Open connections.
    pub connections: usize,
    /// True if holds survive a restart.
    pub durable: bool,
    /// True once the server has begun to stop.
    pub draining: bool,
    /// True if the server has a secret. Without a secret no hold can be broken.
    pub has_secret: bool,
    /// True if events of keys are kept.
    pub keeps_history: bool,
}

/// Summary of a key in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRow {
    /// Key space.
    pub space: KeySpace,
    /// Key.
    pub key: Box<[u8]>,
    /// Number of holders.
    pub held: u32,
    /// Number of slots, if the key is a semaphore.
    pub limit: Option<u32>,
    /// Number of waiters.
    pub waiting: u32,
    /// Age of the first waiter.
    pub oldest_wait: Option<Duration>,
    /// Holder with the oldest grant.
    pub holder: Option<RowHolder>,
}

/// Holder of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowHolder {
    /// Identity of the holder, as its client sent it.
    pub by: String,
    /// Fencing number.
    pub number: u64,
    /// Time since the grant.
    pub held_for: Duration,
    /// Lease, counted from the last renewal.
    pub lease: Duration,
    /// Time until the lease ends.
    pub left: Duration,
    /// True if the hold belongs to no connection: the end of a connection cannot end it.
    pub detached: bool,
}

/// Result of an operator's action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdminOutcome {
    /// The action was carried out.
    Done,
    /// The server has no secret, so it cannot tell an operator from any other client.
    NoSecret,
    /// The secret is wrong, or the address is blocked after too many wrong secrets.
    WrongSecret,
    /// No hold of the key has this fencing number.
    NotHeld,
    /// The holder cannot be notified: it has no connection, or its client does not use the extension.
    HolderUnreachable,
}
