//! Between enqueue and wait.

use std::time::Duration;

use tenure_core::Time;
use tokio::sync::oneshot;

use crate::request::shut_down;
use crate::{Clock, Guard, Result};

/// A place in the queue, taken by [`LockRequest::enqueue`](crate::LockRequest::enqueue).
///
/// Dropping it leaves the queue; a grant that came meanwhile is given back.
#[derive(Debug)]
pub struct Pending {
    clock: Clock,
    timeout: Option<Duration>,
    answer: oneshot::Receiver<Result<Guard>>,
    until: oneshot::Sender<Time>,
}

impl Pending {
    pub(crate) fn new(
        clock: Clock,
        timeout: Option<Duration>,
        answer: oneshot::Receiver<Result<Guard>>,
        until: oneshot::Sender<Time>,
    ) -> Self {
        Self { clock, timeout, answer, until }
    }

    /// Waits for the lock, as long as the timeout of the request allows, counted from now.
    ///
    /// # Errors
    ///
    /// As [`LockRequest::acquire`](crate::LockRequest::acquire). The place is given up with a timeout.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives the place up.
    pub async fn wait(self) -> Result<Guard> {
        if let Some(timeout) = self.timeout {
            // The task has answered already where it no longer listens.
            let _ = self.until.send(self.clock.now() + timeout);
        }
        self.answer.await.unwrap_or_else(|_| Err(shut_down()))
    }
}
