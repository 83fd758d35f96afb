//! SQL statements of the store. Each operation is one conditional statement that reads the database's clock.
//!
//! The clock is `clock_timestamp()`, never `now()`, which stands still from the start of a transaction. A statement
//! decides only by columns of the row that it writes. If it had to wait for another transaction, PostgreSQL reads that
//! row again, and no other: a decision by any other row could be stale.

use crate::store::pg::clock::NOW;
use crate::store::pg::durable::DURABLE;
use crate::store::pg::incarnation::EPOCH;
use crate::store::pg::table::Table;

/// SQL condition that the claim is executed in time. It uses parameters that have the same number in every claim.
///
/// A claim does nothing unless the database's clock is between `$9` and `$10`: a claim that arrives late, or after a
/// step of the clock, must not be granted. `$11` is the expected time. `$12` is the time for which the claimer assumes
/// the clock to be steady, `$13` the time for which it has observed that.
const IN_TIME: &str =
    "(extract(epoch FROM clock_timestamp()) * 1000000)::int8 BETWEEN $9::int8 AND $10::int8";

/// All statements for one table. Statements that grant contain the placeholder [`EPOCH`].
#[derive(Debug)]
pub(super) struct LeaseStatements {
    pub(super) take: String,
    pub(super) claim: String,
    pub(super) claim_shared: String,
    pub(super) renew: String,
    pub(super) renew_shared: String,
    pub(super) release: String,
    pub(super) release_shared: String,
    pub(super) evict: String,
    pub(super) evict_shared: String,
    pub(super) inspect: String,
    /// As `inspect`, without the waiters.
    pub(super) inspect_holders: String,
    pub(super) list: String,
    pub(super) notify: String,
    pub(super) withdraw: String,
    pub(super) held: String,
    pub(super) clean: String,
    /// True if waiters are marked. Claims then have one more parameter.
    pub(super) marks: bool,
}

impl LeaseStatements {
    /// Statements for a table. With `marks`, a claim that waits is marked in the table of waiters.
    pub(super) fn new(table: &Table, marks: bool) -> Self {
        let channel = table.channel_literal();
        let waiters = table.waiters().quoted();
        let table = table.quoted();
        let marked = marks.then_some(&*waiters);
        Self {
            take: take(&table),
            claim: claim(&table, marked),
            claim_shared: claim_shared(&table, marked),
            renew: renew(&table, marked),
            renew_shared: renew_shared(&table, marked),
            release: release(&table, &channel),
            release_shared: release_shared(&table, &channel),
            evict: evict(&table, &channel),
            evict_shared: evict_shared(&table, &channel),
            inspect: inspect(&table, marked),
            inspect_holders: inspect(&table, None),
            list: list(&table, marked),
            notify: format!("SELECT pg_notify({channel}, $1)"),
            withdraw: withdraw(&waiters),
            held: held(&table),
            clean: format!(
                "DELETE FROM {waiters} AS w WHERE until < clock_timestamp() - $1 * interval '1 microsecond' \
                 OR {} RETURNING {NOW} AS now",
                is_beyond_life()
            ),
            marks,
        }
    }
}

/// SQL condition that a lease of `ttl` that ends at `until` (both in microseconds) has certainly ended.
///
/// Either the clock has passed the end, and has been steady for longer than the holder can rely on an earlier time. Or
/// the end is further away than a lease is long, because the clock was set back, and the holder's own deadline has
/// passed since.
fn is_over(until: &str, ttl: &str) -> String {
    let now = NOW;
    format!(
        "(({until} <= {now} AND $12::int8 >= {ttl} + {ttl} / 6 + 50000 \
            AND {now} <= $11::int8 + greatest({ttl} / 12, 25000)) \
          OR ({until} > {now} + {ttl} + 1000000 AND $13::int8 >= {ttl} + {ttl} / 6 + 50000))"
    )
}

/// SQL of a timestamp column in microseconds since 1970.
fn micros(column: &str) -> String {
    format!("(extract(epoch FROM {column}) * 1000000)::int8")
}

/// SQL of the holders in `rows`, one row per holder; holds whose lease has ended are left out.
fn holder_rows(rows: &str) -> String {
    let (granted, until) = (micros("l.granted_at"), micros("l.locked_until"));
    format!(
        "SELECT l.key, h.epoch, h.number, h.id, h.host, h.pid, h.note, h.granted, h.until, l.slots \
         FROM {rows} AS l CROSS JOIN LATERAL ( \
             SELECT l.epoch, l.counter AS number, l.holder_id AS id, l.holder_host AS host, \
                    l.holder_pid AS pid, l.holder_note AS note, {granted} AS granted, {until} AS until \
             WHERE l.holders IS NULL AND l.locked_until > clock_timestamp() \
             UNION ALL \
             SELECT (e->>'epoch')::int8, (e->>'number')::int8, e->>'id', e->>'host', \
                    (e->>'pid')::int8, e->>'note', (e->>'granted')::int8, (e->>'until')::int8 \
             FROM jsonb_array_elements(l.holders) AS e \
             WHERE (e->>'until')::int8 > {NOW} \
         ) AS h"
    )
}

/// Last part of every claim: the grant, or else the current holders. Always returns at least one row, for the clock.
///
/// With a table of `waiters`, a claim that is not granted and has `queue` is marked there, or its mark is extended.
fn outcome(table: &str, space: &str, queue: &str, waiters: Option<&str>) -> String {
    let marked = waiters.map_or_else(String::new, |waiters| mark(waiters, space, queue));
    let shown = holder_rows(&format!("(SELECT * FROM {table} WHERE space = {space} AND key = $1)"));
    format!(
        "won AS (SELECT epoch, number FROM taken UNION ALL SELECT epoch, number FROM made) \
         {marked} SELECT {NOW} AS now, true AS granted, epoch, number, NULL::text AS id, NULL::text AS host, \
                NULL::int8 AS pid, NULL::text AS note, NULL::int4 AS slots \
         FROM won \
         UNION ALL \
         SELECT {NOW}, false, s.epoch, s.number, s.id, s.host, s.pid, s.note, s.slots \
         FROM (SELECT 1) AS always LEFT JOIN LATERAL ({shown}) AS s ON true \
         WHERE NOT EXISTS (SELECT FROM won)"
    )
}

/// Part of a claim that marks it as waiting.
///
/// A waiter claims about once per second. Its mark is written again only when half of its life is over, or when the
/// database's clock was set back.
fn mark(waiters: &str, space: &str, queue: &str) -> String {
    let (life, half) = (MARK_SECONDS, MARK_SECONDS / 2);
    let beyond = is_beyond_life();
    format!(
        ", marked AS ( \
             INSERT INTO {waiters} AS w (space, key, claim, waiter_id, waiter_host, waiter_pid, waiter_note, since, until) \
             SELECT {space}, $1, $2, $5, $6, $7, $8, clock_timestamp(), clock_timestamp() + interval '{life} s' \
             WHERE {queue}::bool AND NOT EXISTS (SELECT FROM won) \
             ON CONFLICT (space, key, claim) DO UPDATE \
                 SET since = least(w.since, excluded.since), until = excluded.until \
                 WHERE w.until < clock_timestamp() + interval '{half} s' OR {beyond} \
         )"
    )
}

/// Life of a mark, in seconds. The mark of a waiter that died counts for this long.
const MARK_SECONDS: u32 = 4;

/// SQL condition that the mark `w` ends later than a mark can: the database's clock was set back since it was written.
/// It does not count, or the mark of a waiter that died would count until the clock has caught up.
fn is_beyond_life() -> String {
    format!("w.until > clock_timestamp() + interval '{MARK_SECONDS} s'")
}

/// SQL condition that another claim than those of the row `l` waits for its key.
fn is_awaited(waiters: &str) -> String {
    let others = waits_for("l");
    format!("EXISTS (SELECT FROM {waiters} AS w WHERE {others})")
}

/// SQL condition that the mark `w` is that of a live waiter for the key of the row `row`, which does not hold it.
fn waits_for(row: &str) -> String {
    let beyond = is_beyond_life();
    format!(
        "w.space = {row}.space AND w.key = {row}.key AND w.until > clock_timestamp() AND NOT {beyond} \
         AND w.claim IS DISTINCT FROM {row}.claim \
         AND NOT coalesce({row}.holders @> jsonb_build_array(jsonb_build_object('claim', encode(w.claim, 'hex'))), false)"
    )
}

/// Removes the mark of a claim, and those of dead waiters for the same key: `$1` space, `$2` key, `$3` claim.
fn withdraw(waiters: &str) -> String {
    let beyond = is_beyond_life();
    format!(
        "DELETE FROM {waiters} AS w WHERE space = $1 AND key = $2 \
             AND (claim = $3 OR until < clock_timestamp() OR {beyond}) \
         RETURNING {NOW} AS now"
    )
}

/// Grants an exclusive lock of a key that has a row and is free: `$1` key, `$2` claim, `$3` secret, `$4` ttl, `$5` to
/// `$8` the identity of the holder.
///
/// The server plans every statement anew, since none has a name. Planning this one takes a fifth of the time of
/// [`claim`].
fn take(table: &str) -> String {
    let update = update(table);
    format!(
        "{update} RETURNING {NOW} AS now, true AS granted, l.epoch, l.counter AS number, {DURABLE}"
    )
}

fn update(table: &str) -> String {
    let mine = "(l.claim = $2 AND l.holders IS NULL AND l.locked_until > clock_timestamp())";
    let released = "l.locked_until = '-infinity'";
    let over = is_over(
        "(CASE WHEN isfinite(l.locked_until) THEN extract(epoch FROM l.locked_until) * 1000000 ELSE 0 END)::int8",
        "(extract(epoch FROM l.ttl) * 1000000)::int8",
    );
    format!(
        "UPDATE {table} AS l SET \
             epoch = CASE WHEN {mine} THEN l.epoch ELSE greatest(l.epoch, {EPOCH}) END, \
             counter = CASE WHEN {mine} THEN l.counter ELSE l.counter + 1 END, \
             granted_at = CASE WHEN {mine} THEN l.granted_at ELSE clock_timestamp() END, \
             claim = $2, secret = $3, ttl = $4 * interval '1 microsecond', \
             holder_id = $5, holder_host = $6, holder_pid = $7, holder_note = $8, \
             slots = NULL, holders = NULL, \
             locked_until = clock_timestamp() + $4 * interval '1 microsecond' \
         WHERE l.space = 0 AND l.key = $1 AND {IN_TIME} AND ({mine} OR {released} OR {over})"
    )
}

/// Grants an exclusive lock of any key; returns the holders if it is not free. With `waiters`, `$14` is true if the
/// claim waits.
fn claim(table: &str, waiters: Option<&str>) -> String {
    let (update, outcome) = (update(table), outcome(table, "0", "$14", waiters));
    format!(
        "WITH taken AS ( \
             {update} RETURNING l.epoch, l.counter AS number, {DURABLE} \
         ), made AS ( \
             INSERT INTO {table} (space, key, epoch, counter, claim, secret, ttl, holder_id, holder_host, \
                                  holder_pid, holder_note, granted_at, locked_until) \
             SELECT 0, $1, {EPOCH}, 1, $2, $3, $4 * interval '1 microsecond', $5, $6, $7, $8, \
                    clock_timestamp(), clock_timestamp() + $4 * interval '1 microsecond' \
             WHERE {IN_TIME} AND NOT EXISTS (SELECT FROM {table} WHERE space = 0 AND key = $1) \
             ON CONFLICT (space, key) DO NOTHING \
             RETURNING epoch, counter AS number, {DURABLE} \
         ), {outcome}"
    )
}

/// Grants a shared lock or a slot. Parameters as for [`claim`]; `$14` is the number of slots, null for a shared lock,
/// and `$15` the key space. With `waiters`, `$16` is true if the claim waits.
fn claim_shared(table: &str, waiters: Option<&str>) -> String {
    let element_over = is_over("(e->>'until')::int8", "(e->>'ttl')::int8");
    let row_over = is_over(
        "(CASE WHEN isfinite(l.locked_until) THEN extract(epoch FROM l.locked_until) * 1000000 ELSE 0 END)::int8",
        "(extract(epoch FROM l.ttl) * 1000000)::int8",
    );
    // The other holders whose lease has not certainly ended, and the earlier grant of this same claim.
    let others = format!(
        "(SELECT coalesce(jsonb_agg(e), '[]') FROM jsonb_array_elements(l.holders) AS e \
          WHERE e->>'claim' <> encode($2, 'hex') AND NOT {element_over})"
    );
    let before = format!(
        "(SELECT e FROM jsonb_array_elements(l.holders) AS e \
          WHERE e->>'claim' = encode($2, 'hex') AND (e->>'until')::int8 > {NOW} LIMIT 1)"
    );
    let entry = |epoch: &str, number: &str, granted: &str| {
        format!(
            "jsonb_build_object('epoch', {epoch}, 'number', {number}, 'claim', encode($2, 'hex'), \
             'secret', encode($3, 'hex'), 'id', $5::text, 'host', $6::text, 'pid', $7::int8, 'note', $8::text, \
             'granted', {granted}, 'until', {NOW} + $4::int8, 'ttl', $4::int8)"
        )
    };
    let renewed = entry(
        "coalesce((s.before->>'epoch')::int8, greatest(l.epoch, s.present))",
        "coalesce((s.before->>'number')::int8, l.counter + 1)",
        &format!("coalesce((s.before->>'granted')::int8, {NOW})"),
    );
    let first = entry(EPOCH, "1", NOW);
    let outcome = outcome(table, "$15", "$16", waiters);
    format!(
        "WITH taken AS ( \
             UPDATE {table} AS l SET \
                 (epoch, counter, holders, ttl, locked_until, slots, claim, secret, holder_id, holder_host, \
                  holder_pid, holder_note, granted_at) = ( \
                 SELECT CASE WHEN s.before IS NULL THEN greatest(l.epoch, s.present) ELSE l.epoch END, \
                        CASE WHEN s.before IS NULL THEN l.counter + 1 ELSE l.counter END, \
                        s.others || {renewed}, \
                        greatest($4::int8, (SELECT max((e->>'ttl')::int8) FROM jsonb_array_elements(s.others) AS e)) \
                            * interval '1 microsecond', \
                        to_timestamp(greatest({NOW} + $4::int8, \
                            (SELECT max((e->>'until')::int8) FROM jsonb_array_elements(s.others) AS e)) / 1e6), \
                        $14::int4, $2, NULL::bytea, NULL::text, NULL::text, NULL::int8, NULL::text, NULL::timestamptz \
                 FROM (SELECT coalesce({others}, '[]') AS others, {before} AS before, {EPOCH} AS present) AS s) \
             WHERE l.space = $15 AND l.key = $1 AND {IN_TIME} AND CASE WHEN l.holders IS NULL \
                 THEN l.locked_until = '-infinity' OR {row_over} \
                 ELSE jsonb_array_length({others}) = 0 \
                      OR (l.slots IS NOT DISTINCT FROM $14::int4 \
                          AND jsonb_array_length({others}) < coalesce($14::int4, {MAX_SHARERS})) END \
             RETURNING l.epoch, l.counter, l.holders, {DURABLE} \
         ), taken_as AS ( \
             SELECT (e->>'epoch')::int8 AS epoch, (e->>'number')::int8 AS number \
             FROM taken AS t, jsonb_array_elements(t.holders) AS e WHERE e->>'claim' = encode($2, 'hex') \
         ), made AS ( \
             INSERT INTO {table} (space, key, epoch, counter, holders, ttl, locked_until, slots, claim) \
             SELECT $15, $1, {EPOCH}, 1, jsonb_build_array({first}), $4 * interval '1 microsecond', \
                    clock_timestamp() + $4 * interval '1 microsecond', $14::int4, $2 \
             WHERE {IN_TIME} AND NOT EXISTS (SELECT FROM {table} WHERE space = $15 AND key = $1) \
             ON CONFLICT (space, key) DO NOTHING \
             RETURNING epoch, counter AS number, {DURABLE} \
         ), {}",
        outcome.replacen("FROM taken ", "FROM taken_as ", 1)
    )
}

/// Maximum number of holders of a shared lock or semaphore: each is an element of its row.
pub(super) const MAX_SHARERS: i32 = 1_000;

/// Renews many exclusive holds: `$1` spaces, `$2` keys, `$3` numbers, `$4` secrets, `$5` ttls.
///
/// Rows that another transaction has locked are skipped, and reported as skipped: one locked row must not delay all the
/// others.
fn renew(table: &str, waiters: Option<&str>) -> String {
    let awaited = waiters.map_or_else(|| "false".to_owned(), is_awaited);
    format!(
        "WITH asked AS ( \
             SELECT * FROM unnest($1::int2[], $2::text[], $3::int8[], $4::bytea[], $5::int8[]) \
                 WITH ORDINALITY AS a (space, key, number, secret, ttl, nth) \
         ), locked AS ( \
             SELECT l.space, l.key FROM {table} AS l JOIN asked AS a ON l.space = a.space AND l.key = a.key \
             FOR UPDATE OF l SKIP LOCKED \
         ), renewed AS ( \
             UPDATE {table} AS l SET ttl = a.ttl * interval '1 microsecond', \
                 locked_until = clock_timestamp() + a.ttl * interval '1 microsecond' \
             FROM asked AS a JOIN locked AS k ON k.space = a.space AND k.key = a.key \
             WHERE l.space = a.space AND l.key = a.key AND l.holders IS NULL AND l.counter = a.number \
                 AND l.secret = a.secret AND l.locked_until > clock_timestamp() \
             RETURNING a.nth, {DURABLE} \
         ) \
         SELECT {NOW} AS now, a.nth, r.nth IS NOT NULL AS renewed, \
                r.nth IS NULL AND k.key IS NULL AND l.key IS NOT NULL AS passed_over, {awaited} AS awaited \
         FROM asked AS a LEFT JOIN renewed AS r ON r.nth = a.nth \
              LEFT JOIN locked AS k ON k.space = a.space AND k.key = a.key \
              LEFT JOIN {table} AS l ON l.space = a.space AND l.key = a.key AND l.counter = a.number"
    )
}

/// Renews many shared holds. Rows are locked in the order of their keys, so that two such renewals cannot deadlock.
fn renew_shared(table: &str, waiters: Option<&str>) -> String {
    let awaited = waiters.map_or_else(|| "false".to_owned(), is_awaited);
    let awaited =
        format!("(SELECT {awaited} FROM {table} AS l WHERE l.space = a.space AND l.key = a.key)");
    let asked = "unnest($1::int2[], $2::text[], $3::int8[], $4::bytea[], $5::int8[]) \
                 WITH ORDINALITY AS a (space, key, number, secret, ttl, nth)";
    let fits = "a.space = l.space AND a.key = l.key AND a.number = (e->>'number')::int8 \
                AND encode(a.secret, 'hex') = e->>'secret'";
    format!(
        "WITH locked AS ( \
             SELECT l.space, l.key FROM {table} AS l \
             WHERE (l.space, l.key) IN (SELECT a.space, a.key FROM {asked}) \
             ORDER BY l.space, l.key FOR UPDATE \
         ), renewed AS ( \
             UPDATE {table} AS l SET (holders, locked_until, ttl) = ( \
                 SELECT jsonb_agg(s.e ORDER BY (s.e->>'number')::int8), \
                        to_timestamp(max((s.e->>'until')::int8) / 1e6), \
                        max((s.e->>'ttl')::int8) * interval '1 microsecond' \
                 FROM (SELECT CASE WHEN a.nth IS NULL OR (e->>'until')::int8 <= {NOW} THEN e \
                              ELSE e || jsonb_build_object('until', {NOW} + a.ttl, 'ttl', a.ttl) END AS e \
                       FROM jsonb_array_elements(l.holders) AS e LEFT JOIN {asked} ON {fits}) AS s) \
             FROM locked AS k \
             WHERE l.space = k.space AND l.key = k.key AND jsonb_array_length(l.holders) > 0 \
             RETURNING l.space, l.key, l.holders, {DURABLE} \
         ) \
         SELECT {NOW} AS now, a.nth, EXISTS ( \
                    SELECT FROM renewed AS l, jsonb_array_elements(l.holders) AS e \
                    WHERE {fits} AND (e->>'until')::int8 > {NOW}) AS renewed, \
                false AS passed_over, coalesce({awaited}, false) AS awaited \
         FROM {asked}"
    )
}

/// Releases an exclusive hold: `$1` space, `$2` key, `$3` number, `$4` secret. A hold whose lease has ended may still
/// be released, as long as no other claim was granted since: the number in the row is then still the same.
fn release(table: &str, channel: &str) -> String {
    free(table, channel, "l.space = $1 AND l.key = $2 AND l.counter = $3 AND l.secret = $4")
}

/// Evicts an exclusive hold: `$1` key, `$2` epoch, `$3` number.
fn evict(table: &str, channel: &str) -> String {
    free(
        table,
        channel,
        "l.key = $1 AND l.epoch = $2 AND l.counter = $3 AND l.locked_until > clock_timestamp()",
    )
}

fn free(table: &str, channel: &str, condition: &str) -> String {
    format!(
        "UPDATE {table} AS l SET locked_until = '-infinity', claim = NULL, secret = NULL, granted_at = NULL, \
             holder_id = NULL, holder_host = NULL, holder_pid = NULL, holder_note = NULL \
         WHERE {condition} AND l.holders IS NULL AND l.locked_until <> '-infinity' \
         RETURNING {NOW} AS now, pg_notify({channel}, l.space || ':' || l.key), {DURABLE}"
    )
}

fn release_shared(table: &str, channel: &str) -> String {
    let fits = "(e->>'number')::int8 = $3 AND e->>'secret' = encode($4, 'hex')";
    free_shared(table, channel, "l.space = $1 AND l.key = $2", fits)
}

fn evict_shared(table: &str, channel: &str) -> String {
    let fits = format!(
        "(e->>'epoch')::int8 = $2 AND (e->>'number')::int8 = $3 AND (e->>'until')::int8 > {NOW}"
    );
    free_shared(table, channel, "l.key = $1", &fits)
}

fn free_shared(table: &str, channel: &str, condition: &str, fits: &str) -> String {
    format!(
        "WITH freed AS ( \
             UPDATE {table} AS l SET (holders, locked_until) = ( \
                 SELECT coalesce(jsonb_agg(e), '[]'), \
                        coalesce(to_timestamp(max((e->>'until')::int8) / 1e6), '-infinity') \
                 FROM jsonb_array_elements(l.holders) AS e WHERE NOT ({fits})) \
             WHERE {condition} AND EXISTS (SELECT FROM jsonb_array_elements(l.holders) AS e WHERE {fits}) \
             RETURNING l.space, l.key, {DURABLE} \
         ) SELECT {NOW} AS now, pg_notify({channel}, space || ':' || key) FROM freed"
    )
}

/// Finds holds that exclude those of the request, as a question to another primary: `$1` spaces, `$2` keys, `$3`
/// secrets of the request's holds, `$4` true for those that also exclude shared holds and slots.
fn held(table: &str) -> String {
    format!(
        "SELECT a.nth FROM unnest($1::int2[], $2::text[], $3::bytea[], $4::bool[]) \
             WITH ORDINALITY AS a (space, key, secret, alone, nth) \
         JOIN {table} AS l ON l.space = a.space AND l.key = a.key \
         WHERE l.holders IS NULL AND l.locked_until > clock_timestamp() AND l.secret IS DISTINCT FROM a.secret \
            OR a.alone AND EXISTS ( \
                SELECT FROM jsonb_array_elements(l.holders) AS e \
                WHERE (e->>'until')::int8 > {NOW} AND e->>'secret' IS DISTINCT FROM encode(a.secret, 'hex'))"
    )
}

/// Reads the holders of keys, and then the waiters: `$1` spaces, `$2` keys. A row without a key carries only the time.
fn inspect(table: &str, waiters: Option<&str>) -> String {
    let rows = format!(
        "SELECT * FROM {table} WHERE (space, key) IN (SELECT * FROM unnest($1::int2[], $2::text[]))"
    );
    shown(&rows, waiters)
}

/// Lists held keys with their waiters: `$1` space, `$2` prefix, `$3` the key to continue after. Rows as for
/// [`inspect`].
fn list(table: &str, waiters: Option<&str>) -> String {
    let rows = format!(
        "SELECT * FROM {table} WHERE space = $1 AND left(key, length($2)) = $2 AND key >= $2 \
             AND ($3::text IS NULL OR key > $3) AND locked_until > clock_timestamp() ORDER BY key LIMIT 500"
    );
    shown(&rows, waiters)
}

/// SQL of the holders and the waiters of the keys in `rows`.
fn shown(rows: &str, waiters: Option<&str>) -> String {
    let holders = holder_rows("asked");
    let holders = holders.replacen("SELECT l.key", "SELECT l.space, l.key, false AS waits", 1);
    let waiting = waiters.map_or_else(String::new, |waiters| {
        let (since, until) = (micros("w.since"), micros("w.until"));
        format!(
            " UNION ALL SELECT w.space, w.key, true, 0::int8, 0::int8, w.waiter_id, w.waiter_host, w.waiter_pid, \
                    w.waiter_note, {since}, {until}, NULL::int4 \
             FROM asked AS l JOIN {waiters} AS w ON {}",
            waits_for("l")
        )
    });
    format!(
        "WITH asked AS MATERIALIZED ({rows}) \
         SELECT {NOW} AS now, s.* FROM (SELECT 1) AS always LEFT JOIN ({holders}{waiting}) AS s ON true \
         ORDER BY s.space, s.key, s.waits, s.epoch, s.number, s.granted"
    )
}
