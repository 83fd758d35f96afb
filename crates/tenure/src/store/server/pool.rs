//! Free connections of the plain protocol, which needs a connection per wait.

use std::sync::{Arc, MutexGuard};

use super::connection::Connection;
use crate::mutex::Mutex;

/// Number of free connections that are kept for reuse.
const MAX_POOLED_CONNECTIONS: usize = 4;

/// Connections that have no claims left.
pub(super) struct FreeConnections<C>(Mutex<FreeList<C>>);

struct FreeList<C> {
    free: Vec<Arc<Connection<C>>>,
    /// The store was closed: nothing is kept.
    closed: bool,
}

impl<C> FreeConnections<C> {
    pub(super) fn new() -> Self {
        Self(Mutex::new(FreeList { free: Vec::new(), closed: false }))
    }

    /// Takes a connection that is open.
    pub(super) fn take(&self) -> Option<Arc<Connection<C>>> {
        let mut list = self.lock();
        while let Some(connection) = list.free.pop() {
            if connection.is_open() {
                return Some(connection);
            }
        }
        None
    }

    /// Keeps a connection that has no claims left.
    pub(super) fn put(&self, connection: Arc<Connection<C>>) {
        let mut list = self.lock();
        if connection.is_open() && list.free.len() < MAX_POOLED_CONNECTIONS && !list.closed {
            list.free.push(connection);
        }
    }

    /// Closes the free connections, and keeps none from now on.
    pub(super) fn close(&self) {
        let mut list = self.lock();
        list.closed = true;
        list.free.clear();
    }

    fn lock(&self) -> MutexGuard<'_, FreeList<C>> {
        self.0.lock()
    }
}
