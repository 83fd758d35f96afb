//! Durability finding: the writes that a loss of power would cost. Only a server's monitoring port shows how often it
//! syncs to disk.

use std::io;
use std::time::Duration;

use futures_util::future::join_all;
use serde::Deserialize;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::connect::{INFO_TIMEOUT, MAX_SERVERS};
use super::inner::NatsInner;
use super::layout::BucketLayout;
use crate::store::Finding;

/// Largest number of bytes read of a reply.
const MAX_ANSWER_BYTES: u64 = 4 * 1024 * 1024;

/// Times at which a server syncs writes to disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SyncPolicy {
    /// Syncs before it acknowledges.
    Always,
    /// Syncs at this interval.
    Every(Duration),
}

/// Finding about the writes that a loss of power would cost a bucket with this many replicas.
pub(super) async fn durability(inner: &NatsInner, replicas: usize) -> Finding {
    durability_finding(inner.layout, replicas, &sync_policies(inner).await)
}

impl SyncPolicy {
    /// Longest time between a write's acknowledgement and its sync.
    fn delay(self) -> Duration {
        match self {
            Self::Always => Duration::ZERO,
            Self::Every(interval) => interval,
        }
    }
}

#[derive(Deserialize)]
struct Varz {
    jetstream: Option<JetStream>,
}

#[derive(Deserialize)]
struct JetStream {
    config: Option<JetStreamConfig>,
}

#[derive(Deserialize)]
struct JetStreamConfig {
    /// In nanoseconds.
    #[serde(default)]
    sync_interval: u64,
    #[serde(default)]
    sync_always: bool,
}

/// Reads the sync policies of the servers from their monitoring ports.
async fn sync_policies(inner: &NatsInner) -> Vec<(String, io::Result<SyncPolicy>)> {
    let end = inner.now() + INFO_TIMEOUT;
    let each = async |address: &String| {
        let policy = tokio::select! {
            biased;
            policy = read_sync_policy(address) => policy,
            () = inner.api.clock.sleep_until(end) => Err(io::ErrorKind::TimedOut.into()),
        };
        (address.clone(), policy)
    };
    join_all(inner.options.monitors.iter().take(MAX_SERVERS).map(each)).await
}

fn durability_finding(
    layout: BucketLayout,
    replicas: usize,
    policies: &[(String, io::Result<SyncPolicy>)],
) -> Finding {
    const WHAT: &str = "durability";
    if layout != BucketLayout::Native {
        return Finding::warning(WHAT, "none: the bucket is in memory");
    }
    if let Some((address, Err(error))) = policies.iter().find(|(_, policy)| policy.is_err()) {
        return Finding::warning(
            WHAT,
            format!("not known: cannot read the monitoring port {address}: {error}"),
        )
        .advise("name the monitoring port of every server: ?monitor=HOST:PORT,…");
    }
    let known = policies.iter().filter_map(|(_, policy)| policy.as_ref().ok());
    let delay = match known.max_by_key(|policy| policy.delay()) {
        Some(SyncPolicy::Always) => {
            return Finding::ok(WHAT, "a write is on disk before it is acknowledged");
        }
        Some(SyncPolicy::Every(interval)) => format!("up to {interval:?}"),
        None => "by default up to 2 minutes".to_owned(),
    };
    let when = match replicas {
        1 => "its server loses power".to_owned(),
        replicas => format!("{} of its {replicas} servers lose power at once", replicas / 2 + 1),
    };
    let detail = format!(
        "a write is acknowledged {delay} before it is on disk: if {when}, the grants of that time may be lost, and \
         their tokens issued again"
    );
    let mut advice = "set sync_interval: always in the jetstream block of every server (2.15.1 or later makes that \
                      cheap), and keep replicas in separate failure domains"
        .to_owned();
    if policies.is_empty() {
        advice += "; to see whether it is set, name the monitoring ports: ?monitor=HOST:PORT,…";
    }
    Finding::warning(WHAT, detail).advise(advice)
}

/// Reads the sync policy from the monitoring port at `address`.
async fn read_sync_policy(address: &str) -> io::Result<SyncPolicy> {
    let mut stream = TcpStream::connect(address).await?;
    let request = format!("GET /varz HTTP/1.0\r\nHost: {address}\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    stream.take(MAX_ANSWER_BYTES).read_to_end(&mut answer).await?;
    parse(&answer)
}

fn parse(answer: &[u8]) -> io::Result<SyncPolicy> {
    let invalid = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why.to_owned());
    let blank = answer.windows(4).position(|four| four == b"\r\n\r\n");
    let (head, body) = answer.split_at(blank.ok_or_else(|| invalid("the reply is not HTTP"))?);
    let status = head.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let status = String::from_utf8_lossy(status);
    if status.split(' ').nth(1) != Some("200") {
        return Err(invalid(&format!("the reply is {status}")));
    }
    let varz: Varz = serde_json::from_slice(&body[4..])?;
    let config = varz.jetstream.and_then(|jetstream| jetstream.config);
    match config {
        Some(JetStreamConfig { sync_always: true, .. }) => Ok(SyncPolicy::Always),
        Some(JetStreamConfig { sync_interval: every @ 1.., .. }) => {
            Ok(SyncPolicy::Every(Duration::from_nanos(every)))
        }
        _ => Err(invalid("the reply has no sync settings of JetStream")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::FindingLevel;

    #[test]
    fn sync_settings_are_parsed_and_other_answers_refused() {
        let answer =
            |body: &str| parse(format!("HTTP/1.0 200 OK\r\nX: y\r\n\r\n{body}").as_bytes());
        let config = |text: &str| answer(&format!(r#"{{"jetstream":{{"config":{{{text}}}}}}}"#));
        assert_eq!(config(r#""sync_interval":1,"sync_always":true"#).unwrap(), SyncPolicy::Always);
        let every = config(r#""sync_interval":120000000000"#).unwrap();
        assert_eq!(every, SyncPolicy::Every(Duration::from_secs(120)));
        for body in ["", "[]", "{}", r#"{"jetstream":{"config":{}}}"#] {
            assert!(answer(body).is_err(), "{body}");
        }
        assert!(
            parse(b"HTTP/1.0 404 Not Found\r\n\r\n{}").unwrap_err().to_string().contains("404")
        );
        assert!(parse(b"INFO {}\r\n").is_err());
    }

    #[test]
    fn power_loss_finding_depends_on_the_replicas() {
        let finding = |layout, replicas| durability_finding(layout, replicas, &[]);
        assert!(finding(BucketLayout::Native, 1).detail.contains("if its server loses power"));
        assert!(
            finding(BucketLayout::Native, 3)
                .detail
                .contains("if 2 of its 3 servers lose power at once")
        );
        let memory = finding(BucketLayout::Nlock { ttl: Duration::from_secs(1) }, 1);
        assert!(memory.detail.contains("in memory"));
    }

    #[test]
    fn durability_finding_reports_the_worst_server() {
        let two = SyncPolicy::Every(Duration::from_secs(2));
        let finding = |settings: Vec<io::Result<SyncPolicy>>| {
            let all: Vec<_> =
                settings.into_iter().map(|setting| ("h:1".to_owned(), setting)).collect();
            durability_finding(BucketLayout::Native, 3, &all)
        };
        assert_eq!(
            finding(vec![Ok(SyncPolicy::Always), Ok(SyncPolicy::Always)]).level,
            FindingLevel::Ok
        );
        let worst = finding(vec![Ok(SyncPolicy::Always), Ok(two)]);
        assert_eq!(worst.level, FindingLevel::Warning);
        assert!(worst.detail.contains("up to 2s before"), "{worst:?}");
        let silent = finding(vec![Ok(SyncPolicy::Always), Err(io::ErrorKind::TimedOut.into())]);
        assert_eq!(silent.level, FindingLevel::Warning, "{silent:?}");
    }
}
