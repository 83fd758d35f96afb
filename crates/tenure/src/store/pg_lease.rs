//! Locks on lease rows of PostgreSQL: they work through any pooler, and need no connection per lock.
//!
//! A hold is a row of one table. The row names its holder, expires by the database's clock, and is renewed. Every
//! operation is one conditional, unnamed statement, so PgBouncer may run each on another session. A process needs at
//! most five connections however many locks it holds, and renews all its holds in a few statements per interval.
//!
//! **A hold ends** when `clock_timestamp()` of the database passes the end of its lease. That clock can be set, so it
//! alone decides nothing. Every answer carries its time. A holder that sees the clock jump by more than half its margin
//! loses its hold at once. A claimer that saw a jump waits until no holder can still rely on the old time.
//!
//! **The table** is created by `tenure schema --apply`, or by a database administrator from the output of `tenure
//! schema`.
//!
//! ```no_run
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
//! let client = tenure::Client::connect("postgres://app@db.example/app").await?;
//! let guard = client.lock("reports/nightly").acquire().await?;
//! # guard.release().await }
//! ```
//!
//! The modules are layers. Each imports only modules of the lines below it, or further right in its own line:
//!
//! ```text
//! pg_lease                           the store
//! join, examine                      claims; findings of `tenure doctor`
//! hold, renewals                     the hold of a claim, renewed together with others
//! watch, inspect                     changes; views
//! shared                             connections and statements of a store
//! renewal_queue, schema, sql         the renewals that wait to be sent; the table; the statements
//! hold_name                          the name of a hold, and its handle
//! ```

mod examine;
mod hold;
mod hold_name;
mod inspect;
mod join;
mod renewal_queue;
mod renewals;
mod schema;
mod shared;
mod sql;
mod watch;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::{FencingToken, Key};
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

use self::hold::LeaseHold;
use self::hold_name::{HoldName, space_number};
use self::shared::{DEFAULT_TABLE, LeaseShared, REQUEST_TIMEOUT};
use self::sql::LeaseStatements;
use super::pg::migrate;
use super::pg::settings::Settings;
use super::pg::table::Table;
use super::{
    Answer, Capabilities, Claim, Finding, Handle, Handoff, Hold, KeySpace, KeyState, Liveness,
    QueueKind, Store, Version,
};
use crate::{Error, ErrorKind, Result};

/// Shortest lease. With a shorter one, a brief delay of the network or the server would lose the hold.
const MIN_TTL: Duration = Duration::from_secs(1);

/// Locks on lease rows of PostgreSQL. Clones share one store.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
/// # let service = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/services/example.rs"));
/// # let Some(url) = service("TENURE_TEST_POSTGRES") else { return Ok(()) };
/// # let url = format!("{url}{}table=doc_{}", if url.contains('?') { '&' } else { '?' }, std::process::id());
/// let store = tenure::PgLeaseStore::open(&url)?; // postgres://app@db.example/app
/// store.apply_schema().await?; // once, or `tenure schema --apply`
/// let client = tenure::Client::with_store(std::sync::Arc::new(store));
/// let guard = client.lock("reports/nightly").acquire().await?;
/// guard.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct PgLeaseStore(Arc<LeaseShared>);

impl PgLeaseStore {
    /// Opens the store that a `postgres:` URL names. It connects when it is first used.
    ///
    /// The URL is read as libpq reads it, with two further options: `table=SCHEMA.NAME`, and `poll=MILLISECONDS` for
    /// the poll interval if no notification can arrive.
    ///
    /// # Errors
    ///
    /// `Invalid` if the URL, a file that it names or the environment is invalid.
    pub fn open(url: &str) -> Result<Self> {
        let (settings, own) = Settings::parse(url, &["table", "poll"])?;
        let (mut table, mut poll) = (Table::named(DEFAULT_TABLE), None);
        for (name, value) in own {
            match &*name {
                "table" => table = Table::parse(&value, "table=")?,
                _ => poll = Some(parse_poll(&value)?),
            }
        }
        Ok(Self(Arc::new(LeaseShared::new(settings, table, poll))))
    }

    /// SQL that creates the table, for a database administrator. It may be run repeatedly and concurrently. It refuses
    /// a table of that name that is not tenure's. It also creates the table of the server's incarnation.
    pub fn schema(&self) -> String {
        schema::sql(&self.0.table)
    }

    /// Runs [`schema`](Self::schema).
    ///
    /// # Errors
    ///
    /// `Misconfigured` if a table of that name is not tenure's, or the server is a standby; `Denied` if the role may
    /// not create it. Nothing is changed then.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the table created or not, nothing in between.
    pub async fn apply_schema(&self) -> Result<()> {
        let schema = self.schema();
        let applied = migrate::apply(&self.0.pool, &self.0.clock, &schema);
        applied.await.map_err(|error| error.at(self))
    }

    /// SQL of a grant to one holder and of its release, for benchmarks of the server alone.
    #[doc(hidden)]
    pub async fn statements(&self) -> Result<[String; 2]> {
        let by = self.0.clock.now() + REQUEST_TIMEOUT;
        let mut connection = self.0.connection(by).await?;
        self.0.incarnation.ensure_epoch(&mut connection, by).await?;
        Ok([self.0.incarnation.fill(&self.0.sql().take), self.0.sql().release.clone()])
    }

    async fn inspect_rows(&self, key: &Key, space: KeySpace) -> Result<Vec<Row>> {
        let (spaces, keys) = (vec![space_number(space)], vec![key.as_str()]);
        let by = self.0.clock.now() + REQUEST_TIMEOUT;
        let parameters: [(&(dyn ToSql + Sync), Type); 2] =
            [(&spaces, Type::INT2_ARRAY), (&keys, Type::TEXT_ARRAY)];
        Ok(self.0.ask(|sql| &sql.inspect, &parameters, by).await?.0)
    }
}

fn parse_poll(text: &str) -> Result<Duration> {
    let ms = text.trim_end_matches("ms").parse().ok().filter(|ms| (1..=60_000).contains(ms));
    let message = "invalid poll: give a time between 1ms and 60000ms, as in poll=250ms";
    ms.map(Duration::from_millis).ok_or_else(|| Error::new(ErrorKind::Invalid, message))
}

#[async_trait]
impl Store for PgLeaseStore {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            queue: QueueKind::None,
            liveness: Liveness::Lease,
            push: true,
            handoff: Handoff::OnRenewal,
            shared: true,
            semaphore: true,
            detached: true,
            list: true,
            identities: true,
            evict: true,
            ordered_tokens: true,
            min_ttl: MIN_TTL,
        }
    }

    async fn claim(&self, claim: &Claim, limit: Duration) -> Result<Answer> {
        let answered = join::claim(&self.0, claim, limit).await;
        answered.map_err(|error| error.on(&claim.key).at(self))
    }

    async fn withdraw(&self, claim: &Claim, limit: Duration) -> Result<()> {
        let withdrawn = join::withdraw(&self.0, claim, limit).await;
        withdrawn.map_err(|error| error.on(&claim.key).at(self))
    }

    async fn resume(&self, key: &Key, handle: &Handle) -> Result<Box<dyn Hold>> {
        let name = HoldName::parse(key, handle).ok_or_else(|| {
            let message = "invalid handle: it is not of a hold on PostgreSQL";
            Error::new(ErrorKind::Invalid, message).on(key).at(self)
        })?;
        Ok(Box::new(LeaseHold::new(&self.0, name, None)))
    }

    async fn changed(&self, key: &Key, space: KeySpace, since: Version) -> Result<()> {
        watch::changed(&self.0, space_number(space), key, since).await
    }

    async fn inspect(&self, key: &Key, space: KeySpace) -> Result<KeyState> {
        let rows = self.inspect_rows(key, space).await.map_err(|error| error.on(key).at(self))?;
        let found = inspect::states(&rows, space).pop();
        Ok(found.unwrap_or_else(|| inspect::free_key(key.clone(), space)))
    }

    async fn list(
        &self,
        space: KeySpace,
        prefix: &str,
        after: Option<&str>,
    ) -> Result<Vec<KeyState>> {
        let by = self.0.clock.now() + REQUEST_TIMEOUT;
        let parameters: [(&(dyn ToSql + Sync), Type); 3] =
            [(&space_number(space), Type::INT2), (&prefix, Type::TEXT), (&after, Type::TEXT)];
        let answer = self.0.ask(|sql| &sql.list, &parameters, by).await;
        let (rows, _) = answer.map_err(|error| error.at(self))?;
        Ok(inspect::states(&rows, space))
    }

    async fn evict(&self, key: &Key, token: FencingToken, reason: &str) -> Result<()> {
        let number = |half: u64| i64::try_from(half).unwrap_or(-1);
        let (epoch, number) = (number(token.epoch()), number(token.number()));
        let statements: [fn(&LeaseStatements) -> &str; 2] =
            [|sql| &sql.evict, |sql| &sql.evict_shared];
        for sql in statements {
            let by = self.0.clock.now() + REQUEST_TIMEOUT;
            let parameters: [(&(dyn ToSql + Sync), Type); 3] =
                [(&key.as_str(), Type::TEXT), (&epoch, Type::INT8), (&number, Type::INT8)];
            let answer = self.0.ask(sql, &parameters, by).await;
            let (rows, _) = answer.map_err(|error| error.on(key).at(self))?;
            if !rows.is_empty() {
                tracing::info!(name: "tenure.evicted", %key, store = %self, %token, reason);
                return Ok(());
            }
        }
        let message =
            format!("no hold has the token {token}: see `tenure status` for the present holder");
        Err(Error::new(ErrorKind::NotHeld, message).on(key).at(self))
    }

    async fn examine(&self, limit: Duration) -> Vec<Finding> {
        let mut findings = Vec::new();
        match examine::server(&self.0, self.0.clock.now() + limit).await {
            Ok(more) => findings.extend(more),
            Err(error) => findings.push(Finding::error("server", &error.at(self))),
        }
        match examine::queues(&self.0, self.0.clock.now() + limit).await {
            Ok(found) => findings.push(found),
            Err(error) => findings.push(Finding::error("queues", &error.at(self))),
        }
        findings
    }

    async fn clean(&self, older_than: Duration) -> Result<u64> {
        let cleaned = join::clean_marks(&self.0, older_than).await;
        cleaned.map_err(|error| error.at(self))
    }

    async fn close(&self) {
        self.0.pool.close();
    }
}

impl fmt::Display for PgLeaseStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Debug for PgLeaseStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}
