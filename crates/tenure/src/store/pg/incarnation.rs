//! The incarnation of the server, and the epoch of the tokens that are granted under it.
//!
//! A fail-over may lose grants, and then counters go back. The timeline rises with each fail-over, but two standbys of one
//! primary that are promoted one after the other both write timeline 2. So the incarnation of the server (its system
//! identifier, its timeline, the time at which it was started) is kept in a table beside the locks, with an epoch: one
//! row. Whoever finds it to be another raises the epoch to the database's time in microseconds, or by one where that is
//! behind, before anything is granted.
//!
//! The table is made with the current timeline as its epoch. So nothing changes for participants of a version without
//! incarnations, until the server is started again.

use std::sync::{Arc, Mutex, PoisonError};

use tenure_core::Time;
use tokio_postgres::Row;

use super::connect::Connection;
use super::durable::DURABLE;
use super::failure;
use super::migrate::REFUSED;
use super::table::Table;
use crate::store::Finding;
use crate::{Error, ErrorKind, Result};

/// The table, in the schema of the table whose grants it is for: so all who use that find the same one.
pub(crate) const TABLE: &str = "tenure_incarnation";
/// What the comment of the table says.
const VERSION: &str = "tenure incarnation, version 1";

/// Stands for the epoch in statements that grant; see [`Incarnation::fill`].
pub(crate) const EPOCH: &str = "@epoch@";

/// The timeline that the server writes. What `pg_control_checkpoint` tells is late by a checkpoint.
pub(crate) const TIMELINE: &str =
    "('x' || lpad(left(pg_walfile_name(pg_current_wal_lsn()), 8), 16, '0'))::bit(64)::int8";

const SYSTEM: &str = "(SELECT system_identifier FROM pg_control_system())";

/// Fails, and says so in words that [`is_another`] knows. `clock_timestamp` keeps the planner from trying it early.
const ANOTHER: &str =
    "('tenure: another incarnation of the server, seen ' || clock_timestamp())::int8";
const MARK: &str = "tenure: another incarnation";

/// How often a grant is sent anew because the incarnation was another.
const TRIES: usize = 3;

/// Whether the row `i` is of the server that answers.
///
/// The system identifier is left out: to read it takes as long as to read a file, and no two servers were started in
/// the same microsecond.
pub(crate) fn is_current() -> String {
    format!("i.started = pg_postmaster_start_time() AND i.timeline = {TIMELINE}")
}

/// Where the epoch of one table's grants comes from.
#[derive(Debug)]
pub(crate) struct Incarnation(Mutex<Arc<Source>>);

#[derive(Debug)]
struct Source {
    /// The table, as it stands in SQL.
    table: String,
    /// There is such a table. Else the timeline is the epoch.
    kept: bool,
}

impl Incarnation {
    /// As it should be; what is there is found out by [`question`].
    pub(crate) fn of(table: &Table) -> Self {
        let table = match table.schema() {
            Some(schema) => format!("\"{schema}\".{TABLE}"),
            None => TABLE.to_owned(),
        };
        Self(Mutex::new(Arc::new(Source { table, kept: true })))
    }

    fn source(&self) -> Arc<Source> {
        Arc::clone(&self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Notes the answer to [`question`], whose two columns begin at `at`.
    pub(crate) fn note(&self, row: &Row, at: usize) {
        if let Some(table) = row.get(at) {
            let source = Arc::new(Source { table, kept: row.get(at + 1) });
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = source;
        }
    }

    /// The statement with SQL for the epoch.
    ///
    /// The check is part of each statement that grants, because behind a pooler the next statement may reach a server
    /// that was started meanwhile. It costs no round trip. A statement that fails it has changed nothing.
    pub(crate) fn fill(&self, statement: &str) -> String {
        let Source { table, kept } = &*self.source();
        let epoch = if *kept {
            let current = is_current();
            // What the statement sees is of its own snapshot. That is as good as the newest: an epoch is never changed
            // while its server runs, and it is on disk before any statement can see it.
            format!("coalesce((SELECT i.epoch FROM {table} AS i WHERE {current}), {ANOTHER})")
        } else {
            // Once there is a table, others go by it.
            format!(
                "CASE WHEN to_regclass({}) IS NULL THEN {TIMELINE} ELSE {ANOTHER} END",
                literal(table)
            )
        };
        statement.replace(EPOCH, &epoch)
    }

    /// After the `nth` failure of a request that grants: makes the epoch that of the server, so that the request may be
    /// made again. The error, if it failed for another reason or too often.
    pub(crate) async fn settle(
        &self,
        error: Error,
        nth: usize,
        table: &Table,
        connection: &mut Connection,
        by: Time,
    ) -> Result<()> {
        if !is_another(&error) {
            return Err(explain(error));
        }
        if nth >= TRIES {
            let message = "the server is started again and again: nothing was granted";
            return Err(Error::new(ErrorKind::Unavailable, message).because(error));
        }
        let renewed = self.renew(table, connection, by).await;
        renewed.map_err(|error| explain(failure::nothing_done(error)))
    }

    /// Finds the table, and raises the epoch in it if the incarnation is another.
    async fn renew(&self, table: &Table, connection: &mut Connection, by: Time) -> Result<()> {
        let question = format!("SELECT {}", question(&literal(&table.quoted())));
        let rows = connection.query(&question, &[], by).await?;
        if let Some(row) = rows.first() {
            self.note(row, 0);
        }
        let source = self.source();
        if source.kept {
            connection.query(&raise(&source.table), &[], by).await?;
        }
        Ok(())
    }
}

/// Two columns: the name of the incarnation's table, and whether there is one. `table` is SQL for the text that names the
/// table whose grants it is for; the name is null where that is missing.
pub(crate) fn question(table: &str) -> String {
    let name = format!(
        "(SELECT format('%I.{TABLE}', n.nspname) FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace \
          WHERE c.oid = to_regclass({table}))"
    );
    format!("{name}, to_regclass({name}) IS NOT NULL")
}

/// Raises the epoch if the incarnation is another than the one that is kept: compare and swap. Of several that try it at
/// once one does it, and the others find it done.
pub(crate) fn raise(table: &str) -> String {
    let now = "(extract(epoch FROM clock_timestamp()) * 1000000)::int8";
    format!(
        "INSERT INTO {table} AS i (one, system, timeline, started, epoch) \
         SELECT true, {SYSTEM}, {TIMELINE}, pg_postmaster_start_time(), {now} \
         ON CONFLICT (one) DO UPDATE SET system = EXCLUDED.system, timeline = EXCLUDED.timeline, \
             started = EXCLUDED.started, epoch = greatest(i.epoch + 1, EXCLUDED.epoch) \
         WHERE (i.system, i.timeline, i.started) IS DISTINCT FROM (EXCLUDED.system, EXCLUDED.timeline, EXCLUDED.started) \
         RETURNING i.epoch, {DURABLE}"
    )
}

/// Whether a statement was refused because of the incarnation.
fn is_another(error: &Error) -> bool {
    said(error).is_some_and(|refusal| refusal.contains(MARK))
}

/// The same error, which names the table if it is the incarnation's that the role may not use.
pub(crate) fn explain(error: Error) -> Error {
    let denied = failure::code(&error) == Some("42501");
    if !(denied && said(&error).is_some_and(|refusal| refusal.contains(TABLE))) {
        return error;
    }
    let message = format!(
        "the role lacks rights on the table {TABLE}: an owner must GRANT SELECT, INSERT, UPDATE on it, or run `tenure \
         schema --apply` again, which grants them to the roles that have them on the table beside it"
    );
    Error::new(ErrorKind::Denied, message).because(error)
}

/// The server's own words.
fn said(error: &Error) -> Option<&str> {
    let source = std::error::Error::source(error)?.downcast_ref::<tokio_postgres::Error>()?;
    source.as_db_error().map(tokio_postgres::error::DbError::message)
}

/// A text as it stands in SQL.
pub(crate) fn literal(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

/// The SQL that makes it, beside a table that is there.
pub(crate) fn sql(beside: &Table) -> String {
    let (quoted, shown) = (beside.quoted(), beside.shown());
    format!(
        "-- The incarnation of the server, in the table {TABLE} of the same schema: with it fencing tokens grow when a
-- fail-over repeats a timeline. The next start of the server raises the tokens: from then on all participants that
-- use {shown} must be of a version that knows this table. Roles that may update {shown} are granted the rights here;
-- any other role needs: GRANT SELECT, INSERT, UPDATE ON {TABLE} TO the_role;
DO $tenure$
DECLARE
    beside CONSTANT oid := to_regclass('{quoted}');
    name text;
    role text;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('tenure schema'));
    SELECT format('%I.{TABLE}', n.nspname) INTO name
        FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = beside;
    IF to_regclass(name) IS NULL THEN
        EXECUTE format('CREATE TABLE %s (
            one          boolean PRIMARY KEY CHECK (one),
            system       bigint NOT NULL,
            timeline     bigint NOT NULL,
            started      timestamp with time zone NOT NULL,
            epoch        bigint NOT NULL
        )', name);
        EXECUTE format('COMMENT ON TABLE %s IS %L', name, '{VERSION}');
        EXECUTE format('INSERT INTO %s SELECT true, $1, $2, pg_postmaster_start_time(), $2', name)
            USING {SYSTEM}, {TIMELINE};
    ELSIF obj_description(to_regclass(name), 'pg_class') IS DISTINCT FROM '{VERSION}' THEN
        RAISE EXCEPTION 'the table % is not understood: it says \"%\" of itself',
                name, coalesce(obj_description(to_regclass(name), 'pg_class'), 'nothing')
            USING ERRCODE = '{REFUSED}', HINT = 'Nothing was changed. Rename it, or use a tenure that fits.';
    END IF;
    IF pg_has_role((SELECT relowner FROM pg_class WHERE oid = to_regclass(name)), 'USAGE') THEN
        FOR role IN SELECT DISTINCT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END
            FROM pg_class AS c, aclexplode(coalesce(c.relacl, acldefault('r', c.relowner))) AS a
            WHERE c.oid = beside AND a.privilege_type = 'UPDATE'
        LOOP
            EXECUTE format('GRANT SELECT, INSERT, UPDATE ON %s TO %s', name, role);
        END LOOP;
    END IF;
END
$tenure$;
",
    )
}

/// Asked for [`finding`]: whether the incarnation is kept, and whether the role may use it.
pub(crate) fn examination(table: &Table) -> String {
    let question = question(&literal(&table.quoted()));
    format!(
        "SELECT q.name, q.kept::int, (SELECT bool_and(has_table_privilege(to_regclass(q.name), r)) \
         FROM unnest('{{SELECT,INSERT,UPDATE}}'::text[]) AS r)::int FROM (SELECT {question}) AS q (name, kept)"
    )
}

/// What [`examination`] found; `command` makes the table, as the advice says.
pub(crate) fn finding(row: &tokio_postgres::SimpleQueryRow, command: &str) -> Finding {
    let name = row.get(0).unwrap_or(TABLE);
    match (row.get(1), row.get(2)) {
        (Some("1"), Some("1")) => Finding::ok("incarnation", format!("kept in {name}")),
        (Some("1"), _) => Finding::failed("incarnation", format!("not enough rights on {name}"))
            .advise(format!("an owner must GRANT SELECT, INSERT, UPDATE ON {name}")),
        _ => Finding::warning(
            "incarnation",
            format!(
                "no table {name}: a second fail-over can give out the same fencing tokens again"
            ),
        )
        .advise(format!("run `{command}`, once all participants are of this version")),
    }
}
