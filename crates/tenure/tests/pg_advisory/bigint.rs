//! Keys of 64 bits: beside sessions that call `pg_advisory_lock(bigint)` themselves, and apart from all other locks.

use std::sync::Arc;

use tenure::postgres::{AdvisoryKey, LOCK_BIGINT_SQL, lock_in, lock_shared_in, try_lock_in};
use tenure::store::KeySpace;
use tenure::{Client, ErrorKind, PgAdvisoryStore};
use tokio_postgres::types::Type;

use crate::interop::Psql;
use crate::refusals::says;
use crate::services;
use crate::support::{TTL, advisory, client, own_lock, pair, stranger, until};

/// A client of a store with 64-bit keys.
fn bigint(url: &str) -> Client {
    client(&format!("{url}?key=bigint"))
}

/// A 64-bit key of this test alone.
fn own_number() -> i64 {
    own_lock("key=bigint").0.parse().unwrap()
}

async fn is_true(db: &tokio_postgres::Client, sql: &str) -> bool {
    db.query_one(sql, &[]).await.unwrap().get(0)
}

async fn held(client: &Client, key: &str) {
    let error = client.lock(key).ttl(TTL).try_acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Held, "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_that_call_the_functions_by_hand_exclude_us_and_are_excluded() {
    let Some(url) = services::postgres() else { return };
    let number = own_number();
    let (ours, theirs) = (bigint(&url), stranger(&url).await);
    for number in [number, !number, number >> 34, -9_000_000_000, i64::MIN, i64::MAX, -1, 0] {
        let key = &number.to_string();
        let call = |function: &str| format!("SELECT pg_{function}('{number}'::bigint)");
        theirs.batch_execute(&call("advisory_lock")).await.unwrap();
        held(&ours, key).await;
        let shared = ours.lock(key).shared().ttl(TTL).try_acquire().await.unwrap_err();
        assert_eq!(shared.kind(), ErrorKind::Held, "{shared}");
        let waiting = tokio::spawn(ours.lock(key).ttl(TTL).acquire());
        until("our wait", async || ours.inspect(key).await.unwrap().waiters.len() == 1).await;
        assert!(is_true(&theirs, &call("advisory_unlock")).await);
        let guard = waiting.await.unwrap().unwrap();
        assert!(!is_true(&theirs, &call("try_advisory_lock")).await, "{key} is held by us");
        assert!(!is_true(&theirs, &call("try_advisory_lock_shared")).await, "{key} is held by us");
        guard.release().await.unwrap();
        assert!(is_true(&theirs, &call("try_advisory_lock")).await, "{key} is free");
        held(&ours, key).await;
        assert!(is_true(&theirs, &call("advisory_unlock")).await);

        assert!(is_true(&theirs, &call("try_advisory_lock_shared")).await);
        held(&ours, key).await;
        let shared = ours.lock(key).shared().ttl(TTL).try_acquire().await.unwrap();
        assert!(is_true(&theirs, &call("advisory_unlock_shared")).await);
        assert!(!is_true(&theirs, &call("try_advisory_lock")).await, "{key} is shared by us");
        shared.release().await.unwrap();

        let lock = call("advisory_xact_lock");
        theirs.batch_execute(&format!("BEGIN; {lock}")).await.unwrap();
        held(&ours, key).await;
        theirs.batch_execute("COMMIT").await.unwrap();
        ours.lock(key).ttl(TTL).try_acquire().await.unwrap().release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn psql_takes_turns_with_an_election() {
    let Some(url) = services::postgres() else { return };
    let Some(programs) = services::postgres_programs() else { return };
    let number = -own_number().abs();
    let (ours, mut one) = (bigint(&url), Psql::start(&programs, &url));
    let lock = format!("SELECT pg_try_advisory_lock({number})");
    assert_eq!(one.ask(&lock), "t");
    let election = ours.election(number.to_string()).ttl(TTL).start().await.unwrap();
    until("our wait", async || ours.inspect(number.to_string()).await.unwrap().waiters.len() == 1)
        .await;
    assert!(!election.is_leader());
    drop(one);
    assert!(election.wait_for_leadership(TTL * 10).await.unwrap(), "its session has ended");
    let mut two = Psql::start(&programs, &url);
    assert_eq!(two.ask(&lock), "f", "held by us");
    election.shutdown(None).await.unwrap();
    assert_eq!(two.ask(&lock), "t", "free again");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_hold_is_shown_and_named() {
    let Some(url) = services::postgres() else { return };
    let (number, theirs) = (own_number(), stranger(&url).await);
    let key = number.to_string();
    let sql = format!(
        "SET application_name = 'nightly export'; SELECT pg_advisory_lock('{number}'::int8)"
    );
    theirs.batch_execute(&sql).await.unwrap();
    let ours = bigint(&url);
    let state = ours.inspect(&key).await.unwrap();
    assert_eq!(state.holders.len(), 1, "{state:?}");
    assert_eq!(state.holders[0].by.as_ref().unwrap().id, "nightly export");
    let listed = ours.list("").await.unwrap();
    let listed = listed.iter().filter(|state| state.key.as_str() == key);
    assert_eq!(listed.map(|state| state.holders.len()).collect::<Vec<_>>(), [1]);
    assert!(client(&url).list(&key).await.unwrap().is_empty(), "no lock of two numbers");
    let error = ours.lock(&key).ttl(TTL).try_acquire().await.unwrap_err();
    assert!(error.to_string().contains("nightly export"), "{error}");
    assert!(error.to_string().contains("key=bigint"), "the store is named with its form: {error}");
    let findings = ours.examine(TTL * 10).await;
    let tells = |part: &str| findings.iter().any(|it| it.detail.contains(part));
    assert!(tells("pg_advisory_lock(bigint)"), "{findings:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn locks_of_the_two_forms_are_separate_and_listed_apart() {
    let Some(url) = services::postgres() else { return };
    let name = format!("both forms/{}", std::process::id());
    let (pairs, numbers) = (client(&url), bigint(&url));
    let one = pairs.lock(&name).id("pairs").ttl(TTL).acquire().await.unwrap();
    let two = numbers.lock(&name).id("numbers").ttl(TTL).try_acquire().await.unwrap();
    for (client, id) in [(&pairs, "pairs"), (&numbers, "numbers")] {
        let shown = client.store().list(KeySpace::Lock, &name, None).await.unwrap();
        let ids = shown.iter().flat_map(|state| &state.holders);
        let ids: Vec<_> = ids.map(|holder| holder.by.as_ref().unwrap().id.as_str()).collect();
        assert_eq!(ids, [id], "{shown:?}");
    }
    one.release().await.unwrap();
    two.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_is_the_64_bit_number_that_the_docs_say() {
    let Some(url) = services::postgres() else { return };
    let name = format!("reports/nightly/ü/{}", std::process::id());
    let page = include_str!("../../../../docs/postgres-advisory.md");
    let (_, section) = page.split_once("## 64-bit keys\n").unwrap();
    let block = section.split_once("```sql\n").unwrap().1.split_once("```").unwrap().0;
    let (ours, sql) = (bigint(&url), stranger(&url).await);
    let row = sql.query_one(&block.replace("reports/nightly", &name), &[]).await.unwrap();
    let number: i64 = row.get("key");
    let guard = ours.lock(&name).ttl(TTL).acquire().await.unwrap();
    assert!(!is_true(&sql, &format!("SELECT pg_try_advisory_lock('{number}'::int8)")).await);
    assert_eq!(ours.inspect(number.to_string()).await.unwrap().holders.len(), 1);
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_locks_the_same_number() {
    let Some(url) = services::postgres() else { return };
    let ours = bigint(&url);
    let name = format!("64 bits in transactions/{}", std::process::id());
    let (mut one, mut two) = (stranger(&url).await, stranger(&url).await);
    for key in [name, own_number().to_string(), (i64::MIN + 1).to_string()] {
        let held = ours.lock(&key).ttl(TTL).acquire().await.unwrap();
        let transaction = one.transaction().await.unwrap();
        assert!(!try_lock_in(&transaction, AdvisoryKey::bigint(&key)).await.unwrap());
        assert!(
            try_lock_in(&transaction, &format!("pair of {key}")).await.unwrap(),
            "not this one"
        );
        held.release().await.unwrap();
        lock_in(&transaction, AdvisoryKey::bigint(&key)).await.unwrap();
        self::held(&ours, &key).await;
        transaction.commit().await.unwrap();
        ours.lock(&key).ttl(TTL).try_acquire().await.unwrap().release().await.unwrap();

        let (one, two) = (one.transaction().await.unwrap(), two.transaction().await.unwrap());
        lock_shared_in(&one, AdvisoryKey::bigint(&key)).await.unwrap();
        lock_shared_in(&two, AdvisoryKey::bigint(&key)).await.unwrap();
        let shared = ours.lock(&key).shared().ttl(TTL).try_acquire().await.unwrap();
        shared.release().await.unwrap();
        self::held(&ours, &key).await;
    }
    let transaction = one.transaction().await.unwrap();
    let error = lock_in(&transaction, AdvisoryKey::bigint("1,2")).await.unwrap_err();
    says(&error, ErrorKind::Invalid, "key=bigint");
    let name = format!("published, 64 bits/ü/{}", std::process::id());
    transaction.query_typed(LOCK_BIGINT_SQL, &[(&name, Type::TEXT)]).await.unwrap();
    let two = two.transaction().await.unwrap();
    assert!(!try_lock_in(&two, AdvisoryKey::bigint(&name)).await.unwrap());
    held(&ours, &name).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_keys_are_refused_before_a_server_is_asked() {
    // No server listens there.
    let ours = bigint("postgres://app@127.0.0.1:1/app");
    for (key, part) in [
        ("9223372036854775808", "between -9223372036854775808 and 9223372036854775807"),
        ("042", "write 42"),
        ("+7", "write 7"),
        ("1234,5678", "one number, or a name"),
    ] {
        says(&ours.election(key).build().unwrap_err(), ErrorKind::Invalid, part);
        let error = ours.lock(key).ttl(TTL).try_acquire().await.unwrap_err();
        says(&error, ErrorKind::Invalid, part);
        let error = ours.inspect(key).await.unwrap_err();
        says(&error, ErrorKind::Invalid, part);
    }
    let error = PgAdvisoryStore::open("postgres+advisory://h/d?key=int8").unwrap_err();
    says(&error, ErrorKind::Invalid, "key=bigint");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_lock_of_the_schema_is_no_key() {
    let Some(url) = services::postgres() else { return };
    let db = stranger(&url).await;
    let sql = "SELECT hashtext('tenure schema')::int8";
    let number: i64 = db.query_one(sql, &[]).await.unwrap().get(0);
    let refused = bigint(&url).election(number.to_string()).build().unwrap_err();
    says(&refused, ErrorKind::Invalid, "tenure schema");
}

#[tokio::test(flavor = "multi_thread")]
async fn terms_of_64_bit_keys_are_counted_in_a_table_of_their_own() {
    let Some(url) = services::postgres() else { return };
    let (number, admin) = (own_number(), stranger(&url).await);
    let name = format!("tenure_bigint_terms_{}", std::process::id());
    let (counted, of_pairs) =
        (format!("{url}?key=bigint&terms={name}"), format!("{url}?terms={name}"));
    let open = |url: &str| PgAdvisoryStore::open(&advisory(url)).unwrap();
    open(&of_pairs).apply_schema().await.unwrap();
    let refusal =
        async |url: &str, key: &str| client(url).lock(key).ttl(TTL).acquire().await.unwrap_err();
    let error = refusal(&counted, &number.to_string()).await;
    says(&error, ErrorKind::Misconfigured, "not a table of terms for this key form");
    let findings = client(&counted).examine(TTL * 10).await;
    let terms = findings.iter().find(|finding| finding.what == "terms").unwrap();
    assert!(terms.detail.contains("no table"), "{terms:?}");
    let error = open(&counted).apply_schema().await.unwrap_err();
    says(&error, ErrorKind::Misconfigured, "nothing was changed");
    admin.batch_execute(&format!("DROP TABLE {name}")).await.unwrap();
    open(&counted).apply_schema().await.unwrap();
    open(&counted).apply_schema().await.unwrap();
    let ours = client(&counted);
    for number in [number, i64::MIN + 2] {
        for term in 1..=2_i64 {
            let key = number.to_string();
            ours.lock(key).ttl(TTL).acquire().await.unwrap().release().await.unwrap();
            let sql = format!("SELECT terms FROM {name} WHERE key = $1");
            assert_eq!(admin.query_one(&sql, &[&number]).await.unwrap().get::<_, i64>(0), term);
        }
    }
    let error = refusal(&of_pairs, "1,2").await;
    says(&error, ErrorKind::Misconfigured, "not a table of terms for this key form");
    admin.batch_execute(&format!("DROP TABLE {name}")).await.unwrap();
}

/// Advisory locks of sessions whose name has this prefix: `objsubid`, `classid` and `objid`.
async fn locks_of(db: &tokio_postgres::Client, prefix: &str) -> Vec<(i16, i64, i64)> {
    let sql = "SELECT l.objsubid, l.classid::int8, l.objid::int8 FROM pg_locks AS l \
               JOIN pg_stat_activity AS a ON a.pid = l.pid \
               WHERE l.locktype = 'advisory' AND a.application_name LIKE $1 || '%'";
    let rows = db.query(sql, &[&prefix]).await.unwrap();
    rows.iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect()
}

/// Waits for a lock, each on a connection of its own. The locks are released as soon as they are granted.
async fn crowd(url: &str, form: &str, key: &str, prefix: &str) -> Vec<tokio::task::JoinHandle<()>> {
    let observer = client(&format!("{url}?{form}"));
    let mut tasks = Vec::new();
    for nth in 0..7 {
        let request = client(&format!("{url}?{form}")).lock(key).ttl(TTL * 10);
        let request = request.id(format!("{prefix}{nth}"));
        tasks.push(tokio::spawn(async move {
            request.acquire().await.unwrap().release().await.unwrap();
        }));
        until("a waiter", async || observer.inspect(key).await.unwrap().waiters.len() == nth + 1)
            .await;
    }
    tasks
}

#[tokio::test(flavor = "multi_thread")]
async fn places_and_tickets_are_no_locks_of_either_form() {
    let Some(url) = services::postgres() else { return };
    let admin = stranger(&url).await;
    // A role that cannot read the comments of others.
    let role = format!("tenure_reader_{}", std::process::id());
    admin.batch_execute(&format!("CREATE ROLE {role} LOGIN")).await.unwrap();
    let plain = url.replace("postgres@", &format!("{role}@"));
    for (form, other, lock_space) in [("key=pair", "key=bigint", 2), ("key=bigint", "key=pair", 1)]
    {
        let (key, prefix) = (own_lock(form).0, format!("{form} {} ", std::process::id()));
        let guard = client(&format!("{url}?{form}")).lock(&key).ttl(TTL).acquire().await.unwrap();
        let tasks = crowd(&url, form, &key, &prefix).await;
        let found = locks_of(&admin, &prefix).await;
        let queue = found.iter().filter(|(space, ..)| *space != lock_space);
        let queue: Vec<_> = queue.collect();
        assert_eq!(queue.len(), 7, "four places and three tickets: {found:?}");
        let own = found.iter().filter(|(space, ..)| *space == lock_space).count();
        assert_eq!(own, 4, "the waits of those that have a place: {found:?}");
        for url in [&url, &plain] {
            let theirs = client(&format!("{url}?{other}"));
            let is_own = |id: &str| id.starts_with(&prefix);
            let listed = theirs.list("").await.unwrap();
            let holders = listed.iter().flat_map(|state| &state.holders);
            let shown = holders.filter_map(|holder| holder.by.as_ref());
            assert_eq!(shown.filter(|by| is_own(&by.id)).count(), 0, "{other}: {listed:?}");
        }
        guard.release().await.unwrap();
        for task in tasks {
            task.await.unwrap();
        }
    }
    let gone = format!("SELECT count(*) = 0 FROM pg_stat_activity WHERE usename = '{role}'");
    until("the end of idle sessions", async || is_true(&admin, &gone).await).await;
    admin.batch_execute(&format!("DROP ROLE {role}")).await.unwrap();
}

/// A key that has the number of a place of another form's queue, which is a matter of chance: one of them waits, and that
/// is all.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_with_the_number_of_a_place_delays_and_breaks_nothing() {
    let Some(url) = services::postgres() else { return };
    let admin = stranger(&url).await;
    let (key, prefix) = (pair().0, format!("collision {} ", std::process::id()));
    let pairs = client(&url);
    let guard = pairs.lock(&key).ttl(TTL).acquire().await.unwrap();
    let tasks = crowd(&url, "key=pair", &key, &prefix).await;
    let found = locks_of(&admin, &prefix).await;
    // Places have small lower halves, tickets the time.
    let places = found.iter().filter(|(space, _, object)| *space == 1 && *object < 64);
    let numbers: Vec<_> = places.map(|(_, class, object)| class << 32 | object).collect();
    assert_eq!(numbers.len(), 4, "{found:?}");
    let ours = bigint(&url);
    for number in &numbers {
        held(&ours, &number.to_string()).await;
        let state = ours.inspect(number.to_string()).await.unwrap();
        assert!(state.holders[0].by.as_ref().unwrap().id.starts_with(&prefix), "{state:?}");
    }
    guard.release().await.unwrap();
    for task in tasks {
        task.await.unwrap();
    }
    // All places are taken by keys of the other form: waiters stand by and poll.
    let mut taken = Vec::new();
    for number in &numbers {
        taken.push(ours.lock(number.to_string()).ttl(TTL * 10).acquire().await.unwrap());
    }
    let guard = pairs.lock(&key).ttl(TTL).acquire().await.unwrap();
    let waiting = tokio::spawn(client(&url).lock(&key).ttl(TTL).acquire());
    until("a waiter", async || pairs.inspect(&key).await.unwrap().waiters.len() == 1).await;
    guard.release().await.unwrap();
    waiting.await.unwrap().unwrap().release().await.unwrap();
    for guard in taken {
        guard.release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_of_a_64_bit_key_is_noticed() {
    let Some(url) = services::postgres() else { return };
    let (ours, key) = (bigint(&url), own_number().to_string());
    let store = Arc::clone(ours.store());
    let guard = ours.lock(&key).ttl(TTL).acquire().await.unwrap();
    let state = ours.inspect(&key).await.unwrap();
    let watched = state.key.clone();
    let change =
        tokio::spawn(async move { store.changed(&watched, KeySpace::Lock, state.version).await });
    guard.release().await.unwrap();
    change.await.unwrap().unwrap();
}
