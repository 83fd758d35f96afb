//! Check of the server's settings for `tenure doctor`.

use std::time::{SystemTime, UNIX_EPOCH};

use tenure_core::Time;
use tokio_postgres::SimpleQueryRow;

use super::primaries::Primaries;
use super::settings::Settings;
use crate::store::Finding;

/// SQL for [`findings`].
pub(crate) const SERVER_QUERY: &str = "SELECT current_setting('server_version') AS version, \
    (current_setting('idle_session_timeout', true) IS NOT NULL)::int AS ends_idle_sessions, \
    pg_is_in_recovery()::int AS is_standby, current_setting('max_connections') AS max_connections, \
    (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend') AS used_connections, \
    coalesce((SELECT ssl::int FROM pg_stat_ssl WHERE pid = pg_backend_pid()), 0) AS is_encrypted, \
    current_setting('fsync') AS fsync, (extract(epoch FROM clock_timestamp()) * 1000)::int8 AS now_ms, \
    (SELECT reset_val FROM pg_settings WHERE name = 'synchronous_commit') AS synchronous_commit, \
    current_setting('synchronous_standby_names') AS standby_names, \
    (SELECT count(*) FROM pg_stat_replication) AS standbys";

/// Clock difference above which a warning is reported, in milliseconds.
const MAX_CLOCK_SKEW_MS: i64 = 1_000;

/// Findings that all stores on PostgreSQL share.
pub(crate) fn findings(row: &SimpleQueryRow, settings: &Settings) -> Vec<Finding> {
    let text = |column: &str| row.get(column).unwrap_or_default();
    let number = |column: &str| text(column).parse::<i64>().unwrap_or_default();
    let mut findings = vec![Finding::ok("server", format!("PostgreSQL {}", text("version")))];
    findings.push(if text("is_standby") == "1" {
        Finding::failed("role", "a read-only standby")
            .advise("name the primary, or all servers with target_session_attrs=read-write")
    } else {
        Finding::ok("role", "a primary")
    });
    let (max, used) = (number("max_connections"), number("used_connections"));
    let detail = format!("{used} of {max} in use");
    findings.push(if used * 5 > max * 4 {
        Finding::warning("connections", detail)
            .advise("raise max_connections, or lower the pool sizes of other clients")
    } else {
        Finding::ok("connections", detail)
    });
    findings.push(match (text("is_encrypted") == "1", settings.is_local()) {
        (true, _) => Finding::ok("encryption", "TLS"),
        (false, true) => Finding::ok("encryption", "none, within this host"),
        (false, false) => {
            Finding::warning("encryption", "none: the network can read and change the traffic")
                .advise("give sslmode=verify-full")
        }
    });
    findings.push(if text("fsync") == "on" {
        Finding::ok("fsync", "on")
    } else {
        Finding::warning(
            "fsync",
            "off: a crash of the machine can undo grants and repeat fencing tokens",
        )
        .advise("set fsync = on")
    });
    // The value that the server, the database and the role set. The current value would be wrong: a session of advisory
    // locks has raised its own already.
    findings.push(match text("synchronous_commit") {
        "off" => Finding::ok(
            "synchronous_commit",
            "off: tenure raises it to local for its own writes only",
        ),
        other => Finding::ok("synchronous_commit", other),
    });
    findings.push(replication(
        text("standby_names"),
        text("synchronous_commit"),
        number("standbys"),
    ));
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let apart = number("now_ms").saturating_sub(i64::try_from(now.as_millis()).unwrap_or(i64::MAX));
    let detail = format!("{apart} ms from this host's");
    findings.push(if apart.abs() > MAX_CLOCK_SKEW_MS {
        Finding::warning("clock", detail)
            .advise("no lock relies on it, but logs will disagree: run NTP")
    } else {
        Finding::ok("clock", detail)
    });
    findings
}

/// Finding about the listed servers.
pub(crate) async fn listed_servers(primaries: &Primaries, by: Time) -> Option<Finding> {
    match primaries.finding(by).await {
        Ok(finding) => finding,
        Err(error) => Some(Finding::error("listed servers", &error)),
    }
}

/// Warns of asynchronous standbys: a promoted standby that lacks a grant gives the lock to another holder.
fn replication(synchronous: &str, commit: &str, standbys: i64) -> Finding {
    const WHAT: &str = "replication";
    if !synchronous.is_empty() && !matches!(commit, "off" | "local") {
        let detail = format!("synchronous: a grant is on a standby first ({synchronous})");
        return Finding::ok(WHAT, detail);
    }
    let standbys = match standbys {
        0 => return Finding::ok(WHAT, "no standby is connected"),
        1 => "1 standby".to_owned(),
        n => format!("{n} standbys"),
    };
    Finding::warning(
        WHAT,
        format!(
            "{standbys}, asynchronous: a fail-over can lose the last grants, and two holders run"
        ),
    )
    .advise("set synchronous_standby_names and synchronous_commit = on, or check the fencing token")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::FindingLevel;

    #[test]
    fn standbys_that_may_lack_a_grant_are_a_warning() {
        for (synchronous, commit, standbys, verdict) in [
            ("", "on", 0, FindingLevel::Ok),
            ("", "on", 1, FindingLevel::Warning),
            ("ANY 1 (a, b)", "on", 2, FindingLevel::Ok),
            ("ANY 1 (a, b)", "remote_apply", 2, FindingLevel::Ok),
            // Raised to local only: the commit does not wait for standbys.
            ("ANY 1 (a, b)", "off", 2, FindingLevel::Warning),
            ("ANY 1 (a, b)", "local", 2, FindingLevel::Warning),
        ] {
            let found = replication(synchronous, commit, standbys);
            assert_eq!(found.level, verdict, "{synchronous} {commit} {standbys}: {found:?}");
        }
    }
}
