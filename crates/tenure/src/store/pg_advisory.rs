//! Locks on PostgreSQL's session advisory locks: no table, hand-over by the server's own queue, and the same locks that
//! `pg_advisory_lock(key1, key2)` takes in any other program, or with `?key=bigint` those of `pg_advisory_lock(key)`.
//!
//! A hold is one session, on a connection of its own, and ends with that session. If its process dies, the server frees
//! the lock within milliseconds. If its process is frozen or cut off, the server ends the session after it was idle for
//! the ttl (`idle_session_timeout`, PostgreSQL 14 and newer). The holder counts the same time on its own clock, from
//! before its last renewal was sent, and reports the loss before the server ends the session.
//!
//! **Keys.** `1234,5678` is the lock of these two numbers. Any other key is hashed to a pair: the first four bytes of
//! its SHA-256 and the next four, as signed numbers. With `?key=bigint` in the URL, `42` is the lock of this 64-bit
//! number, and any other key is hashed to the first eight bytes of its SHA-256. Locks of the two forms are separate.
//!
//! **Poolers** in transaction mode share one session among several clients, and would grant one lock to all of them.
//! They are detected and refused, as is a standby.
//!
//! ```no_run
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
//! let client = tenure::Client::connect("postgres+advisory://app@db.example/app").await?;
//! let guard = client.lock("1234,5678").acquire().await?;
//! # guard.release().await }
//! ```
//!
//! The modules are layers. Each imports only modules of the lines below it, or further right in its own line:
//!
//! ```text
//! pg_advisory                       the store
//! join, evict, examine              its operations
//! place, hold                       the wait of a claim; its hold
//! claim                             the state of a claim
//! wait                              the wait of a session, in the queue or standing by
//! shared                            the sessions of a store
//! inspect, session, terms           views; one session; the table of terms
//! sql, queue_locks, tag             statements; limit of the queue; identities
//! lock_id, pair                     key numbers
//! options                           the options of the URL
//! ```

mod claim;
mod evict;
mod examine;
mod hold;
mod inspect;
mod join;
mod lock_id;
mod options;
mod pair;
mod place;
mod queue_locks;
mod session;
mod shared;
mod sql;
mod tag;
mod terms;
mod wait;

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::{FencingToken, Key};
use tokio::io::{AsyncRead, AsyncWrite};

use self::claim::AdvisoryClaims;
pub(crate) use self::lock_id::LockId;
use self::options::AdvisoryOptions;
pub(crate) use self::options::KeyForm;
pub(crate) use self::pair::Pair;
use self::shared::AdvisoryShared;
use super::pg::dial::ConnectFn;
use super::pg::migrate;
use super::pg::pool::Pool;
use super::pg::settings::Settings;
use super::pg::watch;
use super::{
    Answer, Capabilities, Claim, Finding, Handle, Handoff, Hold, KeySpace, KeyState, Liveness,
    QueueKind, Store, Version,
};
use crate::{Error, ErrorKind, Result};

/// Shortest ttl. With a shorter one, a brief delay of the network or the server would lose the hold.
const MIN_TTL: Duration = Duration::from_secs(1);
/// Maximum number of keys per list.
const MAX_LISTED_KEYS: usize = 500;

/// Locks on PostgreSQL's session advisory locks. Clones share one store.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
/// # let service = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/services/example.rs"));
/// # let Some(url) = service("TENURE_TEST_POSTGRES") else { return Ok(()) };
/// let store = tenure::PgAdvisoryStore::open(&url)?; // postgres+advisory://app@db.example/app
/// let client = tenure::Client::with_store(std::sync::Arc::new(store));
/// let guard = client.lock("1234,5678").acquire().await?; // pg_advisory_lock(1234, 5678)
/// guard.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct PgAdvisoryStore {
    shared: Arc<AdvisoryShared>,
    claims: Arc<AdvisoryClaims>,
}

impl PgAdvisoryStore {
    /// Opens the store that a `postgres+advisory:` URL names; `postgres:` and `postgresql:` are accepted, too. It
    /// connects when it is first used.
    ///
    /// The URL is read as libpq reads it, with four further options. `key=bigint` makes keys of 64-bit numbers instead of
    /// pairs, see [the forms](crate::postgres#keys). `wait=MILLISECONDS`, 15000 by default, is the time
    /// for which one statement blocks for a lock before it is sent again, unless half the ttl is shorter; while it
    /// blocks, VACUUM cannot remove rows that died since it began. `queue=NUMBER`, 4 by default, is the number of
    /// sessions, of all processes, that block for one lock; further waiters stand by. `terms=SCHEMA.NAME` names a table
    /// in which grants are counted, see [`schema`](Self::schema).
    ///
    /// # Errors
    ///
    /// `Invalid` if the URL, a file that it names or the environment is invalid.
    pub fn open(url: &str) -> Result<Self> {
        let plain = match url.split_once(':') {
            Some(("postgres+advisory" | "postgresql+advisory", rest)) => format!("postgres:{rest}"),
            _ => url.to_owned(),
        };
        let (settings, own) = Settings::parse(&plain, AdvisoryOptions::NAMES)?;
        Ok(Self::new(settings, AdvisoryOptions::parse(own)?))
    }

    /// SQL that creates the table that `terms=` names; `None` if the URL names no table, since locks need none.
    ///
    /// The table counts the terms of each lock. If a leader was cut off and leads again within its
    /// [`reconnect_grace`](crate::election::ElectionRequest::reconnect_grace), the count shows whether another leader
    /// had a term in between; if so, `on_lost` and `on_acquired` are called. Only participants that name the same table
    /// are counted.
    pub fn schema(&self) -> Option<String> {
        self.shared.terms.as_deref().map(|table| terms::sql(table, self.shared.form))
    }

    /// Runs [`schema`](Self::schema), if there is any.
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
        let Some(schema) = self.schema() else { return Ok(()) };
        let clock = self.shared.clock.clone();
        let pool = Pool::new(self.shared.settings.clone(), clock.clone(), 1);
        migrate::apply(&pool, &clock, &schema).await.map_err(|error| error.at(self))
    }

    /// Creates a store that calls `connect` for each connection it needs: for a proxy, for custom TLS, or for tests.
    /// Every connection must be a separate session of the same database.
    ///
    /// ```no_run
    /// # use tenure::{Client, PgAdvisoryStore};
    /// # use tokio_postgres::NoTls;
    /// let store = PgAdvisoryStore::with_connections(|| tokio_postgres::connect("host=localhost user=app", NoTls));
    /// let client = Client::with_store(std::sync::Arc::new(store));
    /// ```
    pub fn with_connections<F, Opening, S, T>(connect: F) -> Self
    where
        F: Fn() -> Opening + Send + Sync + 'static,
        Opening: Future<
                Output = std::result::Result<
                    (tokio_postgres::Client, tokio_postgres::Connection<S, T>),
                    tokio_postgres::Error,
                >,
            > + Send
            + 'static,
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        Self::new(ConnectFn::new(connect).into(), AdvisoryOptions::default())
    }

    fn new(settings: Settings, options: AdvisoryOptions) -> Self {
        let shared = Arc::new(AdvisoryShared::new(settings, options));
        Self { shared, claims: Arc::default() }
    }
}

#[async_trait]
impl Store for PgAdvisoryStore {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            queue: QueueKind::Fifo,
            liveness: Liveness::Both,
            push: true,
            handoff: Handoff::None,
            shared: true,
            semaphore: false,
            detached: false,
            list: true,
            identities: true,
            evict: true,
            ordered_tokens: true,
            min_ttl: MIN_TTL,
        }
    }

    fn max_ttl(&self) -> Option<Duration> {
        Some(join::MAX_TTL)
    }

    fn check_key(&self, key: &Key) -> Result<()> {
        LockId::of(self.shared.form, key).map(drop)
    }

    async fn claim(&self, claim: &Claim, limit: Duration) -> Result<Answer> {
        let by = self.shared.clock.now() + limit;
        let answered = join::claim(&self.shared, &self.claims, claim, by).await;
        answered.map_err(|error| error.on(&claim.key).at(self))
    }

    async fn resume(&self, key: &Key, _: &Handle) -> Result<Box<dyn Hold>> {
        Err(hold::no_handle().on(key).at(self))
    }

    async fn changed(&self, key: &Key, space: KeySpace, since: Version) -> Result<()> {
        let lock = LockId::of(self.shared.form, key)?;
        let named = lock.key().filter(|_| space == KeySpace::Lock);
        match named {
            Some(key) => watch::changed(&self.shared, (0, key), since).await,
            None => std::future::pending().await,
        }
    }

    async fn inspect(&self, key: &Key, space: KeySpace) -> Result<KeyState> {
        let sessions = async {
            match space {
                KeySpace::Lock => self.shared.sessions_of(key).await,
                KeySpace::Semaphore => Ok(Vec::new()),
            }
        };
        let sessions = sessions.await.map_err(|error| error.on(key).at(self))?;
        Ok(inspect::state(key.clone(), space, &sessions))
    }

    async fn list(
        &self,
        space: KeySpace,
        prefix: &str,
        after: Option<&str>,
    ) -> Result<Vec<KeyState>> {
        if space == KeySpace::Semaphore {
            return Ok(Vec::new());
        }
        let found = self.shared.sessions(&[]).await;
        let mut states = inspect::states(found.map_err(|error| error.at(self))?, space);
        let matches = |key: &str| key.starts_with(prefix) && after.is_none_or(|after| key > after);
        states.retain(|state| matches(state.key.as_str()));
        states.truncate(MAX_LISTED_KEYS);
        Ok(states)
    }

    async fn evict(&self, key: &Key, token: FencingToken, reason: &str) -> Result<()> {
        if evict::evict(&self.shared, key, token).await.map_err(|error| error.on(key).at(self))? {
            tracing::info!(name: "tenure.evicted", %key, store = %self, %token, reason);
            return Ok(());
        }
        let message =
            format!("no hold has the token {token}: see `tenure status` for the present holder");
        Err(Error::new(ErrorKind::NotHeld, message).on(key).at(self))
    }

    async fn examine(&self, limit: Duration) -> Vec<Finding> {
        examine::findings(&self.shared, self.shared.clock.now() + limit).await
    }

    async fn close(&self) {
        self.shared.close();
    }
}

impl fmt::Display for PgAdvisoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.shared, f)
    }
}

impl fmt::Debug for PgAdvisoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.shared, f)
    }
}
