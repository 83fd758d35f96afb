//! Between enqueue and wait.

use std::sync::Arc;
use std::time::Duration;

use tenure_core::{Key, Time};
use tokio::sync::oneshot;

use crate::request::shut_down_error;
use crate::{Clock, Guard, Result, Store};

/// A place in the queue, taken by [`LockRequest::enqueue`](crate::LockRequest::enqueue).
///
/// Dropping it leaves the queue; a grant that came meanwhile is given back.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
/// # let client = tenure::Client::connect("memory:").await?;
/// let holder = client.lock("reports").acquire().await?;
/// let place = client.lock("reports").enqueue().await?; // in the queue from here on
/// // … tell somebody, get ready …
/// holder.release().await?;
/// let guard = place.wait().await?;
/// # guard.release().await?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Pending {
    key: Key,
    store: Arc<dyn Store>,
    clock: Clock,
    timeout: Option<Duration>,
    answer: oneshot::Receiver<Result<Guard>>,
    until: oneshot::Sender<Time>,
}

impl Pending {
    pub(crate) fn new(
        key: Key,
        store: Arc<dyn Store>,
        clock: Clock,
        timeout: Option<Duration>,
        answer: oneshot::Receiver<Result<Guard>>,
        until: oneshot::Sender<Time>,
    ) -> Self {
        Self { key, store, clock, timeout, answer, until }
    }

    /// Waits for the lock, as long as the timeout of the request allows, counted from now.
    ///
    /// # Errors
    ///
    /// As [`LockRequest::acquire`](crate::LockRequest::acquire). The place is given up with a timeout. `Lost` where it
    /// was granted and then lost before this was called.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives the place up.
    pub async fn wait(self) -> Result<Guard> {
        if let Some(timeout) = self.timeout {
            // The task has answered already where it no longer listens.
            let _ = self.until.send(self.clock.now() + timeout);
        }
        let Self { key, store, answer, .. } = self;
        answer.await.unwrap_or_else(|_| Err(shut_down_error(&key).at(&store)))?.ensure_held()
    }
}
