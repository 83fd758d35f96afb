//! The SQL function that enqueues a job, for programs in other languages.

use tenure_core::jobs::DELAYED_HOLDER;

use super::options::MAX_ATTEMPTS;
use crate::store::pg::table::Table;

/// SQL comment that shows how programs in other languages enqueue: by the function, or by an `INSERT`.
pub(super) fn usage(table: &Table, function: &str) -> String {
    let (quoted, channel) = (table.quoted(), table.channel());
    format!(
        "-- Programs in any language enqueue in their own transactions, with all arguments but the first optional:
--     SELECT {function}('{{\"report\": 7}}', priority => 5, delay => '1 hour', max_attempts => 3, unique_key => 'report 7');
-- It returns the id of the new job, or of the open job of that key. By hand, with every column that has a meaning:
--     INSERT INTO {quoted} (payload, priority, created_at, max_attempts, unique_key, locked_until, locked_by)
--     VALUES ('{{\"report\": 7}}', 5, clock_timestamp(), 3, 'report 7', NULL, NULL);   -- available at once
--     VALUES ('{{\"report\": 8}}', 5, clock_timestamp(), 3, NULL, clock_timestamp() + interval '1 hour', '{DELAYED_HOLDER}');
--     SELECT pg_notify('{channel}', '');   -- wakes idle workers when the transaction commits; they also poll
"
    )
}

/// SQL of a script that creates the function unless there is one of that name.
pub(super) fn create(table: &Table, function: &str) -> String {
    let definition = definition(table, function);
    format!("    IF to_regproc('{function}') IS NULL THEN\n        {definition};\n    END IF;\n")
}

/// SQL that creates the function.
pub(super) fn definition(table: &Table, function: &str) -> String {
    let (quoted, channel) = (table.quoted(), table.channel());
    format!(
        "CREATE FUNCTION {function}(payload {quoted}.payload%TYPE DEFAULT NULL, priority integer DEFAULT 0,
            delay interval DEFAULT '0', max_attempts integer DEFAULT {MAX_ATTEMPTS}, unique_key text DEFAULT NULL)
            RETURNS {quoted}.id%TYPE LANGUAGE plpgsql AS $add$
        #variable_conflict use_column
        DECLARE
            job {quoted}.id%TYPE;
        BEGIN
            LOOP
                INSERT INTO {quoted} AS t (payload, priority, created_at, max_attempts, unique_key, locked_until, locked_by)
                VALUES ($1, coalesce($2, 0), clock_timestamp(), $4, $5,
                    CASE WHEN $3 > '0' THEN clock_timestamp() + $3 END, CASE WHEN $3 > '0' THEN '{DELAYED_HOLDER}' END)
                ON CONFLICT (unique_key)
                    WHERE completed_at IS NULL AND failed_at IS NULL AND unique_key IS NOT NULL DO NOTHING
                RETURNING t.id INTO job;
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
