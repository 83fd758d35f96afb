//! Chunks that are held without a process, as by a shell script, and lists of chunks.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::SystemTime;

use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::super::db::invalid;
use super::super::detached::run_detached;
use super::super::job::time;
use super::{CheckpointGuard, Checkpoints};
use crate::store::pg::clock::micros;
use crate::store::pg::connect::Parameter;
use crate::{Error, ErrorKind, Result};

/// Maximum number of chunks per list.
const MAX_LISTED_CHUNKS: usize = 10_000;

/// The handle of a chunk that is held without a process: it renews and completes the claim from any process. As text it
/// is the token and the worker, `7@host:311:00af:c0`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointHandle {
    lease_token: i64,
    worker: String,
}

impl fmt::Display for CheckpointHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.lease_token, self.worker)
    }
}

impl FromStr for CheckpointHandle {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (number, worker) = text.split_once('@').unwrap_or_default();
        match number.parse() {
            Ok(lease_token) if !worker.is_empty() && !worker.contains('\0') => {
                Ok(Self { lease_token, worker: worker.to_owned() })
            }
            _ => Err(invalid("invalid handle of a chunk: give the text that its claim printed")),
        }
    }
}

/// A chunk as its row shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CheckpointRow {
    /// Id of the matrix.
    pub matrix_id: String,
    /// Hash that names the chunk.
    pub chunk_hash: String,
    /// Time at which the chunk was last completed.
    pub last_synced_at: Option<SystemTime>,
    /// Number of rows at that time, or as the current worker has saved it since.
    pub row_count: Option<i64>,
    /// True if a worker holds the chunk.
    pub held: bool,
    /// That worker, or the last one if its lease has ended.
    pub locked_by: Option<String>,
    /// End of its lease.
    pub locked_until: Option<SystemTime>,
    /// Token of the last claim.
    pub lease_token: i64,
}

impl CheckpointRow {
    fn read(row: &Row) -> Self {
        Self {
            matrix_id: row.get("matrix_id"),
            chunk_hash: row.get("chunk_hash"),
            last_synced_at: time(row.get("last_synced_at")),
            row_count: row.get("row_count"),
            held: row.get("held"),
            locked_by: row.get("locked_by"),
            locked_until: time(row.get("locked_until")),
            lease_token: row.get("lease_token"),
        }
    }
}

impl CheckpointGuard {
    /// Keeps the chunk without this process. It is no longer renewed here: the claim ends with its lease unless the
    /// handle [saves](Checkpoints::save) or [completes](Checkpoints::complete) it.
    pub fn detach(self) -> CheckpointHandle {
        self.ticket.dealt_with();
        let (lease_token, worker) = (self.name.number, self.table.db.worker.clone());
        CheckpointHandle { lease_token, worker }
    }
}

/// Change of a detached claim.
enum DetachedChange {
    Save { ttl: i64, row_count: Option<i64> },
    Complete { row_count: i64 },
}

impl Checkpoints {
    /// Renews a detached claim by the lease of these options. With `row_count`, also stores the number of rows so far.
    ///
    /// # Errors
    ///
    /// `Lost` if the lease has ended, or another worker holds the chunk: nothing was changed. `Unknown` if no answer
    /// arrived.
    ///
    /// # Cancel safety
    ///
    /// The claim is renewed or not, as if the future had not been dropped.
    pub async fn save(
        &self,
        matrix_id: &str,
        chunk_hash: &str,
        handle: &CheckpointHandle,
        row_count: Option<i64>,
    ) -> Result<()> {
        let ttl = micros(self.0.db.lease.ttl());
        let change = DetachedChange::Save { ttl, row_count };
        self.change(matrix_id, chunk_hash, handle, change).await
    }

    /// Completes a detached claim: marks the chunk as synchronised, and records its number of rows. Accepted even after
    /// the lease has ended, as long as no other worker has claimed the chunk.
    ///
    /// # Errors
    ///
    /// `Lost` if another worker has claimed the chunk, or it is completed already: nothing was changed. `Unknown` if no
    /// answer arrived.
    ///
    /// # Cancel safety
    ///
    /// The chunk is completed even if the future is dropped.
    pub async fn complete(
        &self,
        matrix_id: &str,
        chunk_hash: &str,
        handle: &CheckpointHandle,
        row_count: i64,
    ) -> Result<()> {
        self.change(matrix_id, chunk_hash, handle, DetachedChange::Complete { row_count }).await
    }

    async fn change(
        &self,
        matrix_id: &str,
        chunk_hash: &str,
        handle: &CheckpointHandle,
        change: DetachedChange,
    ) -> Result<()> {
        let (matrix, chunk, handle) = (matrix_id.to_owned(), chunk_hash.to_owned(), handle.clone());
        let shared = Arc::clone(&self.0);
        let updated = run_detached(async move {
            let (sql, extent, row_count): (_, Parameter<'_>, Parameter<'_>) = match &change {
                DetachedChange::Save { ttl, row_count } => {
                    (&shared.sql.save, (ttl, Type::INT8), (row_count, Type::INT8))
                }
                DetachedChange::Complete { row_count } => {
                    (&shared.sql.end, (&true, Type::BOOL), (row_count, Type::INT8))
                }
            };
            let parameters: [Parameter<'_>; 6] = [
                (&matrix, Type::TEXT),
                (&chunk, Type::TEXT),
                (&handle.lease_token, Type::INT8),
                (&handle.worker, Type::TEXT),
                extent,
                row_count,
            ];
            let (rows, _) = shared.db.ask(sql, &parameters, shared.db.by()).await?;
            Ok(!rows.is_empty())
        });
        self.check_updated(matrix_id, chunk_hash, updated.await)
    }

    /// Lists up to `limit` chunks, at most ten thousand, in the order of their names: all, or those of one matrix.
    ///
    /// # Errors
    ///
    /// `Unavailable` if the server cannot be reached.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future changes nothing.
    pub async fn list(&self, matrix_id: Option<&str>, limit: usize) -> Result<Vec<CheckpointRow>> {
        let db = &self.0.db;
        let limit = i64::try_from(limit.clamp(1, MAX_LISTED_CHUNKS)).unwrap_or(1);
        let parameters: [Parameter<'_>; 2] = [(&matrix_id, Type::TEXT), (&limit, Type::INT8)];
        let answer = db.ask(&self.0.sql.list, &parameters, db.by()).await;
        let (rows, _) = answer.map_err(|error| error.at(db))?;
        Ok(rows.iter().map(CheckpointRow::read).collect())
    }

    /// `Lost` if an update matched no row.
    fn check_updated(
        &self,
        matrix_id: &str,
        chunk_hash: &str,
        updated: Result<bool>,
    ) -> Result<()> {
        if updated.map_err(|error| error.at(&self.0.db))? {
            return Ok(());
        }
        let message = format!(
            "chunk {chunk_hash} of {matrix_id} was lost: its lease has ended, or another worker has claimed it"
        );
        Err(Error::new(ErrorKind::Lost, message).at(&self.0.db))
    }
}
