//! What servers and bucket say of themselves, and whether that is good enough for locks.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::future::join_all;
use tenure_core::Key;

use super::NatsStore;
use super::api::{ApiDeadline, KeyWrite, WriteOutcome};
use super::bucket::{self, StreamInfo};
use super::connect;
use super::inner::NatsInner;
use super::layout::BucketLayout;
use super::monitor;
use super::options::{Credentials, Options};
use super::settings;
use super::watch;
use crate::store::{Finding, KeySpace};
use crate::{Error, ErrorKind, Result};

/// The key that rights are tried on. Nothing is ever written to it.
const PROBE_KEY: &str = "tenure/doctor";
/// A sequence that no stream comes to.
const UNREACHABLE_SEQUENCE: u64 = 1 << 60;
/// The oldest server that has what we need.
const MIN_SERVER_VERSION: (u32, u32) = (2, 9);
/// How long another server of the cluster may take to say who it is.
pub(super) const INFO_TIMEOUT: Duration = Duration::from_secs(2);
/// The most servers that are asked.
pub(super) const MAX_SERVERS: usize = 16;
/// The largest difference of clocks that needs no attention.
const MAX_CLOCK_SKEW: Duration = Duration::from_secs(10);
/// A lag from which on a replica is told as one that does not keep up.
const MAX_REPLICA_LAG: u64 = 1_000;

/// What can be known of servers and bucket beyond that they answer.
pub(super) async fn findings(store: &NatsStore, until: ApiDeadline) -> Vec<Finding> {
    let inner = &store.inner;
    let mut findings = vec![servers(inner).await, connection(inner)];
    match bucket::info(&inner.api, &inner.stream, until).await {
        Ok(info) => {
            findings.push(shape(inner, &info, store.made));
            findings.push(settings::finding(&info, &inner.options.bucket, inner.layout));
            findings.extend(replicas(&info));
            findings.extend(clock(&info, SystemTime::now()));
            findings.push(monitor::durability(inner, info.config.num_replicas).await);
        }
        Err(trouble) => findings.push(Finding::error("bucket", &trouble.into())),
    }
    findings.extend(rights(store, until).await);
    findings
}

/// A server, as it greets.
#[derive(Clone, Debug, PartialEq, Eq)]
struct GreetedServer {
    name: String,
    version: String,
}

/// The versions of all servers that we know of.
async fn servers(inner: &NatsInner) -> Finding {
    let info = inner.api.client.server_info();
    let ours = GreetedServer { name: info.server_name, version: info.version };
    let mut addresses: Vec<_> = inner.options.servers.clone();
    addresses.extend(info.connect_urls);
    addresses.sort();
    addresses.dedup();
    addresses.truncate(MAX_SERVERS);
    let mut silent = Vec::new();
    let mut greeted = BTreeMap::from([(info.server_id, ours)]);
    if addresses.len() > 1 {
        for (address, answer) in join_all(addresses.iter().map(|at| greet(inner, at))).await {
            match answer {
                Some((id, server)) => _ = greeted.insert(id, server),
                None => silent.push(address.clone()),
            }
        }
    }
    versions(&greeted.into_values().collect::<Vec<_>>(), &silent)
}

/// Asks one server by itself who it is.
async fn greet<'a>(
    inner: &NatsInner,
    address: &'a String,
) -> (&'a String, Option<(String, GreetedServer)>) {
    let options = Options { servers: vec![address.clone()], ..inner.options.clone() };
    let end = inner.now() + INFO_TIMEOUT;
    let api = tokio::select! {
        biased;
        api = connect::connect(&options) => api.ok(),
        () = inner.api.clock.sleep_until(end) => None,
    };
    let info = api.and_then(|api| api.client.try_server_info());
    let greeted = info.map(|info| {
        (info.server_id, GreetedServer { name: info.server_name, version: info.version })
    });
    (address, greeted)
}

fn versions(greeted: &[GreetedServer], silent: &[String]) -> Finding {
    let mut told: Vec<_> =
        greeted.iter().map(|server| format!("{} {}", server.name, server.version)).collect();
    told.sort();
    let told = told.join(", ");
    let too_old = |server: &&GreetedServer| {
        number(&server.version).is_some_and(|has| has < MIN_SERVER_VERSION)
    };
    if let Some(old) = greeted.iter().find(too_old) {
        let (major, minor) = MIN_SERVER_VERSION;
        return Finding::failed("servers", format!("{told}: {} is too old", old.version))
            .advise(format!("tenure needs {major}.{minor} or later: upgrade it"));
    }
    if !silent.is_empty() {
        let away = silent.join(", ");
        return Finding::warning("servers", format!("{told}; no answer from {away}"))
            .advise("a client cannot turn to those when it loses its own: see whether they are up and can be reached from here");
    }
    if greeted.iter().any(|server| server.version != greeted[0].version) {
        return Finding::warning("servers", told).advise("the versions differ: finish the upgrade");
    }
    Finding::ok("servers", told)
}

/// Major and minor number of a version.
fn number(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.trim_start_matches('v').split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn connection(inner: &NatsInner) -> Finding {
    let info = inner.api.client.server_info();
    let secret = match &inner.options.credentials {
        Credentials::Token(_) => Some("a token"),
        Credentials::User(..) => Some("a password"),
        // A signature goes over the wire, the seed never does.
        Credentials::None | Credentials::Nkey(_) | Credentials::File(_) => None,
    };
    let near = |server: &String| {
        let host = server.rsplit_once(':').map_or(server.as_str(), |(host, _)| host);
        let ip = host.trim_matches(['[', ']']).parse().is_ok_and(|ip: IpAddr| ip.is_loopback());
        ip || host == "localhost"
    };
    let near = inner.options.servers.iter().all(near);
    let who = match &inner.options.credentials {
        Credentials::None => "without credentials",
        Credentials::Token(_) => "by token",
        Credentials::User(..) => "by user and password",
        Credentials::Nkey(_) => "by nkey",
        Credentials::File(_) => "by a file of credentials",
    };
    if inner.options.tls || info.tls_required {
        return Finding::ok("connection", format!("TLS, {who}"));
    }
    match secret {
        Some(secret) if !near => Finding::warning("connection", format!("in the clear, {who}"))
            .advise(format!("{secret} can be read on its way: turn TLS on, or use an nkey")),
        _ => Finding::ok("connection", format!("in the clear, {who}")),
    }
}

fn shape(inner: &NatsInner, info: &StreamInfo, made: bool) -> Finding {
    let (storage, copies) = (&info.config.storage, info.config.num_replicas);
    let form = match inner.layout {
        BucketLayout::Native => "tenure's form".to_owned(),
        BucketLayout::Nlock { ttl } => format!("nlock's form with a ttl of {ttl:?}"),
    };
    let made = if made { "; made just now" } else { "" };
    let detail = format!(
        "{}: {storage} storage, {copies} {}, {form}{made}",
        inner.options.bucket,
        if copies == 1 { "replica" } else { "replicas" },
    );
    match inner.layout {
        BucketLayout::Nlock { .. } => Finding::warning("bucket", detail).advise(
            "best effort: a restart of its server forgets who holds; use a bucket of tenure's form once nobody needs nlock's",
        ),
        BucketLayout::Native if copies == 1 => Finding::warning("bucket", detail).advise(
            "while its one server is down nothing is granted: on a cluster, use a bucket with replicas=3",
        ),
        BucketLayout::Native => Finding::ok("bucket", detail),
    }
}

/// Who leads the stream and who follows, where there are several.
fn replicas(info: &StreamInfo) -> Option<Finding> {
    let cluster = info.cluster.as_ref().filter(|_| info.config.num_replicas > 1)?;
    let Some(leader) = cluster.leader.as_ref().filter(|leader| !leader.is_empty()) else {
        return Some(
            Finding::failed("replicas", "the bucket has no leader: nothing can be written")
                .advise("a majority of its servers must be up and see each other"),
        );
    };
    let behind = |peer: &&bucket::Peer| peer.offline || !peer.current || peer.lag > MAX_REPLICA_LAG;
    let lame: Vec<_> = cluster
        .replicas
        .iter()
        .filter(behind)
        .map(|bucket::Peer { name, offline, lag, .. }| {
            if *offline {
                format!("{name} is offline")
            } else {
                format!("{name} is {lag} writes behind")
            }
        })
        .collect();
    let names: Vec<_> = cluster.replicas.iter().map(|peer| peer.name.as_str()).collect();
    let detail = format!("led by {leader}, followed by {}", names.join(", "));
    Some(if lame.is_empty() {
        let detail = format!("{detail}; an election takes 4 to 9 s, which holds of 12 s outlive");
        Finding::ok("replicas", detail)
    } else {
        Finding::warning("replicas", format!("{detail}; {}", lame.join(", ")))
            .advise("the loss of one more may stop all locks: bring it back")
    })
}

/// Compares the clock of the server that answers for the stream with this host's. A record that no client has watched is
/// taken over by the servers' clocks, once it is older than three leases and 30 s. Servers before 2.10 do not tell theirs.
fn clock(info: &StreamInfo, now: SystemTime) -> Option<Finding> {
    const WHAT: &str = "clock";
    let told = match info.answered_at()? {
        Ok(told) => UNIX_EPOCH + Duration::from_nanos(told),
        Err(trouble) => return Some(Finding::error(WHAT, &trouble)),
    };
    let (apart, which) = match told.duration_since(now) {
        Ok(ahead) => (ahead, "ahead of"),
        Err(behind) => (behind.duration(), "behind"),
    };
    let detail = format!("{:.1} s {which} this host's", apart.as_secs_f64());
    Some(if apart <= MAX_CLOCK_SKEW {
        Finding::ok(WHAT, detail)
    } else {
        Finding::warning(WHAT, detail).advise(
            "run NTP on all servers: a leader whose clock is ahead of the last one's by more than 3 leases and 30 s may let \
             a client take over a live holder",
        )
    })
}

/// Whether the account may do what locks need. Each is tried in a way that changes nothing.
async fn rights(store: &NatsStore, until: ApiDeadline) -> Vec<Finding> {
    let inner = &store.inner;
    let key = Key::new(PROBE_KEY).expect("a plain name");
    let subject = inner.subject(&key, KeySpace::Lock);
    let (mut missing, mut may) = (Vec::new(), vec!["read"]);
    let mut tried = |what, outcome: Result<()>| match outcome {
        Ok(()) => may.push(what),
        Err(error) => missing.push((what, error)),
    };
    tried("write", write(inner, &subject, until).await);
    tried("watch", watch::probe(inner, &subject, until).await);
    if inner.layout == BucketLayout::Native {
        tried("purge", inner.probe_purge(&key, until).await);
    }
    let mut findings: Vec<_> = missing
        .iter()
        .map(|(what, error)| {
            let what_for = match *what {
                "write" => "no lock can be acquired without it",
                "watch" => "waiters only look now and then without it, and lists are empty",
                _ => "tickets of order of arrival (fair) pile up without it",
            };
            let finding = match *what {
                "purge" => {
                    Finding::warning("right to purge", crate::store::examine::error_chain(error))
                }
                what => Finding::error(format!("right to {what}"), error),
            };
            finding.advise(what_for)
        })
        .collect();
    if missing.is_empty() {
        findings.push(Finding::ok("rights", may.join(", ")));
    }
    findings
}

/// A write at a sequence that no key has: refused for that, and for nothing else where we may write.
async fn write(inner: &NatsInner, subject: &str, until: ApiDeadline) -> Result<()> {
    match inner.api.write(subject, UNREACHABLE_SEQUENCE, KeyWrite::default(), until).await? {
        WriteOutcome::Conflict => Ok(()),
        WriteOutcome::Unclear(error) => Err(error),
        WriteOutcome::Done(sequence) => {
            let message = format!("the server took a write that it had to refuse, as {sequence}");
            Err(Error::new(ErrorKind::Misconfigured, message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::FindingLevel;

    fn greeted(version: &str) -> GreetedServer {
        GreetedServer { name: format!("n-{version}"), version: version.to_owned() }
    }

    #[test]
    fn servers_that_are_old_or_differ_or_are_away_are_told() {
        let verdict = |versions: &[&str], silent: &[String]| {
            let all: Vec<_> = versions.iter().map(|version| greeted(version)).collect();
            super::versions(&all, silent).level
        };
        assert_eq!(verdict(&["2.15.1", "2.15.1"], &[]), FindingLevel::Ok);
        assert_eq!(verdict(&["2.9.10"], &[]), FindingLevel::Ok);
        assert_eq!(verdict(&["2.15.1", "2.10.26"], &[]), FindingLevel::Warning);
        assert_eq!(verdict(&["2.15.1"], &["h:1".to_owned()]), FindingLevel::Warning);
        assert_eq!(verdict(&["2.15.1", "2.8.4"], &[]), FindingLevel::Failed);
        assert_eq!(number("2.12.0-RC.1"), Some((2, 12)));
    }

    fn info(cluster: &str) -> StreamInfo {
        let text = format!(
            r#"{{ "config": {{ "storage": "file", "num_replicas": 3 }}, "created": "2026-01-01T00:00:00Z",
                "state": {{ "last_seq": 0 }}, "cluster": {cluster} }}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn a_server_whose_clock_is_off_is_told() {
        let text = r#"{ "config": { "storage": "file", "num_replicas": 1 }, "created": "2026-01-01T00:00:00Z",
            "ts": "2026-01-01T00:01:00Z", "state": { "last_seq": 0 } }"#;
        let info: StreamInfo = serde_json::from_str(text).unwrap();
        let at = |text: &str| humantime::parse_rfc3339(text).unwrap();
        let told = |now: &str| clock(&info, at(now)).unwrap();
        assert_eq!(told("2026-01-01T00:01:02Z").level, FindingLevel::Ok);
        let ahead = told("2026-01-01T00:00:00Z");
        assert_eq!(ahead.level, FindingLevel::Warning);
        assert_eq!(ahead.detail, "60.0 s ahead of this host's");
        assert_eq!(told("2026-01-01T00:01:11Z").detail, "11.0 s behind this host's");
        assert!(clock(&self::info("null"), at("2026-01-01T00:00:00Z")).is_none(), "an old server");
    }

    #[test]
    fn a_stream_without_a_leader_and_replicas_that_lag_are_told() {
        let told = |cluster: &str| replicas(&info(cluster)).unwrap();
        assert_eq!(told(r#"{ "name": "c" }"#).level, FindingLevel::Failed);
        let peers = r#"[{ "name": "b", "current": true }, { "name": "c", "current": false, "offline": true }]"#;
        let lame = told(&format!(r#"{{ "leader": "a", "replicas": {peers} }}"#));
        assert_eq!(lame.level, FindingLevel::Warning);
        assert!(lame.detail.contains("c is offline"), "{lame:?}");
        let well = told(r#"{ "leader": "a", "replicas": [{ "name": "b", "current": true }] }"#);
        assert_eq!(well.level, FindingLevel::Ok, "{well:?}");
    }
}
