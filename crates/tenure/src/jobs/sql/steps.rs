//! SQL about steps of the database's clock: when a lease is over, and leases that end later than they can last.

use tenure_core::jobs::{DELAYED_HOLDER, LEASE_MARK};

use super::parts::{OPEN, micros};
use crate::store::pg::clock::NOW;

/// Time by which a lease may end later than it can last, for the delay between two readings of the clock.
const SLACK: &str = "interval '1 second'";

/// Lease in microseconds that the worker of the row `t` recorded in its name; null if it recorded none.
fn recorded_lease() -> String {
    format!("substring(t.locked_by FROM '[{LEASE_MARK}]([0-9]{{1,7}})$')::int8 * 1000000")
}

/// Condition of a held row whose lease or delay is certainly over: `$2` the time that the worker expects on the
/// database's clock, `$3` the time for which it knows that clock to be steady, `$4` the time by which the clock may be
/// ahead, `$5` the lease to assume of workers that record none. All are in microseconds.
///
/// After a step forward, a lease that began before it is over only when the clock has passed its end by the step as well.
/// That is no longer than the lease lasts. A step that the worker does not know of yet, because it came just now, does
/// not count: the expected time is the latest that the statement accepts. A delay has no worker to protect.
pub(super) fn is_over() -> String {
    let lease = format!("coalesce({}, $5::int8)", recorded_lease());
    let us = "interval '1 microsecond'";
    format!(
        "(t.locked_until IS NULL OR t.locked_until <= clock_timestamp() AND (t.locked_by = '{DELAYED_HOLDER}' OR \
             t.locked_until <= least(clock_timestamp(), \
                 'epoch'::timestamptz + ($2::int8 + greatest({lease} / 12, 25000)) * {us}) \
                 - CASE WHEN $3::int8 >= {lease} + {lease} / 6 + 50000 THEN 0 ELSE $4::int8 END * {us}))"
    )
}

/// Condition of a held row whose lease ends later than it can last: the clock was set back since it began.
pub(super) fn is_ahead() -> String {
    format!(
        "coalesce(t.locked_until > clock_timestamp() + ({}) * interval '1 microsecond' + {SLACK} \
             AND t.locked_until < 'infinity', false)",
        recorded_lease()
    )
}

/// Lists held rows whose lease ends later than it can last, at most `$1`.
pub(super) fn leases_ahead(table: &str) -> String {
    format!(
        "SELECT {NOW} AS now, t.id::text AS id, coalesce(t.lease_token, 0) AS lease_token, t.locked_by, \
             {} AS locked_until \
         FROM {table} AS t WHERE {OPEN} AND t.locked_by IS NOT NULL AND {} ORDER BY t.id LIMIT $1::int8",
        end_of_lease(),
        is_ahead()
    )
}

/// Ends such leases: `$1` ids, `$2` tokens, `$3` workers, `$4` the ends that were observed. The next sweep does the rest.
/// A row that was renewed or claimed meanwhile has another end, and is left alone.
pub(super) fn end_leases_ahead(table: &str, id: &str) -> String {
    format!(
        "UPDATE {table} AS t SET locked_until = NULL \
         FROM unnest($1::text[]::{id}[], $2::int8[], $3::text[], $4::int8[]) AS a (id, token, worker, until) \
         WHERE t.id = a.id AND coalesce(t.lease_token, 0) = a.token AND t.locked_by = a.worker \
             AND {} = a.until AND {OPEN} \
         RETURNING {NOW} AS now, t.id::text AS id",
        end_of_lease()
    )
}

fn end_of_lease() -> String {
    format!("coalesce({}, {})", micros("locked_until"), i64::MAX)
}
