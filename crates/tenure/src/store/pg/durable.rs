//! Commits that are on disk before they are acknowledged.

/// Makes the commit of its statement wait for the server's own disk, if `synchronous_commit` is off; any other setting
/// stays as it is. The setting ends with the transaction: a pooler's session keeps nothing of it.
///
/// A commit that a crash of the server can take back after it was acknowledged would give a lock to a second holder.
///
/// Belongs into `RETURNING`. PostgreSQL evaluates that for each row that it writes, so that the setting is raised exactly
/// if the statement has something to lose. It skips a `WITH` query that is never referred to, unless that one writes.
pub(crate) const DURABLE: &str = "CASE WHEN current_setting('synchronous_commit') = 'off' \
    THEN set_config('synchronous_commit', 'local', true) END";

/// The statement, which must end in a `RETURNING` list, with [`DURABLE`] as the last column of that.
#[cfg(feature = "jobs")]
pub(crate) fn durable(statement: &str) -> String {
    format!("{statement}, {DURABLE}")
}
