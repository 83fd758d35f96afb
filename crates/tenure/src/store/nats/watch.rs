//! Notifications of changes: one JetStream consumer per key that this process waits for, shared by all waiters for it.
//!
//! A watch only wakes waiters. Its messages may be late, and a claim that follows is decided by its own conditional
//! write. A consumer that dies with its server is detected by missing heartbeats. Until then, the waiters' polls find
//! the changes that it did not deliver.

use std::sync::Arc;

use futures_util::StreamExt as _;
use tenure_core::{Key, Time};
use tokio::sync::watch;

use super::consumer::{HEARTBEAT, HEARTBEAT_TIMEOUT, create_consumer, parse};
use super::inner::NatsInner;
use super::keys;
use crate::store::{KeySpace, Version};
use crate::{Error, ErrorKind, Result};

/// Resolves when the key has changed since `since`.
pub(super) async fn changed(
    inner: &Arc<NatsInner>,
    key: &Key,
    space: KeySpace,
    since: Version,
) -> Result<()> {
    let subject = inner.subject(key, space);
    let mut changes = subscribe(inner, &subject).await?;
    loop {
        changes.borrow_and_update();
        let now = inner.now();
        let (version, due) = match inner.keys.known(&subject) {
            Some(known) => (keys::version_of(&known, now), known.observations.next_takeover(now)),
            None => (Version::default(), Time::MAX),
        };
        if version != since {
            return Ok(());
        }
        tokio::select! {
            watched = changes.changed() => watched.map_err(|error| {
                let message = "the watch has ended";
                Error::new(ErrorKind::Unavailable, message).because(error)
            })?,
            () = inner.api.clock.sleep_until(due) => {}
        }
    }
}

/// Subscribes to a subject, beginning with its present state. Joins a running watch if there is one.
pub(super) async fn subscribe(
    inner: &Arc<NatsInner>,
    subject: &str,
) -> Result<watch::Receiver<u64>> {
    if let Some(changes) = inner.watches.running(subject) {
        return Ok(changes);
    }
    inner.queues.watch_starting(subject);
    let connection = inner.api.connections();
    let (messages, _) = create_consumer(&inner.api, &inner.stream, subject, HEARTBEAT).await?;
    let (sender, changes) = watch::channel(0);
    inner.watches.insert(subject, changes.clone());
    let (weak_inner, subject) = (Arc::downgrade(inner), subject.to_owned());
    tokio::spawn(async move {
        let mut messages = messages;
        // The map keeps one receiver: a watch in use has at least two. It ends after two heartbeats without use,
        // not one: a waiter that claims and waits again drops its receiver for a moment, and should find the watch
        // still running.
        let mut unused_heartbeats = 0;
        while unused_heartbeats < 2 {
            let next = tokio::time::timeout(HEARTBEAT_TIMEOUT, messages.next());
            let Ok(Some(message)) = next.await else { break };
            let Some(inner) = weak_inner.upgrade() else { break };
            unused_heartbeats = if sender.receiver_count() > 1 { 0 } else { unused_heartbeats + 1 };
            if let Some((message, _)) = parse(&message) {
                unused_heartbeats = 0;
                // The message is noted before receivers are notified: they read the noted state as soon as they
                // wake.
                inner.note_message(&message, connection);
                sender.send_replace(message.sequence);
            }
        }
        // The sender is dropped before the waiters of the queue are woken: they see by the closed channel that the
        // watch has ended.
        drop(sender);
        if let Some(inner) = weak_inner.upgrade() {
            inner.queues.watch_ended(&subject, inner.watches.running(&subject).is_some());
        }
    });
    Ok(changes)
}
