//! Connection pool: a few connections for many requests.

use std::ops::{Deref, DerefMut};
use std::sync::MutexGuard;

use tenure_core::Time;
use tokio::sync::{Semaphore, SemaphorePermit};

use super::connect::PgConnection;
use super::listed;
use super::primaries::Primaries;
use super::settings::{PgServer, Settings};
use crate::mutex::Mutex;
use crate::{Clock, Error, ErrorKind, Result};

/// Pool of at most a fixed number of connections.
#[derive(Debug)]
pub(crate) struct Pool {
    settings: Settings,
    primaries: Primaries,
    clock: Clock,
    permits: Semaphore,
    idle: Mutex<Vec<PgConnection>>,
    /// Server of the newest connection, if several are listed.
    last_server: Mutex<Option<PgServer>>,
}

/// A connection taken from the pool. Dropping it returns it, unless a request on it was interrupted.
#[derive(Debug)]
pub(crate) struct PooledConnection<'a> {
    pool: &'a Pool,
    connection: Option<PgConnection>,
    /// True if the connection was opened just now.
    pub(crate) fresh: bool,
    /// True if the connection is closed when this value is dropped.
    discarded: bool,
    _permit: SemaphorePermit<'a>,
}

impl Pool {
    pub(crate) fn new(settings: Settings, clock: Clock, size: usize) -> Self {
        let primaries = Primaries::new(settings.clone(), clock.clone());
        Self {
            settings,
            primaries,
            clock,
            permits: Semaphore::new(size),
            idle: Mutex::default(),
            last_server: Mutex::default(),
        }
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Other primaries among the listed servers.
    pub(crate) fn primaries(&self) -> &Primaries {
        &self.primaries
    }

    /// Takes an idle connection or opens one, by `by` at the latest.
    pub(crate) async fn take(&self, by: Time) -> Result<PooledConnection<'_>> {
        let permit = tokio::select! {
            biased;
            permit = self.permits.acquire() => permit.map_err(|_| closed())?,
            () = self.clock.sleep_until(by) => {
                let message = "timed out waiting for a connection: all are busy with other requests";
                return Err(Error::new(ErrorKind::Unavailable, message));
            }
        };
        let (connection, fresh) = match self.take_idle() {
            Some(connection) => (connection, false),
            None => (self.open(by).await?, true),
        };
        let connection = Some(connection);
        Ok(PooledConnection { pool: self, connection, fresh, discarded: false, _permit: permit })
    }

    async fn open(&self, by: Time) -> Result<PgConnection> {
        let last = self.last_server.lock().clone();
        let opened =
            listed::open_preferring(last.as_ref(), &self.settings, &self.clock, by, None).await?;
        *self.last_server.lock() = opened.listed().map(|listed| listed.server.clone());
        Ok(opened)
    }

    /// Closes idle connections and hands out no more.
    pub(crate) fn close(&self) {
        self.permits.close();
        self.lock().clear();
    }

    /// True after [`close`](Self::close).
    pub(crate) fn is_closed(&self) -> bool {
        self.permits.is_closed()
    }

    fn take_idle(&self) -> Option<PgConnection> {
        let mut idle = self.lock();
        // Those to an old primary are closed. A new connection leads to the newest one.
        let is_good = |it: &PgConnection| it.is_usable() && self.primaries.is_current(it);
        // The most recently used first: a firewall or pooler may have closed connections that were idle for longer.
        std::iter::from_fn(|| idle.pop()).find(is_good)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<PgConnection>> {
        self.idle.lock()
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::Shutdown, "the store was closed")
}

impl PooledConnection<'_> {
    /// Returns false if the connection leads to an old primary, and closes it then. A connection that was opened just
    /// now leads to the newest primary.
    pub(crate) async fn check_current(&mut self, by: Time) -> Result<bool> {
        let Some(connection) = self.connection.as_mut().filter(|_| !self.fresh) else {
            return Ok(true);
        };
        let is_current = self.pool.primaries.check_current(connection, by).await?;
        if !is_current {
            self.discard();
        }
        Ok(is_current)
    }

    /// Keeps the connection from being used again, once this value is dropped.
    pub(crate) fn discard(&mut self) {
        self.discarded = true;
    }
}

impl Deref for PooledConnection<'_> {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        self.connection.as_ref().expect("taken only when dropped")
    }
}

impl DerefMut for PooledConnection<'_> {
    fn deref_mut(&mut self) -> &mut PgConnection {
        self.connection.as_mut().expect("taken only when dropped")
    }
}

impl Drop for PooledConnection<'_> {
    fn drop(&mut self) {
        let usable = self.connection.take().filter(PgConnection::is_usable);
        let is_kept = !self.discarded && !self.pool.permits.is_closed();
        if let Some(connection) = usable.filter(|_| is_kept) {
            self.pool.lock().push(connection);
        }
    }
}
