//! SQL statements of the store. Each is one message of the simple protocol: a server that received half a request would
//! wait for the rest, and not count the session as idle.

use std::time::Duration;

use super::pair::Pair;
use super::tag::{COMMENT_PREFIX, Tag, name_sql};
use crate::store::pg::clock::NOW;
use crate::store::pg::incarnation::{self, TIMELINE};
use crate::store::pg::table::Table;

/// Notification channel for releases.
pub(super) const CHANNEL: &str = "tenure_advisory";

/// Time, in seconds, that a new holder waits so that the notice of a session's end can reach the previous holder. The
/// server sends that notice before it frees the lock, but the previous holder's network may be slower than ours.
const LOSS_NOTICE_SECONDS: f64 = 0.01;

/// Identity of the session that a statement is for.
#[derive(Clone, Debug)]
pub(super) struct SessionIdent {
    pub(super) pid: i32,
    /// Random value of a setting of this session: no other session has it.
    pub(super) marker: String,
    /// True if the server can end idle sessions.
    pub(super) leases: bool,
    /// Epoch of the server's run, if a table beside the table of terms stores it. It is valid as long as the session
    /// lives, because the session ends with the run.
    pub(super) epoch: Option<i64>,
}

/// Lock that is claimed, and the terms of the claim.
#[derive(Clone, Copy, Debug)]
pub(super) struct LockSpec {
    pub(super) pair: Pair,
    pub(super) shared: bool,
    pub(super) ttl: Duration,
}

/// Behaviour of a claim if the lock is held.
#[derive(Clone, Copy, Debug)]
pub(super) enum ClaimWait {
    /// Does not wait. `park`: if another session holds the lock, this session is not used for the claim again.
    Try { park: bool },
    /// Waits in the server's queue for at most `bound`.
    Wait { bound: Duration },
}

/// First statement of a session: marks and configures it, and asks for the properties of the server. If terms are
/// counted, it also asks for the incarnation.
pub(super) fn greeting(marker: &str, terms: Option<&Table>) -> String {
    let incarnation = terms.map_or_else(
        || incarnation::NO_COLUMNS.to_owned(),
        |table| incarnation::query_columns(&incarnation::literal(&table.quoted())),
    );
    // Settings that this server does not have are skipped.
    let known = |name: &str, value: &str| {
        format!(
            "CASE WHEN current_setting('{name}', true) IS NOT NULL THEN set_config('{name}', '{value}', false) END"
        )
    };
    let settings = [
        known("statement_timeout", "0"),
        known("transaction_timeout", "0"),
        known("idle_session_timeout", "0"),
        known("default_transaction_read_only", "off"),
        known("tcp_keepalives_idle", "5"),
        known("tcp_keepalives_interval", "2"),
        known("tcp_keepalives_count", "3"),
        known("tcp_user_timeout", "10000"),
        // Only Linux detects a closed connection reliably.
        format!(
            "CASE WHEN version() LIKE '%linux%' THEN {} END",
            known("client_connection_check_interval", "1000")
        ),
        // If a crash could undo the commit of a token, the same token could be issued twice.
        "CASE WHEN current_setting('synchronous_commit') = 'off' \
         THEN set_config('synchronous_commit', 'local', false) END"
            .to_owned(),
    ];
    format!(
        "SELECT pg_backend_pid() AS pid, pg_is_in_recovery()::int AS is_standby, \
         current_setting('server_version_num') AS version, \
         (current_setting('idle_session_timeout', true) IS NOT NULL)::int AS ends_idle_sessions, \
         (SELECT backend_start::text FROM pg_stat_activity WHERE pid = pg_backend_pid()) AS session_started, \
         {incarnation}, set_config('tenure.session', '{marker}', false), {}",
        settings.join(", ")
    )
}

/// Claims the lock. Returns the outcome, and for a grant the two halves of its token and the database's time.
///
/// The number of the token is drawn after the lock is held, so it is larger than that of every earlier holder. The
/// message that goes into the log makes the commit wait until the number is on disk, so the order survives a crash.
pub(super) fn claim(own: &SessionIdent, tag: &Tag, spec: &LockSpec, wait: ClaimWait) -> String {
    let LockSpec { pair: Pair { first, second }, shared, ttl } = *spec;
    let suffix = if shared { "_shared" } else { "" };
    let (mine, lock, bound, lifted) = match wait {
        ClaimWait::Try { park } => {
            let lock = format!("pg_try_advisory_lock{suffix}({first}, {second})");
            // A session tries for a lock once. If it holds the lock already, another client uses the same session: a
            // pooler.
            ("moved", lock, None, if park { Duration::ZERO } else { ttl })
        }
        ClaimWait::Wait { bound } => {
            let lock = format!("pg_advisory_lock{suffix}({first}, {second})::text IS NOT NULL");
            // A wait that timed out may have been granted at the same moment: then the session holds the lock already.
            ("granted", lock, Some(bound), ttl)
        }
    };
    // The sessions that held the lock when the wait began. If all of them are gone at the end, they were ended instead
    // of releasing the lock, and the notice may still be on its way to a process that believes to hold it. So the grant
    // waits for LOSS_NOTICE_SECONDS.
    let (before, courtesy) = match wait {
        ClaimWait::Try { .. } => ("''".to_owned(), "NULL".to_owned()),
        ClaimWait::Wait { .. } => (
            format!(
                "(SELECT string_agg(pid::text, ',') FROM pg_locks WHERE granted AND {})",
                is_lock(spec.pair)
            ),
            format!(
                "CASE WHEN c.what = 'granted' AND NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = ANY \
                 (string_to_array(current_setting('tenure.before'), ',')::int[])) THEN pg_sleep({LOSS_NOTICE_SECONDS}) END"
            ),
        ),
    };
    let bound = bound.map_or(0, millis);
    let armed = own.idle_timeout(ttl);
    let lifted = own.idle_timeout(lifted);
    let (comment, name, same) = (tag.comment(), &tag.name, own.same());
    let epoch = own.epoch.map_or_else(|| TIMELINE.to_owned(), |epoch| format!("{epoch}::int8"));
    let held = held_by_own(spec.pair);
    let named = name_sql(name, "c.epoch", "c.number");
    format!(
        "{comment}SELECT c.what, c.epoch, c.number, {NOW} AS now, \
         CASE WHEN c.what = 'granted' THEN set_config('application_name', {named}, false) ELSE {lifted} END, {courtesy} \
         FROM (SELECT b.what, \
         CASE WHEN b.what = 'granted' THEN {epoch} END AS epoch, \
         CASE WHEN b.what = 'granted' THEN CASE WHEN pg_logical_emit_message(true, 'tenure', '') IS NOT NULL \
         THEN txid_current() END END AS number \
         FROM (SELECT CASE WHEN ({same}) IS NOT TRUE THEN 'moved' WHEN pg_is_in_recovery() THEN 'standby' \
         WHEN {held} THEN '{mine}' \
         WHEN set_config('tenure.before', coalesce({before}, ''), false) IS NULL THEN 'moved' \
         WHEN set_config('lock_timeout', '{bound}', false) IS NULL THEN 'moved' \
         WHEN set_config('application_name', '{name}', false) IS NULL THEN 'moved' \
         WHEN coalesce({armed}, 'none') IS NULL THEN 'moved' \
         WHEN {lock} THEN 'granted' ELSE 'busy' END AS what OFFSET 0) AS b OFFSET 0) AS c"
    )
}

/// Counts a new term of a lock that this session holds; returns the number of terms, this one included.
pub(super) fn count(tag: &Tag, table: &Table, pair: Pair) -> String {
    let (comment, table, Pair { first, second }) = (tag.comment(), table.quoted(), pair);
    format!(
        "{comment}INSERT INTO {table} AS t (key1, key2, terms) VALUES ({first}, {second}, 1) \
         ON CONFLICT (key1, key2) DO UPDATE SET terms = t.terms + 1 RETURNING terms"
    )
}

/// Proves that the session lives and is ours, and that the server is a primary; restarts the idle timeout.
pub(super) fn renew(own: &SessionIdent, tag: &Tag, ttl: Duration) -> String {
    let (comment, same, armed) = (tag.comment(), own.same(), own.idle_timeout(ttl));
    format!(
        "{comment}SELECT ({same})::int AS is_same_session, pg_is_in_recovery()::int AS is_standby, {armed}"
    )
}

/// Releases the lock and notifies watchers.
pub(super) fn release(own: &SessionIdent, pair: Pair, shared: bool) -> String {
    let suffix = if shared { "_shared" } else { "" };
    let Pair { first, second } = pair;
    let (same, lifted) = (own.same(), own.idle_timeout(Duration::ZERO));
    format!(
        "SELECT CASE WHEN {same} THEN pg_advisory_unlock{suffix}({first}, {second}) ELSE false END::int AS released, \
         {}, {lifted}, set_config('application_name', 'tenure', false)",
        notify(&format!("0:{pair}"))
    )
}

/// SQL that notifies watchers. The payload is inserted as it is: it must never come from a user.
pub(super) fn notify(payload: &str) -> String {
    format!("pg_notify('{CHANNEL}', '{payload}')")
}

/// Returns a row if that session waits in the queue.
pub(super) fn is_waiting(pid: i32) -> String {
    format!(
        "SELECT 1 FROM pg_locks WHERE pid = {pid} AND locktype = 'advisory' AND objsubid = 2 AND NOT granted"
    )
}

/// Cancels the wait of a session of ours.
pub(super) fn cancel(pid: i32, started: &str) -> String {
    format!(
        "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE pid = {pid} AND backend_start = '{started}'"
    )
}

/// Ends the session of a holder if its `application_name` still matches. With `waits`, the server waits until it is
/// gone.
pub(super) fn evict(pid: i32, application_name: &str, waits: bool) -> String {
    let patience = if waits { ", 2000" } else { "" };
    format!(
        "SELECT pg_terminate_backend(pid{patience})::int FROM pg_stat_activity \
         WHERE pid = {pid} AND application_name = '{application_name}'"
    )
}

/// Holders and waiters of these pairs, or of all locks if `pairs` is empty.
pub(super) fn sessions(version: u32, pairs: &[Pair]) -> String {
    let waited = if version >= 140_000 { "l.waitstart" } else { "NULL::timestamptz" };
    let micros = |span: &str| format!("(extract(epoch FROM {span}) * 1000000)::int8");
    let of = |pair: &Pair| {
        let (first, second) = pair.unsigned();
        format!("l.classid = {first} AND l.objid = {second}")
    };
    let those = match pairs {
        [] => String::new(),
        _ => format!(" AND ({})", pairs.iter().map(of).collect::<Vec<_>>().join(" OR ")),
    };
    format!(
        "SELECT l.classid::int8 AS classid, l.objid::int8 AS objid, l.pid, l.granted::int AS granted, \
         a.application_name, CASE WHEN left(a.query, {}) = '{COMMENT_PREFIX}' THEN a.query END AS comment, \
         coalesce(host(a.client_addr), '') AS host, (a.state = 'active')::int AS is_active, {} AS idle_for, \
         {} AS waited_for, {NOW} AS now \
         FROM pg_locks AS l LEFT JOIN pg_stat_activity AS a ON a.pid = l.pid \
         WHERE l.locktype = 'advisory' AND l.objsubid = 2 \
         AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()){those} \
         ORDER BY l.classid, l.objid, l.granted DESC, {waited}, l.pid",
        COMMENT_PREFIX.len(),
        micros("clock_timestamp() - a.state_change"),
        micros(&format!("clock_timestamp() - {waited}")),
    )
}

impl SessionIdent {
    /// SQL condition that the statement runs on this very session.
    fn same(&self) -> String {
        let Self { pid, marker, .. } = self;
        format!("pg_backend_pid() = {pid} AND current_setting('tenure.session', true) = '{marker}'")
    }

    fn idle_timeout(&self, after: Duration) -> String {
        if self.leases {
            format!("set_config('idle_session_timeout', '{}', false)", millis(after))
        } else {
            "NULL::text".to_owned()
        }
    }
}

fn held_by_own(pair: Pair) -> String {
    let is = is_lock(pair);
    format!("EXISTS (SELECT FROM pg_locks WHERE pid = pg_backend_pid() AND granted AND {is})")
}

/// SQL condition that a row of `pg_locks` belongs to this lock.
fn is_lock(pair: Pair) -> String {
    let (first, second) = pair.unsigned();
    format!(
        "locktype = 'advisory' AND objsubid = 2 AND classid = {first} AND objid = {second} \
         AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )
}

fn millis(span: Duration) -> u128 {
    span.as_millis()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_cannot_end_silent_sessions_is_not_asked_to() {
        let old = SessionIdent { pid: 7, marker: "m".into(), leases: false, epoch: None };
        let new = SessionIdent { leases: true, ..old.clone() };
        let ttl = Duration::from_secs(3);
        assert!(!old.idle_timeout(ttl).contains("idle_session_timeout"));
        assert!(new.idle_timeout(ttl).contains("'3000'"));
        assert!(!sessions(130_000, &[]).contains("waitstart"));
    }
}
