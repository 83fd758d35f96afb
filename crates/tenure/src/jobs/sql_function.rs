//! The SQL function that enqueues a job, for programs in other languages.

use tenure_core::jobs::DELAYED_HOLDER;

use super::options::MAX_ATTEMPTS;
use crate::store::pg::job_columns::ENQUEUE_VERSION;
use crate::store::pg::table::Table;

/// SQL comment that shows how programs in other languages enqueue: by the function, or by an `INSERT`.
pub(super) fn usage(table: &Table, function: &str) -> String {
    let (quoted, channel) = (table.quoted(), table.channel());
    format!(
        "-- Programs in any language enqueue in their own transactions, with all arguments but the first optional:
--     SELECT {function}('{{\"report\": 7}}', priority => 5, delay => '1 hour', max_attempts => 3, unique_key => 'report 7',
--         group_key => 'customer 9', meta => '{{\"source\": \"import\"}}');
-- It returns the id of the new job, or of the open job of that key. By hand, with every column that has a meaning:
--     INSERT INTO {quoted} (payload, priority, created_at, max_attempts, unique_key, group_key, meta, locked_until, locked_by)
--     VALUES ('{{\"report\": 7}}', 5, clock_timestamp(), 3, 'report 7', NULL, NULL, NULL, NULL);   -- available at once
--     VALUES ('{{\"report\": 8}}', 5, clock_timestamp(), 3, NULL, 'customer 9', NULL, clock_timestamp() + interval '1 hour', '{DELAYED_HOLDER}');
--     SELECT pg_notify('{channel}', '');   -- wakes idle workers when the transaction commits; they also poll
"
    )
}

/// SQL of a script that creates the function, or replaces one of another version.
pub(super) fn create(table: &Table, function: &str) -> String {
    let statements = statements(table, function).map(|sql| format!("        {sql};\n")).concat();
    let is_current = is_current(&format!("'{function}'"));
    format!("    IF {is_current} IS NOT TRUE THEN\n{statements}    END IF;\n")
}

/// SQL condition: the function exists in the present version. `function` is SQL of its name, as text.
pub(super) fn is_current(function: &str) -> String {
    format!("obj_description(to_regproc({function})::oid, 'pg_proc') = '{ENQUEUE_VERSION}'")
}

/// Statements that create the function, or replace one of another version. It is dropped first: a function with other
/// parameters would stay beside the new one, and calls would be ambiguous.
pub(super) fn statements(table: &Table, function: &str) -> [String; 3] {
    [
        format!("DROP FUNCTION IF EXISTS {function}"),
        definition(table, function),
        format!("COMMENT ON FUNCTION {function} IS '{ENQUEUE_VERSION}'"),
    ]
}

/// SQL that creates the function.
fn definition(table: &Table, function: &str) -> String {
    let (quoted, channel) = (table.quoted(), table.channel());
    // PostgreSQL checks a statement of a function when it is first executed. So the function works without the optional
    // columns as long as their arguments are null.
    let (plain, extended) =
        (insert(&quoted, "", ""), insert(&quoted, ", group_key, meta", ", $6, $7"));
    format!(
        "CREATE FUNCTION {function}(payload {quoted}.payload%TYPE DEFAULT NULL, priority integer DEFAULT 0,
            delay interval DEFAULT '0', max_attempts integer DEFAULT {MAX_ATTEMPTS}, unique_key text DEFAULT NULL,
            group_key text DEFAULT NULL, meta jsonb DEFAULT NULL)
            RETURNS {quoted}.id%TYPE LANGUAGE plpgsql AS $add$
        #variable_conflict use_column
        DECLARE
            job {quoted}.id%TYPE;
        BEGIN
            LOOP
                IF $6 IS NULL AND $7 IS NULL THEN
{plain}                ELSE
{extended}                END IF;
                IF job IS NOT NULL THEN
                    IF coalesce($3 <= '0', true) THEN
                        PERFORM pg_notify('{channel}', '');
                    END IF;
                    RETURN job;
                END IF;
                -- The open job of that key may end before it is read: then this one is inserted after all.
                SELECT t.id INTO job FROM {quoted} AS t
                WHERE t.unique_key = $5 AND t.completed_at IS NULL AND t.failed_at IS NULL;
                IF job IS NOT NULL THEN
                    RETURN job;
                END IF;
            END LOOP;
        END
        $add$"
    )
}

/// SQL that inserts the job of the function's arguments, with values of further columns.
fn insert(table: &str, columns: &str, values: &str) -> String {
    format!(
        "                    INSERT INTO {table} AS t (payload, priority, created_at, max_attempts, unique_key,
                        locked_until, locked_by{columns})
                    VALUES ($1, coalesce($2, 0), clock_timestamp(), $4, $5,
                        CASE WHEN $3 > '0' THEN clock_timestamp() + $3 END, CASE WHEN $3 > '0' THEN '{DELAYED_HOLDER}' END{values})
                    ON CONFLICT (unique_key)
                        WHERE completed_at IS NULL AND failed_at IS NULL AND unique_key IS NOT NULL DO NOTHING
                    RETURNING t.id INTO job;
"
    )
}
