//! What cannot work is refused with a clear error, and nothing is changed.

use tenure::{Client, Error, ErrorKind, PgLeaseStore};

use crate::server::Server;
use crate::services;
use crate::support::{Schema, with_schema};

async fn refusal(url: &str) -> Error {
    let client = Client::connect(url).await.unwrap();
    let error = client.lock("key").acquire().await.unwrap_err();
    let text = format!("{error} {error:?} {client:?} {}", client.store());
    assert!(!text.contains("hunter2"), "{text}");
    error
}

fn says(error: &Error, kind: ErrorKind, part: &str) {
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.to_string().contains(part), "{error}");
}

#[test]
fn a_missing_table_says_how_to_make_it() {
    let Some(url) = services::postgres() else { return };
    with_schema(&url, async |schema| {
        let url = schema.url().replace(".locks", ".others");
        says(&refusal(&url).await, ErrorKind::Misconfigured, "run `tenure schema --locks --apply`");
        PgLeaseStore::open(&url).unwrap().apply_schema().await.unwrap();
        let client = Client::connect(&url).await.unwrap();
        client.lock("key").acquire().await.unwrap().release().await.unwrap();
    });
}

#[test]
fn a_table_that_is_not_understood_is_left_alone() {
    let Some(url) = services::postgres() else { return };
    with_schema(&url, async |schema| {
        let db = schema.connect().await;
        for (make, part) in [
            ("CREATE TABLE @ (space smallint, key text)", "not a lock table of tenure"),
            (
                "CREATE TABLE @ (a int); COMMENT ON TABLE @ IS 'tenure locks, version 2'",
                "version 2",
            ),
            ("CREATE VIEW @ AS SELECT 1 AS space", "not a lock table of tenure"),
        ] {
            let name = format!("{}.odd", schema.name);
            db.batch_execute(&make.replace('@', &name)).await.unwrap();
            let url = schema.url().replace(".locks", ".odd");
            let before = columns(&db, &name).await;
            says(&refusal(&url).await, ErrorKind::Misconfigured, part);
            let applied = PgLeaseStore::open(&url).unwrap().apply_schema().await.unwrap_err();
            says(&applied, ErrorKind::Misconfigured, "nothing was changed");
            assert_eq!(columns(&db, &name).await, before);
            let kind = if make.contains("VIEW") { "VIEW" } else { "TABLE" };
            db.batch_execute(&format!("DROP {kind} {name}")).await.unwrap();
        }
        // One that says it is ours and is not.
        let lie = format!(
            "ALTER TABLE {0}.locks RENAME TO odd; ALTER TABLE {0}.odd RENAME counter TO count",
            schema.name
        );
        db.batch_execute(&lie).await.unwrap();
        let url = schema.url().replace(".locks", ".odd");
        says(&refusal(&url).await, ErrorKind::Misconfigured, "does not fit");
        let applied = PgLeaseStore::open(&url).unwrap().apply_schema().await.unwrap_err();
        says(&applied, ErrorKind::Misconfigured, "not understood");
    });
}

async fn columns(db: &tokio_postgres::Client, table: &str) -> i64 {
    let sql =
        "SELECT count(*) FROM pg_attribute WHERE attrelid = $1::text::regclass AND attnum > 0";
    db.query_one(sql, &[&table]).await.unwrap().get(0)
}

#[test]
fn the_schema_is_applied_twice_and_by_many_at_once() {
    let Some(url) = services::postgres() else { return };
    with_schema(&url, async |schema| {
        let url = schema.url().replace("tenure_test", "tenure_test_new");
        let tasks: Vec<_> = (0..8)
            .map(|_| {
                let store = PgLeaseStore::open(&url).unwrap();
                tokio::spawn(async move { store.apply_schema().await })
            })
            .collect();
        for task in tasks {
            task.await.unwrap().unwrap();
        }
        let db = schema.connect().await;
        let name = schema.name.replace("tenure_test", "tenure_test_new");
        // What is printed is what is applied.
        db.batch_execute(&PgLeaseStore::open(&url).unwrap().schema()).await.unwrap();
        db.batch_execute(&format!("DROP SCHEMA {name} CASCADE")).await.unwrap();
    });
}

#[test]
fn rights_and_credentials_are_told_apart_and_no_password_is_shown() {
    let Some(server) = Server::start() else { return };
    with_schema(&server.url(), async move |schema: Schema| {
        let db = schema.connect().await;
        let roles = format!(
            "CREATE ROLE poor LOGIN; GRANT USAGE ON SCHEMA {0} TO poor; GRANT SELECT ON {0}.locks TO poor; \
             CREATE ROLE stranger LOGIN; CREATE ROLE locked_out LOGIN PASSWORD 'right'; \
             GRANT USAGE ON SCHEMA {0} TO locked_out; GRANT SELECT, INSERT, UPDATE ON {0}.locks TO locked_out",
            schema.name
        );
        db.batch_execute(&roles).await.unwrap();
        let at = |user: &str, database: &str| {
            schema.url_at(&format!("postgres://{user}@127.0.0.1:{}/{database}", server.port))
        };
        says(&refusal(&at("poor:hunter2", "postgres")).await, ErrorKind::Denied, "GRANT");
        says(&refusal(&at("stranger", "postgres")).await, ErrorKind::Denied, "USAGE");
        let wrong = refusal(&at("locked_out:hunter2", "postgres")).await;
        says(&wrong, ErrorKind::Denied, "password");
        says(&refusal(&at("locked_out", "postgres")).await, ErrorKind::Denied, "$PGPASSWORD");
        says(
            &refusal(&at("postgres", "nowhere")).await,
            ErrorKind::Misconfigured,
            "no such database",
        );
        let rows = format!("SELECT count(*) FROM {}.locks", schema.name);
        assert_eq!(db.query_one(&rows, &[]).await.unwrap().get::<_, i64>(0), 0, "nothing changed");

        // The rights that the docs ask for are enough, and so is the right password. The schema grants those on the table
        // of the incarnation to every role that has them on the locks.
        let refused = refusal(&at("locked_out:right", "postgres")).await;
        says(&refused, ErrorKind::Denied, "tenure_incarnation");
        schema.store().apply_schema().await.unwrap();
        let client = Client::connect(&at("locked_out:right", "postgres")).await.unwrap();
        let guard = client.lock("key").acquire().await.unwrap();
        assert!(
            client.store().list(tenure::store::KeySpace::Lock, "", None).await.unwrap().len() == 1
        );
        guard.release().await.unwrap();
        drop(server);
    });
}

#[test]
fn encryption_is_refused_by_a_server_that_has_none() {
    let Some(url) = services::postgres() else { return };
    with_schema(&url, async |schema| {
        for mode in ["require", "verify-full"] {
            let client =
                Client::connect(&format!("{}&sslmode={mode}", schema.url())).await.unwrap();
            let error = client.lock("key").try_acquire().await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Denied, "{mode}: {error}");
        }
    });
}
