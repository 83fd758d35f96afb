//! Numbers of jobs by state, read by index: the cost does not grow with the table.

use std::collections::{BTreeMap, BTreeSet};

use tenure_core::jobs::JobState;
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::Queue;
use crate::Result;
use crate::store::pg::connect::Parameter;

/// Maximum number of jobs that are counted in each part of a large table.
pub(super) const MAX_COUNTED: u64 = 10_000;
/// Size in bytes up to which all rows of a table are counted.
const MAX_EXACT_BYTES: i64 = 16 << 20;

/// Numbers of jobs by state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct JobCounts {
    pub(super) by_state: BTreeMap<String, u64>,
    /// States of which there may be more jobs.
    pub(super) at_least: BTreeSet<String>,
    /// True if the number of completed jobs is an estimate.
    pub(super) completed_is_estimate: bool,
    /// True if failed jobs can be found without reading the whole of a large table.
    pub(super) finds_failed: bool,
}

impl Queue {
    pub(super) async fn count(&self) -> Result<JobCounts> {
        let size = self.request(&self.0.sql.size, &[]).await?;
        let number = |column: &str| size.first().and_then(|row| row.get::<_, Option<i64>>(column));
        if number("bytes").unwrap_or_default() <= MAX_EXACT_BYTES {
            let rows = self.request(&self.0.sql.counts, &[]).await?;
            return Ok(JobCounts { finds_failed: true, ..JobCounts::read(&rows) });
        }
        let indexed = size.first().and_then(|row| row.get("indexes_failed")).unwrap_or(false);
        let sql = if indexed { &self.0.sql.bounded_counts } else { &self.0.sql.bounded_open };
        let limit = i64::try_from(MAX_COUNTED).unwrap_or(i64::MAX);
        let parameters: [Parameter<'_>; 1] = [(&limit, Type::INT8)];
        let mut counts = JobCounts::read(&self.request(sql, &parameters).await?);
        let others: u64 = counts.by_state.values().sum();
        let rows = number("rows").unwrap_or_default().unsigned_abs();
        counts.by_state.insert(JobState::Completed.to_string(), rows.saturating_sub(others));
        counts.completed_is_estimate = true;
        counts.finds_failed = indexed;
        Ok(counts)
    }
}

impl JobCounts {
    fn read(rows: &[Row]) -> Self {
        let mut counts = Self::default();
        let mut parts: BTreeMap<String, (u64, Vec<String>)> = BTreeMap::new();
        for row in rows {
            let (state, part): (String, String) = (row.get("state"), row.get("part"));
            let jobs = row.get::<_, i64>("jobs").unsigned_abs();
            *counts.by_state.entry(state.clone()).or_default() += jobs;
            if part != "all" {
                let (counted, states) = parts.entry(part).or_default();
                *counted += jobs;
                states.push(state);
            }
        }
        let full = parts.into_values().filter(|(counted, _)| *counted >= MAX_COUNTED);
        counts.at_least = full.flat_map(|(_, states)| states).collect();
        counts
    }
}
