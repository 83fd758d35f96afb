//! What a server may do and must refuse. Plain values; the command reads them from flags and environment.

use std::time::Duration;

use tenure_core::table;
use tenure_core::wire::MAX_LINE;

/// The limits and manners of an [`Engine`](crate::Engine).
#[derive(Clone, Debug)]
pub struct Settings {
    /// The lease of who names none. Whole seconds.
    pub default_lease: Duration,
    /// The longest lease; a longer one is shortened, and the reply says so. Whole seconds.
    pub max_lease: Duration,
    /// Whether the end of a connection ends its holds.
    pub auto_release: bool,
    /// How long a line may take from its first byte to its end; `None` for ever.
    pub read_timeout: Option<Duration>,
    /// How long replies may wait to be read; `None` for ever.
    pub write_timeout: Option<Duration>,
    /// How many connections there may be.
    pub max_connections: usize,
    /// How many of them from one address.
    pub max_connections_per_peer: usize,
    /// How many wrong secrets an address may send within a minute before it is turned away for as long.
    pub max_auth_failures: u32,
    /// How many bytes a line may have, but for those that carry a secret or a description of the client.
    pub max_line: usize,
    /// How many bytes of a connection are taken before they can be served; the rest stays unread.
    pub max_pipelined: usize,
    /// How many claims of our extension a connection may have at once.
    pub max_claims_per_connection: usize,
    /// How many keys a connection may watch at once.
    pub max_watches_per_connection: usize,
    /// Whether our extension of the protocol is there; without it every command of it answers `error`, as servers in
    /// the field do.
    pub extension: bool,
    /// The limits of the table.
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
