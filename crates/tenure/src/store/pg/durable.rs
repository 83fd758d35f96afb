//! Commits that are on disk before they are acknowledged.

/// SQL that makes the commit of its statement wait for the server's own disk if `synchronous_commit` is off. Any other
/// value is kept. The setting ends with the transaction, so it does not leak into a pooler's session.
///
/// Without it, a crash of the server could undo a grant after it was acknowledged, and a second holder would get the
/// lock.
///
/// It belongs into `RETURNING`, which PostgreSQL evaluates for each row that is written: the setting is raised exactly
/// if the statement has written something. A `WITH` query that only reads and is never referred to would be skipped.
pub(crate) const DURABLE: &str = "CASE WHEN current_setting('synchronous_commit') = 'off' \
    THEN set_config('synchronous_commit', 'local', true) END";

/// Appends [`DURABLE`] to a statement, which must end in a `RETURNING` list.
#[cfg(feature = "jobs")]
pub(crate) fn durable(statement: &str) -> String {
    format!("{statement}, {DURABLE}")
}
