//! Inspection of jobs, and changes by an operator.

use std::collections::BTreeMap;

use tenure_core::jobs::JobState;
use tokio_postgres::types::Type;

use super::Queue;
use super::db::invalid;
use super::job::JobRow;
use crate::store::pg::connect::Parameter;
use crate::store::pg::failure;
use crate::{Error, ErrorKind, Result};

/// Maximum number of jobs per page of a list.
const MAX_LISTED_JOBS: usize = 1_000;

impl Queue {
    /// Reads the job of this id; `None` if there is no such job.
    ///
    /// # Errors
    ///
    /// `Invalid` if the text cannot be an id.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future changes nothing.
    pub async fn show(&self, id: &str) -> Result<Option<JobRow>> {
        let rows = self.request(&self.0.sql.show, &[(&id, Type::TEXT)]).await?;
        Ok(rows.first().map(JobRow::read))
    }

    /// Lists up to `limit` jobs, at most a thousand, the newest first: all or those of one state, from the start or after
    /// an id.
    ///
    /// Ids that are numbers count as growing with time. Jobs with other ids are listed by `created_at` if the table has
    /// an index over it and it is `NOT NULL`, and else by descending id.
    ///
    /// # Errors
    ///
    /// `Unavailable` if the server cannot be reached.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future changes nothing.
    pub async fn list(
        &self,
        state: Option<JobState>,
        after: Option<&str>,
        limit: usize,
    ) -> Result<Vec<JobRow>> {
        let (state, limit) =
            (state.map(|state| state.to_string()), limit.clamp(1, MAX_LISTED_JOBS));
        let limit = i64::try_from(limit).unwrap_or(1);
        let parameters: [Parameter<'_>; 3] =
            [(&state, Type::TEXT), (&limit, Type::INT8), (&after, Type::TEXT)];
        let sql = &self.0.sql;
        let by_time = !self.0.has_counted_ids
            && self
                .request(&sql.has_time_index, &[])
                .await?
                .iter()
                .all(|row| row.get("has_time_index"));
        let list = if by_time { &sql.list_by_time } else { &sql.list };
        let rows = self.request(list, &parameters).await?;
        Ok(rows.iter().map(JobRow::read).collect())
    }

    /// Number of jobs by state. In a table of more than 16 MiB at most 10,000 jobs that wait, that are held or delayed, and
    /// that failed are counted, by index, and the number of completed jobs is an estimate of the server;
    /// [`summary`](Self::summary) tells which numbers are exact.
    ///
    /// # Errors
    ///
    /// `Unavailable` if the server cannot be reached.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future changes nothing.
    pub async fn counts(&self) -> Result<BTreeMap<String, u64>> {
        Ok(self.count().await?.by_state)
    }

    /// Returns true if a job is available, or waits for a retry. Running jobs and delayed jobs without an attempt do
    /// not count, and neither do jobs that are set aside.
    ///
    /// # Errors
    ///
    /// `Unavailable` if the server cannot be reached.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future changes nothing.
    pub async fn has_pending(&self) -> Result<bool> {
        let aside = self.0.set_aside.ids(self.0.db.clock.now());
        let rows = self.request(&self.0.sql.pending, &[(&aside, Type::TEXT_ARRAY)]).await?;
        Ok(rows.first().is_some_and(|row| row.get("pending")))
    }

    /// Makes a failed or delayed job available at once, with all its attempts. Also one whose lease ends later than it can
    /// last, because the database's clock was set back.
    ///
    /// # Errors
    ///
    /// `Invalid` if there is no such job, if it is completed, running or available, or if another job of its unique key
    /// is open: nothing was changed.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the job requeued or not.
    pub async fn requeue(&self, id: &str) -> Result<()> {
        let rows = self.request(&self.0.sql.requeue, &[(&id, Type::TEXT)]).await?;
        self.check_changed(rows.is_empty(), id, "cannot be requeued").await
    }

    /// Marks an open job as failed. If a worker runs the job, its next heartbeat reports the job as lost.
    ///
    /// # Errors
    ///
    /// `Invalid` if there is no such job, or it is completed or failed already: nothing was changed.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the job cancelled or not.
    pub async fn cancel(&self, id: &str, why: &str) -> Result<()> {
        let rows =
            self.request(&self.0.sql.cancel, &[(&id, Type::TEXT), (&why, Type::TEXT)]).await?;
        self.check_changed(rows.is_empty(), id, "cannot be cancelled").await
    }

    /// Deletes a job that is not running.
    ///
    /// # Errors
    ///
    /// `Invalid` if there is no such job, or a worker runs it: nothing was changed.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the job deleted or not.
    pub async fn remove(&self, id: &str) -> Result<()> {
        let removed = self.request(&self.0.sql.remove, &[(&id, Type::TEXT)]).await;
        let rows = removed.map_err(|error| self.deletion_error(error))?;
        self.check_changed(rows.is_empty(), id, "cannot be removed: cancel it first").await
    }

    /// Names the right that only deletions need.
    pub(super) fn deletion_error(&self, error: Error) -> Error {
        let table = self.table();
        let denied =
            format!("permission denied for table {}", table.rsplit('.').next().unwrap_or(&table));
        match failure::server_message(&error) {
            Some(message) if error.kind() == ErrorKind::Denied && message.starts_with(&denied) => {
                let advice = format!(
                    "the role may not delete jobs: an owner must GRANT DELETE on {table} ({message})"
                );
                self.at(Error::new(ErrorKind::Denied, advice))
            }
            _ => error,
        }
    }

    pub(super) async fn request(
        &self,
        sql: &str,
        parameters: &[Parameter<'_>],
    ) -> Result<Vec<tokio_postgres::Row>> {
        let by = self.0.db.by();
        let answer = self.0.db.ask(sql, parameters, by).await;
        answer.map(|(rows, _)| rows).map_err(|error| self.at(error))
    }

    /// Returns the reason as an error if no row was changed.
    async fn check_changed(&self, unchanged: bool, id: &str, cannot: &str) -> Result<()> {
        if !unchanged {
            return Ok(());
        }
        Err(self.at(match self.show(id).await? {
            Some(row) => invalid(&format!("job {id} is {} and {cannot}", row.state)),
            None => Error::new(ErrorKind::Invalid, format!("there is no job {id}")),
        }))
    }
}
