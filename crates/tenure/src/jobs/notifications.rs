//! Wake-ups of the workers of a queue that wait for new jobs.

use std::sync::atomic::AtomicUsize;

use tokio::sync::Notify;

/// Wake-ups of the workers of a queue that wait for new jobs.
#[derive(Debug, Default)]
pub(super) struct JobNotifications {
    /// Number of workers that listen.
    pub(super) listeners: AtomicUsize,
    pub(super) arrived: Notify,
    pub(super) stopped: Notify,
}

impl JobNotifications {
    /// Resolves when a job may be available.
    pub(super) async fn notified(&self) {
        self.arrived.notified().await;
    }

    /// Wakes the listener task, so that it ends if no listener is left.
    pub(super) fn stop_listening(&self) {
        self.stopped.notify_one();
    }
}
