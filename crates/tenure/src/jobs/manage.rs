//! Looking at jobs, and changing them by hand.

use std::collections::BTreeMap;

use tenure_core::jobs::JobState;
use tokio_postgres::types::Type;

use super::Queue;
use super::db::invalid;
use super::job::JobRow;
use crate::store::pg::connect::Parameter;
use crate::{Error, ErrorKind, Result};

/// The most jobs of one page.
const MAX_LISTED_JOBS: usize = 1_000;

impl Queue {
    /// The job of this id; `None` where there is none.
    ///
    /// # Errors
    ///
    /// `Invalid` where it cannot be an id.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future changes nothing.
    pub async fn show(&self, id: &str) -> Result<Option<JobRow>> {
        let rows = self.request(&self.0.sql.show, &[(&id, Type::TEXT)]).await?;
        Ok(rows.first().map(JobRow::read))
    }

    /// Up to `most` jobs, at most a thousand, by their ids; those of one state; those after an id.
    ///
    /// # Errors
    ///
    /// `Unavailable` where the server cannot be reached.
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
        let (state, most) = (state.map(|state| state.to_string()), limit.clamp(1, MAX_LISTED_JOBS));
        let most = i64::try_from(most).unwrap_or(1);
        let parameters: [Parameter<'_>; 3] =
            [(&state, Type::TEXT), (&most, Type::INT8), (&after, Type::TEXT)];
        let rows = self.request(&self.0.sql.list, &parameters).await?;
        Ok(rows.iter().map(JobRow::read).collect())
    }

    /// How many jobs are in which state. Looks at every row.
    ///
    /// # Errors
    ///
    /// `Unavailable` where the server cannot be reached.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future changes nothing.
    pub async fn counts(&self) -> Result<BTreeMap<String, u64>> {
        let rows = self.request(&self.0.sql.counts, &[]).await?;
        let count = |row: &tokio_postgres::Row| (row.get(1), row.get::<_, i64>(2).unsigned_abs());
        Ok(rows.iter().map(count).collect())
    }

    /// Whether a job is left that somebody could claim now, or will be tried again. Jobs that others run are not counted.
    ///
    /// # Errors
    ///
    /// `Unavailable` where the server cannot be reached.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future changes nothing.
    pub async fn has_pending(&self) -> Result<bool> {
        let rows = self.request(&self.0.sql.pending, &[]).await?;
        Ok(rows.first().is_some_and(|row| row.get(1)))
    }

    /// Lets a job that failed, or waits for its time, be claimed at once; it has all its attempts again.
    ///
    /// # Errors
    ///
    /// `Invalid` where there is no such job, where it is completed, running or available, or where another job of its
    /// unique key is open: nothing was changed.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves it done or not.
    pub async fn requeue(&self, id: &str) -> Result<()> {
        let rows = self.request(&self.0.sql.requeue, &[(&id, Type::TEXT)]).await?;
        self.check_changed(rows.is_empty(), id, "cannot be tried again").await
    }

    /// Gives up a job that is open. Whoever runs it hears that it is lost, at its next heartbeat.
    ///
    /// # Errors
    ///
    /// `Invalid` where there is no such job, or it is final already: nothing was changed.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves it done or not.
    pub async fn cancel(&self, id: &str, why: &str) -> Result<()> {
        let rows =
            self.request(&self.0.sql.cancel, &[(&id, Type::TEXT), (&why, Type::TEXT)]).await?;
        self.check_changed(rows.is_empty(), id, "cannot be cancelled").await
    }

    /// Deletes a job that nobody runs.
    ///
    /// # Errors
    ///
    /// `Invalid` where there is no such job, or somebody runs it: nothing was changed.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves it done or not.
    pub async fn remove(&self, id: &str) -> Result<()> {
        let rows = self.request(&self.0.sql.remove, &[(&id, Type::TEXT)]).await?;
        self.check_changed(rows.is_empty(), id, "cannot be removed: cancel it first").await
    }

    pub(super) async fn request(
        &self,
        sql: &str,
        parameters: &[Parameter<'_>],
    ) -> Result<Vec<tokio_postgres::Row>> {
        let by = self.0.db.by();
        let asked = self.0.db.ask(sql, parameters, by).await;
        asked.map(|(rows, _)| rows).map_err(|error| self.at(error))
    }

    /// Says why nothing was changed.
    async fn check_changed(&self, nothing: bool, id: &str, cannot: &str) -> Result<()> {
        if !nothing {
            return Ok(());
        }
        Err(self.at(match self.show(id).await? {
            Some(row) => invalid(&format!("job {id} is {} and {cannot}", row.state)),
            None => Error::new(ErrorKind::Invalid, format!("there is no job {id}")),
        }))
    }
}
