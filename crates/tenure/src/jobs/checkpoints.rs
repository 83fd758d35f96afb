//! Checkpoints: each chunk of a matrix is synchronised by one worker at a time.

pub(super) mod detached;
mod statements;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use tenure_core::jobs::RenewalOutcome;
use tenure_core::keeper::Loss;
use tenure_core::{FencingToken, Time};
use tokio_postgres::types::Type;
use tokio_postgres::{GenericClient, Row};

use super::db::{JobDb, invalid};
use super::detached::run_detached;
use super::heart::{self, Holds, Look, RowName, Rows, Ticket};
use super::job::time;
use super::options::{Options, REQUEST_TIMEOUT};
use super::sql::{RAISED_TOKEN, micros as sql_micros};
use crate::store::pg::clock::{Reading, micros};
use crate::store::pg::connect::{Parameter, PgConnection};
use crate::store::pg::failure::{self, RequestStage};
use crate::store::pg::job_columns::CHECKPOINTS;
use crate::store::pg::pool::PooledConnection;
use crate::store::pg::probe::HeldQuestion;
use crate::store::pg::renewer::{RenewalStatement, outcomes};
use crate::store::pg::table::Table;
use crate::{Clock, Error, ErrorKind, Result};

/// Maximum length of `matrix_id` and of `chunk_hash`, in bytes.
const MAX_NAME: usize = 1_000;

/// Checkpoints in a table of PostgreSQL, one row per chunk of a matrix. Clones share one connection pool.
///
/// ```
/// use tenure::jobs::{CheckpointClaim, Checkpoints, Schema};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
/// # let service = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/services/example.rs"));
/// # let Some(url) = service("TENURE_TEST_POSTGRES") else { return Ok(()) };
/// # let table = format!("doc_chunks_{}", std::process::id());
/// # let table = table.as_str();
/// Schema::of_checkpoints(table)?.apply(&url).await?;
/// let chunks = Checkpoints::connect(&url, table).await?;
/// match chunks.claim("matrix 7", "9f2c").await? {
///     CheckpointClaim::Granted(chunk) => chunk.complete(1_204).await?, // the chunk has 1,204 rows
///     CheckpointClaim::Held { by, .. } => println!("held by {by:?}"),
///     _ => {}
/// }
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Checkpoints(Arc<CheckpointShared>);

struct CheckpointShared {
    db: JobDb,
    holds: Arc<Holds>,
    sql: CheckpointStatements,
}

/// Answer to the claim of a chunk.
#[derive(Debug)]
#[non_exhaustive]
pub enum CheckpointClaim {
    /// The chunk is claimed.
    Granted(CheckpointGuard),
    /// Another worker holds the chunk.
    Held {
        /// Name of that worker.
        by: Option<String>,
        /// End of its lease, unless it is renewed.
        until: Option<SystemTime>,
    },
    /// The table has no such chunk.
    Unknown,
}

impl Checkpoints {
    /// Default options of checkpoints: a lease of 2 minutes, a heartbeat every 30 seconds.
    pub fn options() -> Options {
        Options {
            lease: Duration::from_secs(120),
            heartbeat: Some(Duration::from_secs(30)),
            ..Options::default()
        }
    }

    /// Connects to the checkpoints in this table, with [`Checkpoints::options`].
    ///
    /// # Errors
    ///
    /// `Misconfigured` if the table is missing or lacks columns, `Denied` if the role lacks rights, `Unavailable` if
    /// the server cannot be reached.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing behind.
    pub async fn connect(url: &str, table: &str) -> Result<Self> {
        Self::connect_with(url, table, Self::options()).await
    }

    /// Connects to the checkpoints in this table, with the given options.
    ///
    /// # Errors
    ///
    /// As for [`connect`](Self::connect); also `Invalid` if the options contradict each other.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing behind.
    pub async fn connect_with(url: &str, table: &str, options: Options) -> Result<Self> {
        static TABLES: AtomicU64 = AtomicU64::new(0);
        let mut db = JobDb::new(url, table, options, CHECKPOINTS)?;
        db.worker = format!("{}:c{}", db.worker, TABLES.fetch_add(1, Ordering::Relaxed));
        let shape = db.shape().await?.clone();
        db.fit_worker(&shape);
        let kind = shape.get("matrix_id").map_or("text", |column| &column.kind);
        let sql = CheckpointStatements::new(&db.table, kind);
        let holds = Holds::new(db.lease, db.clock.clone());
        let shared = Arc::new(CheckpointShared { db, holds: Arc::clone(&holds), sql });
        let rows: Weak<dyn Rows> = Arc::<CheckpointShared>::downgrade(&shared);
        holds.keep(rows);
        Ok(Self(shared))
    }

    /// Claims a chunk, and inserts its row if it is missing.
    ///
    /// # Errors
    ///
    /// `Invalid` if a name is empty, too long or has a NUL. `Unknown` if no answer arrived: the chunk may be held until
    /// its lease ends.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future releases a chunk that was claimed.
    pub async fn claim(&self, matrix_id: &str, chunk_hash: &str) -> Result<CheckpointClaim> {
        self.ask(matrix_id, chunk_hash, true).await
    }

    /// Claims a chunk that has a row; [`CheckpointClaim::Unknown`] if it has none.
    ///
    /// # Errors
    ///
    /// As for [`claim`](Self::claim).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future releases a chunk that was claimed.
    pub async fn claim_known(&self, matrix_id: &str, chunk_hash: &str) -> Result<CheckpointClaim> {
        self.ask(matrix_id, chunk_hash, false).await
    }

    async fn ask(&self, matrix: &str, chunk: &str, insert: bool) -> Result<CheckpointClaim> {
        for (what, text) in [("matrix_id", matrix), ("chunk_hash", chunk)] {
            if text.is_empty() || text.len() > MAX_NAME || text.contains('\0') {
                let message = format!("the {what} must have 1 to {MAX_NAME} bytes and no NUL");
                return Err(invalid(&message).at(&self.0.db));
            }
        }
        let (shared, matrix, chunk) = (Arc::clone(&self.0), matrix.to_owned(), chunk.to_owned());
        let claimed = run_detached(async move {
            loop {
                let claimed = shared.claim(&matrix, &chunk, insert).await?;
                // Another worker inserted the row at the same moment: the statement neither saw nor inserted it. The
                // next statement sees the row.
                if !(insert && matches!(claimed, CheckpointClaim::Unknown)) {
                    return Ok(claimed);
                }
            }
        });
        claimed.await.map_err(|error| error.at(&self.0.db))
    }
}

impl CheckpointShared {
    async fn claim(
        self: &Arc<Self>,
        matrix: &str,
        chunk: &str,
        insert: bool,
    ) -> Result<CheckpointClaim> {
        let ttl = micros(self.db.lease.ttl());
        let parameters: [Parameter<'_>; 5] = [
            (&matrix, Type::TEXT),
            (&chunk, Type::TEXT),
            (&self.db.worker, Type::TEXT),
            (&ttl, Type::INT8),
            (&insert, Type::BOOL),
        ];
        let by = self.db.clock.now() + self.db.lease.request_limit().min(REQUEST_TIMEOUT);
        let (mut connection, rows, reading) =
            self.db.grant(&self.sql.claim, &parameters, by).await?;
        if let Some(row) = rows.first().filter(|row| row.get("granted")) {
            let number = row.get("lease_token");
            let counts = if number == i64::MAX {
                let message =
                    "the lease_token of the chunk is the largest number, and cannot grow: lower it";
                Err(Error::new(ErrorKind::Misconfigured, message))
            } else {
                self.confirm(&mut connection, matrix, chunk, by).await
            };
            if let Err(error) = counts {
                let (id, part) = (matrix.to_owned(), chunk.to_owned());
                self.withdraw(&mut connection, RowName { id, part, number, progress: None }).await;
                return Err(error);
            }
        }
        drop(connection);
        Ok(match rows.first() {
            None => CheckpointClaim::Unknown,
            Some(row) if row.get("granted") => match self.guard(row, reading, matrix, chunk) {
                Ok(guard) => CheckpointClaim::Granted(guard),
                Err(name) => {
                    // The deadline of the lease has passed: no worker may start on the chunk. It is released at once.
                    self.drop_one(name).await;
                    let message = "the answer to the claim arrived after the deadline of its lease";
                    return Err(Error::new(ErrorKind::Unknown, message));
                }
            },
            Some(row) => CheckpointClaim::Held {
                by: row.get("locked_by"),
                until: time(row.get("locked_until")),
            },
        })
    }

    /// Fails if a granted chunk does not count.
    async fn confirm(
        &self,
        connection: &mut PooledConnection<'_>,
        matrix: &str,
        chunk: &str,
        by: Time,
    ) -> Result<()> {
        let (matrices, chunks) = (vec![matrix], vec![chunk]);
        let parameters: [Parameter<'_>; 3] = [
            (&matrices, Type::TEXT_ARRAY),
            (&chunks, Type::TEXT_ARRAY),
            (&self.db.worker, Type::TEXT),
        ];
        let question = HeldQuestion { sql: &self.sql.held, parameters: &parameters };
        if connection.listed().is_some() && self.holds.holds(matrix, chunk) {
            let message = "this process still holds the chunk, by a claim at an older primary";
            return Err(Error::new(ErrorKind::Unavailable, message));
        }
        self.db.confirm(connection, question, by).await?.1.map_or(Ok(()), Err)
    }

    /// Makes the guard of a claimed chunk; its name if the deadline of its lease has passed already.
    fn guard(
        self: &Arc<Self>,
        row: &Row,
        reading: Reading,
        matrix: &str,
        chunk: &str,
    ) -> std::result::Result<CheckpointGuard, RowName> {
        let (number, epoch): (i64, i64) = (row.get("lease_token"), row.get("epoch"));
        let (id, part) = (matrix.to_owned(), chunk.to_owned());
        let name = RowName { id, part, number, progress: None };
        let rows: Arc<dyn Rows> = Arc::<Self>::clone(self);
        let Some(ticket) = self.holds.admit(name.clone(), Arc::default(), reading, rows) else {
            return Err(name);
        };
        Ok(CheckpointGuard {
            look: ticket.look.clone(),
            clock: self.db.clock.clone(),
            ticket,
            name,
            token: FencingToken::new(epoch.unsigned_abs(), number.unsigned_abs()),
            last_synced_at: time(row.get("last_synced_at")),
            row_count: row.get("row_count"),
            table: Arc::clone(self),
        })
    }
}

/// A claimed chunk. Its lease is renewed until the chunk is completed or released; dropping the guard releases it.
#[must_use = "a dropped guard releases its chunk"]
pub struct CheckpointGuard {
    // Fields are dropped in this order. The ticket comes before the table: its drop hands the chunk to the table, which
    // releases it.
    ticket: Ticket,
    name: RowName,
    token: FencingToken,
    last_synced_at: Option<SystemTime>,
    row_count: Option<i64>,
    look: tokio::sync::watch::Receiver<Look>,
    clock: Clock,
    table: Arc<CheckpointShared>,
}

impl CheckpointGuard {
    /// Id of the matrix.
    pub fn matrix_id(&self) -> &str {
        &self.name.id
    }

    /// Hash that names the chunk.
    pub fn chunk_hash(&self) -> &str {
        &self.name.part
    }

    /// Time at which the chunk was last completed, if ever.
    pub fn last_synced_at(&self) -> Option<SystemTime> {
        self.last_synced_at
    }

    /// Number of rows at that time.
    pub fn row_count(&self) -> Option<i64> {
        self.row_count
    }

    /// Fencing token of this claim. It grows with every claim of this chunk.
    pub fn fencing_token(&self) -> FencingToken {
        self.token
    }

    /// Time until the deadline of the lease; zero once the chunk is lost. A local clock check: no I/O.
    pub fn remaining(&self) -> Duration {
        let Look { deadline, lost, .. } = *self.look.borrow();
        if lost.is_some() { Duration::ZERO } else { deadline.since(self.clock.now()) }
    }

    /// Resolves when the chunk is lost: at the deadline of its lease, or when the database refuses a renewal.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses nothing; the next call resolves at once.
    pub async fn lost(&self) -> Loss {
        heart::lost(&self.clock, &self.look).await
    }

    /// Renews the lease at the database now, in addition to the automatic heartbeats. It does not extend
    /// [`remaining`](Self::remaining); the next automatic heartbeat does.
    ///
    /// # Errors
    ///
    /// `Lost` if this worker no longer holds the chunk.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the lease renewed or not.
    pub async fn heartbeat(&self) -> Result<()> {
        let at = |error: Error| error.at(&self.table.db);
        let by = self.table.db.by();
        let (_, outcomes) =
            self.table.renew(std::slice::from_ref(&self.name), by).await.map_err(at)?;
        match outcomes.first() {
            Some(RenewalOutcome::Refused(_)) => Err(at(self.lost_error())),
            _ => Ok(()),
        }
    }

    /// Marks the chunk as synchronised, and records its number of rows.
    ///
    /// # Errors
    ///
    /// `Lost` if another worker has claimed the chunk: nothing was changed.
    ///
    /// # Cancel safety
    ///
    /// The chunk is completed even if the future is dropped.
    pub async fn complete(self, row_count: i64) -> Result<()> {
        self.end(Some(row_count)).await
    }

    /// Completes the chunk in the caller's transaction: it is marked as synchronised together with its rows, or not at
    /// all. After the commit drop the guard, which then changes nothing. After a rollback the chunk is still held.
    ///
    /// While the transaction is open, no heartbeat can renew the lease: it must commit before
    /// [`remaining`](Self::remaining) is over.
    ///
    /// # Errors
    ///
    /// `Lost` if this worker no longer holds the chunk: roll back. `NotHeld` in a forked copy of the process.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the completion in the transaction or not: roll back.
    pub async fn complete_in(
        &self,
        transaction: &impl GenericClient,
        row_count: i64,
    ) -> Result<()> {
        let CheckpointShared { db, sql, .. } = &*self.table;
        db.check_process()?;
        let RowName { id, part, number, .. } = &self.name;
        let parameters: [Parameter<'_>; 6] = [
            (id, Type::TEXT),
            (part, Type::TEXT),
            (number, Type::INT8),
            (&db.worker, Type::TEXT),
            (&true, Type::BOOL),
            (&row_count, Type::INT8),
        ];
        match transaction.query_typed(&sql.end_in, &parameters).await {
            Ok(rows) if rows.is_empty() => Err(self.lost_error().at(db)),
            Ok(_) => Ok(()),
            Err(error) => Err(failure::explain(error, RequestStage::Asking).at(db)),
        }
    }

    /// Releases the chunk unchanged.
    ///
    /// # Errors
    ///
    /// As for [`complete`](Self::complete).
    ///
    /// # Cancel safety
    ///
    /// The chunk is released even if the future is dropped.
    pub async fn release(self) -> Result<()> {
        self.end(None).await
    }

    async fn end(self, row_count: Option<i64>) -> Result<()> {
        let table = Arc::clone(&self.table);
        let ended = run_detached(async move {
            let ended = self.table.end(&self.name, row_count).await?;
            self.ticket.dealt_with();
            if ended { Ok(()) } else { Err(self.lost_error()) }
        });
        ended.await.map_err(|error| error.at(&table.db))
    }

    fn lost_error(&self) -> Error {
        let message = format!(
            "chunk {} of {} was lost: another worker has claimed it",
            self.chunk_hash(),
            self.matrix_id()
        );
        Error::new(ErrorKind::Lost, message)
    }
}

impl CheckpointShared {
    /// Withdraws a grant that does not count, at the server that made it.
    async fn withdraw(&self, connection: &mut PgConnection, name: RowName) {
        let parameters: [Parameter<'_>; 6] = [
            (&name.id, Type::TEXT),
            (&name.part, Type::TEXT),
            (&name.number, Type::INT8),
            (&self.db.worker, Type::TEXT),
            (&false, Type::BOOL),
            (&0_i64, Type::INT8),
        ];
        // If this fails, the chunk is free when its lease ends.
        if let Err(error) = connection.query(&self.sql.end, &parameters, self.db.by()).await {
            let RowName { id, part, .. } = &name;
            tracing::warn!(name: "tenure.withdraw_failed", id, part, store = %self.db, %error);
        }
    }

    async fn end(&self, name: &RowName, row_count: Option<i64>) -> Result<bool> {
        let done = row_count.is_some();
        let rows = row_count.unwrap_or_default();
        let parameters: [Parameter<'_>; 6] = [
            (&name.id, Type::TEXT),
            (&name.part, Type::TEXT),
            (&name.number, Type::INT8),
            (&self.db.worker, Type::TEXT),
            (&done, Type::BOOL),
            (&rows, Type::INT8),
        ];
        let (rows, _) = self.db.ask(&self.sql.end, &parameters, self.db.by()).await?;
        Ok(!rows.is_empty())
    }
}

#[async_trait]
impl RenewalStatement for CheckpointShared {
    type Name = RowName;

    async fn renew(&self, names: &[RowName], by: Time) -> Result<(Reading, Vec<RenewalOutcome>)> {
        let ids: Vec<&str> = names.iter().map(|name| name.id.as_str()).collect();
        let parts: Vec<&str> = names.iter().map(|name| name.part.as_str()).collect();
        let numbers: Vec<i64> = names.iter().map(|name| name.number).collect();
        let ttl = micros(self.db.lease.ttl());
        let parameters: [Parameter<'_>; 5] = [
            (&ids, Type::TEXT_ARRAY),
            (&parts, Type::TEXT_ARRAY),
            (&numbers, Type::INT8_ARRAY),
            (&self.db.worker, Type::TEXT),
            (&ttl, Type::INT8),
        ];
        let held: [Parameter<'_>; 3] =
            [(&ids, Type::TEXT_ARRAY), (&parts, Type::TEXT_ARRAY), (&self.db.worker, Type::TEXT)];
        let held = HeldQuestion { sql: &self.sql.held, parameters: &held };
        let read = |rows: &[Row]| outcomes(names.len(), rows);
        self.db.renew(&self.sql.heartbeat, &parameters, held, read, by).await
    }
}

#[async_trait]
impl Rows for CheckpointShared {
    async fn drop_one(&self, name: RowName) {
        // If this fails, the chunk is free when its lease ends.
        if let Err(error) = self.end(&name, None).await {
            tracing::warn!(name: "tenure.release_failed", id = name.id, part = name.part, %error);
        }
    }
}

impl Drop for CheckpointShared {
    fn drop(&mut self) {
        self.holds.leave();
    }
}

struct CheckpointStatements {
    claim: String,
    heartbeat: String,
    /// Finds chunks of the request that another worker holds, as a question to another primary.
    held: String,
    end: String,
    /// For a transaction of the caller, which decides itself how durable its commit is.
    end_in: String,
    save: String,
    list: String,
}

impl CheckpointStatements {
    fn new(table: &Table, id: &str) -> Self {
        use crate::store::pg::clock::NOW;
        use crate::store::pg::durable::{DURABLE, durable};
        use crate::store::pg::incarnation::EPOCH;
        let table = table.quoted();
        let lease = "clock_timestamp() + $4::int8 * interval '1 microsecond'";
        let this = format!("t.matrix_id = $1::text::{id} AND t.chunk_hash = $2");
        let (synced, until) = (sql_micros("last_synced_at"), sql_micros("locked_until"));
        let granted =
            format!("lease_token, last_synced_at, row_count::int8 AS row_count, {DURABLE}");
        let claim = format!(
            "WITH taken AS ( \
                 UPDATE {table} AS t SET locked_until = {lease}, locked_by = $3, lease_token = {RAISED_TOKEN} \
                 WHERE {this} AND (t.locked_until IS NULL OR t.locked_until <= clock_timestamp()) \
                 RETURNING {granted} \
             ), made AS ( \
                 INSERT INTO {table} (matrix_id, chunk_hash, locked_until, locked_by, lease_token) \
                 SELECT $1::text::{id}, $2, {lease}, $3, 1 \
                 WHERE $5 AND NOT EXISTS (SELECT FROM {table} AS t WHERE {this}) \
                 ON CONFLICT (matrix_id, chunk_hash) DO NOTHING \
                 RETURNING {granted} \
             ), won AS (SELECT * FROM taken UNION ALL SELECT * FROM made) \
             SELECT {NOW} AS now, true AS granted, lease_token, {EPOCH} AS epoch, {synced} AS last_synced_at, row_count, \
                 NULL::text AS locked_by, NULL::int8 AS locked_until FROM won AS t \
             UNION ALL \
             SELECT {NOW}, false, 0, 0, NULL::int8, NULL::int8, locked_by, {until} FROM {table} AS t \
             WHERE {this} AND NOT EXISTS (SELECT FROM won)"
        );
        let heartbeat = format!(
            "WITH asked AS ( \
                 SELECT * FROM unnest($1::text[]::{id}[], $2::text[], $3::int8[]) \
                     WITH ORDINALITY AS a (matrix, chunk, token, nth) \
             ), locked AS ( \
                 SELECT a.nth FROM {table} AS t JOIN asked AS a ON t.matrix_id = a.matrix AND t.chunk_hash = a.chunk \
                 WHERE t.lease_token = a.token AND t.locked_by = $4 FOR UPDATE OF t SKIP LOCKED \
             ), renewed AS ( \
                 UPDATE {table} AS t SET locked_until = clock_timestamp() + $5::int8 * interval '1 microsecond' \
                 FROM asked AS a JOIN locked AS k ON k.nth = a.nth \
                 WHERE t.matrix_id = a.matrix AND t.chunk_hash = a.chunk AND t.lease_token = a.token \
                     AND t.locked_by = $4 AND t.locked_until > clock_timestamp() \
                 RETURNING a.nth, {DURABLE} \
             ) \
             SELECT {NOW} AS now, a.nth, r.nth IS NOT NULL AS renewed, \
                 r.nth IS NULL AND k.nth IS NULL AND t.locked_by IS NOT NULL AS passed_over \
             FROM asked AS a LEFT JOIN renewed AS r ON r.nth = a.nth LEFT JOIN locked AS k ON k.nth = a.nth \
                  LEFT JOIN {table} AS t ON t.matrix_id = a.matrix AND t.chunk_hash = a.chunk \
                      AND t.lease_token = a.token AND t.locked_by = $4"
        );
        // Accepted even after the lease has ended, as long as no other worker has claimed the chunk.
        let end = format!(
            "UPDATE {table} AS t SET locked_until = NULL, locked_by = NULL, \
                 last_synced_at = CASE WHEN $5 THEN clock_timestamp() ELSE t.last_synced_at END, \
                 row_count = CASE WHEN $5 THEN $6::int8 ELSE t.row_count END \
             WHERE {this} AND t.lease_token = $3 AND t.locked_by = $4 RETURNING {NOW} AS now"
        );
        let held = format!(
            "SELECT a.nth FROM unnest($1::text[]::{id}[], $2::text[]) WITH ORDINALITY AS a (matrix, chunk, nth) \
             JOIN {table} AS t ON t.matrix_id = a.matrix AND t.chunk_hash = a.chunk \
             WHERE t.locked_until > clock_timestamp() AND t.locked_by IS DISTINCT FROM $3"
        );
        let (save, list) = (statements::save(&table, id), statements::list(&table, id));
        Self { claim, heartbeat, held, end: durable(&end), end_in: end, save, list }
    }
}

impl fmt::Debug for Checkpoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checkpoints")
            .field("table", &self.0.db.table.shown())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for CheckpointGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CheckpointGuard")
            .field("matrix_id", &self.name.id)
            .field("chunk_hash", &self.name.part)
            .field("token", &self.token)
            .field("remaining", &self.remaining())
            .finish_non_exhaustive()
    }
}
