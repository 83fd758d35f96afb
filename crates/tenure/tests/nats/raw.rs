//! A participant that does exactly what nlock does, and hands that write by hand.

use std::time::Duration;

use async_nats::{Client, HeaderMap};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

/// A connection without tenure.
pub(crate) struct Raw {
    pub(crate) client: Client,
    bucket: String,
}

/// What a conditional write came to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Wrote {
    At(u64),
    Refused(u64),
}

impl Raw {
    /// `url` names server and bucket, as tenure's does.
    pub(crate) async fn connect(url: &str) -> Self {
        let url = url.split('?').next().expect("a first part");
        let (servers, bucket) = url.rsplit_once('/').expect("a bucket");
        let servers: Vec<_> =
            servers.trim_start_matches("nats://").split(',').map(str::to_owned).collect();
        // A stopped server keeps its connections open: found out by what it does not answer.
        let options = async_nats::ConnectOptions::new().ping_interval(Duration::from_secs(1));
        let client = options.connect(servers).await.expect("the server is up");
        Self { client, bucket: bucket.to_owned() }
    }

    pub(crate) fn subject(&self, name: &str) -> String {
        format!("$KV.{}.{name}", self.bucket)
    }

    /// Writes a value, or deletes the key, at a revision.
    pub(crate) async fn write(&self, name: &str, value: Option<&str>, revision: u64) -> Wrote {
        let mut headers = HeaderMap::new();
        headers.insert("Nats-Expected-Last-Subject-Sequence", revision.to_string());
        if value.is_none() {
            headers.insert("KV-Operation", "DEL");
        }
        self.publish(name, headers, value.unwrap_or_default()).await
    }

    /// Writes a value whatever is there.
    pub(crate) async fn overwrite(&self, name: &str, value: &str) -> Wrote {
        self.publish(name, HeaderMap::new(), value).await
    }

    /// Deletes the key whatever is there.
    pub(crate) async fn delete(&self, name: &str) -> Wrote {
        let mut headers = HeaderMap::new();
        headers.insert("KV-Operation", "DEL");
        self.publish(name, headers, "").await
    }

    async fn publish(&self, name: &str, headers: HeaderMap, value: &str) -> Wrote {
        let subject = self.subject(name);
        let reply = self.client.request_with_headers(subject, headers, value.to_owned().into());
        let reply: Value = serde_json::from_slice(&reply.await.expect("an answer").payload)
            .expect("the server answers in JSON");
        match reply["error"]["err_code"].as_u64() {
            Some(code) => Wrote::Refused(code),
            None => Wrote::At(reply["seq"].as_u64().expect("a sequence")),
        }
    }

    /// Info of the stream, if a server answers for it.
    pub(crate) async fn info(&self) -> Option<Value> {
        let subject = format!("$JS.API.STREAM.INFO.KV_{}", self.bucket);
        let asked = self.client.request(subject, "".into());
        let reply = tokio::time::timeout(Duration::from_secs(1), asked).await.ok()?.ok()?;
        serde_json::from_slice(&reply.payload).ok()
    }

    /// Deletes the bucket.
    pub(crate) async fn drop_bucket(&self) {
        self.api(&format!("STREAM.DELETE.KV_{}", self.bucket), &Value::Null).await;
    }

    /// A request of the API.
    pub(crate) async fn api(&self, what: &str, ask: &Value) -> Value {
        let body = if ask.is_null() { String::new() } else { ask.to_string() };
        let subject = format!("$JS.API.{what}");
        let reply = tokio::time::timeout(
            Duration::from_secs(10),
            self.client.request(subject, body.into()),
        );
        let reply = reply.await.expect("in time").expect("an answer");
        serde_json::from_slice(&reply.payload).expect("the server answers in JSON")
    }

    /// Value of a key.
    pub(crate) async fn value(&self, name: &str) -> Value {
        let data = STANDARD.decode(self.last(name).await["data"].as_str().expect("a value"));
        serde_json::from_slice(&data.expect("base64")).expect("JSON")
    }

    /// Revision of a key.
    pub(crate) async fn revision(&self, name: &str) -> u64 {
        self.last(name).await["seq"].as_u64().expect("a sequence")
    }

    async fn last(&self, name: &str) -> Value {
        let ask = serde_json::json!({ "last_by_subj": self.subject(name) });
        let mut found = self.api(&format!("STREAM.MSG.GET.KV_{}", self.bucket), &ask).await;
        found["message"].take()
    }

    /// nlock's `TryAcquire`: create the key, or take over what was deleted, at the revision of that.
    pub(crate) async fn nlock_try(&self, name: &str, owner: &str) -> Option<u64> {
        match self.write(name, Some(owner), 0).await {
            Wrote::At(revision) => return Some(revision),
            Wrote::Refused(10_071 | 10_164) => {}
            Wrote::Refused(code) => panic!("refused with {code}"),
        }
        let ask = serde_json::json!({ "last_by_subj": self.subject(name) });
        let found = self.api(&format!("STREAM.MSG.GET.KV_{}", self.bucket), &ask).await;
        let message = found.get("message")?;
        // A deleted key has no value.
        if message["data"].as_str().is_some_and(|data| !data.is_empty()) {
            return None;
        }
        let revision = message["seq"].as_u64().expect("a sequence");
        match self.write(name, Some(owner), revision).await {
            Wrote::At(revision) => Some(revision),
            Wrote::Refused(_) => None,
        }
    }
}
