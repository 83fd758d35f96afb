//! Locks in a transaction of your own, on PostgreSQL.
//!
//! The lock begins in the transaction and ends with it, whether it commits, rolls back, or its connection breaks. It
//! needs no connection of its own and no lease, and works through every pooler: a pooler keeps a transaction on one
//! session. It is an advisory lock: it excludes the locks and elections of [`PgAdvisoryStore`](crate::PgAdvisoryStore)
//! on the same key and database, and pgleaderlock's.
//!
//! There is no guard and no fencing token, because the lock protects only what the transaction itself writes.
//!
//! ```no_run
//! # async fn example(client: &mut tokio_postgres::Client) -> Result<(), Box<dyn std::error::Error>> {
//! let transaction = client.transaction().await?;
//! tenure::postgres::lock_in(&transaction, "invoices/2026").await?; // waits for its turn
//! transaction.execute("INSERT INTO invoices …", &[]).await?;
//! transaction.commit().await?; // the lock ends here
//! # Ok(()) }
//! ```
//!
//! # Keys
//!
//! PostgreSQL has two kinds of advisory locks, which never exclude each other. So there are two forms of keys:
//!
//! | form | numbers | names | store |
//! |---|---|---|---|
//! | pair | `1234,5678`: two signed 32-bit numbers | hashed to two numbers, see [`LOCK_SQL`] | `postgres+advisory://…` |
//! | [`AdvisoryKey::bigint`] | `42`: one signed 64-bit number | hashed to one number, see [`LOCK_BIGINT_SQL`] | `postgres+advisory://…?key=bigint` |
//!
//! Other languages and drivers send [`LOCK_SQL`] or [`LOCK_BIGINT_SQL`] in a transaction, with the key as its
//! parameter.

use std::fmt;

use tokio_postgres::Transaction;
use tokio_postgres::types::Type;

use crate::store::pg::failure::{self, RequestStage};
use crate::store::pg_advisory::{KeyForm, LockId, Pair};
use crate::{Error, ErrorKind, Key, Result};

/// SQL that locks a key (`$1`) until the end of the transaction, and waits for it. It takes the lock that [`lock_in`]
/// takes: that of two numbers for `1234,5678`, else that of the hashed name. Numbers that `lock_in` refuses fail with
/// SQLSTATE 22003 (too large) or 22P02 (a zero too many).
pub const LOCK_SQL: &str = "SELECT pg_advisory_xact_lock(n.key1, n.key2) FROM (SELECT \
    CASE WHEN k.text ~ '^(0|-?[1-9][0-9]*),(0|-?[1-9][0-9]*)$' THEN split_part(k.text, ',', 1)::int \
         WHEN k.text ~ '^-?[0-9]+,-?[0-9]+$' THEN ('a zero too many: ' || k.text)::int \
         ELSE ('x' || substr(k.hash, 1, 8))::bit(32)::int END AS key1, \
    CASE WHEN k.text ~ '^(0|-?[1-9][0-9]*),(0|-?[1-9][0-9]*)$' THEN split_part(k.text, ',', 2)::int \
         ELSE ('x' || substr(k.hash, 9, 8))::bit(32)::int END AS key2 \
    FROM (SELECT $1::text AS text, encode(sha256(convert_to($1::text, 'UTF8')), 'hex') AS hash) AS k) AS n";

/// As [`LOCK_SQL`], for [`AdvisoryKey::bigint`].
pub const LOCK_BIGINT_SQL: &str = "SELECT pg_advisory_xact_lock(\
    CASE WHEN k.text = '-616986387' THEN ('a key of `tenure schema`: ' || k.text)::bigint \
         WHEN k.text ~ '^(0|-?[1-9][0-9]*)$' THEN k.text::bigint \
         WHEN k.text ~ '^[-+]?[0-9]+$' THEN ('a zero or a sign too many: ' || k.text)::bigint \
         WHEN k.text ~ '^-?[0-9]+,-?[0-9]+$' THEN ('a pair, not a number: ' || k.text)::bigint \
         ELSE ('x' || substr(k.hash, 1, 16))::bit(64)::bigint END) \
    FROM (SELECT $1::text AS text, encode(sha256(convert_to($1::text, 'UTF8')), 'hex') AS hash) AS k";

/// Key of a lock in a transaction. Any text is a key in the pair form.
///
/// ```no_run
/// # async fn example(transaction: &tokio_postgres::Transaction<'_>) -> tenure::Result<()> {
/// use tenure::postgres::{AdvisoryKey, lock_in};
///
/// lock_in(transaction, "1234,5678").await?; // pg_advisory_xact_lock(1234, 5678)
/// lock_in(transaction, AdvisoryKey::bigint(42)).await?; // pg_advisory_xact_lock(42)
/// lock_in(transaction, AdvisoryKey::bigint("invoices/2026")).await?; // hashed to 64 bits
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdvisoryKey {
    text: String,
    form: KeyForm,
}

impl AdvisoryKey {
    /// A key of 64 bits: a number, or a name that is hashed to one. It is the lock of `?key=bigint` in a URL.
    pub fn bigint(key: impl fmt::Display) -> Self {
        Self { text: key.to_string(), form: KeyForm::Bigint }
    }
}

impl<T: AsRef<str>> From<T> for AdvisoryKey {
    fn from(key: T) -> Self {
        Self { text: key.as_ref().to_owned(), form: KeyForm::Pair }
    }
}

/// Locks a key until the end of the transaction, and waits for it.
///
/// The wait ends with the `lock_timeout` or `statement_timeout` of the session, if one is set. The error is then
/// `Timeout`, and the transaction can only be rolled back. Two transactions that lock the same keys in another order
/// deadlock: the server ends one of them.
///
/// # Errors
///
/// `Invalid` if the key is invalid. `Timeout` as above. Any other error of the server or the connection.
///
/// # Cancel safety
///
/// Not cancel safe: after a drop the transaction may hold the lock or wait for it. Roll it back.
pub async fn lock_in(transaction: &Transaction<'_>, key: impl Into<AdvisoryKey>) -> Result<()> {
    ask(transaction, &key.into(), "pg_advisory_xact_lock").await.map(drop)
}

/// As [`lock_in`], in shared mode: any number of transactions share the key, and exclude [`lock_in`].
///
/// # Errors
///
/// As for [`lock_in`].
///
/// # Cancel safety
///
/// As for [`lock_in`].
pub async fn lock_shared_in(
    transaction: &Transaction<'_>,
    key: impl Into<AdvisoryKey>,
) -> Result<()> {
    ask(transaction, &key.into(), "pg_advisory_xact_lock_shared").await.map(drop)
}

/// Locks a key until the end of the transaction if it is free. Returns false if it is held.
///
/// # Errors
///
/// `Invalid` if the key is invalid, or any error of the server or the connection.
///
/// # Cancel safety
///
/// Not cancel safe: after a drop the transaction may hold the lock. Roll it back.
pub async fn try_lock_in(
    transaction: &Transaction<'_>,
    key: impl Into<AdvisoryKey>,
) -> Result<bool> {
    ask(transaction, &key.into(), "pg_try_advisory_xact_lock").await
}

/// Calls a function of the server with the numbers of a key. Returns true, or the answer of a function that tries.
async fn ask(transaction: &Transaction<'_>, key: &AdvisoryKey, function: &str) -> Result<bool> {
    let (form, key) = (key.form, Key::new(&key.text)?);
    let call = |arguments| format!("SELECT {function}({arguments})::text <> 'false' AS granted");
    let rows = match LockId::of(form, &key)? {
        LockId::Pair(Pair { first, second }) => {
            let parameters = [(&first as _, Type::INT4), (&second as _, Type::INT4)];
            transaction.query_typed(&call("$1, $2"), &parameters).await
        }
        LockId::Bigint(number) => {
            transaction.query_typed(&call("$1"), &[(&number, Type::INT8)]).await
        }
    };
    let rows = rows.map_err(|error| explain(error).on(&key))?;
    Ok(rows.first().is_some_and(|row| row.get("granted")))
}

/// Converts the error of a statement that waits for a lock.
fn explain(error: tokio_postgres::Error) -> Error {
    let message = match error.code().map(tokio_postgres::error::SqlState::code) {
        Some("55P03") => "another transaction or session holds it, and lock_timeout has passed",
        Some("57014") => "the statement was cancelled, or statement_timeout has passed",
        _ => return failure::explain(error, RequestStage::Asking),
    };
    Error::new(ErrorKind::Timeout, message).because(error)
}
