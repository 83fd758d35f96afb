//! Waiters leave a mark: they are shown, and the holder learns of them.

use std::sync::Arc;
use std::time::Duration;

use tenure::store::{FindingLevel, KeyState};
use tenure::{Client, ErrorKind};
use tokio::task::JoinSet;

use crate::services;
use crate::support::{Schema, Worker, until, with_schema};

const TTL: Duration = Duration::from_secs(3);

async fn waiting(client: &Client, key: &str) -> Vec<String> {
    ids(&client.inspect(key).await.unwrap())
}

/// Ids of the waiters.
fn ids(state: &KeyState) -> Vec<String> {
    state.waiters.iter().map(|waiter| waiter.by.clone().unwrap().id).collect()
}

async fn marks(schema: &Schema) -> i64 {
    let sql = format!("SELECT count(*) FROM {}.locks_waiters", schema.name);
    schema.connect().await.query_one(&sql, &[]).await.unwrap().get(0)
}

#[test]
fn waiters_are_shown_in_order_and_leave_no_mark_behind() {
    let Some(url) = services::postgres() else { return };
    with_schema(&url, async |schema| {
        let (holder, other) = (schema.client(), schema.client());
        let guard = holder.lock("a").ttl(TTL).acquire().await.unwrap();
        let tried = other.lock("a").id("tries").ttl(TTL).try_acquire().await.unwrap_err();
        assert_eq!(tried.kind(), ErrorKind::Held);
        let mut waits = Vec::new();
        for id in ["first", "second", "third"] {
            let request = other.lock("a").id(id).ttl(TTL).timeout(Duration::from_secs(60));
            waits.push(request.enqueue().await.unwrap());
        }
        assert_eq!(
            waiting(&holder, "a").await,
            ["first", "second", "third"],
            "and none that tried"
        );
        let listed = holder.list("").await.unwrap();
        assert_eq!(listed.len(), 1, "{listed:?}");
        assert_eq!(ids(&listed[0]), ["first", "second", "third"], "lists show them as well");
        assert_eq!(listed[0].holders.len(), 1, "{listed:?}");
        // Longer than the life of a mark, which is extended meanwhile.
        tokio::time::sleep(Duration::from_secs(6)).await;
        assert_eq!(waiting(&holder, "a").await.len(), 3);
        drop(waits.pop());
        until("the third has left", async || waiting(&holder, "a").await.len() == 2).await;
        guard.release().await.unwrap();
        // In no order.
        let mut served = JoinSet::new();
        for wait in waits {
            served.spawn(async move { wait.wait().await.unwrap().release().await.unwrap() });
        }
        served.join_all().await;
        until("no mark is left", async || marks(&schema).await == 0).await;
        let wait = other.lock("b").ttl(TTL).acquire().await.unwrap();
        let late = holder.lock("b").ttl(TTL).timeout(Duration::from_millis(100)).acquire().await;
        assert_eq!(late.unwrap_err().kind(), ErrorKind::Timeout);
        until("nor after a timeout", async || marks(&schema).await == 0).await;
        wait.release().await.unwrap();
    });
}

#[test]
fn a_holder_learns_of_waiters_for_locks_shared_locks_and_slots() {
    let Some(url) = services::postgres() else { return };
    with_schema(&url, async |schema| {
        let (holder, other) = (schema.client(), schema.client());
        let requests = |client: &Client, note: &str| {
            let lock = |key| client.lock(key).ttl(TTL).note(note);
            [
                lock("lock"),
                lock("readers").shared(),
                client.semaphore("slots", 1).ttl(TTL).note(note),
            ]
        };
        for (held, mut asked) in
            requests(&holder, "holds").into_iter().zip(requests(&other, "waits"))
        {
            let guard = held.acquire().await.unwrap();
            if guard.key().as_str() == "readers" {
                asked = other.lock("readers").ttl(TTL);
            }
            let early = tokio::time::timeout(TTL, guard.handoff_requested()).await;
            assert!(early.is_err(), "{}: nothing waits, and two renewals have passed", guard.key());
            let wait = asked.enqueue().await.unwrap();
            tokio::time::timeout(TTL * 5, guard.handoff_requested()).await.expect("asked");
            guard.release().await.unwrap();
            let next = wait.wait().await.unwrap();
            let early = tokio::time::timeout(TTL, next.handoff_requested()).await;
            assert!(early.is_err(), "{}: its own mark does not count", next.key());
            next.release().await.unwrap();
        }
    });
}

#[test]
fn the_mark_of_a_killed_waiter_ends_in_seconds() {
    let Some(url) = services::postgres() else { return };
    with_schema(&url, async |schema| {
        let client = schema.client();
        let guard = client.lock("key").ttl(TTL).acquire().await.unwrap();
        let mut waiter = Worker::start(&schema, "hold");
        until("it waits", async || !waiting(&client, "key").await.is_empty()).await;
        waiter.kill();
        until("its mark has ended", async || waiting(&client, "key").await.is_empty()).await;
        assert_eq!(marks(&schema).await, 1, "until it is cleaned up");
        assert_eq!(client.gc(Duration::ZERO).await.unwrap(), 1);
        assert_eq!(marks(&schema).await, 0);
        guard.release().await.unwrap();
    });
}

#[test]
fn a_table_without_waiters_works_as_before_and_the_doctor_says_so() {
    let Some(url) = services::postgres() else { return };
    with_schema(&url, async |schema| {
        let db = schema.connect().await;
        db.batch_execute(&format!("DROP TABLE {}.locks_waiters", schema.name)).await.unwrap();
        let (holder, other) = (schema.client(), schema.client());
        let guard = holder.lock("a").ttl(TTL).acquire().await.unwrap();
        let wait = other.lock("a").ttl(TTL).enqueue().await.unwrap();
        assert_eq!(waiting(&holder, "a").await, [""; 0]);
        let findings = holder.examine(Duration::from_secs(5)).await;
        let found = findings.iter().find(|finding| finding.what == "waiters").unwrap();
        assert_eq!(found.level, FindingLevel::Warning);
        assert!(found.advice.as_ref().unwrap().contains("tenure schema --locks --apply"));
        guard.release().await.unwrap();
        wait.wait().await.unwrap().release().await.unwrap();
        let role = format!("{}_user", schema.name);
        db.batch_execute(&format!(
            "CREATE ROLE {role}; GRANT UPDATE ON {}.locks TO {role}",
            schema.name
        ))
        .await
        .unwrap();
        let store = Arc::new(schema.store());
        store.apply_schema().await.unwrap();
        store.apply_schema().await.unwrap();
        let findings = Client::with_store(store).examine(Duration::from_secs(5)).await;
        assert!(findings.iter().all(|it| it.what != "waiters" || it.level == FindingLevel::Ok));
        let sql = format!(
            "SELECT has_table_privilege('{role}', '{}.locks_waiters', 'DELETE')",
            schema.name
        );
        assert!(db.query_one(&sql, &[]).await.unwrap().get::<_, bool>(0), "granted with the locks");
        db.batch_execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await.unwrap();
    });
}

#[test]
fn a_holder_goes_on_when_the_table_of_waiters_is_dropped_or_revoked() {
    let Some(url) = services::postgres() else { return };
    with_schema(&url, async |schema| {
        let db = schema.connect().await;
        let role = format!("{}_user", schema.name);
        let setup = format!(
            "CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA {0} TO {role}; \
             GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {0} TO {role}",
            schema.name
        );
        db.batch_execute(&setup).await.unwrap();
        let table = format!("{}.locks_waiters", schema.name);
        let server = services::postgres().unwrap().replace("postgres@", &format!("{role}@"));
        for change in [format!("REVOKE ALL ON {table} FROM {role}"), format!("DROP TABLE {table}")]
        {
            let url = schema.url_at(&server);
            let holder = Client::connect(&url).await.unwrap();
            let other = Client::connect(&url).await.unwrap();
            let guard = holder.lock("a").ttl(TTL).acquire().await.unwrap();
            let slot = holder.semaphore("b", 1).ttl(TTL).acquire().await.unwrap();
            let waits = other.lock("a").ttl(TTL).timeout(Duration::from_secs(60));
            let wait = waits.enqueue().await.unwrap();
            until("the waiter is marked", async || !waiting(&holder, "a").await.is_empty()).await;
            db.batch_execute(&change).await.unwrap();
            // Several renewals, and claims of the waiter.
            let lost = tokio::time::timeout(TTL * 2, async {
                tokio::select! { lost = guard.lost() => lost, lost = slot.lost() => lost }
            });
            assert!(lost.await.is_err(), "{change}: a hold was lost");
            assert_eq!(waiting(&holder, "a").await, [""; 0], "{change}");
            assert_eq!(holder.list("a").await.unwrap().len(), 1, "{change}");
            assert_eq!(holder.gc(Duration::ZERO).await.unwrap(), 0, "{change}");
            guard.release().await.unwrap();
            slot.release().await.unwrap();
            wait.wait().await.unwrap().release().await.unwrap();
            db.batch_execute(&setup.replace(&format!("CREATE ROLE {role} LOGIN; "), ""))
                .await
                .unwrap();
        }
        db.batch_execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await.unwrap();
    });
}

#[test]
fn a_mark_from_before_a_step_back_of_the_clock_does_not_count() {
    let Some(url) = services::postgres() else { return };
    with_schema(&url, async |schema| {
        let (holder, other) = (schema.client(), schema.client());
        let guard = holder.lock("a").ttl(TTL).acquire().await.unwrap();
        let request = other.lock("a").id("lives").ttl(TTL).timeout(Duration::from_secs(60));
        let wait = request.enqueue().await.unwrap();
        assert_eq!(waiting(&holder, "a").await, ["lives"]);
        // To the statements this is the same: the clock is an hour behind the marks. One of them is of a dead waiter.
        let db = schema.connect().await;
        db.batch_execute(&format!(
            "WITH late AS (UPDATE {0}.locks_waiters SET since = since + interval '1 h', until = until + interval '1 h' \
             RETURNING space, key, since, until) \
             INSERT INTO {0}.locks_waiters (space, key, claim, waiter_id, since, until) \
             SELECT space, k, '\\x00', 'died', since, until FROM late, unnest('{{a,b}}'::text[]) AS k",
            schema.name
        ))
        .await
        .unwrap();
        until("the live waiter is marked again", async || waiting(&holder, "a").await == ["lives"])
            .await;
        let alone = other.lock("b").ttl(TTL).acquire().await.unwrap();
        let asked = tokio::time::timeout(TTL, alone.handoff_requested()).await;
        assert!(asked.is_err(), "a dead waiter asked for the lock");
        alone.release().await.unwrap();
        guard.release().await.unwrap();
        wait.wait().await.unwrap().release().await.unwrap();
        until("the marks of that key are gone", async || marks(&schema).await == 1).await;
        assert_eq!(holder.gc(Duration::from_secs(60)).await.unwrap(), 1, "and the other one");
    });
}
