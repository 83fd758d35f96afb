//! Findings for `tenure doctor` about the server, its sessions and the table of terms.

use tenure_core::Time;
use tokio_postgres::SimpleQueryRow;

use super::options::KeyForm;
use super::shared::AdvisoryShared;
use super::{session, terms};
use crate::store::pg::table::Table;
use crate::store::{Finding, pg};

/// Findings about a server that answers.
pub(super) async fn findings(shared: &AdvisoryShared, by: Time) -> Vec<Finding> {
    let mut findings = Vec::new();
    let read = |rows: &[SimpleQueryRow]| {
        let row = rows.first();
        let leases = row.and_then(|row| row.get("ends_idle_sessions")) == Some("1");
        let common = row.map(|row| pg::examine::findings(row, &shared.settings));
        (leases, common.unwrap_or_default())
    };
    match shared.query(by, |_| pg::examine::SERVER_QUERY.to_owned(), read).await {
        Ok((leases, common)) => {
            findings.extend(common);
            findings.extend(pg::examine::listed_servers(&shared.primaries, by).await);
            findings.push(pooler(shared, by).await);
            findings.push(Finding::ok("sessions", "each connection has a session of its own"));
            findings.push(keys(shared.form));
            findings.push(frozen_holders(leases));
            match shared.terms.as_deref() {
                Some(table) => {
                    findings.push(terms_finding(shared, table, by).await);
                    findings.push(incarnation_finding(shared, table, by).await);
                }
                None => findings.push(no_incarnation()),
            }
        }
        Err(error) => findings.push(Finding::error("server", &error.at(shared))),
    }
    findings
}

async fn pooler(shared: &AdvisoryShared, by: Time) -> Finding {
    let found = pg::pooler::finding(&shared.settings, &shared.clock, by).await;
    found.unwrap_or_else(|error| Finding::error("pooler", &error.at(shared)))
}

async fn terms_finding(shared: &AdvisoryShared, table: &Table, by: Time) -> Finding {
    let read = |rows: &[SimpleQueryRow]| {
        let flag = |column| rows.first().is_some_and(|row| session::flag(row, column));
        (flag("is_ours"), flag("allowed"))
    };
    let name = table.shown();
    match shared.query(by, |_| terms::query(table, shared.form), read).await {
        Ok((true, true)) => Finding::ok("terms", format!("counted in {name}")),
        Ok((true, false)) => Finding::failed("terms", format!("insufficient rights on {name}"))
            .advise(format!("an owner must GRANT SELECT, INSERT, UPDATE ON {name}")),
        Ok((false, _)) => {
            let detail = format!("there is no table {name} for the terms of this key form");
            Finding::failed("terms", detail).advise("run `tenure schema --apply` with the same URL")
        }
        Err(error) => Finding::error("terms", &error.at(shared)),
    }
}

async fn incarnation_finding(shared: &AdvisoryShared, table: &Table, by: Time) -> Finding {
    let read = |rows: &[SimpleQueryRow]| {
        rows.first().map(|row| pg::incarnation::finding(row, "tenure schema --apply"))
    };
    let answer = shared.query(by, |_| pg::incarnation::examination(table), read).await;
    match answer {
        Ok(found) => found.unwrap_or_else(no_incarnation),
        Err(error) => Finding::error("incarnation", &error.at(shared)),
    }
}

fn keys(form: KeyForm) -> Finding {
    let detail = match form {
        KeyForm::Pair => {
            "two 32-bit numbers: excludes sessions that call pg_advisory_lock(int, int)"
        }
        KeyForm::Bigint => {
            "one 64-bit number: excludes sessions that call pg_advisory_lock(bigint)"
        }
    };
    Finding::ok("keys", detail)
}

fn frozen_holders(leases: bool) -> Finding {
    if leases {
        return Finding::ok("frozen holders", "the server ends their sessions after the ttl");
    }
    Finding::warning(
        "frozen holders",
        "a holder that is frozen or cut off keeps its lock: this server has no idle_session_timeout",
    )
    .advise("use PostgreSQL 14 or newer, or lease rows: postgres://")
}

fn no_incarnation() -> Finding {
    Finding::warning(
        "incarnation",
        "not stored: a second fail-over can issue the same fencing tokens again",
    )
    .advise("name a table with terms=NAME in the URL of all participants, and run `tenure schema --apply` with it")
}
