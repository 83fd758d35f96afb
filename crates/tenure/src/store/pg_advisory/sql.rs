//! SQL statements of the store. Each is one message of the simple protocol: a server that received half a request would
//! wait for the rest, and not count the session as idle.

use std::time::Duration;

use super::lock_id::LockId;
use super::options::KeyForm;
use super::queue_locks::{self, COUNTED_RESERVES, QueueLocks};
use super::tag::{COMMENT_PREFIX, Tag, name_sql};
use crate::store::pg::clock::NOW;
use crate::store::pg::incarnation;
use crate::store::pg::role::TIMELINE;
use crate::store::pg::table::Table;

/// Notification channel for releases.
pub(super) const CHANNEL: &str = "tenure_advisory";

/// SQLSTATE of a claim that reached another session than its own before it could listen: a division by zero.
pub(super) const OTHER_SESSION: &str = "22012";

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
    pub(super) lock: LockId,
    pub(super) shared: bool,
    pub(super) ttl: Duration,
    /// Number of places in the queue.
    pub(super) queue: u8,
}

/// Behaviour of a claim if the lock is held.
#[derive(Clone, Copy, Debug)]
pub(super) enum ClaimWait {
    /// Fails. The session is not used for this claim again.
    Try,
    /// Takes a free place in the queue, unless reserves wait for one.
    Enter,
    /// Registers the session as a reserve. It takes a place at once if one is free that no older reserve needs.
    JoinReserve,
    /// Next attempt of a reserve, which was called, or has found by [`poll`] that it may enter.
    EnterAfter { ticket: u32 },
    /// Waits in the server's queue for at most `bound`, in a place.
    Wait { bound: Duration, place: u8 },
}

/// First statement of a session: asks for the properties of the server, and changes nothing. If terms are counted, it
/// also asks for the incarnation.
pub(super) fn greeting(terms: Option<&Table>) -> String {
    let incarnation = terms.map_or_else(
        || incarnation::NO_COLUMNS.to_owned(),
        |table| incarnation::query_columns(&incarnation::literal(&table.quoted())),
    );
    format!(
        "SELECT pg_backend_pid() AS pid, pg_is_in_recovery()::int AS is_standby, \
         current_setting('server_version_num') AS version, \
         (current_setting('idle_session_timeout', true) IS NOT NULL)::int AS ends_idle_sessions, \
         (SELECT backend_start::text FROM pg_stat_activity WHERE pid = pg_backend_pid()) AS session_started, \
         {incarnation}"
    )
}

/// Marks and configures the session of process `pid`. On any other session it changes nothing, and returns no row.
pub(super) fn mark(pid: i32, marker: &str) -> String {
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
        "SELECT set_config('tenure.session', '{marker}', false), {} WHERE pg_backend_pid() = {pid}",
        settings.join(", ")
    )
}

/// Claims the lock. Returns the outcome, and for a grant the two halves of its token and the database's time.
///
/// The number of the token is drawn after the lock is held, so it is larger than that of every earlier holder. The
/// message that goes into the log makes the commit wait until the number is on disk, so the order survives a crash.
pub(super) fn claim(own: &SessionIdent, tag: &Tag, spec: &LockSpec, wait: ClaimWait) -> String {
    let ClaimSql { prelude, ticket, mine, before, bound, lock, otherwise, reserves, lifted, after } =
        ClaimSql::new(own, spec, wait);
    let armed = own.idle_timeout(spec.ttl);
    let (comment, name, same) = (tag.comment(), &tag.name, own.same());
    let epoch = own.epoch.map_or_else(|| TIMELINE.to_owned(), |epoch| format!("{epoch}::int8"));
    let held = held_by_own(spec.lock);
    let named = name_sql(name, "c.epoch", "c.number");
    format!(
        "{comment}{prelude}SELECT c.what, c.epoch, c.number, c.ticket, c.reserves, {NOW} AS now, \
         CASE WHEN c.what = 'granted' THEN set_config('application_name', {named}, false) \
         WHEN c.what <> 'moved' THEN {lifted} END, {after} \
         FROM (SELECT b.what, b.ticket, CASE WHEN b.what = 'busy' THEN {reserves} END AS reserves, \
         CASE WHEN b.what = 'granted' THEN {epoch} END AS epoch, \
         CASE WHEN b.what = 'granted' THEN CASE WHEN pg_logical_emit_message(true, 'tenure', '') IS NOT NULL \
         THEN txid_current() END END AS number \
         FROM (SELECT t.ticket, CASE WHEN ({same}) IS NOT TRUE THEN 'moved' WHEN pg_is_in_recovery() THEN 'standby' \
         WHEN {held} THEN '{mine}' \
         WHEN set_config('tenure.before', coalesce({before}, ''), false) IS NULL THEN 'moved' \
         WHEN set_config('lock_timeout', '{bound}', false) IS NULL THEN 'moved' \
         WHEN set_config('application_name', '{name}', false) IS NULL THEN 'moved' \
         WHEN coalesce({armed}, 'none') IS NULL THEN 'moved' \
         WHEN {lock} THEN 'granted' {otherwise}ELSE 'busy' END AS what \
         FROM (SELECT {ticket} AS ticket OFFSET 0) AS t OFFSET 0) AS b OFFSET 0) AS c"
    )
}

/// Parts of a claim that depend on its [`ClaimWait`].
struct ClaimSql {
    /// Statements before the claim.
    prelude: String,
    ticket: String,
    /// Outcome if the session holds the lock already.
    mine: &'static str,
    /// Sessions that hold the lock before the claim.
    before: String,
    /// `lock_timeout` in milliseconds.
    bound: u128,
    /// Condition that the lock is granted.
    lock: String,
    /// Branches of the CASE after that condition.
    otherwise: String,
    /// Number of reserves.
    reserves: String,
    /// Idle timeout of a session that was not granted the lock.
    lifted: String,
    /// Further columns, with the effects of the outcome.
    after: String,
}

impl ClaimSql {
    fn new(own: &SessionIdent, spec: &LockSpec, wait: ClaimWait) -> Self {
        let LockSpec { lock, shared, ttl, queue } = *spec;
        let (arguments, locks) = (lock.arguments(), QueueLocks::of(lock));
        let suffix = if shared { "_shared" } else { "" };
        let sleep = format!("pg_sleep({LOSS_NOTICE_SECONDS})");
        let once = Self {
            prelude: String::new(),
            ticket: "NULL::int8".to_owned(),
            // A session is granted a lock once. If it holds the lock already, another client uses the same session: a
            // pooler.
            mine: "moved",
            before: "''".to_owned(),
            bound: 0,
            lock: format!("pg_try_advisory_lock{suffix}({arguments})"),
            otherwise: String::new(),
            reserves: "NULL::int8".to_owned(),
            lifted: own.idle_timeout(ttl),
            after: "NULL".to_owned(),
        };
        match wait {
            ClaimWait::Try => Self { lifted: own.idle_timeout(Duration::ZERO), ..once },
            ClaimWait::Enter => {
                let (reserves, places) = (locks.has_reserves(), locks.take_place(queue));
                Self { otherwise: format!("WHEN {reserves} THEN 'busy' {places}"), ..once }
            }
            ClaimWait::JoinReserve => {
                let (register, is_full) =
                    (locks.register("t.ticket"), locks.is_full(queue, "t.ticket"));
                let (places, unregister) = (locks.take_place(queue), locks.unregister("c.ticket"));
                Self {
                    // In a transaction of its own, and before the ticket can be read: a call that is sent as soon as
                    // the ticket is there must arrive. Nothing after the first statement is executed if that fails.
                    prelude: format!(
                        "SELECT WHERE 1 / coalesce(({})::int, 0) = 0; BEGIN; LISTEN {}; COMMIT; ",
                        own.same(),
                        queue_locks::reserve_channel(own.pid)
                    ),
                    ticket: queue_locks::new_ticket(),
                    otherwise: format!(
                        "WHEN NOT ({register}) THEN 'moved' WHEN {is_full} THEN 'busy' {places}"
                    ),
                    reserves: COUNTED_RESERVES.to_owned(),
                    lifted: own.reserve_timeout(ttl, "c.reserves"),
                    after: format!(
                        "CASE WHEN c.what LIKE 'place %' THEN {unregister} END, \
                         CASE WHEN c.what = 'granted' THEN {sleep} END"
                    ),
                    ..once
                }
            }
            ClaimWait::EnterAfter { ticket } => {
                let ticket = format!("{ticket}::int8");
                let (is_full, places) =
                    (locks.is_full_unless_empty(queue, &ticket), locks.take_place(queue));
                let unregister = locks.unregister(&ticket);
                Self {
                    ticket,
                    otherwise: format!("WHEN {is_full} THEN 'busy' {places}"),
                    reserves: COUNTED_RESERVES.to_owned(),
                    lifted: own.reserve_timeout(ttl, "c.reserves"),
                    // The holder that called this reserve was the last in the queue, and this one may be the only one
                    // that was called. So it must call in its turn, though it had no place.
                    after: format!(
                        "CASE WHEN c.what LIKE 'place %' THEN ({unregister})::int \
                         WHEN c.what = 'granted' AND {unregister} THEN {} END, \
                         CASE WHEN c.what = 'granted' THEN {sleep} END",
                        locks.call_if_low(queue)
                    ),
                    ..once
                }
            }
            ClaimWait::Wait { bound, place } => Self {
                // A wait that timed out may have been granted at the same moment: then the session holds the lock
                // already.
                mine: "granted",
                // The sessions that held the lock when the wait began. If all of them are gone at the end, they were
                // ended instead of releasing the lock, and the notice may still be on its way to a process that
                // believes to hold it. So the grant waits for LOSS_NOTICE_SECONDS. A reserve that finds the lock free
                // does not know the holders before, and always waits.
                before: format!(
                    "(SELECT string_agg(pid::text, ',') FROM pg_locks WHERE granted AND {})",
                    is_lock(lock)
                ),
                bound: millis(bound),
                lock: format!("pg_advisory_lock{suffix}({arguments})::text IS NOT NULL"),
                after: format!(
                    "CASE WHEN c.what = 'granted' AND {} THEN {} END, \
                     CASE WHEN c.what = 'granted' AND NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = ANY \
                     (string_to_array(current_setting('tenure.before'), ',')::int[])) THEN {sleep} END",
                    locks.free_place(place),
                    locks.call_if_low(queue)
                ),
                ..once
            },
        }
    }
}

/// Polls as a reserve: returns the number of reserves, and whether this one may enter the queue. Calls others if there
/// is room for them. On any other session it changes nothing, and returns no row.
pub(super) fn poll(own: &SessionIdent, tag: &Tag, spec: &LockSpec, ticket: u32) -> String {
    let (comment, lifted) = (tag.comment(), own.reserve_timeout(spec.ttl, "q.reserves"));
    let (ticket, locks) = (format!("{ticket}::int8"), QueueLocks::of(spec.lock));
    let poll = locks.poll(spec.queue, &ticket, &spec.lock.is_row(), &lifted);
    format!("{comment}{poll} WHERE {}", own.same())
}

/// Counts a new term of a lock that this session holds; returns the number of terms, this one included. On any other
/// session it counts nothing, and returns no row.
pub(super) fn count(own: &SessionIdent, tag: &Tag, table: &Table, lock: LockId) -> String {
    let (comment, table, columns) = (tag.comment(), table.quoted(), lock.form().key_columns());
    let (arguments, same) = (lock.arguments(), own.same());
    format!(
        "{comment}INSERT INTO {table} AS t ({columns}, terms) SELECT {arguments}, 1 WHERE {same} \
         ON CONFLICT ({columns}) DO UPDATE SET terms = t.terms + 1 RETURNING terms"
    )
}

/// Proves that the session lives and is ours, and that the server is a primary; restarts the idle timeout.
pub(super) fn renew(own: &SessionIdent, tag: &Tag, ttl: Duration) -> String {
    let (comment, same, armed) = (tag.comment(), own.same(), own.idle_timeout(ttl));
    format!(
        "{comment}SELECT ({same})::int AS is_same_session, pg_is_in_recovery()::int AS is_standby, \
         CASE WHEN {same} THEN {armed} END"
    )
}

/// Releases the lock and notifies watchers.
pub(super) fn release(own: &SessionIdent, lock: LockId, shared: bool) -> String {
    let suffix = if shared { "_shared" } else { "" };
    let arguments = lock.arguments();
    let (same, lifted) = (own.same(), own.idle_timeout(Duration::ZERO));
    format!(
        "SELECT CASE WHEN {same} THEN pg_advisory_unlock{suffix}({arguments}) ELSE false END::int AS released, \
         {}, CASE WHEN {same} THEN {lifted} END, \
         CASE WHEN {same} THEN set_config('application_name', 'tenure', false) END",
        notify(&format!("0:{lock}"))
    )
}

/// SQL that notifies watchers. The payload is inserted as it is: it must never come from a user.
pub(super) fn notify(payload: &str) -> String {
    format!("pg_notify('{CHANNEL}', '{payload}')")
}

/// Returns a row if that session waits in the queue of a lock of this form.
pub(super) fn is_waiting(pid: i32, form: KeyForm) -> String {
    let objsubid = form.objsubid();
    format!(
        "SELECT 1 FROM pg_locks WHERE pid = {pid} AND locktype = 'advisory' AND objsubid = {objsubid} AND NOT granted"
    )
}

/// Returns a row if a session holds the lock in a mode that excludes `spec`: a question to another primary.
pub(super) fn held(spec: &LockSpec) -> String {
    let is = is_lock(spec.lock);
    let excludes = if spec.shared { " AND mode = 'ExclusiveLock'" } else { "" };
    format!("SELECT 1::int8 AS nth FROM pg_locks WHERE granted AND {is}{excludes} LIMIT 1")
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

/// Holders, waiters and reserves of these locks, in this order; of all locks of this form if `locks` is empty. The rows
/// of reserves have `is_ticket`, and their `classid` is that of [`QueueLocks::ticket_class`]. Without `locks` they
/// include locks of the other form that are no tickets.
pub(super) fn sessions(version: i32, form: KeyForm, locks: &[LockId]) -> String {
    let (of_lock, of_ticket) = (form.objsubid(), form.other().objsubid());
    // Locks before tickets.
    let order = if of_lock > of_ticket { "DESC" } else { "ASC" };
    let waited = if version >= 140_000 { "l.waitstart" } else { "NULL::timestamptz" };
    let micros = |span: &str| format!("(extract(epoch FROM {span}) * 1000000)::int8");
    let of = |lock: &LockId| {
        let (is_lock, tickets) = (lock.is_row(), QueueLocks::of(*lock).ticket_class());
        format!("{is_lock} OR objsubid = {of_ticket} AND classid = {tickets}")
    };
    let those = match locks {
        [] => "objsubid IN (1, 2)".to_owned(),
        _ => locks.iter().map(of).collect::<Vec<_>>().join(" OR "),
    };
    format!(
        "SELECT l.classid::int8 AS classid, l.objid::int8 AS objid, l.pid, (l.objsubid = {of_ticket})::int AS is_ticket, \
         (l.objsubid = {of_lock} AND l.granted)::int AS granted, \
         a.application_name, CASE WHEN left(a.query, {}) = '{COMMENT_PREFIX}' THEN a.query END AS comment, \
         coalesce(host(a.client_addr), '') AS host, (a.state = 'active')::int AS is_active, {} AS idle_for, \
         CASE WHEN l.objsubid = {of_ticket} THEN {} ELSE {} END AS waited_for, {NOW} AS now \
         FROM pg_locks AS l LEFT JOIN pg_stat_activity AS a ON a.pid = l.pid \
         WHERE l.locktype = 'advisory' \
         AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND ({those}) \
         ORDER BY l.objsubid {order}, l.classid, CASE WHEN l.objsubid = {of_lock} THEN l.objid END, l.granted DESC, \
         {waited}, waited_for DESC, l.pid",
        COMMENT_PREFIX.len(),
        micros("clock_timestamp() - a.state_change"),
        queue_locks::waited_micros(),
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

    /// Idle timeout of a reserve, which is idle between its polls. It ends the session of a frozen reserve, so that
    /// calls go to others.
    fn reserve_timeout(&self, ttl: Duration, reserves: &str) -> String {
        if self.leases {
            let limit = queue_locks::reserve_timeout_millis(ttl, reserves);
            format!("set_config('idle_session_timeout', ({limit})::text, false)")
        } else {
            "NULL::text".to_owned()
        }
    }
}

fn held_by_own(lock: LockId) -> String {
    let is = is_lock(lock);
    format!("EXISTS (SELECT FROM pg_locks WHERE pid = pg_backend_pid() AND granted AND {is})")
}

/// SQL condition that a row of `pg_locks` belongs to this lock.
fn is_lock(lock: LockId) -> String {
    let is_row = lock.is_row();
    format!(
        "locktype = 'advisory' AND {is_row} \
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
        assert!(!sessions(130_000, KeyForm::Pair, &[]).contains("waitstart"));
    }
}
