//! A few connections for many requests.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tenure_core::Time;
use tokio::sync::{Semaphore, SemaphorePermit};

use super::connect::PgConnection;
use super::settings::Settings;
use crate::{Clock, Error, ErrorKind, Result};

/// Connections that were opened and are free.
#[derive(Debug)]
pub(crate) struct Pool {
    settings: Settings,
    clock: Clock,
    permits: Semaphore,
    idle: Mutex<Vec<PgConnection>>,
}

/// A connection for one request at a time; given back when dropped, unless a request on it was cut off.
#[derive(Debug)]
pub(crate) struct PooledConnection<'a> {
    pool: &'a Pool,
    connection: Option<PgConnection>,
    /// It was opened just now.
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

    /// A connection of one's own, by `by` at the latest.
    pub(crate) async fn take(&self, by: Time) -> Result<PooledConnection<'_>> {
        let seat = tokio::select! {
            biased;
            seat = self.permits.acquire() => seat.map_err(|_| closed())?,
            () = self.clock.sleep_until(by) => {
                let message = "all connections are busy with requests that take too long";
                return Err(Error::new(ErrorKind::Unavailable, message));
            }
        };
        let (connection, fresh) = match self.take_idle() {
            Some(connection) => (connection, false),
            None => (PgConnection::open(&self.settings, &self.clock, by, None).await?, true),
        };
        Ok(PooledConnection { pool: self, connection: Some(connection), fresh, _permit: seat })
    }

    /// Lets go of every connection and gives out no more.
    pub(crate) fn close(&self) {
        self.permits.close();
        self.lock().clear();
    }

    /// Whether it was closed.
    pub(crate) fn is_closed(&self) -> bool {
        self.permits.is_closed()
    }

    fn take_idle(&self) -> Option<PgConnection> {
        let mut idle = self.lock();
        // The one used last: the others may be closed by whoever closes idle ones.
        std::iter::from_fn(|| idle.pop()).find(PgConnection::is_usable)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<PgConnection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
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
