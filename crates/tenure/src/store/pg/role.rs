//! Role of a server: a primary with its timeline, or a standby.

use tenure_core::Time;
use tenure_core::primaries::PrimaryRun;
use tokio_postgres::SimpleQueryRow;

use super::connect::PgConnection;
use super::failure;
use super::settings::WantedServer;
use crate::{Error, ErrorKind, Result};

/// SQL of the timeline that the server writes. `pg_control_checkpoint` would be late by a checkpoint.
pub(crate) const TIMELINE: &str =
    "('x' || lpad(left(pg_walfile_name(pg_current_wal_lsn()), 8), 16, '0'))::bit(64)::int8";
/// SQL of the start time of the server, in microseconds since 1970.
pub(super) const STARTED: &str = "(extract(epoch FROM pg_postmaster_start_time()) * 1000000)::int8";
/// SQL of the system identifier.
pub(super) const SYSTEM: &str = "(SELECT system_identifier FROM pg_control_system())";

/// Role of a server, as it answered.
#[derive(Clone, Copy, Debug)]
pub(super) struct ServerRole {
    /// `None` for a standby.
    pub(super) run: Option<PrimaryRun>,
    read_only: bool,
}

impl ServerRole {
    /// Asks the server. Nothing is changed there.
    pub(super) async fn of(connection: &mut PgConnection, by: Time) -> Result<Self> {
        // A standby writes no timeline, and the function would fail there.
        let sql = format!(
            "SELECT current_setting('transaction_read_only') AS read_only, {SYSTEM} AS system, {STARTED} AS started, \
             CASE WHEN NOT pg_is_in_recovery() THEN {TIMELINE} END AS timeline"
        );
        let rows = connection.simple(&sql, by).await.map_err(failure::nothing_done)?;
        let row = rows.first();
        let number = |column: &str| row.and_then(|row| read_number(row, column));
        let (Some(system), Some(started)) = (number("system"), number("started")) else {
            return Err(Error::new(ErrorKind::Unavailable, "the server sent an unexpected answer"));
        };
        let run = number("timeline").map(|timeline| PrimaryRun { system, timeline, started });
        let read_only = row.and_then(|row| row.get("read_only")) == Some("on");
        Ok(Self { run, read_only })
    }

    /// Fails unless the server has the property that the settings ask for.
    pub(super) fn check(self, wanted: WantedServer) -> Result<()> {
        let message = match wanted {
            WantedServer::ReadWrite if self.read_only => {
                "the server is read-only, and no writable server answers"
            }
            WantedServer::Primary if self.run.is_none() => {
                "the server is a standby, and no primary answers"
            }
            WantedServer::Any | WantedServer::ReadWrite | WantedServer::Primary => return Ok(()),
        };
        Err(Error::new(ErrorKind::Unavailable, message))
    }
}

fn read_number(row: &SimpleQueryRow, column: &str) -> Option<i64> {
    row.get(column).and_then(|text| text.parse().ok())
}
