//! Rows of jobs in the binary format of `COPY`.

use bytes::{BufMut as _, BytesMut};
use tenure_core::jobs::DELAYED_HOLDER;

use super::db::invalid;
use super::job::NewJob;
use super::sql::JobTable;
use crate::store::pg::clock::micros;
use crate::{Result, identity};

/// Microseconds from 1970 to 2000, from which PostgreSQL counts times.
const POSTGRES_EPOCH: i64 = 946_684_800_000_000;

/// Types of the columns that an import writes, and the statement.
#[derive(Debug)]
pub(super) struct ImportStatement {
    pub(super) copy: String,
    /// For jobs with values of optional columns.
    pub(super) copy_extended: String,
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
        let names: String = optional.iter().flat_map(|(column, _)| [", ", column]).collect();
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
    pub(super) fn put(
        &self,
        data: &mut BytesMut,
        job: &NewJob,
        created: i64,
        extended: bool,
    ) -> Result<()> {
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
