//! Consumers of JetStream: each delivers the last message of every key below a filter, and all that follow.

use std::time::Duration;

use async_nats::Subscriber;
use futures_util::StreamExt as _;
use serde::Deserialize;
use serde_json::json;

use super::api::{self, Api, ApiDeadline, ApiError, Message, RECORD_HEADER};
use crate::{Error, ErrorKind, Result};

/// Interval of a consumer's idle heartbeats.
pub(super) const HEARTBEAT: Duration = Duration::from_secs(2);
/// The same for a snapshot, where the first heartbeat means that nothing is left to deliver.
const SNAPSHOT_HEARTBEAT: Duration = Duration::from_millis(200);
/// Time without messages after which a consumer counts as dead.
pub(super) const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout of a watch's start, and of a snapshot.
const WATCH_START_TIMEOUT: Duration = Duration::from_secs(5);

/// Reads the last message of every key below a filter.
pub(super) async fn snapshot(api: &Api, stream: &str, filter: &str) -> Result<Vec<Message>> {
    let until = api.deadline_after(WATCH_START_TIMEOUT);
    let (mut messages, consumer) = create_consumer(api, stream, filter, SNAPSHOT_HEARTBEAT).await?;
    let mut pending = consumer.num_pending + consumer.delivered.consumer_seq;
    let mut found = Vec::new();
    while pending > 0 {
        let next = tokio::select! {
            biased;
            next = messages.next() => next,
            () = api.clock.sleep_until(until.0) => None,
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
pub(super) async fn probe(api: &Api, stream: &str, filter: &str, until: ApiDeadline) -> Result<()> {
    let (_, consumer) = create_consumer(api, stream, filter, HEARTBEAT).await?;
    let subject = format!("CONSUMER.DELETE.{stream}.{}", consumer.name);
    // Without the permission to delete, the consumer expires when inactive, as that of every watch does.
    let _: Result<serde_json::Value, _> = api.request(&subject, &json!(null), until).await;
    Ok(())
}

/// The server's description of a new consumer.
#[derive(Deserialize)]
pub(super) struct Consumer {
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
pub(super) async fn create_consumer(
    api: &Api,
    stream: &str,
    filter: &str,
    heartbeat: Duration,
) -> Result<(Subscriber, Consumer)> {
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
pub(super) fn parse(message: &async_nats::Message) -> Option<(Message, u64)> {
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
