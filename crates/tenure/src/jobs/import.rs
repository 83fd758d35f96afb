//! Import: many jobs by `COPY`, in one transaction.
//!
//! `COPY` cannot leave out jobs whose unique key has an open job, so jobs with a key are inserted by the statement of
//! [`Queue::enqueue_many`], in the same transaction.

use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use tenure_core::jobs::DELAYED_HOLDER;
use tokio_postgres::types::Type;

use super::Queue;
use super::db::invalid;
use super::enqueue::JobValues;
use super::job::NewJob;
use super::shared::{MAX_BATCH_JOBS, QueueShared};
use super::sql::JobTable;
use crate::store::pg::clock::micros;
use crate::store::pg::durable::DURABLE;
use crate::store::pg::pool::PooledConnection;
use crate::{Result, identity};

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
/// Microseconds from 1970 to 2000, from which PostgreSQL counts times.
const POSTGRES_EPOCH: i64 = 946_684_800_000_000;

/// Result of an import.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ImportedJobs {
    /// Jobs that were enqueued.
    pub new: u64,
    /// Jobs that were left out, because another job of their unique key is open.
    pub existing: u64,
}

/// Types of the columns that an import writes, and the statement.
#[derive(Debug)]
pub(super) struct ImportStatement {
    copy: String,
    /// For jobs with values of optional columns.
    copy_extended: String,
    /// The optional columns, with their types.
    optional: Vec<(&'static str, &'static str)>,
    id: NewIdType,
    priority_bytes: u8,
    payload_is_binary: bool,
}

/// Ids that an import must make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NewIdType {
    /// The database makes them.
    Default,
    Uuid,
    Text,
}

impl ImportStatement {
    pub(super) fn new(jobs: &JobTable<'_>, priority: &str) -> Self {
        let id = match (jobs.makes_ids, jobs.id) {
            (false, _) => NewIdType::Default,
            (true, "uuid") => NewIdType::Uuid,
            (true, _) => NewIdType::Text,
        };
        let id_column = if id == NewIdType::Default { "" } else { ", id" };
        let copy = |optional: &str| {
            format!(
                "COPY {} (payload, priority, created_at, max_attempts, locked_until, locked_by{id_column}{optional}) \
                 FROM STDIN (FORMAT binary)",
                jobs.table.quoted()
            )
        };
        let optional = jobs.optional.enqueued();
        let names: String = optional.iter().map(|(column, _)| format!(", {column}")).collect();
        Self {
            copy: copy(""),
            copy_extended: copy(&names),
            optional,
            id,
            priority_bytes: match priority {
                "bigint" => 8,
                "smallint" => 2,
                _ => 4,
            },
            payload_is_binary: jobs.payload == "jsonb",
        }
    }

    /// Appends a job as a row of the binary format, with `extended` also its values of optional columns. `created` is its
    /// time of creation in microseconds since 1970.
    fn put(&self, data: &mut BytesMut, job: &NewJob, created: i64, extended: bool) -> Result<()> {
        let optional = if extended { &self.optional[..] } else { &[] };
        let columns = if self.id == NewIdType::Default { 6 } else { 7 } + optional.len();
        data.put_i16(i16::try_from(columns).unwrap_or(i16::MAX));
        put_json(data, &job.payload, self.payload_is_binary);
        put_length(data, self.priority_bytes.into());
        match self.priority_bytes {
            8 => data.put_i64(job.priority.into()),
            2 => data.put_i16(i16::try_from(job.priority).map_err(|_| {
                invalid("invalid priority: the column of this table is a smallint")
            })?),
            _ => data.put_i32(job.priority),
        }
        put_time(data, created);
        put_length(data, 4);
        data.put_i32(job.max_attempts);
        if job.delay.is_zero() {
            data.put_i32(-1);
            data.put_i32(-1);
        } else {
            put_time(data, created.saturating_add(micros(job.delay)));
            put_text(data, DELAYED_HOLDER);
        }
        self.put_id(data)?;
        for (column, kind) in optional {
            let meta = job.meta.as_ref().map(ToString::to_string);
            match (*column, &job.group_key, meta) {
                ("group_key", Some(group), _) => put_text(data, group),
                ("meta", _, Some(meta)) => put_json(data, &meta, *kind == "jsonb"),
                _ => data.put_i32(-1),
            }
        }
        Ok(())
    }

    fn put_id(&self, data: &mut BytesMut) -> Result<()> {
        if self.id == NewIdType::Default {
            return Ok(());
        }
        let mut id: [u8; 16] = identity::random()?;
        // Version 4, of random bits.
        id[6] = id[6] & 0x0f | 0x40;
        id[8] = id[8] & 0x3f | 0x80;
        if self.id == NewIdType::Uuid {
            put_length(data, id.len());
            data.put_slice(&id);
            return Ok(());
        }
        let hex = format!("{:032x}", u128::from_be_bytes(id));
        let text = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-");
        put_text(data, &text);
        Ok(())
    }
}

fn put_text(data: &mut BytesMut, text: &str) {
    put_length(data, text.len());
    data.put_slice(text.as_bytes());
}

/// A JSON text. The binary form of `jsonb` begins with its version.
fn put_json(data: &mut BytesMut, text: &str, is_binary: bool) {
    let version: &[u8] = if is_binary { &[1] } else { &[] };
    put_length(data, version.len() + text.len());
    data.put_slice(version);
    data.put_slice(text.as_bytes());
}

/// Length of a value. A payload has at most a megabyte.
fn put_length(data: &mut BytesMut, length: usize) {
    data.put_i32(i32::try_from(length).unwrap_or(i32::MAX));
}

fn put_time(data: &mut BytesMut, micros: i64) {
    put_length(data, 8);
    data.put_i64(micros.saturating_sub(POSTGRES_EPOCH));
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
