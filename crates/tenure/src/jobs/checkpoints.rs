//! Checkpoints: one chunk of a matrix is synchronised by one worker at a time.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use tenure_core::jobs::RenewalOutcome;
use tenure_core::keeper::Loss;
use tenure_core::{FencingToken, Time};
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::db::{JobDb, invalid};
use super::heart::{self, Holds, Look, RowName, Rows, Ticket};
use super::job::time;
use super::queue::{run_detached, verdicts};
use super::{Options, schema};
use crate::store::pg::clock::{Reading, micros};
use crate::store::pg::connect::Parameter;
use crate::store::pg::table::Table;
use crate::{Clock, Error, ErrorKind, Result};

/// The longest half of a name, in bytes.
const MAX_NAME: usize = 1_000;

/// Checkpoints in a table, one row for each chunk of each matrix. A clone is the same table.
///
/// ```
/// use tenure::jobs::{Checkpoints, Claimed, Schema};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
/// # let Ok(url) = std::env::var("TENURE_TEST_POSTGRES") else { return Ok(()) };
/// # let table = format!("doc_chunks_{}", std::process::id());
/// # let table = table.as_str();
/// Schema::of_checkpoints(table)?.apply(&url).await?;
/// let chunks = Checkpoints::connect(&url, table).await?;
/// match chunks.claim("matrix 7", "9f2c").await? {
///     Claimed::Granted(chunk) => chunk.complete(1_204).await?, // so many rows
///     Claimed::Held { by, .. } => println!("{by:?} is at it"),
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

/// The answer to a claim.
#[derive(Debug)]
#[non_exhaustive]
pub enum CheckpointClaim {
    /// It is ours.
    Granted(CheckpointGuard),
    /// Another has it.
    Held {
        /// Who.
        by: Option<String>,
        /// Until when, unless it is renewed.
        until: Option<SystemTime>,
    },
    /// There is no such chunk.
    Unknown,
}

impl Checkpoints {
    /// The options of checkpoints: a lease of 2 minutes, a heartbeat every 30 seconds.
    pub fn options() -> Options {
        Options {
            lease: Duration::from_secs(120),
            heartbeat: Some(Duration::from_secs(30)),
            ..Options::default()
        }
    }

    /// The checkpoints in this table, as [`Checkpoints::options`] says.
    ///
    /// # Errors
    ///
    /// `Misconfigured` where the table is missing or of another shape, `Denied` without rights, `Unavailable` where the
    /// server cannot be reached.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing.
    pub async fn connect(url: &str, table: &str) -> Result<Self> {
        Self::connect_with(url, table, Self::options()).await
    }

    /// The same with other options.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect); `Invalid` also where the options contradict each other.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing.
    pub async fn connect_with(url: &str, table: &str, options: Options) -> Result<Self> {
        static TABLES: AtomicU64 = AtomicU64::new(0);
        let mut link = JobDb::new(url, table, options, || Box::new(schema::checkpoint_columns()))?;
        link.worker = format!("{}:c{}", link.worker, TABLES.fetch_add(1, Ordering::Relaxed));
        let kind = link.shape().await?.get("matrix_id").map_or("text", String::as_str);
        let sql = CheckpointStatements::new(&link.table, kind);
        let holds = Holds::new(link.lease, link.clock.clone());
        let shared = Arc::new(CheckpointShared { db: link, holds: Arc::clone(&holds), sql });
        let rows: Weak<dyn Rows> = Arc::<CheckpointShared>::downgrade(&shared);
        tokio::spawn(heart::keep(holds, rows));
        Ok(Self(shared))
    }

    /// Claims a chunk, which is entered where it is not known yet.
    ///
    /// # Errors
    ///
    /// `Invalid` where a name makes no sense; `Unknown` where no answer came: it may be held until its lease ends.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives back what was claimed.
    pub async fn claim(&self, matrix_id: &str, chunk_hash: &str) -> Result<CheckpointClaim> {
        self.ask(matrix_id, chunk_hash, true).await
    }

    /// Claims a chunk that is known; [`Claimed::Unknown`] where it is not.
    ///
    /// # Errors
    ///
    /// As [`claim`](Self::claim).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives back what was claimed.
    pub async fn claim_known(&self, matrix_id: &str, chunk_hash: &str) -> Result<CheckpointClaim> {
        self.ask(matrix_id, chunk_hash, false).await
    }

    async fn ask(&self, matrix: &str, chunk: &str, enter: bool) -> Result<CheckpointClaim> {
        for (what, text) in [("matrix_id", matrix), ("chunk_hash", chunk)] {
            if text.is_empty() || text.len() > MAX_NAME || text.contains('\0') {
                let message = format!("the {what} must have 1 to {MAX_NAME} bytes, and no NUL");
                return Err(invalid(&message).at(&self.0.db));
            }
        }
        let (shared, matrix, chunk) = (Arc::clone(&self.0), matrix.to_owned(), chunk.to_owned());
        let claimed = run_detached(async move {
            loop {
                let claimed = shared.claim(&matrix, &chunk, enter).await?;
                // Another entered it at the same moment.
                if !(enter && matches!(claimed, CheckpointClaim::Unknown)) {
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
        enter: bool,
    ) -> Result<CheckpointClaim> {
        let ttl = micros(self.db.lease.ttl());
        let parameters: [Parameter<'_>; 5] = [
            (&matrix, Type::TEXT),
            (&chunk, Type::TEXT),
            (&self.db.worker, Type::TEXT),
            (&ttl, Type::INT8),
            (&enter, Type::BOOL),
        ];
        let by = self.db.clock.now() + self.db.lease.request_limit().min(super::REQUEST_TIMEOUT);
        let (rows, reading) = self.db.grant(&self.sql.claim, &parameters, by).await?;
        Ok(match rows.first() {
            None => CheckpointClaim::Unknown,
            Some(row) if row.get(1) => match self.guard(row, reading, matrix, chunk) {
                Ok(guard) => CheckpointClaim::Granted(guard),
                Err(name) => {
                    // The lease is as good as over: what is left of it is given back.
                    self.drop_one(name).await;
                    let message = "the answer to the claim came when its lease was as good as over";
                    return Err(Error::new(ErrorKind::Unknown, message));
                }
            },
            Some(row) => CheckpointClaim::Held { by: row.get(4), until: time(row.get(5)) },
        })
    }

    /// The guard of a claimed chunk; its name where its own deadline has passed already.
    fn guard(
        self: &Arc<Self>,
        row: &Row,
        reading: Reading,
        matrix: &str,
        chunk: &str,
    ) -> std::result::Result<CheckpointGuard, RowName> {
        let (number, epoch): (i64, i64) = (row.get(2), row.get(3));
        let name = RowName { id: matrix.to_owned(), part: chunk.to_owned(), number };
        let rows: Arc<dyn Rows> = Arc::<Self>::clone(self);
        let Some(ticket) = self.holds.admit(name.clone(), reading, rows) else { return Err(name) };
        Ok(CheckpointGuard {
            look: ticket.look.clone(),
            clock: self.db.clock.clone(),
            ticket,
            name,
            token: FencingToken::new(epoch.unsigned_abs(), number.unsigned_abs()),
            last_synced_at: time(row.get(5)),
            row_count: row.get(6),
            table: Arc::clone(self),
        })
    }
}

/// A chunk that is ours. Its lease is renewed until it is completed or released; dropping it releases it.
#[must_use = "a dropped guard gives its chunk back"]
pub struct CheckpointGuard {
    // Before the table: what is dropped is given back by it.
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
    /// The matrix.
    pub fn matrix_id(&self) -> &str {
        &self.name.id
    }

    /// The chunk.
    pub fn chunk_hash(&self) -> &str {
        &self.name.part
    }

    /// When the chunk was last completed, if ever.
    pub fn last_synced_at(&self) -> Option<SystemTime> {
        self.last_synced_at
    }

    /// How many rows it had then.
    pub fn row_count(&self) -> Option<i64> {
        self.row_count
    }

    /// The number that grows with every claim of this chunk.
    pub fn fencing_token(&self) -> FencingToken {
        self.token
    }

    /// How long it is ours for certain.
    pub fn remaining(&self) -> Duration {
        let Look { deadline, lost } = *self.look.borrow();
        if lost.is_some() { Duration::ZERO } else { deadline.since(self.clock.now()) }
    }

    /// Resolves when it is no longer ours: at the end of its lease, or when the database says so.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses nothing; the next call resolves at once.
    pub async fn lost(&self) -> Loss {
        heart::lost(&self.clock, &self.look).await
    }

    /// Renews the lease now, beside the heartbeats that go on by themselves.
    ///
    /// # Errors
    ///
    /// `Lost` where it is not ours any more.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves it renewed or not.
    pub async fn heartbeat(&self) -> Result<()> {
        let at = |error: Error| error.at(&self.table.db);
        let by = self.table.db.by();
        let (_, said) = self.table.renew(std::slice::from_ref(&self.name), by).await.map_err(at)?;
        match said.first() {
            Some(RenewalOutcome::Refused(_)) => Err(at(self.lost_error())),
            _ => Ok(()),
        }
    }

    /// Says that the chunk is synchronised, and how many rows it has.
    ///
    /// # Errors
    ///
    /// `Lost` where another has it by now: nothing was changed.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future completes it all the same.
    pub async fn complete(self, row_count: i64) -> Result<()> {
        self.end(Some(row_count)).await
    }

    /// Gives it back as it was.
    ///
    /// # Errors
    ///
    /// As [`complete`](Self::complete).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives it back all the same.
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
            "chunk {} of {} is no longer ours: another has claimed it",
            self.chunk_hash(),
            self.matrix_id()
        );
        Error::new(ErrorKind::Lost, message)
    }
}

impl CheckpointShared {
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
impl Rows for CheckpointShared {
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
        let (rows, reading) = self.db.ask(&self.sql.heartbeat, &parameters, by).await?;
        Ok((reading, verdicts(names.len(), &rows)))
    }

    async fn drop_one(&self, name: RowName) {
        // Its lease ends by itself where this fails.
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
    end: String,
}

impl CheckpointStatements {
    fn new(table: &Table, id: &str) -> Self {
        use super::sql::NOW;
        use crate::store::pg::durable::{DURABLE, durable};
        use crate::store::pg::incarnation::EPOCH;
        let table = table.quoted();
        let lease = "clock_timestamp() + $4::int8 * interval '1 microsecond'";
        let this = format!("t.matrix_id = $1::text::{id} AND t.chunk_hash = $2");
        let micros = |column: &str| format!("(extract(epoch FROM {column}) * 1000000)::int8");
        let (synced, until) = (micros("last_synced_at"), micros("locked_until"));
        let granted =
            format!("lease_token, last_synced_at, row_count::int8 AS row_count, {DURABLE}");
        let claim = format!(
            "WITH taken AS ( \
                 UPDATE {table} AS t SET locked_until = {lease}, locked_by = $3, lease_token = t.lease_token + 1 \
                 WHERE {this} AND (t.locked_until IS NULL OR t.locked_until <= clock_timestamp()) \
                 RETURNING {granted} \
             ), made AS ( \
                 INSERT INTO {table} (matrix_id, chunk_hash, locked_until, locked_by, lease_token) \
                 SELECT $1::text::{id}, $2, {lease}, $3, 1 \
                 WHERE $5 AND NOT EXISTS (SELECT FROM {table} AS t WHERE {this}) \
                 ON CONFLICT (matrix_id, chunk_hash) DO NOTHING \
                 RETURNING {granted} \
             ), won AS (SELECT * FROM taken UNION ALL SELECT * FROM made) \
             SELECT {NOW}, true, lease_token, {EPOCH}, NULL::text, {synced}, row_count FROM won \
             UNION ALL \
             SELECT {NOW}, false, 0, 0, locked_by, {until}, NULL::int8 FROM {table} AS t \
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
             SELECT {NOW}, a.nth, r.nth IS NOT NULL, r.nth IS NULL AND k.nth IS NULL AND t.locked_by IS NOT NULL \
             FROM asked AS a LEFT JOIN renewed AS r ON r.nth = a.nth LEFT JOIN locked AS k ON k.nth = a.nth \
                  LEFT JOIN {table} AS t ON t.matrix_id = a.matrix AND t.chunk_hash = a.chunk \
                      AND t.lease_token = a.token AND t.locked_by = $4"
        );
        // Late is accepted as long as nobody else has claimed it.
        let end = format!(
            "UPDATE {table} AS t SET locked_until = NULL, locked_by = NULL, \
                 last_synced_at = CASE WHEN $5 THEN clock_timestamp() ELSE t.last_synced_at END, \
                 row_count = CASE WHEN $5 THEN $6::int8 ELSE t.row_count END \
             WHERE {this} AND t.lease_token = $3 AND t.locked_by = $4 RETURNING {NOW}"
        );
        Self { claim, heartbeat, end: durable(&end) }
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
