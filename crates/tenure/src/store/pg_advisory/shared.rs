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
use super::lock_id::LockId;
use super::options::{AdvisoryOptions, KeyForm};
use super::session::{Session, SessionSource};
use super::sql;
use crate::mutex::Mutex;
use crate::store::pg::idle::IdlePool;
use crate::store::pg::incarnation::Incarnation;
use crate::store::pg::primaries::Primaries;
use crate::store::pg::settings::Settings;
use crate::store::pg::table::Table;
use crate::store::pg::watch::{PolledVersions, WatchKey, WatchRegistry, Watched};
use crate::{Clock, Error, ErrorKind, Result};

/// Timeout of a request that has none of its own.
pub(super) const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of sessions of this process that wait for one key. Each needs a connection; further waiters queue
/// locally for their turn.
const MAX_WAITING_PER_KEY: usize = 4;
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
    pub(super) form: KeyForm,
    /// Maximum time for which one statement blocks.
    pub(super) wait: Duration,
    /// Number of sessions, of all processes, that may block for one key.
    pub(super) queue: u8,
    /// Table in which terms are counted.
    pub(super) terms: Option<Arc<Table>>,
    incarnation: Arc<Incarnation>,
    /// Other primaries among the listed servers.
    pub(super) primaries: Arc<Primaries>,
    read_permits: Semaphore,
    wait_permits: Mutex<HashMap<LockId, Weak<Semaphore>>>,
    watch: WatchRegistry,
    shown: String,
    /// True once a writable server has answered. From then on a read-only server is a transient failure: a fail-over
    /// may be under way.
    settled: AtomicBool,
    warned: AtomicBool,
}

impl AdvisoryShared {
    pub(super) fn new(settings: Settings, options: AdvisoryOptions) -> Self {
        let AdvisoryOptions { form, wait, queue, terms } = options;
        let clock = Clock::system();
        let shown = settings.to_string();
        let shown = shown.replacen("postgres:", "postgres+advisory:", 1);
        let primaries = Arc::new(Primaries::new(settings.clone(), clock.clone()));
        // A key of the other form is another lock: reports must tell them apart.
        let shown = if form == KeyForm::Bigint { shown + "?key=bigint" } else { shown };
        Self {
            settings,
            primaries,
            idle: IdlePool::new(clock.clone(), MAX_IDLE_SESSIONS, IDLE_SESSION_TIMEOUT),
            clock,
            form,
            wait,
            queue,
            terms: terms.map(Arc::new),
            incarnation: Arc::default(),
            read_permits: Semaphore::new(MAX_CONCURRENT_READS),
            wait_permits: Mutex::default(),
            watch: WatchRegistry::default(),
            shown,
            settled: AtomicBool::new(false),
            warned: AtomicBool::new(false),
        }
    }

    /// Takes an idle session or opens one.
    pub(super) async fn session(&self, by: Time) -> Result<Session> {
        while let Some(kept) = self.idle.take() {
            if kept.can_claim() {
                return Ok(kept);
            }
        }
        self.open(by).await
    }

    async fn open(&self, by: Time) -> Result<Session> {
        if self.idle.is_closed() {
            return Err(Error::new(ErrorKind::Shutdown, "the store was closed"));
        }
        let source = SessionSource {
            settings: &self.settings,
            clock: &self.clock,
            terms: self.terms.clone(),
            incarnation: Arc::clone(&self.incarnation),
            primaries: Arc::clone(&self.primaries),
            settled: self.settled.load(Ordering::Relaxed),
        };
        let session = Session::open(source, by).await?;
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
        if session.can_claim() {
            self.idle.put(session);
        }
        Ok(read(&rows))
    }

    pub(super) fn close(&self) {
        self.read_permits.close();
        self.idle.close();
    }

    /// Sessions that hold or wait for these locks; for all locks of the key form if there are none.
    pub(super) async fn sessions(
        &self,
        locks: &[LockId],
    ) -> Result<BTreeMap<LockId, Vec<LockSession>>> {
        let by = self.clock.now() + REQUEST_TIMEOUT;
        self.sessions_by(locks, by).await
    }

    async fn sessions_by(
        &self,
        locks: &[LockId],
        by: Time,
    ) -> Result<BTreeMap<LockId, Vec<LockSession>>> {
        let statement = |session: &Session| sql::sessions(session.version, self.form, locks);
        self.query(by, statement, |rows| inspect::by_lock(rows, self.form, locks)).await
    }

    /// Sessions that hold or wait for the lock of a key.
    pub(super) async fn sessions_of(&self, key: &Key) -> Result<Vec<LockSession>> {
        let found = self.sessions(&[LockId::of(self.form, key)?]).await?;
        Ok(found.into_values().flatten().collect())
    }

    /// Permits to wait at the server for one key.
    pub(super) fn wait_permits_of(&self, lock: LockId) -> Arc<Semaphore> {
        let mut all = self.wait_permits.lock();
        if let Some(permits) = all.get(&lock).and_then(Weak::upgrade) {
            return permits;
        }
        all.retain(|_, permits| permits.strong_count() > 0);
        let permits = Arc::new(Semaphore::new(MAX_WAITING_PER_KEY));
        all.insert(lock, Arc::downgrade(&permits));
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
        let mut locks = Vec::with_capacity(names.len());
        for (_, key) in names {
            locks.push(LockId::of(self.form, key)?);
        }
        let sent = self.clock.now();
        let mut found = self.sessions_by(&locks, by).await?;
        let version = |lock| inspect::version_of(&found.remove(lock).unwrap_or_default());
        let versions = locks.iter().map(version).collect();
        Ok(PolledVersions { versions, next_end: None, round_trip: self.clock.now().since(sent) })
    }
}

impl fmt::Display for AdvisoryShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}
