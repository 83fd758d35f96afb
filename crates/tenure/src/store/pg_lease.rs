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

mod hold;
mod inspect;
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
use tokio_postgres::types::Type;

use super::pg::clock::{Reading, Window, micros};
use super::pg::failure;
use super::pg::migrate;
use super::pg::settings::Settings;
use super::pg::table::Table;
use super::{
    Answer, Capabilities, Claim, Contended, Finding, Grant, Handle, Handoff, Hold, KeySpace,
    KeyState, LeaseStart, Liveness, Mode, QueueKind, Store, Version, pg,
};
use crate::{Error, ErrorKind, Result};
use hold::{HoldName, LeaseHold};
use shared::{LeaseShared, space_number};

/// Timeout of a request that has none of its own.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Default name of the table.
const DEFAULT_TABLE: &str = "tenure_locks";
/// Shortest lease. With a shorter one, a brief delay of the network or the server would lose the hold.
const MIN_TTL: Duration = Duration::from_secs(1);

/// Locks on lease rows of PostgreSQL. Clones share one store.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
/// # let Ok(url) = std::env::var("TENURE_TEST_POSTGRES") else { return Ok(()) };
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
        Ok([self.0.incarnation.fill(&self.0.sql.take), self.0.sql.release.clone()])
    }

    async fn inspect_rows(&self, key: &Key, space: KeySpace) -> Result<Vec<Row>> {
        let (spaces, keys) = (vec![space_number(space)], vec![key.as_str()]);
        let by = self.0.clock.now() + REQUEST_TIMEOUT;
        let parameters: [(&(dyn tokio_postgres::types::ToSql + Sync), Type); 2] =
            [(&spaces, Type::INT2_ARRAY), (&keys, Type::TEXT_ARRAY)];
        Ok(self.0.ask(&self.0.sql.inspect, &parameters, by).await?.0)
    }

    async fn examine_server(&self, by: tenure_core::Time) -> Result<Vec<Finding>> {
        let table = &self.0.table;
        let rights = format!(
            "SELECT bool_and(has_table_privilege('{}', r))::int FROM unnest('{{SELECT,INSERT,UPDATE}}'::text[]) AS r",
            table.quoted()
        );
        let incarnation = pg::incarnation::examination(table);
        let mut connection = self.0.connection(by).await?;
        let answers = connection
            .simple(&format!("{}; {rights}; {incarnation}", pg::examine::SERVER_QUERY), by)
            .await?;
        let [server, rights, incarnation] = &answers[..] else {
            let message = format!("the server sent {} answers to three queries", answers.len());
            return Err(Error::new(ErrorKind::Unavailable, message));
        };
        let mut findings = pg::examine::findings(server, self.0.pool.settings());
        let name = table.shown();
        findings.push(if rights.get(0) == Some("1") {
            Finding::ok("rights", format!("sufficient on {name}"))
        } else {
            Finding::failed("rights", format!("insufficient on {name}"))
                .advise(format!("an owner must GRANT SELECT, INSERT, UPDATE ON {name}"))
        });
        findings.push(pg::incarnation::finding(incarnation, "tenure schema --locks --apply"));
        Ok(findings)
    }

    async fn examine_queues(&self, by: tenure_core::Time) -> Result<Finding> {
        let question = pg::queues::query(&self.0.table);
        let rows = self.0.connection(by).await?.simple(&question, by).await?;
        Ok(pg::queues::finding(&rows))
    }

    /// Sends the claim. Returns the rows, the reading of the clock, and the interval in which the claim was valid.
    async fn send(&self, claim: &Claim, limit: Duration) -> Result<(Vec<Row>, Reading, Window)> {
        let shared = &*self.0;
        let by = shared.clock.now() + limit;
        let mut connection = shared.connection(by).await.map_err(failure::nothing_done)?;
        let now = shared.clock.now();
        let window = shared.db_clock.window(now, by.since(now));
        let (id, secret) = (claim.id.to_be_bytes(), shared.secret(claim.id));
        let (ttl, pid) = (micros(claim.ttl), i64::from(claim.by.pid));
        let (slots, space) = (slots(claim)?, space_number(claim.mode.space()));
        let (id, secret) = (&id[..], &secret[..]);
        let key = claim.key.as_str();
        let mut parameters: Vec<(&(dyn tokio_postgres::types::ToSql + Sync), Type)> = vec![
            (&key, Type::TEXT),
            (&id, Type::BYTEA),
            (&secret, Type::BYTEA),
            (&ttl, Type::INT8),
            (&claim.by.id, Type::TEXT),
            (&claim.by.host, Type::TEXT),
            (&pid, Type::INT8),
            (&claim.by.note, Type::TEXT),
            (&window.from, Type::INT8),
            (&window.until, Type::INT8),
            (&window.expected, Type::INT8),
            (&window.steady, Type::INT8),
            (&window.measured, Type::INT8),
        ];
        // A free key that was used before needs only the short statement; any other answer needs the long one.
        let sql = if claim.mode == Mode::Exclusive {
            let (rows, reading) =
                shared.grant_on(&mut connection, &shared.sql.take, &parameters, by).await?;
            if !rows.is_empty() {
                return Ok((rows, reading, window));
            }
            &shared.sql.claim
        } else {
            parameters.extend([(&slots as _, Type::INT4), (&space as _, Type::INT2)]);
            &shared.sql.claim_shared
        };
        let (rows, reading) = shared.grant_on(&mut connection, sql, &parameters, by).await?;
        Ok((rows, reading, window))
    }

    fn granted(&self, claim: &Claim, row: &Row, reading: Reading) -> Grant {
        let (epoch, number) = (row.get(2), row.get(3));
        let name = HoldName {
            space: space_number(claim.mode.space()),
            key: claim.key.clone(),
            shared_row: claim.mode != Mode::Exclusive,
            number,
            secret: self.0.secret(claim.id),
        };
        Grant {
            token: inspect::token(epoch, number),
            lease_start: LeaseStart::FromRequest,
            handoff_requested: false,
            // The number of an exclusive hold is the row's count of grants. A shared hold has a number of its own.
            grants: u64::try_from(number).ok().filter(|_| claim.mode == Mode::Exclusive),
            hold: Box::new(LeaseHold::new(&self.0, name, Some(reading))),
        }
    }
}

/// Number of slots that a claim requests; `None` for a lock.
fn slots(claim: &Claim) -> Result<Option<i32>> {
    let Mode::Slot { limit } = claim.mode else { return Ok(None) };
    let max = sql::MAX_SHARERS;
    match i32::try_from(limit) {
        Ok(slots) if slots <= max => Ok(Some(slots)),
        _ => {
            let message = format!("{limit} slots are too many for one row: the maximum is {max}");
            Err(Error::new(ErrorKind::Invalid, message))
        }
    }
}

/// Current holder and version of a contended key; an error if the semaphore has another number of slots.
fn contended(claim: &Claim, rows: &[Row]) -> Result<Contended> {
    let mut holders = Vec::new();
    let mut holder = None;
    for row in rows {
        let (Some(epoch), Some(number)) = (row.get(2), row.get(3)) else { continue };
        holders.push((epoch, number));
        holder.get_or_insert_with(|| inspect::identity(row, 4));
        if let (Mode::Slot { limit }, Some(slots)) = (claim.mode, row.get::<_, Option<i32>>(8))
            && i32::try_from(limit) != Ok(slots)
        {
            let message = format!("the semaphore is in use with {slots} slots, not {limit}");
            return Err(Error::new(ErrorKind::Invalid, message));
        }
    }
    // No holder is shown: another claim was faster and its row is not visible to this statement, or the lease has ended
    // by a clock that is not trusted yet. Retry soon.
    let version = if holders.is_empty() { watch::UNSETTLED } else { inspect::version_of(holders) };
    Ok(Contended { holder, version, retry_after: None, note: None })
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
            handoff: Handoff::None,
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
        let answered = async {
            let (rows, reading, window) = self.send(claim, limit).await?;
            match rows.first() {
                Some(row) if row.get(1) => Ok(Answer::Granted(self.granted(claim, row, reading))),
                _ if !window.contains(reading.db) => {
                    let message = "the claim arrived too late, or the database's clock was set: \
                                   nothing was claimed";
                    Err(Error::new(ErrorKind::Unavailable, message))
                }
                _ => contended(claim, &rows).map(Answer::Contended),
            }
        };
        answered.await.map_err(|error| error.on(&claim.key).at(self))
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
        let parameters: [(&(dyn tokio_postgres::types::ToSql + Sync), Type); 3] =
            [(&space_number(space), Type::INT2), (&prefix, Type::TEXT), (&after, Type::TEXT)];
        let answer = self.0.ask(&self.0.sql.list, &parameters, by).await;
        let (rows, _) = answer.map_err(|error| error.at(self))?;
        Ok(inspect::states(&rows, space))
    }

    async fn evict(&self, key: &Key, token: FencingToken, reason: &str) -> Result<()> {
        let number = |half: u64| i64::try_from(half).unwrap_or(-1);
        let (epoch, number) = (number(token.epoch()), number(token.number()));
        for sql in [&self.0.sql.evict, &self.0.sql.evict_shared] {
            let by = self.0.clock.now() + REQUEST_TIMEOUT;
            let parameters: [(&(dyn tokio_postgres::types::ToSql + Sync), Type); 3] =
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
        match self.examine_server(self.0.clock.now() + limit).await {
            Ok(more) => findings.extend(more),
            Err(error) => findings.push(Finding::error("server", &error.at(self))),
        }
        match self.examine_queues(self.0.clock.now() + limit).await {
            Ok(found) => findings.push(found),
            Err(error) => findings.push(Finding::error("queues", &error.at(self))),
        }
        findings
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
