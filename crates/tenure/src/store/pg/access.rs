//! Requests on a table whose statements return the database's clock in the column `now`.

use std::fmt;

use tenure_core::Time;
use tokio_postgres::Row;

use super::clock::{DbClock, Reading};
use super::connect::{Parameter, PgConnection};
use super::incarnation::Incarnation;
use super::primaries::Primaries;
use super::table::Table;
use crate::{Clock, Result};

/// A table, with the clocks and the incarnation of its users.
#[derive(Clone, Copy)]
pub(crate) struct TableAccess<'a> {
    pub(crate) table: &'a Table,
    pub(crate) clock: &'a Clock,
    pub(crate) db_clock: &'a DbClock,
    pub(crate) incarnation: &'a Incarnation,
    pub(crate) primaries: &'a Primaries,
    /// Store or queue, for the log.
    pub(crate) user: &'a (dyn fmt::Display + Sync),
}

impl TableAccess<'_> {
    /// Sends one request.
    pub(crate) async fn ask(
        &self,
        connection: &mut PgConnection,
        sql: &str,
        parameters: &[Parameter<'_>],
        by: Time,
    ) -> Result<(Vec<Row>, Reading)> {
        let sent = self.clock.now();
        let rows = connection.query_again(sql, parameters, by).await?;
        let reading = Reading::of(&rows, sent, self.clock.now())?;
        if !rows.is_empty()
            && let Some(jump) = self.db_clock.note(reading)
        {
            tracing::warn!(name: "tenure.clock_jump", store = %self.user, jump_ms = jump / 1_000);
        }
        Ok((rows, reading))
    }

    /// Sends one request that grants: fills in the epoch, and retries if the server was restarted meanwhile. The grant
    /// counts only once [`Primaries::confirm_grant`] has confirmed it.
    pub(crate) async fn grant(
        &self,
        connection: &mut PgConnection,
        sql: &str,
        parameters: &[Parameter<'_>],
        by: Time,
    ) -> Result<(Vec<Row>, Reading)> {
        self.primaries.check_claim(connection, by).await?;
        let mut failures = 0;
        loop {
            self.incarnation.ensure_epoch(connection, by).await?;
            let sql = self.incarnation.fill(sql);
            match self.ask(connection, &sql, parameters, by).await {
                Err(error) => {
                    self.incarnation.recover(error, failures, self.table, connection, by).await?;
                }
                answered => return answered,
            }
            failures += 1;
        }
    }
}
