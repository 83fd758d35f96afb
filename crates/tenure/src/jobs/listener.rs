//! Notifications of new jobs: one task and one connection for all workers of a queue, while there are any.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio_postgres::types::Type;

use super::controls::CONTROLS_CHANGED;
use super::shared::QueueShared;
use super::sql;
use crate::Result;
use crate::store::pg::listen::NotificationListener;

/// Pause before `LISTEN` is retried after it failed.
const LISTEN_RETRY_PAUSE: Duration = Duration::from_secs(30);

/// Keeps the listener task of a queue alive until it is dropped.
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
        let listener = opened.unwrap_or_else(|error| {
            tracing::debug!(name: "tenure.watch_failed", store = %shared.db, %error);
            None
        });
        // A job may have been enqueued before `LISTEN` took effect, without a notification: claim once.
        shared.notifications.arrived.notify_one();
        let retry_at = shared.db.clock.now() + LISTEN_RETRY_PAUSE;
        if let Some(mut listener) = listener {
            loop {
                tokio::select! {
                    received = listener.notifications.recv() => match received {
                        None => break,
                        Some((_, payload)) if payload == CONTROLS_CHANGED => {
                            shared.controls.read_soon(shared.db.clock.now());
                        }
                        Some(_) => {}
                    },
                    () = shared.notifications.stopped.notified() => break,
                }
                shared.restart_scan();
                shared.notifications.arrived.notify_one();
            }
        } else {
            // Until the retry, workers find new jobs by polling.
            tokio::select! {
                () = shared.db.clock.sleep_until(retry_at) => {}
                () = shared.notifications.stopped.notified() => {}
            }
        }
    }
}

/// Opens a connection that listens; `None` behind a pooler, or if a notification sent to its channel does not
/// arrive.
async fn open(shared: &QueueShared) -> Result<Option<NotificationListener>> {
    let db = &shared.db;
    let by = db.by();
    let channel = sql::channel(&db.table);
    let begun = NotificationListener::begin(db.pool.settings(), &db.clock, &channel, by).await?;
    let Some(mut listener) = begun else { return Ok(None) };
    let probe = NotificationListener::probe()?;
    db.ask(&shared.sql.notify, &[(&probe, Type::TEXT)], by).await?;
    Ok(listener.receives(&probe, &db.clock).await.then_some(listener))
}
