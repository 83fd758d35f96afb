//! Locks that live and die with a transaction of the caller, beside those of sessions.

use tenure::ErrorKind;
use tenure::postgres::{
    AdvisoryKey, LOCK_BIGINT_SQL, LOCK_SQL, lock_in, lock_shared_in, try_lock_in,
};
use tokio_postgres::Transaction;
use tokio_postgres::types::Type;

use crate::services;
use crate::support::{TTL, client, stranger, until};

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_of_a_transaction_and_one_of_a_session_exclude_each_other_through_any_pooler() {
    let (Some(server), Some(pooler)) = (services::postgres(), services::pgbouncer()) else {
        return;
    };
    let locks = client(&server);
    for url in [&server, &pooler] {
        for key in [format!("in transactions/{}", std::process::id()), "-4711,5".to_owned()] {
            let mut own = stranger(url).await;
            let held = locks.lock(&key).ttl(TTL).acquire().await.unwrap();
            let transaction = own.transaction().await.unwrap();
            assert!(!try_lock_in(&transaction, &key).await.unwrap());
            held.release().await.unwrap();
            until("free", async || try_lock_in(&transaction, &key).await.unwrap()).await;
            let refused = locks.lock(&key).ttl(TTL).try_acquire().await.unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Held);
            let waiting = locks.lock(&key).ttl(TTL).enqueue().await.unwrap();
            transaction.commit().await.unwrap();
            waiting.wait().await.unwrap().release().await.unwrap();

            let transaction = own.transaction().await.unwrap();
            lock_in(&transaction, &key).await.unwrap();
            transaction.rollback().await.unwrap();
            locks.lock(&key).ttl(TTL).try_acquire().await.unwrap().release().await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn shared_locks_wait_for_exclusive_ones_and_a_timeout_is_named() {
    let Some(url) = services::postgres() else { return };
    let key = format!("shared in transactions/{}", std::process::id());
    let (mut one, mut two, mut three) =
        (stranger(&url).await, stranger(&url).await, stranger(&url).await);
    let (one, two) = (one.transaction().await.unwrap(), two.transaction().await.unwrap());
    lock_shared_in(&one, &key).await.unwrap();
    lock_shared_in(&two, &key).await.unwrap();
    let late = three.transaction().await.unwrap();
    late.batch_execute("SET LOCAL lock_timeout = '50ms'").await.unwrap();
    let error = lock_in(&late, &key).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    late.rollback().await.unwrap();
    let waits = three.transaction().await.unwrap();
    let (waited, ()) = tokio::join!(lock_in(&waits, &key), async {
        one.commit().await.unwrap();
        two.commit().await.unwrap();
    });
    waited.unwrap();
    assert_eq!(lock_in(&waits, "").await.unwrap_err().kind(), ErrorKind::Invalid);
}

/// Advisory locks of the transaction, as `pg_locks` shows them.
async fn own_locks(transaction: &Transaction<'_>) -> Vec<(i64, i64, i16)> {
    let sql = "SELECT classid::int8, objid::int8, objsubid FROM pg_locks \
               WHERE locktype = 'advisory' AND pid = pg_backend_pid()";
    let rows = transaction.query(sql, &[]).await.unwrap();
    rows.iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_published_statements_take_the_same_locks() {
    let Some(url) = services::postgres() else { return };
    let mut db = stranger(&url).await;
    let keys = [
        "published/ü",
        "1234,5678",
        "-5,0",
        "0,0",
        "-2147483648,2147483647",
        "2147483648,0",
        "0,-2147483649",
        "07,5",
        "7,-05",
        "-0,1",
        "1,-0",
        "99999999999999999999,1",
        "1234",
        "1234,",
        ",1",
        "1,2,3",
        "+1,2",
        "1, 2",
        "--1,2",
        "-,1",
        "٣,٤",
        "42",
        "-42",
        "0",
        "-0",
        "042",
        "+7",
        "+07",
        "- 7",
        "9223372036854775807",
        "-9223372036854775808",
        "9223372036854775808",
        "-616986387",
        "1e3",
        "0x10",
    ];
    let (mut locked, mut refused) = (0, 0);
    for key in keys {
        for bigint in [false, true] {
            let (own, sql) = if bigint {
                (AdvisoryKey::bigint(key), LOCK_BIGINT_SQL)
            } else {
                (AdvisoryKey::from(key), LOCK_SQL)
            };
            let transaction = db.transaction().await.unwrap();
            let ours = lock_in(&transaction, own).await;
            let ours = match ours {
                Ok(()) => Some(own_locks(&transaction).await),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Invalid, "{key:?}: {error}");
                    None
                }
            };
            transaction.rollback().await.unwrap();
            let transaction = db.transaction().await.unwrap();
            let published = transaction.query_typed(sql, &[(&key, Type::TEXT)]).await;
            let published = match published {
                Ok(_) => Some(own_locks(&transaction).await),
                Err(error) => {
                    let code = error.code().unwrap().code();
                    assert!(["22003", "22P02"].contains(&code), "{key:?}: {error}");
                    None
                }
            };
            transaction.rollback().await.unwrap();
            assert_eq!(ours, published, "{key:?}, bigint {bigint}");
            let found = ours.map_or(0, |locks| locks.len());
            (locked, refused) = (locked + found, refused + 1 - found);
        }
    }
    assert!(locked > 40 && refused > 15, "{locked} keys, {refused} refused");
}
