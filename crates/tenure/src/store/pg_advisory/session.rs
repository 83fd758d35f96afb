//! A session of the server: it holds a lock, or runs read-only queries.

use std::sync::Arc;
#[cfg(unix)]
use std::sync::Weak;
use std::time::Duration;

use tenure_core::{FencingToken, Time};
use tokio_postgres::SimpleQueryRow;

use super::pair::Pair;
use super::sql::{self, ClaimWait, LockSpec, SessionIdent};
use super::tag::Tag;
use super::terms;
#[cfg(unix)]
use crate::store::KeepOpen;
use crate::store::pg::connect::{PgConnection, SessionEnd};
use crate::store::pg::failure;
use crate::store::pg::incarnation::{FoundIncarnation, Incarnation};
use crate::store::pg::settings::Settings;
#[cfg(unix)]
use crate::store::pg::socket::SocketHandle;
use crate::store::pg::table::Table;
use crate::{Clock, Error, ErrorKind, Result, identity};

/// First version of PostgreSQL whose functions have their present names.
const MIN_SERVER_VERSION: u32 = 100_000;

#[derive(Debug)]
pub(super) struct Session {
    connection: PgConnection,
    pub(super) ident: SessionIdent,
    /// Start time of the session, as the server prints it. A pid alone may have been reused by another session.
    pub(super) started: String,
    pub(super) version: u32,
    /// Table in which terms are counted.
    terms: Option<Arc<Table>>,
    /// Run of the server, until the first claim has read its epoch.
    run: Option<(Arc<Incarnation>, FoundIncarnation)>,
}

/// Outcome of a claim.
#[derive(Debug)]
pub(super) enum SessionClaim {
    /// The lock was granted, at `at` on the database's clock.
    Granted {
        token: FencingToken,
        at: i64,
        /// Number of terms of this lock so far, if they are counted.
        terms: Option<u64>,
    },
    /// Another session holds the lock.
    Busy,
}

impl Session {
    /// Connects and marks the session. `settled`: a writable server has answered before.
    pub(super) async fn open(
        settings: &Settings,
        terms: Option<Arc<Table>>,
        incarnation: Arc<Incarnation>,
        clock: &Clock,
        settled: bool,
        by: Time,
    ) -> Result<Self> {
        let marker = format!("{:016x}", u64::from_be_bytes(identity::random()?));
        let mut connection = PgConnection::open(settings, clock, by, None).await?;
        let rows = connection.simple(&sql::greeting(&marker, terms.as_deref()), by).await;
        let rows = rows.map_err(|error| without_tables(failure::nothing_done(error)))?;
        let row = rows.first().ok_or_else(unexpected_answer)?;
        let (pid, version) = (number(row, "pid")?, number(row, "version")?);
        if flag(row, "is_standby") {
            return Err(failure::standby(settled));
        }
        if version < MIN_SERVER_VERSION {
            let message = "this server is older than PostgreSQL 10, the oldest supported version";
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        let started = row.get("session_started").unwrap_or_default().to_owned();
        let (leases, found) = (flag(row, "ends_idle_sessions"), FoundIncarnation::read_text(row));
        let (ident, run) =
            (SessionIdent { pid, marker, leases, epoch: None }, Some((incarnation, found)));
        Ok(Self { connection, ident, started, version, terms, run })
    }

    pub(super) async fn claim(
        &mut self,
        tag: &Tag,
        spec: &LockSpec,
        wait: ClaimWait,
        by: Time,
    ) -> Result<SessionClaim> {
        if let Some((incarnation, found)) = &self.run {
            self.ident.epoch = incarnation.epoch(found, &mut self.connection, by).await?;
            self.run = None;
        }
        let sql = sql::claim(&self.ident, tag, spec, wait);
        let rows = self.connection.simple(&sql, by).await.map_err(without_tables)?;
        let row = rows.first().ok_or_else(unexpected_answer)?;
        match row.get("what") {
            Some("granted") => {
                let token = FencingToken::new(number(row, "epoch")?, number(row, "number")?);
                let at = number(row, "now")?;
                Ok(SessionClaim::Granted { token, at, terms: self.count(tag, spec, by).await? })
            }
            Some("busy") => Ok(SessionClaim::Busy),
            Some("moved") => Err(pooler_error()),
            Some("standby") => Err(failure::standby(true)),
            _ => Err(unexpected_answer()),
        }
    }

    /// Counts a term that has just begun, if terms are counted. Shared holds have no terms.
    async fn count(&mut self, tag: &Tag, spec: &LockSpec, by: Time) -> Result<Option<u64>> {
        let Some(table) = self.terms.as_deref().filter(|_| !spec.shared) else { return Ok(None) };
        let counted = self.connection.simple(&sql::count(tag, table, spec.pair), by).await;
        let rows = counted.map_err(|error| terms::explain(error, table))?;
        number(rows.first().ok_or_else(unexpected_answer)?, "terms").map(Some)
    }

    /// Proves that the session lives. [`ErrorKind::NotHeld`] if another session answered, or the server is a standby.
    pub(super) async fn renew(&mut self, tag: &Tag, ttl: Duration, by: Time) -> Result<()> {
        let rows = self.connection.simple(&sql::renew(&self.ident, tag, ttl), by).await?;
        let row = rows.first().ok_or_else(unexpected_answer)?;
        if !flag(row, "is_same_session") {
            let message = "the answer came from another session than the lock's: a pooler is in between; connect \
                           to the server itself";
            return Err(Error::new(ErrorKind::NotHeld, message));
        }
        if flag(row, "is_standby") {
            let message = "the server has become a standby: the lock is held nowhere";
            return Err(Error::new(ErrorKind::NotHeld, message));
        }
        Ok(())
    }

    /// Releases the lock. Returns false if the session did not hold it.
    pub(super) async fn release(&mut self, pair: Pair, shared: bool, by: Time) -> Result<bool> {
        let rows = self.connection.simple(&sql::release(&self.ident, pair, shared), by).await?;
        Ok(flag(rows.first().ok_or_else(unexpected_answer)?, "released"))
    }

    /// Runs a query that changes no lock of this session.
    pub(super) async fn ask(&mut self, sql: &str, by: Time) -> Result<Vec<SimpleQueryRow>> {
        self.connection.simple(sql, by).await
    }

    pub(super) fn end(&self) -> SessionEnd {
        self.connection.end()
    }

    /// Handle with which another process can keep the session open.
    #[cfg(unix)]
    pub(super) fn keep_open(&self) -> Option<Weak<dyn KeepOpen>> {
        let socket = self.connection.socket()?;
        let socket: Weak<SocketHandle> = Arc::downgrade(socket);
        Some(socket)
    }

    pub(super) fn is_usable(&self) -> bool {
        self.connection.is_usable()
    }
}

/// Replaces the messages of [`failure`] about tables: here a function is refused or missing.
fn without_tables(error: Error) -> Error {
    let (kind, message) = match failure::code(&error) {
        Some("42501") => (
            ErrorKind::Denied,
            "the role may not call a function that locks need: an owner must GRANT EXECUTE on it",
        ),
        Some("42883" | "42704") => (
            ErrorKind::Misconfigured,
            "the server lacks a function that locks need: is it PostgreSQL?",
        ),
        _ => return error,
    };
    Error::new(kind, message).because(error)
}

/// Error for a pooler that shares one session among several clients.
pub(super) fn pooler_error() -> Error {
    let message = "a pooler in transaction mode is in between, and would grant one lock to several clients: connect \
                   to the server itself, or to a pool in session mode, or use lease rows (postgres://)";
    Error::new(ErrorKind::Misconfigured, message)
}

pub(super) fn flag(row: &SimpleQueryRow, column: &str) -> bool {
    row.get(column) == Some("1")
}

pub(super) fn number<T: std::str::FromStr>(row: &SimpleQueryRow, column: &str) -> Result<T> {
    row.get(column).and_then(|text| text.parse().ok()).ok_or_else(unexpected_answer)
}

fn unexpected_answer() -> Error {
    Error::new(ErrorKind::Unknown, "the server sent an unexpected answer")
}
