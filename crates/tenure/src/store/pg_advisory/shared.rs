//! State that the store, its claims and its watchers share.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::{Key, Time};
use tokio::sync::Semaphore;

use super::inspect::{self, LockSession};
use super::pair::Pair;
use super::session::{self, Session};
use super::sql;
use crate::mutex::Mutex;
use crate::store::pg::idle::IdlePool;
use crate::store::pg::incarnation::Incarnation;
use crate::store::pg::settings::Settings;
use crate::store::pg::table::Table;
use crate::store::pg::watch::{PolledVersions, WatchKey, WatchRegistry, Watched};
use crate::{Clock, Error, ErrorKind, Result};

/// Timeout of a request that has none of its own.
pub(super) const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of sessions of this process that block for one key. Each needs a connection; further waiters queue
/// locally for their turn.
const MAX_BLOCKED_PER_KEY: usize = 4;
/// Maximum number of idle sessions.
const MAX_IDLE_SESSIONS: usize = 2;
/// Time after which an idle session is closed.
const IDLE_SESSION_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of concurrent read-only queries.
const MAX_CONCURRENT_READS: usize = 2;

#[derive(Debug)]
pub(super) struct AdvisoryShared {
    pub(super) settings: Settings,
    pub(super) clock: Clock,
    pub(super) idle: IdlePool<Session>,
    /// Maximum time for which one statement blocks.
    pub(super) wait: Duration,
    /// Table in which terms are counted.
    pub(super) terms: Option<Arc<Table>>,
    incarnation: Arc<Incarnation>,
    read_permits: Semaphore,
    wait_permits: Mutex<HashMap<Pair, Weak<Semaphore>>>,
    watch: WatchRegistry,
    shown: String,
    /// True once a writable server has answered. From then on a read-only server is a transient failure: a fail-over
    /// may be under way.
    settled: AtomicBool,
    /// True once two connections were found to have two sessions.
    sessions_distinct: AtomicBool,
    warned: AtomicBool,
}

impl AdvisoryShared {
    pub(super) fn new(settings: Settings, wait: Duration, terms: Option<Table>) -> Self {
        let clock = Clock::system();
        let shown = settings.to_string();
        let shown = shown.replacen("postgres:", "postgres+advisory:", 1);
        Self {
            settings,
            idle: IdlePool::new(clock.clone(), MAX_IDLE_SESSIONS, IDLE_SESSION_TIMEOUT),
            clock,
            wait,
            terms: terms.map(Arc::new),
            incarnation: Arc::default(),
            read_permits: Semaphore::new(MAX_CONCURRENT_READS),
            wait_permits: Mutex::default(),
            watch: WatchRegistry::default(),
            shown,
            settled: AtomicBool::new(false),
            sessions_distinct: AtomicBool::new(false),
            warned: AtomicBool::new(false),
        }
    }

    /// Takes an idle session or opens one. The first time, two are opened: behind a pooler in transaction mode both
    /// have the same backend, which one session alone would not show.
    pub(super) async fn session(&self, by: Time) -> Result<Session> {
        while let Some(kept) = self.idle.take() {
            if kept.is_usable() {
                return Ok(kept);
            }
        }
        let session = self.open(by).await?;
        if !self.sessions_distinct.load(Ordering::Relaxed) {
            match self.open(by).await {
                Ok(other) if other.ident.pid == session.ident.pid => {
                    return Err(session::pooler_error());
                }
                Ok(other) => {
                    self.sessions_distinct.store(true, Ordering::Relaxed);
                    self.idle.put(other);
                }
                // The server may have no room for a second session. The first one is still valid; the next call checks
                // again.
                Err(error) => {
                    tracing::debug!(name: "tenure.second_session_failed", store = %self, %error);
                }
            }
        }
        Ok(session)
    }

    async fn open(&self, by: Time) -> Result<Session> {
        if self.idle.is_closed() {
            return Err(Error::new(ErrorKind::Shutdown, "the store was closed"));
        }
        let settled = self.settled.load(Ordering::Relaxed);
        let terms = self.terms.clone();
        let (settings, incarnation) = (&self.settings, Arc::clone(&self.incarnation));
        let opened = Session::open(settings, terms, incarnation, &self.clock, settled, by);
        let session = opened.await?;
        self.settled.store(true, Ordering::Relaxed);
        if !session.ident.leases && !self.warned.swap(true, Ordering::Relaxed) {
            let version = session.version;
            tracing::warn!(
                name: "tenure.no_idle_session_timeout", store = %self, version,
                "the server cannot free the lock of a frozen or cut-off holder: use PostgreSQL 14 or newer, or lease rows"
            );
        }
        Ok(session)
    }

    /// Runs a query that changes no lock, on an idle session.
    pub(super) async fn query<T>(
        &self,
        by: Time,
        statement: impl FnOnce(&Session) -> String,
        read: impl FnOnce(&[tokio_postgres::SimpleQueryRow]) -> T,
    ) -> Result<T> {
        let _permit = tokio::select! {
            biased;
            permit = self.read_permits.acquire() => permit.map_err(|_| closed())?,
            () = self.clock.sleep_until(by) => return Err(too_many()),
        };
        let mut session = self.session(by).await?;
        let statement = statement(&session);
        let rows = session.ask(&statement, by).await?;
        if session.is_usable() {
            self.idle.put(session);
        }
        Ok(read(&rows))
    }

    pub(super) fn close(&self) {
        self.read_permits.close();
        self.idle.close();
    }

    /// Sessions that hold or wait for the locks of these pairs; of all pairs if there are none.
    pub(super) async fn sessions(
        &self,
        pairs: &[Pair],
    ) -> Result<BTreeMap<Pair, Vec<LockSession>>> {
        let by = self.clock.now() + REQUEST_TIMEOUT;
        let statement = |session: &Session| sql::sessions(session.version, pairs);
        self.query(by, statement, inspect::by_pair).await
    }

    /// Sessions that hold or wait for the lock of a key.
    pub(super) async fn sessions_of(&self, key: &Key) -> Result<Vec<LockSession>> {
        let found = self.sessions(&[Pair::of(key)?]).await?;
        Ok(found.into_values().flatten().collect())
    }

    /// Permits to block at the server for one key.
    pub(super) fn wait_permits_of(&self, pair: Pair) -> Arc<Semaphore> {
        let mut all = self.wait_permits.lock();
        if let Some(permits) = all.get(&pair).and_then(Weak::upgrade) {
            return permits;
        }
        all.retain(|_, permits| permits.strong_count() > 0);
        let permits = Arc::new(Semaphore::new(MAX_BLOCKED_PER_KEY));
        all.insert(pair, Arc::downgrade(&permits));
        permits
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::Shutdown, "the store was closed")
}

fn too_many() -> Error {
    Error::new(
        ErrorKind::Unavailable,
        "timed out waiting for a connection: all are busy with other requests",
    )
}

#[async_trait]
impl Watched for AdvisoryShared {
    fn watch(&self) -> &WatchRegistry {
        &self.watch
    }

    fn clock(&self) -> &Clock {
        &self.clock
    }

    fn settings(&self) -> &Settings {
        &self.settings
    }

    fn channel(&self) -> String {
        sql::CHANNEL.to_owned()
    }

    fn poll(&self) -> Option<Duration> {
        None
    }

    fn is_closed(&self) -> bool {
        self.idle.is_closed()
    }

    async fn notify(&self, payload: &str, by: Time) -> Result<()> {
        self.query(by, |_| format!("SELECT {}", sql::notify(payload)), |_| ()).await
    }

    async fn read_versions(&self, names: &[WatchKey], by: Time) -> Result<PolledVersions> {
        let mut pairs = Vec::with_capacity(names.len());
        for (_, key) in names {
            pairs.push(Pair::of(key)?);
        }
        let sent = self.clock.now();
        let statement = |session: &Session| sql::sessions(session.version, &pairs);
        let mut found = self.query(by, statement, inspect::by_pair).await?;
        let version = |pair| inspect::version_of(&found.remove(pair).unwrap_or_default());
        let versions = pairs.iter().map(version).collect();
        Ok(PolledVersions { versions, next_end: None, round_trip: self.clock.now().since(sent) })
    }
}

impl fmt::Display for AdvisoryShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}
