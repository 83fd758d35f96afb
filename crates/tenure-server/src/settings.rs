//! Limits and timeouts of a server. The command reads them from flags and environment.

use std::time::Duration;

use tenure_core::table;
use tenure_core::wire::MAX_LINE;

/// Limits and timeouts of an [`Engine`](crate::Engine).
#[derive(Clone, Debug)]
pub struct Settings {
    /// Lease granted to clients that do not request one. Whole seconds.
    pub default_lease: Duration,
    /// Longest lease. A longer request is shortened; the reply has the granted lease. Whole seconds.
    pub max_lease: Duration,
    /// True if the end of a connection releases its holds.
    pub auto_release: bool,
    /// Time from the first byte of a line to its end; `None` for no limit.
    pub read_timeout: Option<Duration>,
    /// Time that replies may remain unread; `None` for no limit.
    pub write_timeout: Option<Duration>,
    /// Maximum number of connections.
    pub max_connections: usize,
    /// Maximum number of connections per client address.
    pub max_connections_per_peer: usize,
    /// Number of wrong secrets per minute after which an address is blocked for the rest of that minute.
    pub max_auth_failures: u32,
    /// Maximum length of a line in bytes, except for lines with a secret or with a description of the client.
    pub max_line: usize,
    /// Maximum number of bytes read from a connection at once. While its requests wait, no more is read.
    pub max_pipelined: usize,
    /// Maximum number of claims of the protocol extension per connection.
    pub max_claims_per_connection: usize,
    /// Maximum number of watches per connection.
    pub max_watches_per_connection: usize,
    /// True to offer tenure's extension of the protocol. Without it, its commands are answered with `error`, as dflockd
    /// does.
    pub extension: bool,
    /// Limits of the lock table.
    pub table: table::TableConfig,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            default_lease: Duration::from_secs(33),
            max_lease: Duration::from_secs(24 * 60 * 60),
            auto_release: true,
            read_timeout: Some(Duration::from_secs(23)),
            write_timeout: Some(Duration::from_secs(5)),
            max_connections: 10_000,
            max_connections_per_peer: 10_000,
            max_auth_failures: 10,
            max_line: MAX_LINE,
            max_pipelined: 16 * 1024,
            max_claims_per_connection: 100_000,
            max_watches_per_connection: 10_000,
            extension: true,
            table: table::TableConfig { notify_holders: true, ..table::TableConfig::default() },
        }
    }
}
