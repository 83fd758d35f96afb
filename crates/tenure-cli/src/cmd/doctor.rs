//! `tenure doctor`: what a store finds out about itself.

use std::fmt::Write as _;
use std::time::Duration;

use clap::Args;
use serde_json::json;
use tenure::ErrorKind;
use tenure::store::{Finding, FindingLevel};

use crate::args::{StoreUrl, duration};
use crate::exit::{self, Exit};
use crate::report;

const STORE: &str =
    "Where holds live, as a URL; $TENURE_STORE, or this host's own store by default";

#[derive(Args)]
#[command(after_help = exit::DOCTOR)]
pub(crate) struct Doctor {
    #[arg(short, long, value_name = "URL", conflicts_with = "url", help = STORE)]
    store: Option<String>,
    /// How long the examination may take
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = duration)]
    timeout: Duration,
    /// Print JSON, one object a line
    #[arg(long)]
    json: bool,
    /// The same as --store
    url: Option<String>,
}

pub(crate) fn run(arguments: &Doctor) -> Exit {
    let store = StoreUrl::or_default(arguments.store.as_ref().or(arguments.url.as_ref()));
    super::on_runtime(async {
        let client = match store.connect().await {
            Ok(client) => client,
            // The server answers, and what it keeps cannot be used: a check that failed, and the first one.
            Err(error) if error.kind() == ErrorKind::Misconfigured => {
                let name = error.store().unwrap_or("the store").to_owned();
                return print_findings(arguments, &name, &[Finding::error("settings", &error)]);
            }
            Err(error) => {
                report::print_line(&report::chain(&error));
                return Exit::Failed;
            }
        };
        let name = client.store().to_string();
        let findings = client.examine(arguments.timeout).await;
        client.store().close().await;
        print_findings(arguments, &name, &findings)
    })
}

/// Prints what was found, and how that ends.
fn print_findings(arguments: &Doctor, store: &str, findings: &[Finding]) -> Exit {
    let text = if arguments.json { lines(store, findings) } else { page(store, findings) };
    match super::print(text.as_bytes()) {
        Exit::Success => exit_for_findings(findings),
        exit => exit,
    }
}

fn exit_for_findings(findings: &[Finding]) -> Exit {
    if findings.iter().any(Finding::is_unreachable) {
        Exit::Failed
    } else if findings.iter().any(|finding| finding.level == FindingLevel::Failed) {
        Exit::CheckFailed
    } else {
        Exit::Success
    }
}

/// For people: a line each, with what to do below it.
fn page(store: &str, findings: &[Finding]) -> String {
    let width = findings.iter().map(|finding| finding.what.chars().count()).max().unwrap_or(0);
    let mut text = format!("{store}\n");
    for Finding { what, level: verdict, detail, advice, .. } in findings {
        let mark = match verdict {
            FindingLevel::Ok => "ok  ",
            FindingLevel::Warning => "WARN",
            _ => "FAIL",
        };
        let _ = writeln!(text, "  {mark}  {what:<width$}  {}", without_control_chars(detail));
        if let Some(advice) = advice {
            let _ = writeln!(text, "        {:<width$}  -> {}", "", without_control_chars(advice));
        }
    }
    text
}

/// For programs.
fn lines(store: &str, findings: &[Finding]) -> String {
    let mut text = String::new();
    for Finding { what, level: verdict, detail, advice, .. } in findings {
        let verdict = verdict.to_string();
        let line = json!({
            "store": store, "what": what, "verdict": verdict, "detail": detail, "advice": advice,
        });
        let _ = writeln!(text, "{line}");
    }
    text
}

/// What others wrote, without what would move a cursor or begin a line.
fn without_control_chars(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_a_line_a_finding_and_its_advice_below() {
        let findings = [
            Finding::ok("reachable", "yes"),
            Finding::warning("disk", "slow\nvery").advise("buy another"),
        ];
        let page = page("memory:", &findings);
        let expected = "memory:\n  ok    reachable  yes\n  WARN  disk       slow very\n                   \
                        -> buy another\n";
        assert_eq!(page, expected);
        assert_eq!(exit_for_findings(&findings), Exit::Success, "a warning is no failure");
    }

    #[test]
    fn a_failed_check_is_told_from_a_store_that_is_away() {
        let unwell = [Finding::ok("reachable", "yes"), Finding::failed("rights", "none")];
        assert_eq!(exit_for_findings(&unwell), Exit::CheckFailed);
        assert_eq!(exit_for_findings(&[Finding::failed("reachable", "no")]), Exit::Failed);
    }

    #[test]
    fn a_program_reads_a_line_of_json_for_each() {
        let text = lines("memory:", &[Finding::warning("disk", "slow").advise("buy another")]);
        let line: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(line["verdict"], "warning");
        assert_eq!((&line["what"], &line["advice"]), (&json!("disk"), &json!("buy another")));
    }
}
