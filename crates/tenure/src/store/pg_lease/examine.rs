//! Findings for `tenure doctor` about the server, the table and the job queues beside it.

use tenure_core::Time;

use super::schema;
use super::shared::LeaseShared;
use crate::store::pg::table::Table;
use crate::store::{Finding, pg};
use crate::{Error, ErrorKind, Result};

/// Findings about the server and the table.
pub(super) async fn server(shared: &LeaseShared, by: Time) -> Result<Vec<Finding>> {
    let table = &shared.table;
    let rights = format!(
        "SELECT bool_and(has_table_privilege('{}', r))::int AS allowed FROM unnest('{{SELECT,INSERT,UPDATE}}'::text[]) AS r",
        table.quoted()
    );
    let incarnation = pg::incarnation::examination(table);
    let waiters = format!("SELECT ({})::int AS has_waiters", schema::has_waiters(table));
    let mut connection = shared.connection(by).await?;
    let answers = connection
        .simple(&format!("{}; {rights}; {waiters}; {incarnation}", pg::examine::SERVER_QUERY), by)
        .await?;
    let [server, rights, waiters, incarnation] = &answers[..] else {
        let message = format!("the server sent {} answers to four queries", answers.len());
        return Err(Error::new(ErrorKind::Unavailable, message));
    };
    let mut findings = pg::examine::findings(server, shared.pool.settings());
    let name = table.shown();
    findings.push(if rights.get("allowed") == Some("1") {
        Finding::ok("rights", format!("sufficient on {name}"))
    } else {
        Finding::failed("rights", format!("insufficient on {name}"))
            .advise(format!("an owner must GRANT SELECT, INSERT, UPDATE ON {name}"))
    });
    findings.push(waiters_finding(table, waiters.get("has_waiters") == Some("1")));
    findings.extend(pg::examine::listed_servers(shared.pool.primaries(), by).await);
    findings.push(pg::pooler::finding(shared.pool.settings(), &shared.clock, by).await?);
    findings.push(pg::incarnation::finding(incarnation, "tenure schema --locks --apply"));
    Ok(findings)
}

fn waiters_finding(table: &Table, found: bool) -> Finding {
    let name = table.waiters().shown();
    if found {
        return Finding::ok("waiters", format!("shown, and known to holders, by {name}"));
    }
    Finding::warning(
        "waiters",
        format!("not shown, and unknown to holders: there is no table {name}, or rights on it are missing"),
    )
    .advise(format!(
        "run `tenure schema --locks --apply`; its users need GRANT SELECT, INSERT, UPDATE, DELETE ON {name}"
    ))
}

/// Finding about the job queues beside the table.
pub(super) async fn queues(shared: &LeaseShared, by: Time) -> Result<Finding> {
    let question = pg::queues::query(&shared.table);
    let rows = shared.connection(by).await?.simple(&question, by).await?;
    Ok(pg::queues::finding(&rows))
}
