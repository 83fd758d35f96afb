//! Findings for `tenure doctor` about servers and bucket: versions, replicas, settings, clock and permissions.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::future::join_all;
use tenure_core::Key;

use super::api::{ApiDeadline, KeyWrite, WriteOutcome};
use super::connect::{self, INFO_TIMEOUT, MAX_SERVERS};
use super::inner::NatsInner;
use super::layout::BucketLayout;
use super::options::{Credentials, Options};
use super::stream::{self, StreamInfo};
use super::{consumer, monitor, queue, settings};
use crate::store::{Finding, KeySpace};
use crate::{Error, ErrorKind, Result};

/// Key on which permissions are tested. Nothing is ever written to it.
const PROBE_KEY: &str = "tenure/doctor";
/// A sequence that no stream reaches.
const UNREACHABLE_SEQUENCE: u64 = 1 << 60;
/// Oldest supported version of the server.
const MIN_SERVER_VERSION: (u32, u32) = (2, 9);
/// Largest clock difference that is not reported.
const MAX_CLOCK_SKEW: Duration = Duration::from_secs(10);
/// Lag in writes above which a replica is reported.
const MAX_REPLICA_LAG: u64 = 1_000;

/// Findings about the servers and the bucket. The caller has found that they answer.
pub(super) async fn findings(inner: &NatsInner, created: bool, until: ApiDeadline) -> Vec<Finding> {
    let mut findings = vec![servers(inner).await, connection(inner)];
    match stream::info(&inner.api, &inner.stream, until).await {
        Ok(info) => {
            findings.push(bucket_finding(inner, &info, created));
            findings.push(settings::finding(&info, &inner.options.bucket, inner.layout));
            findings.extend(replicas(&info));
            findings.extend(clock(&info, SystemTime::now()));
            findings.push(monitor::durability(inner, info.config.num_replicas).await);
        }
        Err(error) => findings.push(Finding::error("bucket", &error.into())),
    }
    findings.extend(permissions(inner, until).await);
    findings
}

/// Name and version of a server, as it reports them.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ServerVersion {
    name: String,
    version: String,
}

/// Finding about the versions of all known servers.
async fn servers(inner: &NatsInner) -> Finding {
    let info = inner.api.client.server_info();
    let ours = ServerVersion { name: info.server_name, version: info.version };
    let mut addresses: Vec<_> = inner.options.servers.clone();
    addresses.extend(info.connect_urls);
    addresses.sort();
    addresses.dedup();
    addresses.truncate(MAX_SERVERS);
    let mut silent = Vec::new();
    let mut answered = BTreeMap::from([(info.server_id, ours)]);
    if addresses.len() > 1 {
        for (address, answer) in
            join_all(addresses.iter().map(|address| read_version(inner, address))).await
        {
            match answer {
                Some((id, server)) => _ = answered.insert(id, server),
                None => silent.push(address.clone()),
            }
        }
    }
    versions(&answered.into_values().collect::<Vec<_>>(), &silent)
}

/// Connects to one server and reads its name and version.
async fn read_version<'a>(
    inner: &NatsInner,
    address: &'a String,
) -> (&'a String, Option<(String, ServerVersion)>) {
    let options = Options { servers: vec![address.clone()], ..inner.options.clone() };
    let end = inner.now() + INFO_TIMEOUT;
    let api = tokio::select! {
        biased;
        api = connect::connect(&options) => api.ok(),
        () = inner.api.clock.sleep_until(end) => None,
    };
    let info = api.and_then(|api| api.client.try_server_info());
    let server = info.map(|info| {
        (info.server_id, ServerVersion { name: info.server_name, version: info.version })
    });
    (address, server)
}

fn versions(answered: &[ServerVersion], silent: &[String]) -> Finding {
    let mut names: Vec<_> =
        answered.iter().map(|server| format!("{} {}", server.name, server.version)).collect();
    names.sort();
    let names = names.join(", ");
    let too_old = |server: &&ServerVersion| {
        parse_version(&server.version).is_some_and(|has| has < MIN_SERVER_VERSION)
    };
    if let Some(old) = answered.iter().find(too_old) {
        let (major, minor) = MIN_SERVER_VERSION;
        return Finding::failed("servers", format!("{names}: {} is too old", old.version))
            .advise(format!("tenure needs {major}.{minor} or later: upgrade it"));
    }
    if !silent.is_empty() {
        let silent = silent.join(", ");
        return Finding::warning("servers", format!("{names}; no answer from {silent}")).advise(
            "clients cannot fail over to them: check that they are up and can be reached from here",
        );
    }
    if answered.iter().any(|server| server.version != answered[0].version) {
        return Finding::warning("servers", names)
            .advise("the versions differ: finish the upgrade");
    }
    Finding::ok("servers", names)
}

/// Major and minor number of a version.
fn parse_version(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.trim_start_matches('v').split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn connection(inner: &NatsInner) -> Finding {
    let info = inner.api.client.server_info();
    let secret = match &inner.options.credentials {
        Credentials::Token(_) => Some("a token"),
        Credentials::User(..) => Some("a password"),
        // Only a signature is sent, never the seed.
        Credentials::None | Credentials::Nkey(_) | Credentials::File(_) => None,
    };
    let is_local = |server: &String| {
        let host = server.rsplit_once(':').map_or(server.as_str(), |(host, _)| host);
        let ip = host.trim_matches(['[', ']']).parse().is_ok_and(|ip: IpAddr| ip.is_loopback());
        ip || host == "localhost"
    };
    let local = inner.options.servers.iter().all(is_local);
    let login = match &inner.options.credentials {
        Credentials::None => "without credentials",
        Credentials::Token(_) => "by token",
        Credentials::User(..) => "by user and password",
        Credentials::Nkey(_) => "by nkey",
        Credentials::File(_) => "by credentials file",
    };
    if inner.options.tls || info.tls_required {
        return Finding::ok("connection", format!("TLS, {login}"));
    }
    match secret {
        Some(secret) if !local => Finding::warning("connection", format!("unencrypted, {login}"))
            .advise(format!("{secret} can be read in transit: turn TLS on, or use an nkey")),
        _ => Finding::ok("connection", format!("unencrypted, {login}")),
    }
}

fn bucket_finding(inner: &NatsInner, info: &StreamInfo, created: bool) -> Finding {
    let (storage, replicas) = (&info.config.storage, info.config.num_replicas);
    let layout = match inner.layout {
        BucketLayout::Native => "tenure's form".to_owned(),
        BucketLayout::Nlock { ttl } => format!("nlock's form with a ttl of {ttl:?}"),
    };
    let created = if created { "; created just now" } else { "" };
    let detail = format!(
        "{}: {storage} storage, {replicas} {}, {layout}{created}",
        inner.options.bucket,
        if replicas == 1 { "replica" } else { "replicas" },
    );
    match inner.layout {
        BucketLayout::Nlock { .. } => Finding::warning("bucket", detail).advise(
            "best effort: a restart of its server forgets all holds; use a bucket in tenure's form once no client needs nlock's",
        ),
        BucketLayout::Native if replicas == 1 => Finding::warning("bucket", detail).advise(
            "while its only server is down nothing is granted: on a cluster, use a bucket with replicas=3",
        ),
        BucketLayout::Native => Finding::ok("bucket", detail),
    }
}

/// Finding about the stream's leader and followers; `None` for a single replica.
fn replicas(info: &StreamInfo) -> Option<Finding> {
    let cluster = info.cluster.as_ref().filter(|_| info.config.num_replicas > 1)?;
    let Some(leader) = cluster.leader.as_ref().filter(|leader| !leader.is_empty()) else {
        return Some(
            Finding::failed("replicas", "the bucket has no leader: nothing can be written")
                .advise("a majority of its servers must be up and see each other"),
        );
    };
    let behind = |peer: &&stream::Peer| peer.offline || !peer.current || peer.lag > MAX_REPLICA_LAG;
    let lagging: Vec<_> = cluster
        .replicas
        .iter()
        .filter(behind)
        .map(|stream::Peer { name, offline, lag, .. }| {
            if *offline {
                format!("{name} is offline")
            } else {
                format!("{name} is {lag} writes behind")
            }
        })
        .collect();
    let names: Vec<_> = cluster.replicas.iter().map(|peer| peer.name.as_str()).collect();
    let detail = format!("led by {leader}, followed by {}", names.join(", "));
    Some(if lagging.is_empty() {
        let detail = format!("{detail}; an election takes 4 to 9 s: use a ttl of 30 s or more");
        Finding::ok("replicas", detail)
    } else {
        Finding::warning("replicas", format!("{detail}; {}", lagging.join(", ")))
            .advise("restore these replicas: the loss of one more may stop all locks")
    })
}

/// Compares the clock of the stream's leader with this host's; `None` for a server before 2.10, which does not report
/// it.
///
/// A record that no client has observed may be taken over once it is older than 3 leases and 30 s by the servers'
/// clocks.
fn clock(info: &StreamInfo, now: SystemTime) -> Option<Finding> {
    const WHAT: &str = "clock";
    let server = match info.answered_at()? {
        Ok(nanos) => UNIX_EPOCH + Duration::from_nanos(nanos),
        Err(error) => return Some(Finding::error(WHAT, &error)),
    };
    let (difference, direction) = match server.duration_since(now) {
        Ok(ahead) => (ahead, "ahead of"),
        Err(behind) => (behind.duration(), "behind"),
    };
    let detail = format!("{:.1} s {direction} this host's", difference.as_secs_f64());
    Some(if difference <= MAX_CLOCK_SKEW {
        Finding::ok(WHAT, detail)
    } else {
        Finding::warning(WHAT, detail).advise(
            "run NTP on all servers: if a new leader's clock is ahead of the last one's by more than 3 leases and 30 s, a \
             client may take over a live holder",
        )
    })
}

/// Tests the permissions that locks need, each in a way that changes nothing.
async fn permissions(inner: &NatsInner, until: ApiDeadline) -> Vec<Finding> {
    let key = Key::new(PROBE_KEY).expect("a valid key");
    let subject = inner.subject(&key, KeySpace::Lock);
    let (mut missing, mut granted) = (Vec::new(), vec!["read"]);
    let mut note = |what, outcome: Result<()>| match outcome {
        Ok(()) => granted.push(what),
        Err(error) => missing.push((what, error)),
    };
    note("write", probe_write(inner, &subject, until).await);
    note("watch", consumer::probe(&inner.api, &inner.stream, &subject, until).await);
    if inner.layout == BucketLayout::Native {
        note("purge", queue::probe_purge(inner, &key, until).await);
    }
    let mut findings: Vec<_> = missing
        .iter()
        .map(|(what, error)| {
            let advice = match *what {
                "write" => "without it, no lock can be acquired",
                "watch" => "without it, waiters only poll and lists are empty",
                _ => "without it, tickets of the queue (fair) pile up",
            };
            let finding = match *what {
                "purge" => Finding::warning("right to purge", error.chain()),
                what => Finding::error(format!("right to {what}"), error),
            };
            finding.advise(advice)
        })
        .collect();
    if missing.is_empty() {
        findings.push(Finding::ok("rights", granted.join(", ")));
    }
    findings
}

/// Tests the permission to write, on a condition that is never met: with the permission, the result is a conflict.
async fn probe_write(inner: &NatsInner, subject: &str, until: ApiDeadline) -> Result<()> {
    match inner.api.write(subject, UNREACHABLE_SEQUENCE, KeyWrite::default(), until).await? {
        WriteOutcome::Conflict => Ok(()),
        WriteOutcome::Unclear(error) => Err(error),
        WriteOutcome::Done(sequence) => {
            let message = format!(
                "the server accepted a write that it should have refused, as sequence {sequence}"
            );
            Err(Error::new(ErrorKind::Misconfigured, message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::FindingLevel;

    fn server(version: &str) -> ServerVersion {
        ServerVersion { name: format!("n-{version}"), version: version.to_owned() }
    }

    #[test]
    fn servers_that_are_old_or_differ_or_are_away_are_reported() {
        let verdict = |versions: &[&str], silent: &[String]| {
            let all: Vec<_> = versions.iter().map(|version| server(version)).collect();
            super::versions(&all, silent).level
        };
        assert_eq!(verdict(&["2.15.1", "2.15.1"], &[]), FindingLevel::Ok);
        assert_eq!(verdict(&["2.9.10"], &[]), FindingLevel::Ok);
        assert_eq!(verdict(&["2.15.1", "2.10.26"], &[]), FindingLevel::Warning);
        assert_eq!(verdict(&["2.15.1"], &["h:1".to_owned()]), FindingLevel::Warning);
        assert_eq!(verdict(&["2.15.1", "2.8.4"], &[]), FindingLevel::Failed);
        assert_eq!(parse_version("2.12.0-RC.1"), Some((2, 12)));
    }

    fn info(cluster: &str) -> StreamInfo {
        let text = format!(
            r#"{{ "config": {{ "storage": "file", "num_replicas": 3 }}, "created": "2026-01-01T00:00:00Z",
                "state": {{ "last_seq": 0 }}, "cluster": {cluster} }}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn a_server_whose_clock_is_off_is_reported() {
        let text = r#"{ "config": { "storage": "file", "num_replicas": 1 }, "created": "2026-01-01T00:00:00Z",
            "ts": "2026-01-01T00:01:00Z", "state": { "last_seq": 0 } }"#;
        let info: StreamInfo = serde_json::from_str(text).unwrap();
        let at = |text: &str| humantime::parse_rfc3339(text).unwrap();
        let found = |now: &str| clock(&info, at(now)).unwrap();
        assert_eq!(found("2026-01-01T00:01:02Z").level, FindingLevel::Ok);
        let ahead = found("2026-01-01T00:00:00Z");
        assert_eq!(ahead.level, FindingLevel::Warning);
        assert_eq!(ahead.detail, "60.0 s ahead of this host's");
        assert_eq!(found("2026-01-01T00:01:11Z").detail, "11.0 s behind this host's");
        assert!(clock(&self::info("null"), at("2026-01-01T00:00:00Z")).is_none(), "an old server");
    }

    #[test]
    fn a_stream_without_a_leader_and_replicas_that_lag_are_reported() {
        let found = |cluster: &str| replicas(&info(cluster)).unwrap();
        assert_eq!(found(r#"{ "name": "c" }"#).level, FindingLevel::Failed);
        let peers = r#"[{ "name": "b", "current": true }, { "name": "c", "current": false, "offline": true }]"#;
        let lagging = found(&format!(r#"{{ "leader": "a", "replicas": {peers} }}"#));
        assert_eq!(lagging.level, FindingLevel::Warning);
        assert!(lagging.detail.contains("c is offline"), "{lagging:?}");
        let well = found(r#"{ "leader": "a", "replicas": [{ "name": "b", "current": true }] }"#);
        assert_eq!(well.level, FindingLevel::Ok, "{well:?}");
    }
}
