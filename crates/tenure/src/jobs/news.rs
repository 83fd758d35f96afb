//! Hearing of new jobs: one task and one connection for all workers of a queue, while there are any.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::Notify;
use tokio_postgres::types::Type;

use super::queue::Shared;
use super::sql;
use crate::Result;
use crate::store::pg::listen::Listening;

/// The pause before listening is tried again after it failed.
const AGAIN: Duration = Duration::from_secs(30);

/// Whoever listens.
#[derive(Debug, Default)]
pub(super) struct News {
    listeners: AtomicUsize,
    heard: Notify,
    left: Notify,
}

impl News {
    /// Resolves when there may be a job to claim.
    pub(super) async fn heard(&self) {
        self.heard.notified().await;
    }

    /// Nobody listens any more.
    pub(super) fn leave(&self) {
        self.left.notify_one();
    }
}

/// One who listens until this is dropped.
#[derive(Debug)]
pub(super) struct Listener(Weak<Shared>);

impl Listener {
    pub(super) fn new(queue: &Arc<Shared>) -> Self {
        if queue.news.listeners.fetch_add(1, Ordering::Relaxed) == 0 {
            tokio::spawn(listen(Arc::downgrade(queue)));
        }
        Self(Arc::downgrade(queue))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(queue) = self.0.upgrade()
            && queue.news.listeners.fetch_sub(1, Ordering::Relaxed) == 1
        {
            queue.news.leave();
        }
    }
}

async fn listen(queue: Weak<Shared>) {
    loop {
        let Some(shared) = queue.upgrade() else { return };
        if shared.news.listeners.load(Ordering::Relaxed) == 0 {
            return;
        }
        let opened = open(&shared).await;
        let listening = opened.unwrap_or_else(|error| {
            tracing::debug!(name: "tenure.watch_failed", store = %shared.link, %error);
            None
        });
        // Something may have come before we listened.
        shared.news.heard.notify_one();
        let deaf_until = shared.link.clock.now() + AGAIN;
        if let Some(mut listening) = listening {
            loop {
                tokio::select! {
                    told = listening.news.recv() => if told.is_none() { break },
                    () = shared.news.left.notified() => break,
                }
                shared.look_again();
                shared.news.heard.notify_one();
            }
        } else {
            // The poll is there for that.
            tokio::select! {
                () = shared.link.clock.sleep_until(deaf_until) => {}
                () = shared.news.left.notified() => {}
            }
        }
    }
}

/// A connection that listens, if what is told arrives at it.
async fn open(shared: &Shared) -> Result<Option<Listening>> {
    let link = &shared.link;
    let by = link.by();
    let channel = sql::channel(&link.table);
    let mut listening = Listening::begin(link.pool.settings(), &link.clock, &channel, by).await?;
    let probe = Listening::probe()?;
    link.ask(&shared.sql.notify, &[(&probe, Type::TEXT)], by).await?;
    Ok(listening.hears(&probe, &link.clock).await.then_some(listening))
}
