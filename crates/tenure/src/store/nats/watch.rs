//! Being told of changes: one consumer for each key that this process waits for, shared by all who do.
//!
//! It only wakes: what it tells is hearsay, and a claim that follows is decided by its own conditional write. A consumer
//! that dies with its server is noticed by its missing heartbeats; until then the backstop of those who wait finds what
//! it did not tell.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_nats::Subscriber;
use futures_util::StreamExt as _;
use serde::Deserialize;
use serde_json::json;
use tokio::sync::watch;

use super::NatsInner;
use super::api::{self, ABOUT, ApiDeadline, ApiError, Message};
use crate::{Error, ErrorKind, Result};

/// How often a consumer says that it lives.
const HEARTBEAT: Duration = Duration::from_secs(2);
/// The same, for a list: the first says that there is no more.
const LIST_HEARTBEAT: Duration = Duration::from_millis(200);
/// The silence after which it is taken for dead.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the start of a watch, or a page of a list, may take.
const WATCH_START_TIMEOUT: Duration = Duration::from_secs(5);

/// The watches of a store: each told to whoever has a receiver.
#[derive(Default)]
pub(super) struct Watches(Mutex<HashMap<String, watch::Receiver<u64>>>);

impl Watches {
    /// News of a key, from its present state on. Shared with others that wait for it.
    pub(super) async fn of(
        &self,
        inner: &Arc<NatsInner>,
        subject: &str,
    ) -> Result<watch::Receiver<u64>> {
        if let Some(news) = self.running(subject) {
            return Ok(news);
        }
        inner.queues.begin(subject);
        let (messages, _) = subscribe(inner, subject, HEARTBEAT).await?;
        let (tell, news) = watch::channel(0);
        self.lock().insert(subject.to_owned(), news.clone());
        let (store, subject) = (Arc::downgrade(inner), subject.to_owned());
        tokio::spawn(async move {
            let mut messages = messages;
            // The receiver in the map is no reason to go on.
            let mut idle = 0;
            while idle < 2 {
                let next = tokio::time::timeout(HEARTBEAT_TIMEOUT, messages.next());
                let Ok(Some(message)) = next.await else { break };
                let Some(inner) = store.upgrade() else { break };
                idle = if tell.receiver_count() > 1 { 0 } else { idle + 1 };
                if let Some((message, _)) = parse(&message) {
                    idle = 0;
                    inner.note_message(&message);
                    tell.send_replace(message.sequence);
                }
            }
            drop(tell);
            if let Some(inner) = store.upgrade() {
                inner.queues.end(&subject, inner.watches.running(&subject).is_some());
            }
        });
        Ok(news)
    }

    /// News of a key that somebody here is told already.
    pub(super) fn running(&self, subject: &str) -> Option<watch::Receiver<u64>> {
        let mut watches = self.lock();
        // A receiver whose sender is gone belongs to a watch that ended.
        watches.retain(|_, news| news.has_changed().is_ok());
        watches.get(subject).cloned()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, watch::Receiver<u64>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The last message of every key below a filter.
pub(super) async fn snapshot(inner: &Arc<NatsInner>, filter: &str) -> Result<Vec<Message>> {
    let until = inner.api.until(WATCH_START_TIMEOUT);
    let (mut messages, made) = subscribe(inner, filter, LIST_HEARTBEAT).await?;
    let mut pending = made.num_pending + made.delivered.consumer_seq;
    let mut found = Vec::new();
    while pending > 0 {
        let next = tokio::select! {
            biased;
            next = messages.next() => next,
            () = inner.api.clock.sleep_until(until.0) => None,
        };
        let Some(next) = next else {
            let message = "the list of keys did not come in time";
            return Err(Error::new(ErrorKind::Unavailable, message));
        };
        match parse(&next) {
            Some((message, left)) => {
                found.push(message);
                pending = left;
            }
            // It has nothing to send: what is missing was removed meanwhile.
            None => break,
        }
    }
    Ok(found)
}

/// Whether we may watch a key: makes a consumer of it, and takes it away again.
pub(super) async fn probe(inner: &Arc<NatsInner>, filter: &str, until: ApiDeadline) -> Result<()> {
    let (_, made) = subscribe(inner, filter, HEARTBEAT).await?;
    let subject = format!("CONSUMER.DELETE.{}.{}", inner.stream, made.name);
    // Who may not do that leaves it to end by itself, as every watch does.
    let _: Result<serde_json::Value, _> = inner.api.ask(&subject, &json!(null), until).await;
    Ok(())
}

/// What the server says of a consumer that it made.
#[derive(Deserialize)]
struct Consumer {
    name: String,
    /// How many messages are to come, and how many are on their way.
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

/// A consumer of the last message of each key below a filter and all that follow.
async fn subscribe(
    inner: &Arc<NatsInner>,
    filter: &str,
    heartbeat: Duration,
) -> Result<(Subscriber, Consumer)> {
    let (api, stream): (_, &str) = (&inner.api, &inner.stream);
    let inbox = api.client.new_inbox();
    let messages = api.client.subscribe(inbox.clone()).await.map_err(|error| {
        Error::new(ErrorKind::Unavailable, "cannot listen for changes").because(error)
    })?;
    let nanos = |span: Duration| u64::try_from(span.as_nanos()).unwrap_or(u64::MAX);
    let wanted = json!({
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
    let made: Result<Consumer, ApiError> =
        api.ask(&format!("CONSUMER.CREATE.{stream}"), &wanted, until).await;
    Ok((messages, made?))
}

/// A message of the stream as a consumer delivers it, and how many follow; `None` for heartbeats.
fn parse(message: &async_nats::Message) -> Option<(Message, u64)> {
    let (sequence, time, left) = position(message.reply.as_ref()?.as_str())?;
    let headers = message.headers.as_ref();
    let gone = headers.is_some_and(api::ends_key);
    let about =
        headers.and_then(|headers| headers.get(ABOUT)).map(|about| about.as_str().to_owned());
    let value = (!gone).then(|| message.payload.to_vec());
    let subject = message.subject.to_string();
    Some((Message { subject, sequence, time, about, value }, left))
}

/// Sequence and timestamp of a delivered message, and how many follow it: its reply subject says so.
fn position(reply: &str) -> Option<(u64, u64, u64)> {
    let parts: Vec<_> = reply.strip_prefix("$JS.ACK.")?.split('.').collect();
    // stream, consumer, delivered, stream sequence, consumer sequence, time, pending; newer servers put domain and
    // account before them, and may put something after.
    let at = if parts.len() >= 9 { 2 } else { 0 };
    let number = |part: usize| parts.get(at + part)?.parse().ok();
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
            assert_eq!(position(reply), Some((42, 1_700_000_000_000_000_001, 3)), "{reply}");
        }
        for reply in ["_INBOX.x", "$JS.ACK.KV_b.c1", "$JS.ACK.a.b.c.d.e.f.g"] {
            assert_eq!(position(reply), None, "{reply}");
        }
    }
}
