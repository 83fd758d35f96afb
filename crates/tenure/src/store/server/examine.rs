//! Examination of a lock server: its settings, and their risks.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use tenure_core::Time;

use super::options::{Address, Options};
use super::shared::ServerShared;
use super::wire::Protocol;
use crate::store::Finding;
use crate::units::in_whole_units;

/// Name of the check that all addresses lead to one server.
const ADDRESSES: &str = "addresses";
/// Maximum number of socket addresses of one URL that are checked.
const MAX_MACHINES: usize = 16;
/// Time limit of one connection.
const DIAL_TIMEOUT: Duration = Duration::from_secs(1);
/// Connections made to each socket address: a balancer in front of two servers alternates between them.
const TRIES_PER_MACHINE: usize = 2;

/// Findings about a server beyond its reachability.
pub(super) fn findings(shared: &ServerShared) -> Vec<Finding> {
    let (greeting, options) = (&shared.greeting, shared.dialer.options());
    let mut findings = Vec::new();
    if shared.protocol == Protocol::Plain {
        findings.push(
            Finding::warning(
                "server",
                "it speaks the plain protocol, which does not show its settings",
            )
            .advise(
                "tenure serve has shared locks, names and lists, and keeps holds over a restart",
            ),
        );
    } else {
        let (version, instance) = (&greeting.version, &greeting.instance);
        findings.push(Finding::ok("server", format!("tenure {version}, instance {instance}")));
        findings.push(durability(greeting.durable));
        findings.push(Finding::ok("longest ttl", in_whole_units(greeting.max_lease)));
    }
    findings.push(tokens(shared.protocol, options));
    if !shared.dialer.has_own_connections() {
        findings.push(encryption(options));
    }
    if shared.protocol == Protocol::Extended {
        findings.push(authentication(greeting.auth, options));
    }
    findings
}

/// Connects to every socket address of the URL and compares the instances: two servers behind one name would grant
/// every lock twice.
pub(super) async fn addresses(shared: &ServerShared, until: Time) -> Finding {
    let dialer = &shared.dialer;
    let mut machines: Vec<(&Address, SocketAddr)> = Vec::new();
    for address in &dialer.options().addresses {
        match tokio::net::lookup_host((&*address.host, address.port)).await {
            Ok(found) => machines.extend(found.map(|at| (address, at))),
            Err(error) => {
                let advice = "remove it from the URL, or give it an entry in the name service";
                return Finding::warning(
                    ADDRESSES,
                    format!("{address} cannot be resolved: {error}"),
                )
                .advise(advice);
            }
        }
    }
    machines.sort_by_key(|(_, at)| *at);
    machines.dedup_by_key(|(_, at)| *at);
    machines.truncate(MAX_MACHINES);
    let (mut instances, mut silent) = (BTreeSet::new(), Vec::new());
    for &(address, at) in &machines {
        for _ in 0..TRIES_PER_MACHINE {
            // The limit per connection leaves time for the rest if one machine hangs.
            let until = until.min(shared.clock.now() + DIAL_TIMEOUT);
            match dialer.dial_at(address, at, until).await {
                Ok((_, greeting)) => _ = instances.insert(greeting.instance),
                Err(_) => silent.push(at.to_string()),
            }
        }
    }
    silent.dedup();
    same_server(&instances, machines.len(), &silent)
}

fn same_server(instances: &BTreeSet<String>, machines: usize, silent: &[String]) -> Finding {
    if instances.len() > 1 {
        let names: Vec<_> = instances.iter().map(String::as_str).collect();
        let names = names.join(", ");
        return Finding::failed(ADDRESSES, format!("different servers answer: instances {names}"))
            .advise("two servers grant the same lock twice: the URL must lead to exactly one");
    }
    if !silent.is_empty() {
        let silent = silent.join(", ");
        return Finding::warning(ADDRESSES, format!("no answer from {silent}"))
            .advise("make sure that no other server can be started there");
    }
    let machines =
        if machines == 1 { "one address".into() } else { format!("{machines} addresses") };
    Finding::ok(ADDRESSES, format!("{machines}, one server"))
}

fn durability(durable: bool) -> Finding {
    if durable {
        return Finding::ok("data directory", "holds and fencing tokens outlive a restart");
    }
    Finding::warning(
        "data directory",
        "none: a restart drops all holds, and fencing tokens are ordered only if the server's clock is not set back",
    )
    .advise("start the server with --data-dir DIR")
}

fn tokens(protocol: Protocol, options: &Options) -> Finding {
    const WHAT: &str = "fencing tokens";
    match (protocol, options.ordered_tokens) {
        (Protocol::Extended, _) => Finding::ok(WHAT, "ordered: they grow with every grant"),
        (Protocol::Plain, true) => Finding::ok(
            WHAT,
            "ordered, as fencing=ordered in the URL declares; the plain protocol cannot confirm it",
        ),
        (Protocol::Plain, false) => Finding::warning(
            WHAT,
            "none: the plain protocol does not say whether the server's tokens are ordered, so holds have no token and no \
             resource can be fenced",
        )
        .advise(
            "use tenure serve; or add ?fencing=ordered to the URL if the server is dflockd 2.1 or newer",
        ),
    }
}

fn encryption(options: &Options) -> Finding {
    match (options.tls, is_local(options)) {
        (true, _) => Finding::ok("encryption", "TLS"),
        (false, true) => Finding::ok("encryption", "none: the connection stays within this host"),
        (false, false) => Finding::warning(
            "encryption",
            "none: an eavesdropper can read tokens and acquire locks",
        )
        .advise("start the server with --tls-cert and --tls-key, and use tenures:// in the URL"),
    }
}

fn authentication(asked: bool, options: &Options) -> Finding {
    match (asked, is_local(options)) {
        (true, _) => {
            Finding::ok("authentication", "the server requires an auth token, and accepted ours")
        }
        (false, true) => {
            Finding::ok("authentication", "none: every process on this host can acquire locks")
        }
        (false, false) => Finding::warning(
            "authentication",
            "none: every client that reaches the server can acquire locks",
        )
        .advise("start the server with --auth-token-file FILE, or with --tls-client-ca"),
    }
}

/// True if all addresses are on this host.
fn is_local(options: &Options) -> bool {
    options.addresses.iter().all(|address| {
        let host = address.host.as_str();
        host == "localhost" || host.parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::FindingLevel;

    fn options(tls: bool, rest: &str) -> Options {
        Options::parse(tls, rest, |_| None).unwrap()
    }

    #[test]
    fn two_servers_behind_one_name_are_a_failure() {
        let instances = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        assert_eq!(same_server(&instances(&["a"]), 2, &[]).level, FindingLevel::Ok);
        let two = same_server(&instances(&["a", "b"]), 2, &[]);
        assert_eq!(two.level, FindingLevel::Failed);
        assert!(two.detail.contains("a, b"), "{two:?}");
        let away = same_server(&instances(&["a"]), 2, &["h:1".to_owned()]);
        assert_eq!(away.level, FindingLevel::Warning);
    }

    #[test]
    fn tokens_are_ordered_by_the_extension_or_by_declaration() {
        for (protocol, rest, verdict, part) in [
            (Protocol::Extended, "//h", FindingLevel::Ok, "ordered"),
            (Protocol::Plain, "//h?fencing=ordered", FindingLevel::Ok, "declares"),
            (Protocol::Plain, "//h", FindingLevel::Warning, "none"),
        ] {
            let finding = tokens(protocol, &options(false, rest));
            assert_eq!(finding.level, verdict, "{rest}");
            assert!(finding.detail.contains(part), "{}", finding.detail);
        }
    }

    #[test]
    fn unencrypted_remote_traffic_is_a_warning() {
        for (tls, rest, verdict) in [
            (false, "//127.0.0.1:1", FindingLevel::Ok),
            (false, "//localhost", FindingLevel::Ok),
            (false, "//[::1]:1", FindingLevel::Ok),
            (false, "//localhost,locks.example", FindingLevel::Warning),
            (true, "//locks.example", FindingLevel::Ok),
        ] {
            assert_eq!(encryption(&options(tls, rest)).level, verdict, "{rest}");
        }
        let far = options(true, "//locks.example");
        assert_eq!(authentication(false, &far).level, FindingLevel::Warning);
        assert_eq!(authentication(true, &far).level, FindingLevel::Ok);
        assert_eq!(durability(false).level, FindingLevel::Warning);
    }
}
