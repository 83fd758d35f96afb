//! Import: many jobs by `COPY`, in one transaction.
//!
//! `COPY` cannot leave out jobs whose unique key has an open job, so jobs with a key are inserted by the statement of
//! [`Queue::enqueue_many`], in the same transaction.

use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use tokio_postgres::types::Type;

use super::Queue;
use super::copy_rows::ImportStatement;
use super::db::invalid;
use super::enqueue::JobValues;
use super::job::NewJob;
use super::shared::{MAX_BATCH_JOBS, QueueShared};
use crate::Result;
use crate::store::pg::durable::DURABLE;
use crate::store::pg::pool::PooledConnection;

/// Maximum number of jobs of one import, which is one transaction.
const MAX_IMPORT_JOBS: usize = 1_000_000;
/// Timeout of an import.
const IMPORT_TIMEOUT: Duration = Duration::from_secs(600);
/// Size from which a part of the data is sent.
const CHUNK_BYTES: usize = 1 << 16;
/// Header of the binary format: signature, flags, and no extension.
const BINARY_HEADER: &[u8] = b"PGCOPY\n\xff\r\n\0\0\0\0\0\0\0\0\0";
/// Trailer of the binary format.
const BINARY_TRAILER: i16 = -1;

/// Result of an import.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ImportedJobs {
    /// Jobs that were enqueued.
    pub new: u64,
    /// Jobs that were left out, because another job of their unique key is open.
    pub existing: u64,
}

impl QueueShared {
    /// Writes all jobs in one transaction of a connection that is not used again: after an error or a drop, the server
    /// rolls back.
    async fn import(&self, jobs: &[NewJob]) -> Result<ImportedJobs> {
        let extended = self.needs_optional_columns(jobs)?;
        let by = self.db.clock.now() + IMPORT_TIMEOUT;
        let mut connection = self.db.connection(by).await?;
        while !connection.check_current(by).await? {
            drop(connection);
            connection = self.db.connection(by).await?;
        }
        connection.discard();
        connection.run(&format!("BEGIN; SELECT {DURABLE}"), by).await?;
        let (keyed, plain): (Vec<&NewJob>, Vec<&NewJob>) =
            jobs.iter().partition(|job| job.unique_key.is_some());
        let mut imported = ImportedJobs::default();
        if !plain.is_empty() {
            imported.new += self.copy(&mut connection, &plain, extended, by).await?;
        }
        for chunk in keyed.chunks(MAX_BATCH_JOBS) {
            let values = JobValues::of(&chunk.iter().copied());
            let sql = if extended { &self.sql.enqueue_extended_in } else { &self.sql.enqueue_in };
            let made = connection.query(sql, &values.parameters(extended), by).await?.len();
            imported.new += u64::try_from(made).unwrap_or_default();
            imported.existing += u64::try_from(chunk.len() - made).unwrap_or_default();
        }
        connection.query(&self.sql.notify, &[(&"", Type::TEXT)], by).await?;
        connection.run("COMMIT", by).await?;
        self.restart_scan();
        Ok(imported)
    }

    async fn copy(
        &self,
        connection: &mut PooledConnection<'_>,
        jobs: &[&NewJob],
        extended: bool,
        by: tenure_core::Time,
    ) -> Result<u64> {
        let now = format!("SELECT {} AS now", crate::store::pg::clock::NOW);
        let rows = connection.query(&now, &[], by).await?;
        // Each job is a microsecond younger than the one before, so that claims keep their order.
        let now: i64 = rows.first().map_or(0, |row| row.get("now"));
        let mut chunks: Vec<Bytes> = Vec::new();
        let mut data = BytesMut::from(BINARY_HEADER);
        for (created, job) in (now..).zip(jobs) {
            self.import_sql.put(&mut data, job, created, extended)?;
            if data.len() >= CHUNK_BYTES {
                chunks.push(data.split().freeze());
            }
        }
        data.put_i16(BINARY_TRAILER);
        chunks.push(data.freeze());
        let ImportStatement { copy, copy_extended, .. } = &self.import_sql;
        connection.copy_in(if extended { copy_extended } else { copy }, chunks, by).await
    }
}

impl Queue {
    /// Enqueues up to a million jobs by `COPY`, in one transaction: all of them or none. It is several times as fast as
    /// [`enqueue_many`](Self::enqueue_many), except for jobs with a unique key, and returns no ids.
    ///
    /// # Errors
    ///
    /// `Invalid` if a job is invalid or there are more than a million. `Unknown` if no answer to the commit arrived: the
    /// jobs may be enqueued. After any other error none is.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves all jobs enqueued or none.
    pub async fn import(&self, jobs: &[NewJob]) -> Result<ImportedJobs> {
        if jobs.len() > MAX_IMPORT_JOBS {
            let message = format!(
                "{} jobs are too many for one import, of at most {MAX_IMPORT_JOBS}",
                jobs.len()
            );
            return Err(self.at(invalid(&message)));
        }
        jobs.iter().try_for_each(NewJob::check).map_err(|error| self.at(error))?;
        if jobs.is_empty() {
            return Ok(ImportedJobs::default());
        }
        self.0.import(jobs).await.map_err(|error| self.at(error))
    }
}
