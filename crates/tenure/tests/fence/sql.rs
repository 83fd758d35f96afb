//! The statements against a real PostgreSQL.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tenure::FencingToken;
use tenure::fence::sql;
use tokio::sync::Barrier;
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, NoTls};

use crate::holders::Frozen;
use crate::services;

/// The two ways to fence, as the docs of `fence::sql` give them. Parameters: key, token and, to write, the text.
#[derive(Clone, Copy, Debug)]
enum Way {
    Table,
    Column,
}

const WAYS: [Way; 2] = [Way::Table, Way::Column];

/// The one row's key, in both ways.
const KEY: &str = "reports";

impl Way {
    fn install(self) -> String {
        match self {
            Self::Table => sql::INSTALL.to_owned(),
            Self::Column => "UPDATE reports SET fence = $2::text::numeric(39) \
                             WHERE id = $1 AND fence <= $2::text::numeric(39) AND $2::text::numeric(39) > 0 \
                             RETURNING body"
                .to_owned(),
        }
    }

    fn write(self) -> String {
        match self {
            Self::Table => format!(
                "{} UPDATE reports SET body = $3 WHERE id = 'reports' AND EXISTS (SELECT FROM admitted)",
                sql::ADMIT
            ),
            Self::Column => "UPDATE reports SET body = $3, fence = $2::text::numeric(39) \
                             WHERE id = $1 AND fence <= $2::text::numeric(39) AND $2::text::numeric(39) > 0"
                .to_owned(),
        }
    }

    /// Whether the token was accepted.
    async fn installs(self, db: &Client, token: u128) -> bool {
        self.try_install(db, token).await.unwrap()
    }

    async fn try_install(self, db: &Client, token: u128) -> Result<bool, tokio_postgres::Error> {
        accepted(db.execute(&self.install(), &[&KEY, &token.to_string()]).await)
    }

    /// Whether the token was accepted. What is written is the token itself.
    async fn writes(self, db: &Client, token: u128) -> bool {
        self.try_write(db, token).await.unwrap()
    }

    async fn try_write(self, db: &Client, token: u128) -> Result<bool, tokio_postgres::Error> {
        let token = token.to_string();
        accepted(db.execute(&self.write(), &[&KEY, &token, &token]).await)
    }
}

fn accepted(rows: Result<u64, tokio_postgres::Error>) -> Result<bool, tokio_postgres::Error> {
    rows.map(|rows| {
        assert!(rows <= 1, "{rows} rows");
        rows == 1
    })
}

#[test]
fn a_stale_holder_is_refused_and_a_current_one_is_not() {
    for way in WAYS {
        let old = Frozen::holding(KEY);
        let (first, second) = (old.token().as_u128(), old.successor().as_u128());
        with_schema(async move |schema| {
            let db = schema.connect().await;
            assert!(way.installs(&db, first).await);
            assert!(way.writes(&db, first).await);
            assert!(way.writes(&db, first).await, "{way:?}: as often as it likes");
            assert!(way.installs(&db, second).await);
            assert!(way.installs(&db, second).await, "{way:?}: again, had the answer been lost");
            assert!(!way.writes(&db, first).await, "{way:?}: before the new holder wrote");
            assert!(way.writes(&db, second).await);
            assert!(!way.writes(&db, first).await, "{way:?}: after it did");
            assert!(!way.installs(&db, first).await);
            assert_eq!(body(&db).await, second.to_string());
        });
    }
}

#[test]
fn tokens_compare_as_numbers_up_to_the_greatest() {
    for way in WAYS {
        with_schema(async move |schema| {
            let db = schema.connect().await;
            let rising = [1, 9, 10, u128::from(u64::MAX), u128::from(u64::MAX) + 1, u128::MAX];
            for token in rising {
                assert!(way.installs(&db, token).await, "{way:?}: {token}");
                assert!(way.writes(&db, token).await, "{way:?}: {token}");
            }
            assert!(!way.writes(&db, u128::MAX - 1).await);
        });
    }
    with_schema(async |schema| {
        let db = schema.connect().await;
        assert!(Way::Table.installs(&db, u128::MAX).await);
        let newest: String = db.query_one(sql::NEWEST, &[&KEY]).await.unwrap().get(0);
        assert_eq!(newest.parse(), Ok(FencingToken::from_u128(u128::MAX)));
    });
}

#[test]
fn invalid_fencing_tokens_are_rejected_by_sql() {
    with_schema(async |schema| {
        let db = schema.connect().await;
        for way in WAYS {
            for text in ["NaN", "-1", "340282366920938463463374607431768211456"] {
                let rows = db.execute(&way.install(), &[&KEY, &text]).await;
                // The column has a token to compare with, and no negative number is as new.
                let refused = match &rows {
                    Ok(rows) => *rows == 0 && text == "-1",
                    Err(error) => error.code() == Some(&SqlState::CHECK_VIOLATION),
                };
                assert!(refused, "{way:?}: {text}: {rows:?}");
            }
            assert!(way.installs(&db, 1).await, "{way:?}: nothing was installed");
        }
    });
}

#[test]
fn a_holder_without_a_token_is_refused() {
    with_schema(async |schema| {
        let db = schema.connect().await;
        // A table of an earlier version admits 0, and may have it.
        let earlier = "ALTER TABLE tenure_fence DROP CONSTRAINT tenure_fence_token_check; \
                       INSERT INTO tenure_fence VALUES ('earlier', 0)";
        for (change, key) in [("", KEY), (earlier, "earlier")] {
            db.batch_execute(change).await.unwrap();
            let refused = db.execute(sql::INSTALL, &[&key, &"0"]).await.unwrap_err();
            assert_eq!(refused.code(), Some(&SqlState::INVALID_TEXT_REPRESENTATION));
            let why = refused.as_db_error().unwrap().message();
            assert!(why.contains(&format!("holder of {key} has no fencing token")), "{why}");
            let write = Way::Table.write();
            assert_eq!(db.execute(&write, &[&key, &"0", &"unfenced"]).await.unwrap(), 0);
        }
        assert!(!Way::Column.installs(&db, 0).await);
        assert!(!Way::Column.writes(&db, 0).await);
        assert_eq!(body(&db).await, "");
    });
}

#[test]
fn a_holder_that_installed_nothing_is_refused_by_the_table() {
    with_schema(async |schema| {
        let db = schema.connect().await;
        assert!(!Way::Table.writes(&db, 1).await);
        assert_eq!(body(&db).await, "");
    });
}

#[test]
fn a_stale_write_that_had_to_wait_is_refused() {
    for way in WAYS {
        with_schema(async move |schema| {
            let (new, old) = (schema.connect().await, Arc::new(schema.connect().await));
            assert!(way.installs(&old, 1).await);
            new.batch_execute("BEGIN").await.unwrap();
            assert!(way.installs(&new, 2).await);

            let late = schema.blocked(&old, async move |old| way.try_write(&old, 1).await).await;
            new.batch_execute("COMMIT").await.unwrap();
            assert!(!late.await.unwrap().unwrap(), "{way:?}");
            assert_eq!(body(&new).await, "");
        });
    }
}

#[test]
fn a_stale_write_of_repeatable_read_fails_and_is_refused_when_repeated() {
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        for way in WAYS {
            with_schema(async move |schema| {
                let (new, old) = (schema.connect().await, schema.connect().await);
                assert!(way.installs(&old, 1).await);
                let begin = format!("BEGIN ISOLATION LEVEL {level}");
                old.batch_execute(&begin).await.unwrap();
                assert_eq!(body(&old).await, "");
                assert!(way.installs(&new, 2).await);

                let error = way.try_write(&old, 1).await.unwrap_err();
                assert_eq!(error.code(), Some(&SqlState::T_R_SERIALIZATION_FAILURE), "{way:?}");
                old.batch_execute("ROLLBACK").await.unwrap();
                old.batch_execute(&begin).await.unwrap();
                assert!(!way.writes(&old, 1).await, "{way:?}");
            });
        }
    }
}

#[test]
fn a_new_holder_waits_for_a_write_under_way_and_reads_it() {
    for way in WAYS {
        with_schema(async move |schema| {
            let (old, new) = (schema.connect().await, Arc::new(schema.connect().await));
            assert!(way.installs(&old, 1).await);
            old.batch_execute("BEGIN").await.unwrap();
            assert!(way.writes(&old, 1).await);

            let install =
                schema.blocked(&new, async move |new| way.try_install(&new, 2).await).await;
            old.batch_execute("COMMIT").await.unwrap();
            assert!(install.await.unwrap().unwrap(), "{way:?}");
            assert_eq!(body(&new).await, "1", "{way:?}");
            assert!(!way.writes(&old, 1).await, "{way:?}");
        });
    }
}

#[test]
fn a_newer_write_that_had_to_wait_lands_on_the_older_one() {
    for way in WAYS {
        with_schema(async move |schema| {
            let (old, new) = (schema.connect().await, Arc::new(schema.connect().await));
            assert!(way.installs(&old, 1).await);
            old.batch_execute("BEGIN").await.unwrap();
            assert!(way.writes(&old, 1).await);

            let write = schema.blocked(&new, async move |new| way.try_write(&new, 2).await).await;
            old.batch_execute("COMMIT").await.unwrap();
            assert!(write.await.unwrap().unwrap(), "{way:?}");
            assert_eq!(body(&new).await, "2", "{way:?}");
            assert_eq!(log(&new).await, [1, 2]);
        });
    }
}

#[test]
fn a_transaction_that_begins_with_install_keeps_newer_holders_out_until_it_ends() {
    with_schema(async |schema| {
        let (old, new) = (schema.connect().await, Arc::new(schema.connect().await));
        old.batch_execute("BEGIN").await.unwrap();
        assert!(Way::Table.installs(&old, 1).await);
        let write = async |text: &str| {
            old.execute("UPDATE reports SET body = $1", &[&text]).await.unwrap();
        };
        write("10").await;
        let install = async |new: Arc<Client>| Way::Table.try_install(&new, 2).await;
        let install = schema.blocked(&new, install).await;
        write("11").await;
        old.batch_execute("COMMIT").await.unwrap();
        assert!(install.await.unwrap().unwrap());
        assert!(Way::Table.writes(&new, 2).await);
        assert_eq!(log(&new).await, [10, 11, 2]);

        old.batch_execute("BEGIN").await.unwrap();
        assert!(!Way::Table.installs(&old, 1).await);
        old.batch_execute("ROLLBACK").await.unwrap();
    });
}

#[test]
fn a_token_is_on_disk_when_it_is_installed_whatever_the_database_is_set_to() {
    with_schema(async |schema| {
        let db = schema.connect().await;
        let setting = async || -> String {
            db.query_one("SHOW synchronous_commit", &[]).await.unwrap().get(0)
        };
        for (token, (set, during)) in (1..).zip([("off", "local"), ("off", "local"), ("on", "on")])
        {
            db.batch_execute(&format!("SET synchronous_commit = {set}; BEGIN")).await.unwrap();
            assert!(Way::Table.installs(&db, token).await, "1 is new, the others are larger");
            assert_eq!(setting().await, during);
            db.batch_execute("COMMIT").await.unwrap();
            assert_eq!(setting().await, set, "as it was");
        }
    });
}

#[test]
fn a_write_that_creates_the_row_is_fenced_too() {
    with_schema(async |schema| {
        let db = schema.connect().await;
        let upsert = "INSERT INTO reports AS old (id, body, fence) VALUES ($1, $3, $2::text::numeric(39)) \
                      ON CONFLICT (id) DO UPDATE SET body = EXCLUDED.body, fence = EXCLUDED.fence \
                      WHERE old.fence <= EXCLUDED.fence";
        for (token, rows) in [("2", 1), ("1", 0), ("2", 1), ("10", 1), ("9", 0)] {
            let answer = db.execute(upsert, &[&"weekly", &token, &token]).await.unwrap();
            assert_eq!(answer, rows, "{token}");
        }
    });
}

#[test]
fn of_racing_holders_accepted_writes_come_in_the_order_of_their_tokens() {
    const HOLDERS: u128 = 8;
    const WRITES: usize = 3;
    const ROUNDS: usize = 10;
    for way in WAYS {
        with_schema(async move |schema| {
            let mut connections = Vec::new();
            for _ in 0..HOLDERS {
                connections.push(Arc::new(schema.connect().await));
            }
            let mut refused = 0;
            for _ in 0..ROUNDS {
                schema.clear().await;
                assert!(way.installs(&connections[0], 1).await);
                let start = Arc::new(Barrier::new(connections.len()));
                let holders =
                    shuffled(1..=HOLDERS).into_iter().zip(&connections).map(|(token, db)| {
                        let (db, start) = (Arc::clone(db), Arc::clone(&start));
                        tokio::spawn(async move {
                            start.wait().await;
                            let mut accepted = Vec::new();
                            for _ in 0..WRITES {
                                accepted.extend(way.writes(&db, token).await.then_some(token));
                            }
                            accepted
                        })
                    });
                let mut accepted = Vec::new();
                for holder in holders.collect::<Vec<_>>() {
                    accepted.extend(holder.await.unwrap());
                }
                accepted.sort_unstable();

                let db = &connections[0];
                let log = log(db).await;
                assert!(log.is_sorted(), "{way:?}: {log:?}");
                assert_eq!(
                    log, accepted,
                    "{way:?}: who was told yes wrote, who was told no did not"
                );
                assert_eq!(log.iter().filter(|token| **token == HOLDERS).count(), WRITES);
                assert_eq!(body(db).await, HOLDERS.to_string());
                assert!(!way.writes(db, HOLDERS - 1).await);
                refused += connections.len() * WRITES - accepted.len();
            }
            assert!(refused > 0, "{way:?}: no write ever came late, so nothing was tested");
        });
    }
}

async fn body(db: &Client) -> String {
    db.query_one("SELECT body FROM reports WHERE id = 'reports'", &[]).await.unwrap().get(0)
}

/// Every text that was written to a report, in the order in which the row took it.
async fn log(db: &Client) -> Vec<u128> {
    let rows = db.query("SELECT body FROM log ORDER BY seq", &[]).await.unwrap();
    rows.iter().map(|row| row.get::<_, &str>(0).parse().unwrap()).collect()
}

fn shuffled<T>(items: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut keyed: Vec<_> =
        items.into_iter().map(|item| (getrandom::u64().unwrap(), item)).collect();
    keyed.sort_unstable_by_key(|(key, _)| *key);
    keyed.into_iter().map(|(_, item)| item).collect()
}

/// A schema of its own for one test, with the table of reports and a log of what was written to it.
#[derive(Clone)]
struct Schema {
    url: Arc<str>,
    name: Arc<str>,
}

/// Runs a test in a new schema, and drops that whether the test passes or not.
fn with_schema<F: Future<Output = ()> + Send + 'static>(
    test: impl FnOnce(Schema) -> F + Send + 'static,
) {
    let Some(url) = services::postgres() else { return };
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.unwrap().block_on(async {
        let name = format!("tenure_test_{:016x}", getrandom::u64().unwrap());
        let schema = Schema { url: url.into(), name: name.into() };
        let db = schema.connect().await;
        db.batch_execute(&schema.set_up()).await.unwrap();
        let tested = tokio::spawn(test(schema.clone()));
        let outcome = tokio::time::timeout(Duration::from_secs(60), tested).await;
        // A test that failed may have left a transaction open, on which dropping the schema would wait.
        let others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
                      WHERE application_name = $1 AND pid <> pg_backend_pid()";
        db.execute(others, &[&&*schema.name]).await.unwrap();
        db.batch_execute(&format!("DROP SCHEMA {} CASCADE", schema.name)).await.unwrap();
        if let Err(panic) = outcome.expect("the test takes no more than a minute") {
            std::panic::resume_unwind(panic.into_panic());
        }
    });
}

impl Schema {
    fn set_up(&self) -> String {
        format!(
            "CREATE SCHEMA {};
             {};
             CREATE TABLE reports (id text PRIMARY KEY, body text NOT NULL);
             ALTER TABLE reports ADD COLUMN {};
             INSERT INTO reports (id, body) VALUES ('reports', '');
             CREATE TABLE log (seq bigint GENERATED ALWAYS AS IDENTITY, body text);
             CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS
                 'BEGIN INSERT INTO log (body) VALUES (NEW.body); RETURN NEW; END';
             CREATE TRIGGER note AFTER UPDATE OF body ON reports
                 FOR EACH ROW EXECUTE FUNCTION note();",
            self.name,
            sql::TABLE,
            sql::COLUMN,
        )
    }

    async fn connect(&self) -> Client {
        let mut config: tokio_postgres::Config = self.url.parse().unwrap();
        config.application_name(&*self.name).options(format!("-csearch_path={}", self.name));
        let (client, connection) = config.connect(NoTls).await.unwrap();
        tokio::spawn(connection);
        client
    }

    /// Back to the beginning.
    async fn clear(&self) {
        let clear = "TRUNCATE log, tenure_fence; UPDATE reports SET fence = 0";
        self.connect().await.batch_execute(clear).await.unwrap();
    }

    /// Starts a statement on `db`, and waits until the server says that it waits for another transaction.
    async fn blocked<F, T>(
        &self,
        db: &Arc<Client>,
        statement: impl FnOnce(Arc<Client>) -> F,
    ) -> tokio::task::JoinHandle<T>
    where
        F: Future<Output = T> + Send + 'static,
        T: Send + 'static,
    {
        let pid: i32 = db.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
        let running = tokio::spawn(statement(Arc::clone(db)));
        let watch = self.connect().await;
        loop {
            let waits = "SELECT cardinality(pg_blocking_pids($1)) > 0";
            if watch.query_one(waits, &[&pid]).await.unwrap().get(0) {
                return running;
            }
            assert!(!running.is_finished(), "the statement did not wait");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}
