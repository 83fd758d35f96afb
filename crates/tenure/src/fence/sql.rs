//! Fenced writes to PostgreSQL: statements for any driver.
//!
//! Two ways. **A column on the protected row** where a lock protects one row: nothing else is locked or written. **The
//! table `tenure_fence`** where a lock protects several rows or tables. In both, a statement accepts a token that is as
//! new as the newest seen, and the number of rows it reports is the answer: 0 means stale.
//!
//! # A column on the row
//!
//! Add [`COLUMN`] to the table, then put token and check into your own statements, here with the row's id as `$1` and
//! the token as `$2`:
//!
//! ```sql
//! -- A new holder, first of all: installs the token and reads in one.
//! UPDATE reports SET fence = $2::text::numeric(39)
//!     WHERE id = $1 AND fence <= $2::text::numeric(39) AND $2::text::numeric(39) > 0
//!     RETURNING body;
//!
//! -- Every write.
//! UPDATE reports SET body = $3, fence = $2::text::numeric(39)
//!     WHERE id = $1 AND fence <= $2::text::numeric(39) AND $2::text::numeric(39) > 0;
//!
//! -- A write that creates the row where there is none.
//! INSERT INTO reports AS old (id, body, fence)
//!     SELECT $1, $3, $2::text::numeric(39) WHERE $2::text::numeric(39) > 0
//!     ON CONFLICT (id) DO UPDATE SET body = EXCLUDED.body, fence = EXCLUDED.fence
//!     WHERE old.fence <= EXCLUDED.fence;
//! ```
//!
//! The condition `> 0` refuses a holder that has no token: 0 stands for that, and is as new as a row that nothing has
//! written to. In a program [`value`] refuses it before, with the reason.
//!
//! No row is also reported where there is none with that id. And deleting a row deletes what it remembered, so that a
//! late holder could create it again: mark rows as deleted, or use the table.
//!
//! # The table
//!
//! Create it with [`TABLE`]. A new holder runs [`INSTALL`] before it reads anything; every write begins with [`ADMIT`]:
//!
//! ```
//! use tenure::fence::sql;
//!
//! /// Whether the report was saved: not if a newer holder came.
//! async fn save(
//!     db: &tokio_postgres::Client,
//!     guard: &tenure::Guard,
//!     text: &str,
//! ) -> Result<bool, Box<dyn std::error::Error>> {
//!     let (key, token) = (guard.key().as_str(), sql::value(guard.fencing_token())?);
//!     let admit = sql::ADMIT;
//!     let write = format!("{admit} UPDATE reports SET body = $3 WHERE EXISTS (SELECT FROM admitted)");
//!     Ok(db.execute(&write, &[&key, &token, &text]).await? == 1)
//! }
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let Ok(url) = std::env::var("TENURE_TEST_POSTGRES") else { return Ok(()) };
//! # let (db, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await?;
//! # tokio::spawn(connection);
//! # db.batch_execute("SET search_path = pg_temp").await?;
//! # db.batch_execute("CREATE TABLE reports (body text); INSERT INTO reports VALUES ('')").await?;
//! # db.batch_execute(sql::TABLE).await?;
//! # let client = tenure::Client::connect("memory:").await?;
//! let first = client.lock("reports").acquire().await?;
//! let token = sql::value(first.fencing_token())?;
//! assert_eq!(db.execute(sql::INSTALL, &[&"reports", &token]).await?, 1);
//! assert!(save(&db, &first, "draft").await?);
//!
//! client.store().evict(first.key(), first.fencing_token(), "it hangs").await?;
//! let second = client.lock("reports").acquire().await?;
//! let token = sql::value(second.fencing_token())?;
//! assert_eq!(db.execute(sql::INSTALL, &[&"reports", &token]).await?, 1);
//! assert!(!save(&db, &first, "late").await?);
//! assert!(save(&db, &second, "final").await?);
//! # Ok(()) }
//! ```
//!
//! Several statements that belong together go into one transaction that begins with [`INSTALL`]: roll back if it
//! reports 0 rows. Otherwise it has the row in `tenure_fence` locked, and no newer holder gets in before the commit.
//!
//! # What a crash of the database must not take back
//!
//! With `synchronous_commit = off` a crash takes back commits of the last moment, and with them the newest token: an older
//! holder would get in again, beside a newer one that has read. [`INSTALL`] therefore raises the setting to `local` until
//! the end of its transaction. With a column on the row, or in a transaction that another holder's reads depend on, run
//! `SET LOCAL synchronous_commit = local` yourself.
//!
//! # Why the token is a text
//!
//! A token has 128 bits: too many for a `bigint`, so it is a `numeric(39)`. Few drivers send a number of that size, and
//! those do it each in their own way; all of them send text. `$2::text::numeric(39)` makes the parameter a text for the
//! driver and a number for the comparison. Never compare texts: `'10'` sorts before `'9'`.
//!
//! # Why it holds when statements meet
//!
//! - **Read committed**, the default. The check is part of an `UPDATE`, so it locks the row that has the token. The
//!   second of two statements waits for the first to commit, and then PostgreSQL evaluates its condition again, on the
//!   row as it is by then. A stale write that had to wait reports 0 rows.
//! - **Repeatable read and serializable.** The second one fails with SQLSTATE 40001 instead. Nothing was written: run
//!   the transaction again from its beginning, and it will report 1 row or 0.
//! - **A check that does not lock is none.** A `SELECT` of the token before the write, or in a subquery of it, sees the
//!   database as it was when the statement began; a newer holder can install its token and write before yours lands.
//! - **Install before you read, in a statement of its own.** What a statement reads, but for the row it updates, is
//!   from when it began, and it may have waited since. For the same reason a transaction of repeatable read has to
//!   begin with [`INSTALL`], after the lock was acquired: it sees the database as of its first statement throughout.

use super::NoToken;
use crate::FencingToken;

/// The parameter `$2` for this token.
///
/// # Errors
///
/// [`NoToken`] for [`FencingToken::NONE`].
pub fn value(token: FencingToken) -> Result<String, NoToken> {
    super::encoded_token(token)
}

/// Creates the table `tenure_fence`, one row for each key, in the first schema of the search path.
///
/// The column's check keeps out what `numeric` allows beyond tokens, above all `NaN`, which PostgreSQL holds to be
/// greater than every number: once there, it would refuse everybody.
pub const TABLE: &str = "\
CREATE TABLE IF NOT EXISTS tenure_fence (
    key text PRIMARY KEY,
    token numeric(39) NOT NULL CHECK (token BETWEEN 1 AND 340282366920938463463374607431768211455)
)";

/// Installs a token: `$1` is the key, `$2` the token as text. 1 row: accepted. 0 rows: stale, a newer one is there.
///
/// The first thing that a new holder does, before it reads; also the first statement of a transaction that writes. If
/// `synchronous_commit` is off it is `local` from here to the end of the transaction. For 0, which stands for no token,
/// it fails with SQLSTATE 22P02 and says why.
// The text is cast to a number in order to fail. It contains the key, so that no planner evaluates the cast beforehand,
// when nothing is known of the token.
pub const INSTALL: &str = "\
INSERT INTO tenure_fence AS old (key, token)
SELECT $1::text, CASE
    WHEN $2::text::numeric(39) <> 0 THEN $2::text::numeric(39)
    ELSE ('the holder of ' || $1::text || ' has no fencing token: use tenure serve, or ?fencing=ordered')::numeric
END
WHERE CASE WHEN current_setting('synchronous_commit') = 'off'
    THEN set_config('synchronous_commit', 'local', true) ELSE 'as it is' END <> 'off'
ON CONFLICT (key) DO UPDATE SET token = EXCLUDED.token
WHERE old.token <= EXCLUDED.token";

/// The beginning of a fenced write: `$1` is the key, `$2` the token as text, your own parameters begin at `$3`.
///
/// Your statement follows it, and must end in the condition `EXISTS (SELECT FROM admitted)`: without that it writes
/// whatever the token. 0 rows: stale, or no token, or nothing was installed for the key, or your own conditions met no row.
///
/// ```sql
/// WITH admitted AS (…)
/// UPDATE reports SET body = $3 WHERE id = $4 AND EXISTS (SELECT FROM admitted);
/// -- or: INSERT INTO lines (line) SELECT $3 WHERE EXISTS (SELECT FROM admitted);
/// -- or: DELETE FROM lines WHERE line = $3 AND EXISTS (SELECT FROM admitted);
/// ```
pub const ADMIT: &str = "\
WITH admitted AS (
    UPDATE tenure_fence SET token = $2::text::numeric(39)
    WHERE key = $1 AND token <= $2::text::numeric(39) AND $2::text::numeric(39) > 0
    RETURNING token
)";

/// The newest token installed for the key `$1`, as text, for a [`Stale`](super::Stale) that says what came in between.
///
/// To be shown, not to be decided by: it may be out of date when it arrives.
pub const NEWEST: &str = "SELECT token::text FROM tenure_fence WHERE key = $1";

/// The column for a row that is protected by a lock of its own: `ALTER TABLE reports ADD COLUMN` and then this.
pub const COLUMN: &str = "fence numeric(39) NOT NULL DEFAULT 0 \
CHECK (fence BETWEEN 0 AND 340282366920938463463374607431768211455)";
