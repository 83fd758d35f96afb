//! `tenure doctor`: prints the findings of a store's self-examination.

use std::fmt::Write as _;
use std::time::Duration;

use clap::Args;
use serde_json::json;
use tenure::ErrorKind;
use tenure::store::{Finding, FindingLevel};

use crate::args::store::StoreUrl;
use crate::args::value::duration;
use crate::exit::{self, Exit};
use crate::report;

const STORE: &str = "URL of the store; by default $TENURE_STORE, or the file store of this host";

#[derive(Args)]
#[command(after_help = exit::DOCTOR)]
pub(crate) struct Doctor {
    #[arg(short, long, value_name = "URL", conflicts_with = "url", help = STORE)]
    store: Option<String>,
    /// Time limit for all checks
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = duration)]
    timeout: Duration,
    /// Print JSON, one object per line
    #[arg(long)]
    json: bool,
    /// The same as --store
    url: Option<String>,
}

impl Doctor {
    pub(crate) fn store(&self) -> StoreUrl {
        StoreUrl::or_default(self.store.as_ref().or(self.url.as_ref()))
    }
}

pub(crate) fn run(arguments: &Doctor) -> Exit {
    let store = arguments.store();
    super::on_runtime(async {
        let client = match store.connect_to_examine().await {
            Ok(client) => client,
            // The server is reachable, but its configuration cannot be used: a failed check, not an unreachable store.
            Err(error) if error.kind() == ErrorKind::Misconfigured => {
                let name = error.store().unwrap_or("the store").to_owned();
                return print_findings(arguments, &name, &[Finding::error("settings", &error)]);
            }
            Err(error) => {
                report::print_line(&error.chain());
                return Exit::Failed;
            }
        };
        let name = client.store().to_string();
        let findings = client.examine(arguments.timeout).await;
        client.store().close().await;
        print_findings(arguments, &name, &findings)
    })
}

/// Prints the findings. Returns the exit code that they imply.
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

/// Findings as text: one line each, with the advice below it.
fn page(store: &str, findings: &[Finding]) -> String {
    let width = findings.iter().map(|finding| finding.what.chars().count()).max().unwrap_or(0);
    let mut text = format!("{store}\n");
    for Finding { what, level, detail, advice, .. } in findings {
        let mark = match level {
            FindingLevel::Ok => "ok  ",
            FindingLevel::Warning => "WARN",
            _ => "FAIL",
        };
        let _ = writeln!(text, "  {mark}  {what:<width$}  {}", control_chars_to_spaces(detail));
        if let Some(advice) = advice {
            let _ =
                writeln!(text, "        {:<width$}  -> {}", "", control_chars_to_spaces(advice));
        }
    }
    text
}

/// Findings as JSON, one object per line.
fn lines(store: &str, findings: &[Finding]) -> String {
    let mut text = String::new();
    for Finding { what, level, detail, advice, .. } in findings {
        let verdict = level.to_string();
        let line = json!({
            "store": store, "what": what, "verdict": verdict, "detail": detail, "advice": advice,
        });
        let _ = writeln!(text, "{line}");
    }
    text
}

/// Untrusted text with control characters replaced: it must not move the cursor or begin a line.
fn control_chars_to_spaces(text: &str) -> String {
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
