//! Tables that only tenure uses: their definition, and the SQL that creates and checks them.

use std::fmt::Write as _;

use super::migrate::REFUSED;
use super::table::Table;

/// Definition of a table.
pub(crate) struct TableShape {
    /// Content of the table, for readers of the SQL.
    pub(crate) what: &'static str,
    /// Comment of the table: its kind and version.
    pub(crate) version: &'static str,
    /// Name, type and constraints of each column.
    pub(crate) columns: &'static [(&'static str, &'static str, &'static str)],
    /// Columns of the primary key.
    pub(crate) key: &'static str,
    /// Rights that a user of the table needs.
    pub(crate) rights: &'static str,
    /// True if its rows may be lost in a crash of the server.
    pub(crate) unlogged: bool,
}

impl TableShape {
    /// SQL that creates the table if it is missing, and fails if an existing table differs. Nothing else is changed.
    pub(crate) fn sql(&self, table: &Table) -> String {
        let (quoted, shown) = (table.quoted(), table.shown());
        let schema = table.schema().map_or_else(String::new, |schema| {
            format!(
                "    IF to_regnamespace('\"{schema}\"') IS NULL THEN\n        CREATE SCHEMA \"{schema}\";\n    END IF;\n"
            )
        });
        self.script(&shown, &quoted, &format!("{schema}    name := '{quoted}';\n"), "")
    }

    /// SQL as that of [`sql`](Self::sql), for a table of this name in the schema of another table. Roles that may update
    /// the other table are granted the rights on this one.
    #[cfg(feature = "jobs")]
    pub(crate) fn sql_beside(&self, name: &str, beside: &Table) -> String {
        let beside = beside.quoted();
        let find = format!(
            "    SELECT format('%I.{name}', n.nspname) INTO name
        FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = to_regclass('{beside}');\n"
        );
        let grants = format!(
            "    IF pg_has_role((SELECT relowner FROM pg_class WHERE oid = to_regclass(name)), 'USAGE') THEN
        FOR role IN SELECT DISTINCT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END
            FROM pg_class AS c, aclexplode(coalesce(c.relacl, acldefault('r', c.relowner))) AS a
            WHERE a.privilege_type = 'UPDATE' AND c.oid = to_regclass('{beside}')
        LOOP
            EXECUTE format('GRANT {} ON %s TO %s', name, role);
        END LOOP;
    END IF;\n",
            self.rights
        );
        self.script(name, name, &find, &grants)
    }

    /// The script: `find` sets `name`, the quoted name of the table, and `grants` runs once the table fits.
    fn script(&self, shown: &str, granted: &str, find: &str, grants: &str) -> String {
        let Self { what, version, key, rights, unlogged, .. } = self;
        let kind = if *unlogged { "UNLOGGED TABLE" } else { "TABLE" };
        let mut columns = String::new();
        for (name, kind, rest) in self.columns {
            let _ = writeln!(columns, "            {name:<12} {}{},", kind, spaced(rest));
        }
        let shape = self.columns.iter().map(|(name, kind, rest)| {
            format!("{name} {kind}{}", if rest.contains("NOT NULL") { " not null" } else { "" })
        });
        let shape = shape.collect::<Vec<_>>().join(", ");
        let role = if grants.is_empty() { "" } else { "    role text;\n" };
        format!(
            "-- {what}, in the table {shown}. Safe to run twice, and by several at once.
-- Its users need: GRANT {rights} ON {granted} TO the_role;
DO $tenure$
DECLARE
    version CONSTANT text := '{version}';
    shape CONSTANT text := '{shape}';
    name text;
    found_version text;
    found_shape text;
{role}BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('tenure schema'));
{find}    IF to_regclass(name) IS NULL THEN
        EXECUTE format($table$CREATE {kind} %s (
{columns}            PRIMARY KEY ({key})
        ) WITH (fillfactor = 50)$table$, name);
        EXECUTE format('COMMENT ON TABLE %s IS %L', name, version);
    END IF;
    SELECT string_agg(attname || ' ' || format_type(atttypid, atttypmod)
                      || CASE WHEN attnotnull THEN ' not null' ELSE '' END, ', ' ORDER BY attnum)
        INTO found_shape FROM pg_attribute
        WHERE attrelid = to_regclass(name) AND attnum > 0 AND NOT attisdropped;
    found_version := obj_description(to_regclass(name), 'pg_class');
    IF found_version IS DISTINCT FROM version OR found_shape IS DISTINCT FROM shape THEN
        RAISE EXCEPTION 'the table {shown} is not understood: it says \"%\" of itself and has the columns (%)',
                coalesce(found_version, 'nothing'), found_shape
            USING ERRCODE = '{REFUSED}', HINT = 'name another table, or use a matching version of tenure';
    END IF;
{grants}END
$tenure$;
",
        )
    }
}

fn spaced(rest: &str) -> String {
    if rest.is_empty() { String::new() } else { format!(" {rest}") }
}
