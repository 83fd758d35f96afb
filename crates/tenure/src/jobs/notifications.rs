//! Hearing of new jobs: one task and one connection for all workers of a queue, while there are any.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::Notify;
use tokio_postgres::types::Type;

use super::queue::QueueShared;
use super::sql;
use crate::Result;
use crate::store::pg::listen::NotificationListener;

/// The pause before listening is tried again after it failed.
const LISTEN_RETRY_PAUSE: Duration = Duration::from_secs(30);

/// Whoever listens.
#[derive(Debug, Default)]
pub(super) struct JobNotifications {
    listeners: AtomicUsize,
    arrived: Notify,
    stopped: Notify,
}

impl JobNotifications {
    /// Resolves when there may be a job to claim.
    pub(super) async fn notified(&self) {
        self.arrived.notified().await;
    }

    /// Nobody listens any more.
    pub(super) fn stop_listening(&self) {
        self.stopped.notify_one();
    }
}

/// One who listens until this is dropped.
#[derive(Debug)]
pub(super) struct JobListener(Weak<QueueShared>);

impl JobListener {
    pub(super) fn new(queue: &Arc<QueueShared>) -> Self {
        if queue.notifications.listeners.fetch_add(1, Ordering::Relaxed) == 0 {
            tokio::spawn(listen(Arc::downgrade(queue)));
        }
        Self(Arc::downgrade(queue))
    }
}

impl Drop for JobListener {
    fn drop(&mut self) {
        if let Some(queue) = self.0.upgrade()
            && queue.notifications.listeners.fetch_sub(1, Ordering::Relaxed) == 1
        {
            queue.notifications.stop_listening();
        }
    }
}

async fn listen(queue: Weak<QueueShared>) {
    loop {
        let Some(shared) = queue.upgrade() else { return };
        if shared.notifications.listeners.load(Ordering::Relaxed) == 0 {
            return;
        }
        let opened = open(&shared).await;
        let listening = opened.unwrap_or_else(|error| {
            tracing::debug!(name: "tenure.watch_failed", store = %shared.db, %error);
            None
        });
        // Something may have come before we listened.
        shared.notifications.arrived.notify_one();
        let deaf_until = shared.db.clock.now() + LISTEN_RETRY_PAUSE;
        if let Some(mut listening) = listening {
            loop {
                tokio::select! {
                    told = listening.notifications.recv() => if told.is_none() { break },
                    () = shared.notifications.stopped.notified() => break,
                }
                shared.restart_scan();
                shared.notifications.arrived.notify_one();
            }
        } else {
            // The poll is there for that.
            tokio::select! {
                () = shared.db.clock.sleep_until(deaf_until) => {}
                () = shared.notifications.stopped.notified() => {}
            }
        }
    }
}

/// A connection that listens, if what is told arrives at it.
async fn open(shared: &QueueShared) -> Result<Option<NotificationListener>> {
    let link = &shared.db;
    let by = link.by();
    let channel = sql::channel(&link.table);
    let mut listening =
        NotificationListener::begin(link.pool.settings(), &link.clock, &channel, by).await?;
    let probe = NotificationListener::probe()?;
    link.ask(&shared.sql.notify, &[(&probe, Type::TEXT)], by).await?;
    Ok(listening.receives(&probe, &link.clock).await.then_some(listening))
}
