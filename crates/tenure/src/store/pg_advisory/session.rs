//! A session of the server: it holds a lock, or runs read-only queries.

use std::sync::Arc;
#[cfg(unix)]
use std::sync::Weak;
use std::time::Duration;

use tenure_core::{FencingToken, Time};
use tokio::sync::mpsc;
use tokio_postgres::SimpleQueryRow;

use super::lock_id::LockId;
use super::sql::{self, ClaimWait, LockSpec, SessionIdent};
use super::tag::Tag;
use super::terms;
#[cfg(unix)]
use crate::store::KeepOpen;
use crate::store::pg::connect::{PgConnection, SessionEnd};
use crate::store::pg::failure;
use crate::store::pg::incarnation::{FoundIncarnation, Incarnation};
use crate::store::pg::listed;
use crate::store::pg::pooler::{self, shared_sessions_error};
use crate::store::pg::primaries::{Primaries, RenewalCheck};
use crate::store::pg::probe::HeldQuestion;
use crate::store::pg::settings::Settings;
#[cfg(unix)]
use crate::store::pg::socket::SocketHandle;
use crate::store::pg::table::Table;
use crate::store::pg::version;
use crate::{Clock, Error, ErrorKind, Result, identity};

/// Maximum number of unread notifications. Each is a call to do the same, so one would do.
const MAX_PENDING_CALLS: usize = 2;

#[derive(Debug)]
pub(super) struct Session {
    connection: PgConnection,
    pub(super) ident: SessionIdent,
    /// Start time of the session, as the server prints it. A pid alone may have been reused by another session.
    pub(super) started: String,
    pub(super) version: i32,
    /// Table in which terms are counted.
    terms: Option<Arc<Table>>,
    /// Run of the server, until the first claim has read its epoch.
    run: Option<(Arc<Incarnation>, FoundIncarnation)>,
    /// Notifications to this session, once it has stood by.
    calls: mpsc::Receiver<(String, String)>,
    primaries: Arc<Primaries>,
}

/// Outcome of a claim.
#[derive(Clone, Copy, Debug)]
pub(super) enum SessionClaim {
    /// The lock was granted, at `at` on the database's clock.
    Granted {
        token: FencingToken,
        at: i64,
        /// Number of terms of this lock so far, if they are counted.
        terms: Option<u64>,
    },
    /// Another session holds the lock. This one has a place in the queue, and may wait there.
    Entered { place: u8 },
    /// Another session holds the lock, and the queue is full. This one stands by for a place, as one of `reserves`.
    InReserve { ticket: u32, reserves: u32 },
    /// Another session holds the lock.
    Busy,
}

/// Environment of the sessions of one store.
pub(super) struct SessionSource<'a> {
    pub(super) settings: &'a Settings,
    pub(super) clock: &'a Clock,
    pub(super) terms: Option<Arc<Table>>,
    pub(super) incarnation: Arc<Incarnation>,
    pub(super) primaries: Arc<Primaries>,
    /// True if a writable server has answered before.
    pub(super) settled: bool,
}

impl Session {
    /// Connects, makes sure that the session is ours alone, and marks it.
    pub(super) async fn open(source: SessionSource<'_>, by: Time) -> Result<Self> {
        let SessionSource { settings, clock, terms, incarnation, primaries, settled } = source;
        let marker = format!("{:016x}", u64::from_be_bytes(identity::random()?));
        let (sender, calls) = mpsc::channel(MAX_PENDING_CALLS);
        let mut connection = listed::open(settings, clock, by, Some(sender)).await?;
        let rows = connection.simple(&sql::greeting(terms.as_deref()), by).await;
        let rows = rows.map_err(|error| without_tables(failure::nothing_done(error)))?;
        let row = rows.first().ok_or_else(unexpected_answer)?;
        let (pid, version) = (number(row, "pid")?, number(row, "version")?);
        if flag(row, "is_standby") {
            return Err(failure::standby(settled));
        }
        version::check(version)?;
        let binding = pooler::examine(&mut connection, pid, settings, clock, by).await?;
        let is_own = binding.has_own_session() && {
            let answer = connection.simple(&sql::mark(pid, &marker), by).await;
            !answer.map_err(failure::nothing_done)?.is_empty()
        };
        if !is_own {
            return Err(shared_sessions_error(pooler::name(settings, clock, by).await));
        }
        let started = row.get("session_started").unwrap_or_default().to_owned();
        let (leases, found) = (flag(row, "ends_idle_sessions"), FoundIncarnation::read_text(row));
        let (ident, run) =
            (SessionIdent { pid, marker, leases, epoch: None }, Some((incarnation, found)));
        Ok(Self { connection, ident, started, version, terms, run, calls, primaries })
    }

    pub(super) async fn claim(
        &mut self,
        tag: &Tag,
        spec: &LockSpec,
        wait: ClaimWait,
        by: Time,
    ) -> Result<SessionClaim> {
        self.primaries.check_claim(&mut self.connection, by).await?;
        if let Some((incarnation, found)) = &self.run {
            self.ident.epoch = incarnation.epoch(found, &mut self.connection, by).await?;
            self.run = None;
        }
        let sql = sql::claim(&self.ident, tag, spec, wait);
        let rows = self.connection.simple(&sql, by).await.map_err(explain_claim)?;
        let row = rows.first().ok_or_else(unexpected_answer)?;
        match row.get("what") {
            Some("granted") => {
                let token = FencingToken::new(number(row, "epoch")?, number(row, "number")?);
                let at = number(row, "now")?;
                self.confirm(spec, by).await?;
                Ok(SessionClaim::Granted { token, at, terms: self.count(tag, spec, by).await? })
            }
            Some("busy") if row.get("reserves").is_some() => {
                let (ticket, reserves) = (number(row, "ticket")?, number(row, "reserves")?);
                Ok(SessionClaim::InReserve { ticket, reserves })
            }
            Some("busy") => Ok(SessionClaim::Busy),
            Some("moved") => Err(shared_sessions_error("a pooler")),
            Some("standby") => Err(failure::standby(true)),
            Some(what) => {
                let place = what.strip_prefix("place ").and_then(|place| place.parse().ok());
                let entered = place.map(|place| SessionClaim::Entered { place });
                entered.ok_or_else(unexpected_answer)
            }
            None => Err(unexpected_answer()),
        }
    }

    /// Confirms a grant. After an error the session must be closed, which frees the lock.
    async fn confirm(&mut self, spec: &LockSpec, by: Time) -> Result<()> {
        let sql = sql::held(spec);
        let question = HeldQuestion { sql: &sql, parameters: &[] };
        let end = self.connection.end();
        let confirming = self.primaries.confirm_grant(&mut self.connection, question, by);
        match while_open(end, confirming).await? {
            (_, Some(error)) => Err(error),
            (_, None) => Ok(()),
        }
    }

    /// Polls as a reserve. Returns the number of reserves, and true if this one may enter the queue.
    pub(super) async fn poll(
        &mut self,
        tag: &Tag,
        spec: &LockSpec,
        ticket: u32,
        by: Time,
    ) -> Result<(u32, bool)> {
        let rows = self.connection.simple(&sql::poll(&self.ident, tag, spec, ticket), by).await?;
        let row = rows.first().ok_or_else(|| shared_sessions_error("a pooler"))?;
        Ok((number(row, "reserves")?, flag(row, "may_enter")))
    }

    /// Resolves when a place in the queue may be free for this session, which stands by.
    ///
    /// # Errors
    ///
    /// `Unavailable` when the connection has ended.
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time.
    pub(super) async fn called(&mut self) -> Result<()> {
        let ended = || Error::new(ErrorKind::Unavailable, "the connection ended while it stood by");
        self.calls.recv().await.map(drop).ok_or_else(ended)
    }

    /// Counts a term that has just begun, if terms are counted. Shared holds have no terms.
    async fn count(&mut self, tag: &Tag, spec: &LockSpec, by: Time) -> Result<Option<u64>> {
        let Some(table) = self.terms.as_deref().filter(|_| !spec.shared) else { return Ok(None) };
        let counted =
            self.connection.simple(&sql::count(&self.ident, tag, table, spec.lock), by).await;
        let rows = counted.map_err(|error| terms::explain(error, table))?;
        let row = rows.first().ok_or_else(|| shared_sessions_error("a pooler"))?;
        number(row, "terms").map(Some)
    }

    /// Proves that the session lives. [`ErrorKind::NotHeld`] if another session answered, or the server is a standby or
    /// an old primary.
    pub(super) async fn renew(
        &mut self,
        tag: &Tag,
        spec: &LockSpec,
        ttl: Duration,
        by: Time,
    ) -> Result<()> {
        let rows = self.connection.simple(&sql::renew(&self.ident, tag, ttl), by).await?;
        let row = rows.first().ok_or_else(unexpected_answer)?;
        if !flag(row, "is_same_session") {
            let message = "the answer came from another session than the lock's";
            let cause = shared_sessions_error("a pooler");
            return Err(Error::new(ErrorKind::NotHeld, message).because(cause));
        }
        if flag(row, "is_standby") {
            let message = "the server has become a standby: the lock is held nowhere";
            return Err(Error::new(ErrorKind::NotHeld, message));
        }
        let sql = sql::held(spec);
        let question = HeldQuestion { sql: &sql, parameters: &[] };
        let end = self.connection.end();
        let confirming = self.primaries.confirm_renewal(&mut self.connection, question, by);
        match while_open(end, confirming).await? {
            RenewalCheck::Done(held) if held.is_empty() => Ok(()),
            RenewalCheck::Done(_) => {
                let message =
                    "the lock is held at another primary, too: nothing tells which is right";
                Err(Error::new(ErrorKind::NotHeld, message))
            }
            RenewalCheck::Superseded(error) => {
                let message = "the lock is held at an old primary";
                Err(Error::new(ErrorKind::NotHeld, message).because(error))
            }
        }
    }

    /// Releases the lock. Returns false if the session did not hold it.
    pub(super) async fn release(&mut self, lock: LockId, shared: bool, by: Time) -> Result<bool> {
        let rows = self.connection.simple(&sql::release(&self.ident, lock, shared), by).await?;
        Ok(flag(rows.first().ok_or_else(unexpected_answer)?, "released"))
    }

    /// Runs a query that changes no lock of this session.
    pub(super) async fn ask(&mut self, sql: &str, by: Time) -> Result<Vec<SimpleQueryRow>> {
        self.connection.simple(sql, by).await
    }

    pub(super) fn end(&self) -> SessionEnd {
        self.connection.end()
    }

    /// Makes the system notice within about the ttl that the server's host is silent. A reserve of a large fleet polls
    /// less often than that, and hundreds of polls would cost the server more than the probes.
    pub(super) fn end_after_silence(&self, ttl: Duration) {
        #[cfg(unix)]
        if let Some(socket) = self.connection.socket()
            && let Err(error) = socket.end_after_silence(ttl)
        {
            tracing::debug!(name: "tenure.keepalive_failed", %error);
        }
        #[cfg(not(unix))]
        let _ = ttl;
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

    /// True if the session can be used for another claim: it is usable, and not one of an old primary.
    pub(super) fn can_claim(&self) -> bool {
        self.is_usable() && self.primaries.is_current(&self.connection)
    }
}

/// Waits for the answers of other servers, unless the session ends first.
///
/// The lock is free as soon as its session has ended, and the next holder is granted within milliseconds. A server that
/// is away may keep the answers waiting for longer, so without this the former holder would rely on its lock meanwhile.
async fn while_open<T>(mut end: SessionEnd, answers: impl Future<Output = Result<T>>) -> Result<T> {
    let ended = || Error::new(ErrorKind::Unavailable, "the session of the lock has ended");
    let answered = tokio::select! {
        biased;
        _ = end.changed() => return Err(ended()),
        answered = answers => answered,
    };
    if end.has_changed().unwrap_or(true) { Err(ended()) } else { answered }
}

/// Converts the error of a claim.
fn explain_claim(error: Error) -> Error {
    match failure::code(&error) {
        Some(sql::OTHER_SESSION) => shared_sessions_error("a pooler").because(error),
        _ => without_tables(error),
    }
}

/// Replaces the messages of [`failure`] about tables: here a function is refused or missing.
fn without_tables(error: Error) -> Error {
    let (kind, message) = match failure::code(&error) {
        Some("42883" | "42704") => (
            ErrorKind::Misconfigured,
            "the server lacks a function that locks need: is it PostgreSQL?",
        ),
        // The function is named only if the server speaks English.
        Some("42501") if !failure::names_function(&error) => (
            ErrorKind::Denied,
            "the role may not call a function of advisory locks: an owner must GRANT EXECUTE on the function that the \
             server names",
        ),
        _ => return error,
    };
    Error::new(kind, message).because(error)
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
