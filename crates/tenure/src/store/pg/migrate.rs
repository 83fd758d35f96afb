//! Execution of the SQL that creates tables.

use std::time::Duration;

use tenure_core::Time;

use super::connect::PgConnection;
use super::durable::DURABLE;
use super::failure;
use super::pool::Pool;
use super::version::{self, VERSION};
use crate::{Clock, Error, ErrorKind, Result};

/// SQLSTATE with which our SQL refuses a table that does not fit.
pub(crate) const REFUSED: &str = "TN001";

/// Number of the advisory lock that our SQL takes: `hashtext('tenure schema')`, on processors with the common byte order.
/// Migrations of all versions exclude each other by it.
pub(crate) const SCHEMA_LOCK: i64 = -616_986_387;

/// Timeout of a migration: an index over a large table takes long.
const MIGRATION_TIMEOUT: Duration = Duration::from_secs(600);

/// Runs `sql` in one transaction: all of it or nothing.
pub(crate) async fn apply(pool: &Pool, clock: &Clock, sql: &str) -> Result<()> {
    let by = clock.now() + MIGRATION_TIMEOUT;
    let mut connection = pool.take(by).await?;
    check_server(&mut connection, by).await?;
    run(&mut connection, sql, by).await
}

/// Refuses a server that is too old or read-only.
pub(crate) async fn check_server(connection: &mut PgConnection, by: Time) -> Result<()> {
    let question = format!("SELECT pg_is_in_recovery() AS is_standby, {VERSION} AS version");
    if let Some(server) = connection.query(&question, &[], by).await?.first() {
        version::check(server.get("version"))?;
        if server.get("is_standby") {
            return Err(failure::standby(false));
        }
    }
    Ok(())
}

/// Runs `sql` in one transaction, on a server that was checked.
pub(crate) async fn run(connection: &mut PgConnection, sql: &str, by: Time) -> Result<()> {
    // One message is one transaction. The setting lasts until its end, so the commit is durable.
    connection.run(&format!("SELECT {DURABLE}; {sql}"), by).await.map_err(explain)
}

/// Converts a refusal by our own SQL to `Misconfigured`.
pub(crate) fn explain(error: Error) -> Error {
    let refusal = std::error::Error::source(&error)
        .and_then(|source| source.downcast_ref::<tokio_postgres::Error>())
        .and_then(tokio_postgres::Error::as_db_error)
        .filter(|refusal| refusal.code().code() == REFUSED)
        .map(|refusal| (refusal.message().to_owned(), refusal.hint().map(str::to_owned)));
    match refusal {
        Some((message, hint)) => {
            let hint = hint.unwrap_or_else(|| "name another table".to_owned());
            let message = format!("{message}; nothing was changed: {hint}");
            Error::new(ErrorKind::Misconfigured, message)
        }
        None => error,
    }
}
