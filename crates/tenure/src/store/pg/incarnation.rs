//! The incarnation of the server, and the epoch of the tokens that are granted under it.
//!
//! A fail-over may lose grants, and then counters go back. The timeline rises with each fail-over, but two standbys of one
//! primary that are promoted one after the other both write timeline 2. So the incarnation of the server (its system
//! identifier, its timeline, the time at which it was started) is kept in a table beside the locks, with an epoch: one
//! row. A process that finds another incarnation there raises the epoch to the database's time in microseconds, or by
//! one if that is behind, before anything is granted.
//!
//! The table is made with the current timeline as its epoch. So nothing changes for participants of a version without
//! incarnations, until the server is started again.

use std::sync::{Mutex, PoisonError};

use tenure_core::Time;
use tokio_postgres::{Row, SimpleQueryRow};

use super::connect::PgConnection;
use super::durable::DURABLE;
use super::failure;
use super::migrate::REFUSED;
use super::table::Table;
use crate::store::Finding;
use crate::{Error, ErrorKind, Result};

/// The table, in the schema of the table whose grants it is for: so all its users find the same one.
pub(crate) const TABLE: &str = "tenure_incarnation";
/// What the comment of the table says.
const VERSION: &str = "tenure incarnation, version 1";

/// Stands for the epoch in statements that grant; see [`Incarnation::fill`].
pub(crate) const EPOCH: &str = "@epoch@";

/// The timeline that the server writes. What `pg_control_checkpoint` tells is late by a checkpoint.
pub(crate) const TIMELINE: &str =
    "('x' || lpad(left(pg_walfile_name(pg_current_wal_lsn()), 8), 16, '0'))::bit(64)::int8";
/// When the server was started, in microseconds.
const STARTED: &str = "(extract(epoch FROM pg_postmaster_start_time()) * 1000000)::int8";
const SYSTEM: &str = "(SELECT system_identifier FROM pg_control_system())";

/// Fails, and says so in words that [`is_another`] knows. `clock_timestamp` keeps the planner from trying it early.
const ANOTHER: &str =
    "('tenure: another incarnation of the server, seen ' || clock_timestamp())::int8";
const ANOTHER_MARKER: &str = "tenure: another incarnation";

/// How often the incarnation is asked for anew because it was another by then.
const MAX_EPOCH_TRIES: usize = 3;

/// Where the epoch of one table's grants comes from.
#[derive(Debug, Default)]
pub(crate) struct Incarnation(Mutex<EpochSource>);

#[derive(Clone, Debug, Default)]
enum EpochSource {
    /// No server was asked yet.
    #[default]
    Unknown,
    /// The table says it, and was not asked yet.
    Table(String),
    /// There is no such table: the timeline is the epoch.
    Timeline { table: String },
    /// The table says so, for this run of the server.
    Kept { run: ServerRun, epoch: i64 },
}

/// One run of one server.
///
/// The system identifier is left out: to read it takes as long as to read a file, and no two servers were started in
/// the same microsecond.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ServerRun {
    started: i64,
    timeline: i64,
}

/// The answer to [`question`].
#[derive(Debug)]
pub(crate) struct FoundIncarnation {
    /// The table of the incarnation, as it stands in SQL; `None` if the table whose grants it is for is missing.
    table: Option<String>,
    kept: bool,
    /// `None` on a standby.
    run: Option<ServerRun>,
}

impl FoundIncarnation {
    /// Reads the columns of [`question`], which begin at `at`.
    pub(crate) fn read(row: &Row, at: usize) -> Self {
        let run = row.get::<_, Option<i64>>(at + 2).zip(row.get::<_, Option<i64>>(at + 3));
        let run = run.map(|(started, timeline)| ServerRun { started, timeline });
        Self { table: row.get(at), kept: row.get(at + 1), run }
    }

    /// The same, of an answer in text.
    pub(crate) fn read_text(row: &SimpleQueryRow, at: usize) -> Self {
        let number = |at: usize| row.get(at).and_then(|text| text.parse().ok());
        let run = number(at + 2).zip(number(at + 3));
        let run = run.map(|(started, timeline)| ServerRun { started, timeline });
        Self { table: row.get(at).map(str::to_owned), kept: row.get(at + 1) == Some("t"), run }
    }
}

impl Incarnation {
    fn source(&self) -> EpochSource {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, source: EpochSource) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = source;
    }

    /// The statement with SQL for the epoch.
    ///
    /// What is known of the run is compared in each statement that grants, because behind a pooler the next statement
    /// may reach a server that was started meanwhile. It costs no round trip, and no look at the table: the epoch of a
    /// run never changes. A statement that fails the comparison has changed nothing.
    pub(crate) fn fill(&self, statement: &str) -> String {
        let epoch = match self.source() {
            EpochSource::Unknown | EpochSource::Table(_) => ANOTHER.to_owned(),
            EpochSource::Kept { run: ServerRun { started, timeline }, epoch } => format!(
                "CASE WHEN {STARTED} = {started} AND {TIMELINE} = {timeline} THEN {epoch}::int8 ELSE {ANOTHER} END"
            ),
            // Once there is a table, others go by it.
            EpochSource::Timeline { table } => {
                let table = literal(&table);
                format!("CASE WHEN to_regclass({table}) IS NULL THEN {TIMELINE} ELSE {ANOTHER} END")
            }
        };
        statement.replace(EPOCH, &epoch)
    }

    /// Notes what a new connection has found. Nothing is asked for before something is to be granted: a client that only
    /// looks needs no rights on the table.
    pub(crate) fn note(&self, found: FoundIncarnation) {
        let Some(table) = found.table else { return };
        let mut source = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match &*source {
            _ if !found.kept => *source = EpochSource::Timeline { table },
            EpochSource::Kept { run, .. } if Some(*run) == found.run => {}
            _ => *source = EpochSource::Table(table),
        }
    }

    /// Asks for the epoch if it is not known: to be called before [`fill`](Self::fill).
    pub(crate) async fn ensure_epoch(&self, connection: &mut PgConnection, by: Time) -> Result<()> {
        match self.source() {
            EpochSource::Table(table) => self.fetch_epoch(&table, connection, by).await.map(drop),
            EpochSource::Unknown | EpochSource::Timeline { .. } | EpochSource::Kept { .. } => {
                Ok(())
            }
        }
    }

    /// The epoch of the run that a session has found, which stays that of the session; `None` if no table keeps it.
    pub(crate) async fn epoch(
        &self,
        found: &FoundIncarnation,
        connection: &mut PgConnection,
        by: Time,
    ) -> Result<Option<i64>> {
        let Some(table) = found.table.as_ref().filter(|_| found.kept) else { return Ok(None) };
        match self.source() {
            EpochSource::Kept { run, epoch } if Some(run) == found.run => Ok(Some(epoch)),
            _ => self.fetch_epoch(table, connection, by).await.map(Some),
        }
    }

    /// Reads the epoch, and raises it first if it is of another run.
    async fn fetch_epoch(
        &self,
        table: &str,
        connection: &mut PgConnection,
        by: Time,
    ) -> Result<i64> {
        for _ in 0..MAX_EPOCH_TRIES {
            let asked = connection.query(&epoch_statement(table), &[], by).await;
            let rows = asked.map_err(|error| explain(failure::nothing_done(error)))?;
            // None where another participant has raised it at this moment: that is seen by the next statement.
            if let Some(row) = rows.first() {
                let run = ServerRun { started: row.get(0), timeline: row.get(1) };
                let epoch = row.get(2);
                self.set(EpochSource::Kept { run, epoch });
                return Ok(epoch);
            }
        }
        let message = format!("the epoch in {table} changes all the time: nothing was granted");
        Err(Error::new(ErrorKind::Unavailable, message))
    }

    /// After the `nth` failure of a request that grants: finds out where the epoch is, so that the request may be made
    /// again. The error, if it failed for another reason or too often.
    pub(crate) async fn recover(
        &self,
        error: Error,
        nth: usize,
        table: &Table,
        connection: &mut PgConnection,
        by: Time,
    ) -> Result<()> {
        if !is_another(&error) {
            return Err(error);
        }
        if nth >= MAX_EPOCH_TRIES {
            let message = "the server is started again and again: nothing was granted";
            return Err(Error::new(ErrorKind::Unavailable, message).because(error));
        }
        let question = format!("SELECT {}", query_columns(&literal(&table.quoted())));
        let asked = connection.query(&question, &[], by).await.map_err(failure::nothing_done)?;
        match asked.first() {
            Some(row) => self.note(FoundIncarnation::read(row, 0)),
            None => return Err(error),
        }
        Ok(())
    }
}

/// Four columns: the name of the incarnation's table, whether there is one, and the run of the server. `table` is SQL for
/// the text that names the table whose grants it is for.
pub(crate) fn query_columns(table: &str) -> String {
    let name = format!(
        "(SELECT format('%I.{TABLE}', n.nspname) FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace \
          WHERE c.oid = to_regclass({table}))"
    );
    // A standby has no timeline to tell.
    let timeline = format!("CASE WHEN NOT pg_is_in_recovery() THEN {TIMELINE} END");
    format!("{name}, to_regclass({name}) IS NOT NULL, {STARTED}, {timeline}")
}

/// The run of the server and its epoch: compare and swap. The epoch is raised if the row is of another run, or missing.
///
/// Of several that raise it at once one does, and the others get no row: they find it done when they ask again. What a
/// statement sees is on disk, because a commit is seen by others only when it is.
fn epoch_statement(table: &str) -> String {
    let now = "(extract(epoch FROM clock_timestamp()) * 1000000)::int8";
    format!(
        "WITH kept AS ( \
             SELECT i.epoch FROM {table} AS i WHERE i.system = {SYSTEM} AND i.timeline = {TIMELINE} \
                 AND i.started = pg_postmaster_start_time() \
         ), raised AS ( \
             INSERT INTO {table} AS i (one, system, timeline, started, epoch) \
             SELECT true, {SYSTEM}, {TIMELINE}, pg_postmaster_start_time(), {now} \
             WHERE NOT EXISTS (SELECT FROM kept) \
             ON CONFLICT (one) DO UPDATE SET system = EXCLUDED.system, timeline = EXCLUDED.timeline, \
                 started = EXCLUDED.started, epoch = greatest(i.epoch + 1, EXCLUDED.epoch) \
             WHERE (i.system, i.timeline, i.started) \
                 IS DISTINCT FROM (EXCLUDED.system, EXCLUDED.timeline, EXCLUDED.started) \
             RETURNING i.epoch, {DURABLE} \
         ) \
         SELECT {STARTED}, {TIMELINE}, epoch FROM kept UNION ALL SELECT {STARTED}, {TIMELINE}, epoch FROM raised"
    )
}

/// Whether a statement was refused because of the incarnation.
fn is_another(error: &Error) -> bool {
    server_message(error).is_some_and(|refusal| refusal.contains(ANOTHER_MARKER))
}

/// The same error, which names the table if it is the incarnation's that the role may not use.
fn explain(error: Error) -> Error {
    let denied = failure::code(&error) == Some("42501");
    if !(denied && server_message(&error).is_some_and(|refusal| refusal.contains(TABLE))) {
        return error;
    }
    let message = format!(
        "the role lacks rights on the table {TABLE}: an owner must GRANT SELECT, INSERT, UPDATE on it, or run `tenure \
         schema --apply` again, which grants them to the roles that have them on the table beside it"
    );
    Error::new(ErrorKind::Denied, message).because(error)
}

/// The server's own words.
fn server_message(error: &Error) -> Option<&str> {
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
-- use {shown} must be of a version that knows this table. Roles that may update {shown}, or another table of tenure's in
-- the same schema, are granted the rights here; any other role needs: GRANT SELECT, INSERT, UPDATE ON {TABLE} TO the_role;
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
            USING ERRCODE = '{REFUSED}', HINT = 'Nothing was changed. If it is tenure''s own, say so again: COMMENT ON TABLE '
                || name || ' IS ''{VERSION}''. A new one in its place would give out smaller tokens.';
    END IF;
    IF pg_has_role((SELECT relowner FROM pg_class WHERE oid = to_regclass(name)), 'USAGE') THEN
        FOR role IN SELECT DISTINCT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END
            FROM pg_class AS c, aclexplode(coalesce(c.relacl, acldefault('r', c.relowner))) AS a
            WHERE a.privilege_type = 'UPDATE' AND c.relkind IN ('r', 'p')
                AND c.relnamespace = (SELECT b.relnamespace FROM pg_class AS b WHERE b.oid = beside)
                AND (c.oid = beside OR obj_description(c.oid, 'pg_class') LIKE 'tenure %' OR EXISTS (
                    SELECT FROM pg_attribute AS t WHERE t.attrelid = c.oid AND t.attname = 'locked_until'))
        LOOP
            EXECUTE format('GRANT SELECT, INSERT, UPDATE ON %s TO %s', name, role);
        END LOOP;
    ELSIF NOT has_table_privilege(to_regclass(name), 'SELECT') OR NOT has_table_privilege(to_regclass(name), 'INSERT')
        OR NOT has_table_privilege(to_regclass(name), 'UPDATE') THEN
        RAISE EXCEPTION 'this role lacks rights on the table %', name USING ERRCODE = '{REFUSED}',
            HINT = 'Nothing was changed. Its owner must GRANT SELECT, INSERT, UPDATE ON ' || name
                || ' to every role that uses {shown}.';
    END IF;
END
$tenure$;
",
    )
}

/// Asked for [`finding`]: whether the incarnation is kept, and whether the role may use it.
pub(crate) fn examination(table: &Table) -> String {
    let question = query_columns(&literal(&table.quoted()));
    format!(
        "SELECT q.name, q.kept::int, (SELECT bool_and(has_table_privilege(to_regclass(q.name), r)) \
         FROM unnest('{{SELECT,INSERT,UPDATE}}'::text[]) AS r)::int FROM (SELECT {question}) AS q (name, kept, started, timeline)"
    )
}

/// What [`examination`] found; `command` makes the table, as the advice says.
pub(crate) fn finding(row: &SimpleQueryRow, command: &str) -> Finding {
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
