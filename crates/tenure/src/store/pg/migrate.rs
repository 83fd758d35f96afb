//! Running the SQL that makes tables.

use std::time::Duration;

use super::durable::DURABLE;
use super::failure;
use super::pool::Pool;
use crate::{Clock, Error, ErrorKind, Result};

/// The SQLSTATE with which our SQL refuses what it does not understand.
pub(crate) const REFUSED: &str = "TN001";

/// How long it may take: an index over a large table takes its time.
const MIGRATION_TIMEOUT: Duration = Duration::from_secs(600);

/// Runs `sql`, all of it or nothing.
pub(crate) async fn apply(pool: &Pool, clock: &Clock, sql: &str) -> Result<()> {
    let by = clock.now() + MIGRATION_TIMEOUT;
    let mut lent = pool.take(by).await?;
    let reads = lent.query("SELECT pg_is_in_recovery()", &[], by).await?;
    if reads.first().is_some_and(|row| row.get(0)) {
        return Err(failure::standby(false));
    }
    // One message is one transaction: its commit is durable, as the setting is not lifted before that.
    lent.run(&format!("SELECT {DURABLE}; {sql}"), by).await.map_err(explain)
}

/// What the SQL's own refusal means.
fn explain(error: Error) -> Error {
    let refusal = std::error::Error::source(&error)
        .and_then(|source| source.downcast_ref::<tokio_postgres::Error>())
        .and_then(tokio_postgres::Error::as_db_error)
        .filter(|refusal| refusal.code().code() == REFUSED)
        .map(|refusal| refusal.message().to_owned());
    match refusal {
        Some(message) => {
            let message = format!(
                "{message}; nothing was changed: name another table, or use a tenure that fits"
            );
            Error::new(ErrorKind::Misconfigured, message)
        }
        None => error,
    }
}
