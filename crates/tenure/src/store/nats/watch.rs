//! Notifications of changes: one JetStream consumer per key that this process waits for, shared by all waiters for it.
//!
//! A watch only wakes waiters. Its messages may be late, and a claim that follows is decided by its own conditional
//! write. A consumer that dies with its server is detected by missing heartbeats. Until then, the waiters' polls find
//! the changes that it did not deliver.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_nats::Subscriber;
use futures_util::StreamExt as _;
use serde::Deserialize;
use serde_json::json;
use tokio::sync::watch;

use super::NatsInner;
use super::api::{self, ApiDeadline, ApiError, Message, RECORD_HEADER};
use crate::{Error, ErrorKind, Result};

/// Interval of a consumer's idle heartbeats.
const HEARTBEAT: Duration = Duration::from_secs(2);
/// The same for a snapshot, where the first heartbeat means that nothing is left to deliver.
const SNAPSHOT_HEARTBEAT: Duration = Duration::from_millis(200);
/// Time without messages after which a consumer counts as dead.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout of a watch's start, and of a snapshot.
const WATCH_START_TIMEOUT: Duration = Duration::from_secs(5);

/// Running watches of a store by subject. A watch runs as long as it has receivers.
#[derive(Default)]
pub(super) struct Watches(Mutex<HashMap<String, watch::Receiver<u64>>>);

impl Watches {
    /// Subscribes to a subject, beginning with its present state. Joins a running watch if there is one.
    pub(super) async fn subscribe(
        &self,
        inner: &Arc<NatsInner>,
        subject: &str,
    ) -> Result<watch::Receiver<u64>> {
        if let Some(changes) = self.running(subject) {
            return Ok(changes);
        }
        inner.queues.watch_starting(subject);
        let connection = inner.api.connections();
        let (messages, _) = create_consumer(inner, subject, HEARTBEAT).await?;
        let (sender, changes) = watch::channel(0);
        self.lock().insert(subject.to_owned(), changes.clone());
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
                unused_heartbeats =
                    if sender.receiver_count() > 1 { 0 } else { unused_heartbeats + 1 };
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

    /// Receiver of a watch that runs already.
    pub(super) fn running(&self, subject: &str) -> Option<watch::Receiver<u64>> {
        let mut watches = self.lock();
        // A receiver whose sender is gone belongs to a watch that ended.
        watches.retain(|_, changes| changes.has_changed().is_ok());
        watches.get(subject).cloned()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, watch::Receiver<u64>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads the last message of every key below a filter.
pub(super) async fn snapshot(inner: &Arc<NatsInner>, filter: &str) -> Result<Vec<Message>> {
    let until = inner.api.deadline_after(WATCH_START_TIMEOUT);
    let (mut messages, consumer) = create_consumer(inner, filter, SNAPSHOT_HEARTBEAT).await?;
    let mut pending = consumer.num_pending + consumer.delivered.consumer_seq;
    let mut found = Vec::new();
    while pending > 0 {
        let next = tokio::select! {
            biased;
            next = messages.next() => next,
            () = inner.api.clock.sleep_until(until.0) => None,
        };
        let Some(next) = next else {
            let message = "the list of keys was not delivered in time";
            return Err(Error::new(ErrorKind::Unavailable, message));
        };
        match parse(&next) {
            Some((message, remaining)) => {
                found.push(message);
                pending = remaining;
            }
            // A heartbeat: nothing is left to deliver. Messages that are still missing were removed in between.
            None => break,
        }
    }
    Ok(found)
}

/// Tests the permission to watch a key, by creating a consumer and deleting it.
pub(super) async fn probe(inner: &Arc<NatsInner>, filter: &str, until: ApiDeadline) -> Result<()> {
    let (_, consumer) = create_consumer(inner, filter, HEARTBEAT).await?;
    let subject = format!("CONSUMER.DELETE.{}.{}", inner.stream, consumer.name);
    // Without the permission to delete, the consumer expires when inactive, as that of every watch does.
    let _: Result<serde_json::Value, _> = inner.api.request(&subject, &json!(null), until).await;
    Ok(())
}

/// The server's description of a new consumer.
#[derive(Deserialize)]
struct Consumer {
    name: String,
    /// Number of messages still to be delivered; those in flight are counted in `delivered`.
    #[serde(default)]
    num_pending: u64,
    #[serde(default)]
    delivered: Delivered,
}

#[derive(Default, Deserialize)]
struct Delivered {
    #[serde(default)]
    consumer_seq: u64,
}

/// Creates a consumer of the last message of each key below a filter, and of all that follow.
async fn create_consumer(
    inner: &Arc<NatsInner>,
    filter: &str,
    heartbeat: Duration,
) -> Result<(Subscriber, Consumer)> {
    let (api, stream): (_, &str) = (&inner.api, &inner.stream);
    let inbox = api.client.new_inbox();
    let messages = api.client.subscribe(inbox.clone()).await.map_err(|error| {
        Error::new(ErrorKind::Unavailable, "cannot subscribe to changes").because(error)
    })?;
    let nanos = |span: Duration| u64::try_from(span.as_nanos()).unwrap_or(u64::MAX);
    let config = json!({
        "stream_name": stream,
        "config": {
            "deliver_subject": inbox,
            "deliver_policy": "last_per_subject",
            "filter_subject": filter,
            "ack_policy": "none",
            "max_deliver": 1,
            "replay_policy": "instant",
            "idle_heartbeat": nanos(heartbeat),
            "inactive_threshold": nanos(HEARTBEAT_TIMEOUT),
            "mem_storage": true,
            "num_replicas": 1,
        },
    });
    let until = ApiDeadline(api.clock.now() + WATCH_START_TIMEOUT);
    let consumer: Result<Consumer, ApiError> =
        api.request(&format!("CONSUMER.CREATE.{stream}"), &config, until).await;
    Ok((messages, consumer?))
}

/// Parses a delivered message, and the number of messages that follow; `None` for a heartbeat.
fn parse(message: &async_nats::Message) -> Option<(Message, u64)> {
    let (sequence, timestamp, remaining) = parse_reply_subject(message.reply.as_ref()?.as_str())?;
    let headers = message.headers.as_ref();
    let deleted = headers.is_some_and(api::has_end_marker);
    let record_header = headers
        .and_then(|headers| headers.get(RECORD_HEADER))
        .map(|header| header.as_str().to_owned());
    let value = (!deleted).then(|| message.payload.to_vec());
    let subject = message.subject.to_string();
    Some((Message { subject, sequence, timestamp, record_header, value }, remaining))
}

/// Sequence and timestamp of a delivered message, and the number that follow it, from its reply subject.
fn parse_reply_subject(reply: &str) -> Option<(u64, u64, u64)> {
    let parts: Vec<_> = reply.strip_prefix("$JS.ACK.")?.split('.').collect();
    // stream, consumer, delivered, stream sequence, consumer sequence, time, pending. Newer servers put domain and
    // account before these parts, and may append others.
    let offset = if parts.len() >= 9 { 2 } else { 0 };
    let number = |part: usize| parts.get(offset + part)?.parse().ok();
    Some((number(3)?, number(5)?, number(6)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequence_and_time_are_read_from_both_shapes_of_reply() {
        let short = "$JS.ACK.KV_b.c1.1.42.7.1700000000000000001.3";
        let long = "$JS.ACK._.HASH.KV_b.c1.1.42.7.1700000000000000001.3.x";
        for reply in [short, long] {
            assert_eq!(
                parse_reply_subject(reply),
                Some((42, 1_700_000_000_000_000_001, 3)),
                "{reply}"
            );
        }
        for reply in ["_INBOX.x", "$JS.ACK.KV_b.c1", "$JS.ACK.a.b.c.d.e.f.g"] {
            assert_eq!(parse_reply_subject(reply), None, "{reply}");
        }
    }
}
