//! The incarnation of the server, and the epoch of the tokens that are granted under it.
//!
//! A fail-over may lose grants, and the counters of tokens then fall back. The timeline rises with each fail-over, but
//! two standbys of one primary that are promoted one after the other both write timeline 2. So a table beside the locks
//! stores the incarnation of the server (its system identifier, its timeline, its start time) with an epoch, in one
//! row. A process that finds another incarnation there raises the epoch before anything is granted: to the database's
//! time in microseconds, or by one if that time is not larger.
//!
//! The table is created with the current timeline as its epoch. So nothing changes for participants of a version
//! without incarnations until the server is restarted.

use tenure_core::Time;
use tokio_postgres::{Row, SimpleQueryRow};

use super::clock::NOW;
use super::connect::PgConnection;
use super::durable::DURABLE;
use super::failure;
use super::migrate::REFUSED;
use super::role::{STARTED, SYSTEM, TIMELINE};
use super::table::Table;
use crate::mutex::Mutex;
use crate::store::Finding;
use crate::{Error, ErrorKind, Result};

/// Name of the table. It is in the schema of the table whose grants it serves, so that all users find the same one.
pub(crate) const TABLE: &str = "tenure_incarnation";
/// Comment of the table.
const VERSION: &str = "tenure incarnation, version 1";

/// Placeholder of the epoch in statements that grant; see [`Incarnation::fill`].
pub(crate) const EPOCH: &str = "@epoch@";

/// SQL that fails with a message that [`is_another`] recognizes. `clock_timestamp` keeps the planner from evaluating it
/// while it plans the statement.
const ANOTHER: &str =
    "('tenure: another incarnation of the server, seen ' || clock_timestamp())::int8";
const ANOTHER_MARKER: &str = "tenure: another incarnation";

/// Maximum number of attempts when the incarnation changes while it is read.
const MAX_EPOCH_TRIES: usize = 3;

/// Source of the epoch for the grants of one table.
#[derive(Debug, Default)]
pub(crate) struct Incarnation(Mutex<EpochSource>);

#[derive(Clone, Debug, Default)]
enum EpochSource {
    /// Not known: no server has answered yet.
    #[default]
    Unknown,
    /// The epoch is in this table, and was not read yet.
    Table(String),
    /// The table does not exist: the timeline is the epoch.
    Timeline { table: String },
    /// Epoch that the table has for this run of the server.
    Kept { run: ServerRun, epoch: i64 },
}

/// One run of one server.
///
/// The system identifier is left out: PostgreSQL reads a file for it, and two servers do not start in the same
/// microsecond.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ServerRun {
    started: i64,
    timeline: i64,
}

/// Incarnation that a connection found: the answer to [`query_columns`].
#[derive(Debug)]
pub(crate) struct FoundIncarnation {
    /// Quoted name of the incarnation's table; `None` if the table whose grants it serves is missing.
    table: Option<String>,
    kept: bool,
    /// `None` on a standby.
    run: Option<ServerRun>,
}

impl FoundIncarnation {
    /// Reads the columns of [`query_columns`].
    pub(crate) fn read(row: &Row) -> Self {
        let number = |column: &str| row.get::<_, Option<i64>>(column);
        let run = number("server_started").zip(number("timeline"));
        let run = run.map(|(started, timeline)| ServerRun { started, timeline });
        Self { table: row.get("incarnation_table"), kept: row.get("incarnation_kept"), run }
    }

    /// Reads the columns of [`query_columns`] from an answer in text form.
    pub(crate) fn read_text(row: &SimpleQueryRow) -> Self {
        let number = |column: &str| row.get(column).and_then(|text| text.parse().ok());
        let run = number("server_started").zip(number("timeline"));
        let run = run.map(|(started, timeline)| ServerRun { started, timeline });
        let table = row.get("incarnation_table").map(str::to_owned);
        Self { table, kept: row.get("incarnation_kept") == Some("t"), run }
    }
}

impl Incarnation {
    fn source(&self) -> EpochSource {
        self.0.lock().clone()
    }

    fn set(&self, source: EpochSource) {
        *self.0.lock() = source;
    }

    /// Replaces [`EPOCH`] in a statement by SQL for the epoch.
    ///
    /// Each statement that grants compares the known run with that of the server, because behind a pooler the next
    /// statement may reach a server that was started meanwhile. The comparison costs no round trip and does not read
    /// the table: the epoch of a run never changes. A statement that fails the comparison has changed nothing.
    pub(crate) fn fill(&self, statement: &str) -> String {
        let epoch = match self.source() {
            EpochSource::Unknown | EpochSource::Table(_) => ANOTHER.to_owned(),
            EpochSource::Kept { run: ServerRun { started, timeline }, epoch } => format!(
                "CASE WHEN {STARTED} = {started} AND {TIMELINE} = {timeline} THEN {epoch}::int8 ELSE {ANOTHER} END"
            ),
            // If the table was created meanwhile, other participants use its epoch already: fail, and read it.
            EpochSource::Timeline { table } => {
                let table = literal(&table);
                format!("CASE WHEN to_regclass({table}) IS NULL THEN {TIMELINE} ELSE {ANOTHER} END")
            }
        };
        statement.replace(EPOCH, &epoch)
    }

    /// Records the incarnation that a new connection found. The epoch is read only before the first grant, so that a
    /// client that only inspects needs no rights on the table.
    pub(crate) fn note(&self, found: FoundIncarnation) {
        let Some(table) = found.table else { return };
        let mut source = self.0.lock();
        match &*source {
            _ if !found.kept => *source = EpochSource::Timeline { table },
            EpochSource::Kept { run, .. } if Some(*run) == found.run => {}
            _ => *source = EpochSource::Table(table),
        }
    }

    /// Reads the epoch if it is not known. Call it before [`fill`](Self::fill).
    pub(crate) async fn ensure_epoch(&self, connection: &mut PgConnection, by: Time) -> Result<()> {
        match self.source() {
            EpochSource::Table(table) => self.fetch_epoch(&table, connection, by).await.map(drop),
            EpochSource::Unknown | EpochSource::Timeline { .. } | EpochSource::Kept { .. } => {
                Ok(())
            }
        }
    }

    /// Epoch of the run that a session found, valid as long as the session lives; `None` if no table stores it.
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

    /// Reads the epoch, and raises it first if it belongs to another run.
    async fn fetch_epoch(
        &self,
        table: &str,
        connection: &mut PgConnection,
        by: Time,
    ) -> Result<i64> {
        for _ in 0..MAX_EPOCH_TRIES {
            let answer = connection.query(&epoch_statement(table), &[], by).await;
            let rows = answer.map_err(|error| explain(failure::nothing_done(error)))?;
            // No row if another participant raised the epoch at this moment: the next statement sees its row.
            if let Some(row) = rows.first() {
                let run =
                    ServerRun { started: row.get("server_started"), timeline: row.get("timeline") };
                let epoch = row.get("epoch");
                self.set(EpochSource::Kept { run, epoch });
                return Ok(epoch);
            }
        }
        let message = format!("the epoch in {table} keeps changing: nothing was granted");
        Err(Error::new(ErrorKind::Unavailable, message))
    }

    /// Recovers from the `nth` failure of a request that grants: finds the source of the epoch again, so that the
    /// request can be retried. Returns the error if the request failed for another reason or too often.
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
            let message = "the server keeps restarting: nothing was granted";
            return Err(Error::new(ErrorKind::Unavailable, message).because(error));
        }
        let question = format!("SELECT {}", query_columns(&literal(&table.quoted())));
        let rows = connection.query(&question, &[], by).await.map_err(failure::nothing_done)?;
        match rows.first() {
            Some(row) => self.note(FoundIncarnation::read(row)),
            None => return Err(error),
        }
        Ok(())
    }
}

/// SQL of four columns: the name of the incarnation's table, whether it exists, and the run of the server (start time
/// and timeline). `table` is SQL for the name of the table whose grants it serves.
pub(crate) fn query_columns(table: &str) -> String {
    let name = format!(
        "(SELECT format('%I.{TABLE}', n.nspname) FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace \
          WHERE c.oid = to_regclass({table}))"
    );
    // A standby writes no timeline, and the function would fail there.
    let timeline = format!("CASE WHEN NOT pg_is_in_recovery() THEN {TIMELINE} END");
    format!(
        "{name} AS incarnation_table, to_regclass({name}) IS NOT NULL AS incarnation_kept, \
         {STARTED} AS server_started, {timeline} AS timeline"
    )
}

/// Columns of [`query_columns`] for a store without a table: there is no incarnation.
pub(crate) const NO_COLUMNS: &str = "NULL AS incarnation_table, false AS incarnation_kept, NULL AS server_started, \
    NULL AS timeline";

/// SQL that returns the run of the server and its epoch, and raises the epoch if the row is missing or belongs to
/// another run: a compare-and-swap.
///
/// If several participants raise the epoch at once, one succeeds and the others get no row; they find the new row when
/// they retry. An epoch that a statement reads is on disk, because a commit becomes visible only after it is.
fn epoch_statement(table: &str) -> String {
    format!(
        "WITH kept AS ( \
             SELECT i.epoch FROM {table} AS i WHERE i.system = {SYSTEM} AND i.timeline = {TIMELINE} \
                 AND i.started = pg_postmaster_start_time() \
         ), raised AS ( \
             INSERT INTO {table} AS i (one, system, timeline, started, epoch) \
             SELECT true, {SYSTEM}, {TIMELINE}, pg_postmaster_start_time(), {NOW} \
             WHERE NOT EXISTS (SELECT FROM kept) \
             ON CONFLICT (one) DO UPDATE SET system = EXCLUDED.system, timeline = EXCLUDED.timeline, \
                 started = EXCLUDED.started, epoch = greatest(i.epoch + 1, EXCLUDED.epoch) \
             WHERE (i.system, i.timeline, i.started) \
                 IS DISTINCT FROM (EXCLUDED.system, EXCLUDED.timeline, EXCLUDED.started) \
             RETURNING i.epoch, {DURABLE} \
         ) \
         SELECT {STARTED} AS server_started, {TIMELINE} AS timeline, epoch FROM kept \
         UNION ALL SELECT {STARTED}, {TIMELINE}, epoch FROM raised"
    )
}

/// True if a statement failed because of another incarnation.
fn is_another(error: &Error) -> bool {
    server_message(error).is_some_and(|refusal| refusal.contains(ANOTHER_MARKER))
}

/// Adds the table's name and the remedy to the error if the role lacks rights on the incarnation's table.
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

/// Message of the server.
fn server_message(error: &Error) -> Option<&str> {
    let source = std::error::Error::source(error)?.downcast_ref::<tokio_postgres::Error>()?;
    source.as_db_error().map(tokio_postgres::error::DbError::message)
}

/// SQL literal of a text.
pub(crate) fn literal(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

/// SQL that creates the incarnation's table beside an existing table.
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
            WHERE a.privilege_type = 'UPDATE' AND (c.relkind IN ('r', 'p') OR c.oid = beside)
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

/// SQL for [`finding`]: the table's name, whether it exists, and whether the role may use it.
pub(crate) fn examination(table: &Table) -> String {
    let question = query_columns(&literal(&table.quoted()));
    format!(
        "SELECT q.name, q.kept::int AS kept, (SELECT bool_and(has_table_privilege(to_regclass(q.name), r)) \
         FROM unnest('{{SELECT,INSERT,UPDATE}}'::text[]) AS r)::int AS allowed FROM (SELECT {question}) AS q (name, kept, started, timeline)"
    )
}

/// Finding from the answer to [`examination`]; `command` creates the table, as the advice says.
pub(crate) fn finding(row: &SimpleQueryRow, command: &str) -> Finding {
    let name = row.get("name").unwrap_or(TABLE);
    match (row.get("kept"), row.get("allowed")) {
        (Some("1"), Some("1")) => Finding::ok("incarnation", format!("stored in {name}")),
        (Some("1"), _) => Finding::failed("incarnation", format!("insufficient rights on {name}"))
            .advise(format!("an owner must GRANT SELECT, INSERT, UPDATE ON {name}")),
        _ => Finding::warning(
            "incarnation",
            format!("no table {name}: a second fail-over can issue the same fencing tokens again"),
        )
        .advise(format!("run `{command}` once all participants have this version")),
    }
}
