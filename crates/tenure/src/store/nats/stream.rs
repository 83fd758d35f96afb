//! The stream behind a bucket, as the server describes it.

use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use super::api::{self, Api, ApiDeadline, ApiError};
use crate::Result;

/// The server's description of a stream.
#[derive(Debug, Deserialize)]
pub(super) struct StreamInfo {
    pub(super) config: StreamConfig,
    created: String,
    /// Server time of the reply; absent before server 2.10.
    ts: Option<String>,
    state: StreamState,
    /// Leader and followers; absent on a single server.
    #[serde(default)]
    pub(super) cluster: Option<Cluster>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Cluster {
    pub(super) leader: Option<String>,
    #[serde(default)]
    pub(super) replicas: Vec<Peer>,
}

/// A follower.
#[derive(Debug, Deserialize)]
pub(super) struct Peer {
    pub(super) name: String,
    #[serde(default)]
    pub(super) current: bool,
    #[serde(default)]
    pub(super) offline: bool,
    #[serde(default)]
    pub(super) lag: u64,
}

#[derive(Debug, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "as the server reports them")]
pub(super) struct StreamConfig {
    #[serde(default)]
    pub(super) subjects: Vec<String>,
    pub(super) storage: String,
    #[serde(default = "default_replicas")]
    pub(super) num_replicas: usize,
    #[serde(default = "default_retention")]
    pub(super) retention: String,
    #[serde(default = "default_discard")]
    pub(super) discard: String,
    /// Limits of the whole stream; unlimited if not positive.
    #[serde(default)]
    pub(super) max_msgs: i64,
    #[serde(default)]
    pub(super) max_bytes: i64,
    /// Limit of one message including its headers.
    #[serde(default)]
    pub(super) max_msg_size: i64,
    #[serde(default)]
    pub(super) max_msgs_per_subject: i64,
    /// In nanoseconds.
    #[serde(default)]
    pub(super) max_age: u64,
    #[serde(default)]
    pub(super) mirror: Value,
    #[serde(default)]
    pub(super) sources: Value,
    #[serde(default)]
    pub(super) subject_transform: Value,
    #[serde(default)]
    pub(super) sealed: bool,
    #[serde(default)]
    pub(super) discard_new_per_subject: bool,
    #[serde(default)]
    pub(super) no_ack: bool,
    #[serde(default)]
    pub(super) allow_msg_counter: bool,
    /// Since server 2.12. With `async` a write is acknowledged before it reaches the file system.
    #[serde(default)]
    pub(super) persist_mode: String,
    /// Lifetime of the marker that the server writes in place of a record that expired by age, in nanoseconds.
    #[serde(default)]
    pub(super) subject_delete_marker_ttl: u64,
}

#[derive(Debug, Deserialize)]
struct StreamState {
    last_seq: u64,
    #[serde(default)]
    last_ts: Option<String>,
    #[serde(default)]
    messages: u64,
    #[serde(default)]
    bytes: u64,
}

fn default_replicas() -> usize {
    1
}

fn default_retention() -> String {
    "limits".to_owned()
}

fn default_discard() -> String {
    "old".to_owned()
}

impl StreamInfo {
    /// Creation time of the stream, in nanoseconds. A bucket that was created again has a later one.
    pub(super) fn epoch(&self) -> Result<u64> {
        api::parse_timestamp(&self.created)
    }

    /// Ttl of the bucket (`max_age`); zero if it has none.
    pub(super) fn max_age(&self) -> Duration {
        Duration::from_nanos(self.config.max_age)
    }

    pub(super) fn last_sequence(&self) -> u64 {
        self.state.last_seq
    }

    /// Number of messages in the stream, and their size in bytes.
    pub(super) fn used(&self) -> (u64, u64) {
        (self.state.messages, self.state.bytes)
    }

    /// Server time of the reply, in nanoseconds since 1970; `None` before server 2.10.
    pub(super) fn answered_at(&self) -> Option<Result<u64>> {
        self.ts.as_deref().map(api::parse_timestamp)
    }

    /// Server time, or a lower bound: the last message's time, or the stream's creation.
    pub(super) fn server_time(&self) -> Result<u64> {
        let time = self.ts.as_ref().or(self.state.last_ts.as_ref()).unwrap_or(&self.created);
        api::parse_timestamp(time)
    }
}

/// Reads the description of a stream.
pub(super) async fn info(
    api: &Api,
    stream: &str,
    until: ApiDeadline,
) -> Result<StreamInfo, ApiError> {
    api.request(&format!("STREAM.INFO.{stream}"), &Value::Null, until).await
}
