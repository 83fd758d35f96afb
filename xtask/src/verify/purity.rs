//! Proof that the bans of the core take effect.
//!
//! A ban in `clippy.toml` that is misspelt, deleted or does not resolve is ignored without a message. So clippy runs, with
//! the core's bans, on a fixture that does each banned thing once, and every such line must be reported.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;
use toml::Table;

use crate::{command, repo};

const CORE: &str = "crates/tenure-core";
const FIXTURE: &str = "xtask/fixtures/impure";

/// Prefix of the comment on a fixture line that clippy must report; the banned name follows.
const MARK_PREFIX: &str = "// bites: ";

pub(super) fn check() -> Result<()> {
    let bans = bans(&read(&format!("{CORE}/clippy.toml"))?)?;
    let denied = denied_lints(&read(&format!("{CORE}/src/lib.rs"))?);
    let source = format!("{FIXTURE}/src/lib.rs");
    let marks = marks(&read(&source)?);
    let output = command::output(&mut clippy(&denied)?)?;
    let reports = lint_reports(&String::from_utf8_lossy(&output.stdout));
    if reports.is_empty() {
        bail!("clippy reports nothing on the fixture\n{}", command::printed(&output));
    }
    let faults = faults(&bans, &marks, &reports);
    if !faults.is_empty() {
        bail!("in {source}, under {CORE}/clippy.toml:\n{}", faults.join("\n"));
    }
    Ok(())
}

/// A line of the fixture, and the name that must be reported there: a banned path, or a lint.
type Mark = (u64, String);

/// A report of clippy on a line of the fixture.
struct LintReport {
    line: u64,
    lint: String,
    message: String,
}

impl LintReport {
    fn matches_mark(&self, (line, name): &Mark) -> bool {
        self.line == *line && (self.lint == *name || self.message.contains(&format!("`{name}`")))
    }
}

fn faults(bans: &BTreeSet<String>, marks: &[Mark], reports: &[LintReport]) -> Vec<String> {
    let marked: BTreeSet<_> = marks.iter().map(|(_, name)| name).collect();
    let untried = bans.iter().filter(|ban| !marked.contains(ban));
    let silent =
        marks.iter().filter(|mark| !reports.iter().any(|report| report.matches_mark(mark)));
    untried
        .map(|ban| format!("no line tries `{ban}`, which is banned: add one"))
        .chain(silent.map(|(line, name)| format!("line {line}: `{name}` is not reported")))
        .collect()
}

/// Every path banned in the text of a `clippy.toml`.
fn bans(text: &str) -> Result<BTreeSet<String>> {
    let table: Table = text.parse().context("reading the core's clippy.toml")?;
    let lists = table.iter().filter(|(name, _)| name.starts_with("disallowed-"));
    let entries = lists.filter_map(|(_, list)| list.as_array()).flatten();
    entries
        .map(|entry| entry.get("path").unwrap_or(entry).as_str().map(str::to_owned))
        .collect::<Option<_>>()
        .context("an entry of a disallowed list has no path")
}

/// The lints that the text of a `lib.rs` denies for its whole crate. The fixture is checked with these lints and does not
/// list them itself: removing one from the core fails here as well.
fn denied_lints(text: &str) -> Vec<String> {
    text.lines()
        .filter_map(|line| line.trim().strip_prefix("#![deny(")?.strip_suffix(")]"))
        .flat_map(|lints| lints.split(',').map(|lint| lint.trim().to_owned()))
        .collect()
}

fn marks(text: &str) -> Vec<Mark> {
    (1..)
        .zip(text.lines())
        .filter_map(|(number, line)| {
            Some((number, line.split_once(MARK_PREFIX)?.1.trim().to_owned()))
        })
        .collect()
}

/// Parses cargo's JSON messages, one per line, into reports on the fixture.
fn lint_reports(messages: &str) -> Vec<LintReport> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    messages
        .filter(|message| message["reason"] == "compiler-message")
        .filter_map(|message| {
            let message = &message["message"];
            let spans = message["spans"].as_array()?;
            let span = spans.iter().find(|span| span["is_primary"] == true)?;
            Some(LintReport {
                line: span["line_start"].as_u64()?,
                lint: message["code"]["code"].as_str()?.to_owned(),
                message: message["message"].as_str()?.to_owned(),
            })
        })
        .collect()
}

fn clippy(denied: &[String]) -> Result<Command> {
    let mut cargo =
        repo::cargo(["clippy", "--quiet", "--locked", "--offline", "--message-format=json"]);
    cargo.current_dir(repo::root().join(FIXTURE));
    cargo.env("CLIPPY_CONF_DIR", repo::root().join(CORE));
    cargo.env("CARGO_TARGET_DIR", repo::target()?.join("impure"));
    cargo.arg("--").args(denied.iter().flat_map(|lint| ["-W", lint]));
    Ok(cargo)
}

fn read(path: &str) -> Result<String> {
    fs::read_to_string(repo::root().join(path)).with_context(|| format!("reading {path}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIXTURE: &str = "fn a() {\n    spawn(); // bites: std::thread::spawn\n    for _ in map {} // bites: clippy::order\n}\n";

    fn message(line: u64, code: &str, text: &str) -> String {
        let spans = serde_json::json!([{"is_primary": false, "line_start": 1}, {"is_primary": true, "line_start": line}]);
        let message = serde_json::json!({"message": text, "code": {"code": code}, "spans": spans});
        serde_json::json!({"reason": "compiler-message", "message": message}).to_string()
    }

    fn judge(bans: &[&str], messages: &[String]) -> Vec<String> {
        let bans = bans.iter().map(|ban| (*ban).to_owned()).collect();
        faults(&bans, &marks(FIXTURE), &lint_reports(&messages.join("\n")))
    }

    fn both() -> [String; 2] {
        [
            message(
                2,
                "clippy::disallowed_methods",
                "use of a disallowed method `std::thread::spawn`",
            ),
            message(3, "clippy::order", "iteration over a map"),
        ]
    }

    #[test]
    fn every_mark_reported_is_no_fault() {
        assert_eq!(judge(&["std::thread::spawn"], &both()), [""; 0]);
    }

    #[test]
    fn a_mark_that_is_not_reported_is_a_fault() {
        let [spawn, order] = both();
        assert_eq!(judge(&[], &[spawn]), ["line 3: `clippy::order` is not reported"]);
        assert_eq!(judge(&[], &[order]), ["line 2: `std::thread::spawn` is not reported"]);
    }

    #[test]
    fn a_report_on_another_line_or_of_a_longer_name_does_not_count() {
        let [_, order] = both();
        for other in [
            message(
                1,
                "clippy::disallowed_methods",
                "use of a disallowed method `std::thread::spawn`",
            ),
            message(
                2,
                "clippy::disallowed_methods",
                "use of a disallowed method `std::thread::spawn_at`",
            ),
        ] {
            assert_eq!(judge(&[], &[other, order.clone()]).len(), 1);
        }
    }

    #[test]
    fn a_ban_without_a_mark_is_a_fault() {
        let faults = judge(&["std::thread::spawn", "std::thread::park"], &both());
        assert_eq!(faults, ["no line tries `std::thread::park`, which is banned: add one"]);
    }

    #[test]
    fn bans_are_read_from_every_list_in_both_forms() {
        let text = "a = 1\ndisallowed-types = [{ path = \"x::T\", reason = \"r\" }]\ndisallowed-macros = [\"x::m\"]\n";
        assert_eq!(bans(text).unwrap(), ["x::T", "x::m"].map(str::to_owned).into());
        assert!(bans("disallowed-types = [{ reason = \"r\" }]").is_err());
    }

    #[test]
    fn denied_lints_are_those_of_the_whole_crate() {
        let text =
            "//! #![deny(no)]\n#![deny(clippy::a, clippy::b)]\n#[deny(clippy::c)]\nfn f() {}\n";
        assert_eq!(denied_lints(text), ["clippy::a", "clippy::b"]);
    }
}
