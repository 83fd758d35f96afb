//! Connection pool: a few connections for many requests.

use std::ops::{Deref, DerefMut};
use std::sync::MutexGuard;

use tenure_core::Time;
use tokio::sync::{Semaphore, SemaphorePermit};

use super::connect::PgConnection;
use super::settings::Settings;
use crate::mutex::Mutex;
use crate::{Clock, Error, ErrorKind, Result};

/// Pool of at most a fixed number of connections.
#[derive(Debug)]
pub(crate) struct Pool {
    settings: Settings,
    clock: Clock,
    permits: Semaphore,
    idle: Mutex<Vec<PgConnection>>,
}

/// A connection taken from the pool. Dropping it returns it, unless a request on it was interrupted.
#[derive(Debug)]
pub(crate) struct PooledConnection<'a> {
    pool: &'a Pool,
    connection: Option<PgConnection>,
    /// True if the connection was opened just now.
    pub(crate) fresh: bool,
    _permit: SemaphorePermit<'a>,
}

impl Pool {
    pub(crate) fn new(settings: Settings, clock: Clock, size: usize) -> Self {
        Self { settings, clock, permits: Semaphore::new(size), idle: Mutex::default() }
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.settings
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
            None => (PgConnection::open(&self.settings, &self.clock, by, None).await?, true),
        };
        Ok(PooledConnection { pool: self, connection: Some(connection), fresh, _permit: permit })
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
        // The most recently used first: a firewall or pooler may have closed connections that were idle for longer.
        std::iter::from_fn(|| idle.pop()).find(PgConnection::is_usable)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<PgConnection>> {
        self.idle.lock()
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::Shutdown, "the store was closed")
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
        if let Some(connection) = usable.filter(|_| !self.pool.permits.is_closed()) {
            self.pool.lock().push(connection);
        }
    }
}
