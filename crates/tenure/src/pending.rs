//! The pending acquisition between `enqueue` and `wait`.

use std::sync::Arc;
use std::time::Duration;

use tenure_core::{Key, Time};
use tokio::sync::oneshot;

use crate::{Clock, Error, Guard, Result, Store};

/// Place in the queue of a lock, taken by [`LockRequest::enqueue`](crate::LockRequest::enqueue).
///
/// Dropping it leaves the queue, and releases a grant that arrived meanwhile.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
/// # let client = tenure::Client::connect("memory:").await?;
/// let holder = client.lock("reports").acquire().await?;
/// let place = client.lock("reports").enqueue().await?; // in the queue from here on
/// // … prepare the work …
/// holder.release().await?;
/// let guard = place.wait().await?;
/// # guard.release().await?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
#[must_use = "dropping a place leaves the queue"]
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

    /// Waits for the lock, at most for the timeout of the request, counted from now.
    ///
    /// # Errors
    ///
    /// As [`LockRequest::acquire`](crate::LockRequest::acquire). A timeout leaves the queue. `Lost` if the lock was
    /// granted, and the hold was lost before this call.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the queue.
    pub async fn wait(self) -> Result<Guard> {
        if let Some(timeout) = self.timeout {
            // A send fails only if the task has answered already: then no deadline is needed.
            let _ = self.until.send(self.clock.now() + timeout);
        }
        let Self { key, store, answer, .. } = self;
        answer.await.unwrap_or_else(|_| Err(Error::task_ended(&key).at(&store)))?.ensure_held()
    }
}
