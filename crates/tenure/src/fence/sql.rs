//! Fenced writes to PostgreSQL: statements for any driver.
//!
//! There are two ways. **A column on the protected row** if a lock protects one row: no other row is locked or written.
//! **The table `tenure_fence`** if a lock protects several rows or tables. Either way, a statement accepts a token that
//! is at least as new as the newest seen, and reports the result as its number of rows: 0 means stale.
//!
//! # A column on the row
//!
//! Add [`COLUMN`] to the table, then add token and check to your own statements, here with the row's id as `$1` and the
//! token as `$2`:
//!
//! ```sql
//! -- A new holder, before anything else: installs the token and reads in one statement.
//! UPDATE reports SET fence = $2::text::numeric(39)
//!     WHERE id = $1 AND fence <= $2::text::numeric(39) AND $2::text::numeric(39) > 0
//!     RETURNING body;
//!
//! -- Every write.
//! UPDATE reports SET body = $3, fence = $2::text::numeric(39)
//!     WHERE id = $1 AND fence <= $2::text::numeric(39) AND $2::text::numeric(39) > 0;
//!
//! -- A write that creates the row if there is none.
//! INSERT INTO reports AS old (id, body, fence)
//!     SELECT $1, $3, $2::text::numeric(39) WHERE $2::text::numeric(39) > 0
//!     ON CONFLICT (id) DO UPDATE SET body = EXCLUDED.body, fence = EXCLUDED.fence
//!     WHERE old.fence <= EXCLUDED.fence;
//! ```
//!
//! The condition `> 0` refuses a holder that has no token. Its token is 0, which is as new as the default of a row that
//! was never written. In a program, [`value`] refuses it earlier, with the reason.
//!
//! The statements also report 0 rows if no row has that id. Deleting a row deletes its token as well, so a late holder
//! could create the row again: mark rows as deleted, or use the table.
//!
//! # The table
//!
//! Create it with [`TABLE`]. A new holder runs [`INSTALL`] before it reads anything; every write begins with [`ADMIT`]:
//!
//! ```
//! use tenure::fence::sql;
//!
//! /// Saves the report; false if a newer holder has installed its token.
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
//! # let service = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/services/example.rs"));
//! # let Some(url) = service("TENURE_TEST_POSTGRES") else { return Ok(()) };
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
//! Put several statements that belong together into one transaction that begins with [`INSTALL`]; roll back if it
//! reports 0 rows. Otherwise the transaction has locked the row in `tenure_fence`, and no newer holder is admitted
//! before the commit.
//!
//! # Durability
//!
//! With `synchronous_commit = off`, a crash of the database loses the latest commits, and with them the newest token.
//! An older holder would be admitted again, though a newer one has read. So [`INSTALL`] raises the setting to `local`
//! until the end of its transaction. With a column on the row, or in a transaction that another holder's reads depend
//! on, run `SET LOCAL synchronous_commit = local` yourself.
//!
//! # Why the token is text
//!
//! A token has 128 bits, which do not fit a `bigint`, so the column is a `numeric(39)`. Few drivers send a number of
//! that size, and each does it in its own way; all drivers send text. `$2::text::numeric(39)` makes the parameter a
//! text for the driver and a number for the comparison. Never compare texts: `'10'` sorts before `'9'`.
//!
//! # Concurrent statements
//!
//! - **Read committed**, the default. The check is part of an `UPDATE`, so it locks the row that has the token. The
//!   second of two statements waits until the first commits, and then PostgreSQL evaluates its condition again on the
//!   current row. A stale write that had to wait reports 0 rows.
//! - **Repeatable read and serializable.** The second statement fails with SQLSTATE 40001 instead. Nothing was written:
//!   run the transaction again from its beginning, and it will report 1 row or 0.
//! - **A check without a lock does not protect.** A `SELECT` of the token before the write, or in a subquery of it,
//!   sees the database as it was when the statement began. A newer holder can install its token and write before your
//!   write happens.
//! - **Install before you read, in a statement of its own.** Except for the row it updates, a statement reads the
//!   database as of its beginning, and it may have waited for a lock since. For the same reason a repeatable-read
//!   transaction has to begin with [`INSTALL`], after the lock was acquired: all its statements see the database as of
//!   its first statement.

use super::NoToken;
use crate::FencingToken;

/// Parameter `$2` for this token.
///
/// # Errors
///
/// [`NoToken`] for [`FencingToken::NONE`].
pub fn value(token: FencingToken) -> Result<String, NoToken> {
    super::encoded_token(token)
}

/// Statement that creates the table `tenure_fence`, one row per key, in the first schema of the search path.
///
/// The check of the column excludes values of `numeric` that are not tokens, above all `NaN`. PostgreSQL sorts `NaN`
/// above every number, so a row with `NaN` would refuse every holder.
pub const TABLE: &str = "\
CREATE TABLE IF NOT EXISTS tenure_fence (
    key text PRIMARY KEY,
    token numeric(39) NOT NULL CHECK (token BETWEEN 1 AND 340282366920938463463374607431768211455)
)";

/// Statement that installs a token: `$1` is the key, `$2` the token as text. 1 row: accepted. 0 rows: stale, a newer
/// token is installed.
///
/// A new holder runs it first, before it reads; it is also the first statement of a transaction that writes. If
/// `synchronous_commit` is off, the statement sets it to `local` until the end of the transaction. For the token 0,
/// which stands for no token, it fails with SQLSTATE 22P02 and a message that says why.
// Casting the message to a number makes the statement fail with that message. The message contains the key, a
// parameter, so that the planner cannot evaluate the cast as a constant, before the token is known.
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

/// First part of a fenced write: `$1` is the key, `$2` the token as text, your own parameters begin at `$3`.
///
/// Your statement follows it and must end in the condition `EXISTS (SELECT FROM admitted)`: without it, the statement
/// writes whatever the token is. 0 rows: the token is stale or 0, or no token is installed for the key, or no row met
/// your own conditions.
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

/// Query of the newest token installed for the key `$1`, as text, to fill a [`Stale`](super::Stale).
///
/// For display, not for decisions: the result may be out of date when it arrives.
pub const NEWEST: &str = "SELECT token::text FROM tenure_fence WHERE key = $1";

/// Column of a row that a lock of its own protects: `ALTER TABLE reports ADD COLUMN`, followed by this text.
pub const COLUMN: &str = "fence numeric(39) NOT NULL DEFAULT 0 \
CHECK (fence BETWEEN 0 AND 340282366920938463463374607431768211455)";
