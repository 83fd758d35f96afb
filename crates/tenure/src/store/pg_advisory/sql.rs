//! Every statement, each one message of the simple protocol: a server that got half of one would wait for the rest, and
//! not count it as idle.

use std::time::Duration;

use super::pair::Pair;
use super::tag::{COMMENT_PREFIX, Tag, name_sql};
use crate::store::pg::incarnation::{self, TIMELINE};
use crate::store::pg::table::Table;

/// Where releases are told.
pub(super) const CHANNEL: &str = "tenure_advisory";

/// How long a waiter gives the word of a session's end to arrive at who held the lock on it, in seconds. The server sends
/// that word before it frees the lock, but its way may be longer than ours.
const LOSS_NOTICE_SECONDS: f64 = 0.01;

/// The session that a statement is for.
#[derive(Clone, Debug)]
pub(super) struct SessionIdent {
    pub(super) pid: i32,
    /// A setting of this session that no other has.
    pub(super) marker: String,
    /// The server can end a session that stays silent.
    pub(super) leases: bool,
    /// The epoch of its server's run, if that is kept beside the table of terms. It holds for as long as the session
    /// lives: that ends with the run.
    pub(super) epoch: Option<i64>,
}

/// What is claimed.
#[derive(Clone, Copy, Debug)]
pub(super) struct LockSpec {
    pub(super) pair: Pair,
    pub(super) shared: bool,
    pub(super) ttl: Duration,
}

/// How long to ask for it.
#[derive(Clone, Copy, Debug)]
pub(super) enum ClaimWait {
    /// Not at all. `park`: the session is not used for this claim again where it is held by another.
    Try { park: bool },
    /// In the server's queue.
    Wait { bound: Duration },
}

/// The first statement of a session: marks it, and asks what the server is, and where its incarnation is kept
/// if terms are counted.
pub(super) fn greeting(marker: &str, terms: Option<&Table>) -> String {
    let incarnation = terms.map_or_else(
        || "NULL, false, NULL, NULL".to_owned(),
        |table| incarnation::query_columns(&incarnation::literal(&table.quoted())),
    );
    // What this server does not know is left out.
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
        // Only Linux can tell for certain.
        format!(
            "CASE WHEN version() LIKE '%linux%' THEN {} END",
            known("client_connection_check_interval", "1000")
        ),
        // A token that a crash could take back would be given out twice.
        "CASE WHEN current_setting('synchronous_commit') = 'off' \
         THEN set_config('synchronous_commit', 'local', false) END"
            .to_owned(),
    ];
    format!(
        "SELECT pg_backend_pid(), pg_is_in_recovery()::int, current_setting('server_version_num'), \
         (current_setting('idle_session_timeout', true) IS NOT NULL)::int, \
         (SELECT backend_start::text FROM pg_stat_activity WHERE pid = pg_backend_pid()), \
         {incarnation}, set_config('tenure.session', '{marker}', false), {}",
        settings.join(", ")
    )
}

/// Asks for the lock. Answers what came of it, and for a grant the two halves of its token and the database's time.
///
/// The number of the token is drawn after the lock is held, so that it is larger than that of every holder before; the
/// message that goes into the log makes the commit wait until the number is on disk, so that it stays so after a crash.
pub(super) fn claim(own: &SessionIdent, tag: &Tag, wanted: &LockSpec, how: ClaimWait) -> String {
    let LockSpec { pair: Pair { first, second }, shared, ttl } = *wanted;
    let suffix = if shared { "_shared" } else { "" };
    let (mine, lock, bound, lifted) = match how {
        ClaimWait::Try { park } => {
            let lock = format!("pg_try_advisory_lock{suffix}({first}, {second})");
            // Nobody claims twice on a session: somebody else uses it too.
            ("moved", lock, None, if park { Duration::ZERO } else { ttl })
        }
        ClaimWait::Wait { bound } => {
            let lock = format!("pg_advisory_lock{suffix}({first}, {second})::text IS NOT NULL");
            // A wait that was cut short can have been granted at the same moment.
            ("granted", lock, Some(bound), ttl)
        }
    };
    // Who held it when the wait began. Where that session is gone at the end, it was ended rather than gave the lock back,
    // and the word of it may still be on its way to a process that thinks it leads.
    let (before, courtesy) = match how {
        ClaimWait::Try { .. } => ("''".to_owned(), "NULL".to_owned()),
        ClaimWait::Wait { .. } => (
            format!(
                "(SELECT string_agg(pid::text, ',') FROM pg_locks WHERE granted AND {})",
                is_lock(wanted.pair)
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
    let held = held_by_own(wanted.pair);
    let named = name_sql(name, "c.epoch", "c.number");
    format!(
        "{comment}SELECT c.what, c.epoch, c.number, (extract(epoch FROM clock_timestamp()) * 1000000)::int8, \
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

/// Counts one more term of a lock that this session holds; answers how many there were with it.
pub(super) fn count(tag: &Tag, table: &Table, pair: Pair) -> String {
    let (comment, table, Pair { first, second }) = (tag.comment(), table.quoted(), pair);
    format!(
        "{comment}INSERT INTO {table} AS t (key1, key2, terms) VALUES ({first}, {second}, 1) \
         ON CONFLICT (key1, key2) DO UPDATE SET terms = t.terms + 1 RETURNING terms"
    )
}

/// Proves that the session lives and is ours, and that the server is the one to ask.
pub(super) fn renew(own: &SessionIdent, tag: &Tag, ttl: Duration) -> String {
    let (comment, same, armed) = (tag.comment(), own.same(), own.idle_timeout(ttl));
    format!("{comment}SELECT ({same})::int, pg_is_in_recovery()::int, {armed}")
}

/// Gives the lock back, and tells who watches.
pub(super) fn release(own: &SessionIdent, pair: Pair, shared: bool) -> String {
    let suffix = if shared { "_shared" } else { "" };
    let Pair { first, second } = pair;
    let (same, lifted) = (own.same(), own.idle_timeout(Duration::ZERO));
    format!(
        "SELECT CASE WHEN {same} THEN pg_advisory_unlock{suffix}({first}, {second}) ELSE false END::int, \
         {}, {lifted}, set_config('application_name', 'tenure', false)",
        notify(&format!("0:{pair}"))
    )
}

/// Tells something to who watches. The payload is ours.
pub(super) fn notify(payload: &str) -> String {
    format!("pg_notify('{CHANNEL}', '{payload}')")
}

/// Whether that session waits in the queue.
pub(super) fn is_waiting(pid: i32) -> String {
    format!(
        "SELECT 1 FROM pg_locks WHERE pid = {pid} AND locktype = 'advisory' AND objsubid = 2 AND NOT granted"
    )
}

/// Ends the wait of a session of ours.
pub(super) fn cancel(pid: i32, started: &str) -> String {
    format!(
        "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE pid = {pid} AND backend_start = '{started}'"
    )
}

/// Ends the session of a holder, if it is still the one that is meant, and waits until it is gone.
pub(super) fn evict(pid: i32, application_name: &str, waits: bool) -> String {
    let patience = if waits { ", 2000" } else { "" };
    format!(
        "SELECT pg_terminate_backend(pid{patience})::int FROM pg_stat_activity \
         WHERE pid = {pid} AND application_name = '{application_name}'"
    )
}

/// Who holds and who waits: for these pairs, or for all.
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
        "SELECT l.classid::int8, l.objid::int8, l.pid, l.granted::int, a.application_name, \
         CASE WHEN left(a.query, {}) = '{COMMENT_PREFIX}' THEN a.query END, coalesce(host(a.client_addr), ''), \
         (a.state = 'active')::int, {}, {}, {} \
         FROM pg_locks AS l LEFT JOIN pg_stat_activity AS a ON a.pid = l.pid \
         WHERE l.locktype = 'advisory' AND l.objsubid = 2 \
         AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()){those} \
         ORDER BY l.classid, l.objid, l.granted DESC, {waited}, l.pid",
        COMMENT_PREFIX.len(),
        micros("clock_timestamp() - a.state_change"),
        micros(&format!("clock_timestamp() - {waited}")),
        micros("clock_timestamp()"),
    )
}

impl SessionIdent {
    /// Whether the statement runs on the very session.
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

/// Whether a row of `pg_locks` is of this lock.
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
