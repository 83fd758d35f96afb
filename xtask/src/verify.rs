//! `cargo xtask verify`: every check that needs no running store. It changes no file of the repository.

mod book;
pub(crate) mod cycles;
mod features;
pub(crate) mod language;
mod links;
mod manifests;
mod purity;
mod workflows;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::{Result, anyhow, bail};

use crate::platforms::{self, Extent};
use crate::setup::{self, CARGO_DENY, CHECK_JSONSCHEMA, MDBOOK};
use crate::{command, interrupt, pages, repo};

#[derive(clap::Args)]
pub(crate) struct VerifyArgs {
    /// Also check for known vulnerabilities, which fetches a database from the network
    #[arg(long)]
    advisories: bool,
}

/// Input of the steps.
struct VerifyContext {
    advisories: bool,
    /// Path of cargo-deny, or the reason why it is missing, which fails only its own step.
    cargo_deny: Result<PathBuf>,
    /// The same for mdbook.
    mdbook: Result<PathBuf>,
    /// The same for check-jsonschema.
    check_jsonschema: Result<PathBuf>,
}

/// A check, by name. Success may carry a remark for its line; an error says what is wrong and what to do.
type Check = (&'static str, fn(&VerifyContext) -> Result<String>);

const CHECKS: &[Check] = &[
    ("format", |_| format()),
    ("manifests", |_| without_remark(manifests::check())),
    ("links", |_| without_remark(links::check(repo::root()))),
    ("language", |_| without_remark(language::check())),
    ("workflows", workflows),
    ("cycles", |_| without_remark(cycles::check())),
    ("rows", |_| without_remark(rows_by_name(repo::root()))),
    ("clippy", |_| clippy()),
    ("features", |_| features::check()),
    ("platforms", |_| platforms::check(Extent::Quick)),
    ("purity", |_| without_remark(purity::check())),
    ("docs", |_| docs()),
    ("pages", |_| without_remark(pages::check())),
    ("book", book),
    ("deny", deny),
];

pub(crate) fn run(arguments: &VerifyArgs) -> ExitCode {
    let began = Instant::now();
    let context = VerifyContext {
        advisories: arguments.advisories,
        cargo_deny: setup::ensure(&CARGO_DENY),
        mdbook: setup::ensure(&MDBOOK),
        check_jsonschema: setup::ensure(&CHECK_JSONSCHEMA),
    };
    let failures = run_checks(CHECKS, &context);
    if interrupt::requested() {
        return ExitCode::from(interrupt::EXIT_CODE);
    }
    let seconds = began.elapsed().as_secs_f64();
    if failures.is_empty() {
        println!("verified in {seconds:.1} s");
        return ExitCode::SUCCESS;
    }
    for (name, error) in &failures {
        println!("\n--- {name}\n{error:#}");
    }
    let names = failures.iter().map(|(name, _)| *name).collect::<Vec<_>>();
    println!("\nNOT VERIFIED after {seconds:.1} s: {}", names.join(", "));
    ExitCode::FAILURE
}

/// Runs every step, even after a failure, so that one run reports all failures.
fn run_checks(steps: &[Check], context: &VerifyContext) -> Vec<(&'static str, anyhow::Error)> {
    let mut failures = Vec::new();
    for (name, check) in steps {
        if interrupt::requested() {
            break;
        }
        // The name is printed first, to show which step takes long or hangs.
        print!("{name:<12}");
        let _ = std::io::stdout().flush();
        let began = Instant::now();
        let outcome = check(context);
        let seconds = began.elapsed().as_secs_f64();
        match outcome {
            Ok(remark) if remark.is_empty() => println!("ok      {seconds:>6.1} s"),
            Ok(remark) => println!("ok      {seconds:>6.1} s  ({remark})"),
            Err(error) => {
                println!("FAILED  {seconds:>6.1} s");
                failures.push((*name, error));
            }
        }
    }
    failures
}

fn format() -> Result<String> {
    program(&mut repo::cargo(["fmt", "--all", "--check", "--", "--color=never"]))
}

fn clippy() -> Result<String> {
    let mut cargo = repo::cargo(["clippy", "--workspace", "--all-targets", "--all-features"]);
    program(cargo.args(["--locked", "--quiet", "--", "-D", "warnings"]))
}

/// Fails if a column of a PostgreSQL row is read by position: a column added to a statement would shift the others.
fn rows_by_name(root: &Path) -> Result<()> {
    let mut git = Command::new("git");
    git.current_dir(root).args([
        "grep",
        "--untracked",
        "-nE",
        r"\.(try_)?get(::<[^(]*>)?\([0-9]+\)",
        "--",
    ]);
    git.args(["crates/tenure/src/jobs*", "crates/tenure/src/store/pg*"]);
    git.args(["crates/tenure/src/postgres.rs", "crates/tenure/src/fence*"]);
    let output = command::output(&mut git)?;
    // 1: no line matches.
    match output.status.code() {
        Some(1) => Ok(()),
        _ => bail!("read columns by name:\n{}", command::printed(&output)),
    }
}

fn docs() -> Result<String> {
    let mut cargo = repo::cargo(["doc", "--workspace", "--all-features", "--no-deps"]);
    program(cargo.args(["--locked", "--quiet"]).env("RUSTDOCFLAGS", "-D warnings"))
}

fn workflows(context: &VerifyContext) -> Result<String> {
    let modules = context.check_jsonschema.as_ref().map_err(|error| anyhow!("{error:#}"))?;
    workflows::check(modules)
}

/// Builds the book. Fails on a warning, and on a page that is not in the table of contents.
fn book(context: &VerifyContext) -> Result<String> {
    let mdbook = context.mdbook.as_ref().map_err(|error| anyhow!("{error:#}"))?;
    book::is_complete(&repo::root().join("docs"))?;
    let mut build = Command::new(mdbook);
    build.arg("build").arg(repo::root().join("docs"));
    build.arg("--dest-dir").arg(repo::target()?.join("book"));
    let printed = command::printed(&command::succeed(&mut build)?);
    let warned = printed.lines().filter(|line| line.contains("WARN") || line.contains("ERROR"));
    let warned = warned.collect::<Vec<_>>().join("\n");
    if warned.is_empty() { Ok(String::new()) } else { Err(anyhow!("{warned}")) }
}

/// Runs cargo-deny. Advisories are checked only on request: they come from a database on the network.
fn deny(context: &VerifyContext) -> Result<String> {
    let cargo_deny = context.cargo_deny.as_ref().map_err(|error| anyhow!("{error:#}"))?;
    let mut deny = Command::new(cargo_deny);
    deny.current_dir(repo::root()).args(["--locked", "check"]);
    deny.args(["licenses", "bans", "sources"]);
    if context.advisories {
        deny.arg("advisories");
    }
    let output = command::succeed(&mut deny)?;
    Ok(duplicates(&command::printed(&output)))
}

/// The crates of which cargo-deny found more than one version: not an error, but worth a remark.
fn duplicates(report: &str) -> String {
    let lines = report.lines().filter(|line| line.starts_with("warning[duplicate]"));
    let names = lines.filter_map(|line| line.split('\'').nth(1)).collect::<Vec<_>>();
    if names.is_empty() {
        String::new()
    } else {
        format!("more than one version: {}", names.join(", "))
    }
}

/// Runs a program as a check without a remark. An error contains its output.
fn program(command: &mut Command) -> Result<String> {
    without_remark(command::succeed(command).map(drop))
}

fn without_remark(outcome: Result<()>) -> Result<String> {
    outcome.map(|()| String::new())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::stores::Folder;

    #[test]
    fn a_failure_does_not_hide_the_ones_after_it() {
        let steps: &[Check] = &[
            ("first", |_| bail!("one")),
            ("second", |_| Ok("a remark".to_owned())),
            ("third", |_| bail!("three")),
        ];
        let context = without_tools("not needed");
        let failures = run_checks(steps, &context);
        let names = failures.iter().map(|(name, _)| *name).collect::<Vec<_>>();
        assert_eq!(names, ["first", "third"]);
    }

    #[test]
    fn without_its_tool_a_step_fails_and_says_why() {
        assert_eq!(deny(&without_tools("no network")).unwrap_err().to_string(), "no network");
        assert_eq!(book(&without_tools("no network")).unwrap_err().to_string(), "no network");
        assert_eq!(workflows(&without_tools("no network")).unwrap_err().to_string(), "no network");
    }

    fn without_tools(why: &'static str) -> VerifyContext {
        VerifyContext {
            advisories: false,
            cargo_deny: Err(anyhow!(why)),
            mdbook: Err(anyhow!(why)),
            check_jsonschema: Err(anyhow!(why)),
        }
    }

    #[test]
    fn a_column_read_by_position_is_found() {
        let folder = Folder::create("verify-rows").unwrap();
        let jobs = folder.path().join("crates/tenure/src/jobs");
        fs::create_dir_all(&jobs).unwrap();
        command::succeed(Command::new("git").arg("init").current_dir(folder.path())).unwrap();
        fs::write(jobs.join("a.rs"), "row.get(\"id\"), text.get(..3)").unwrap();
        rows_by_name(folder.path()).unwrap();
        let reads = ["row.get(0)", "row.try_get(1)?", "row.get::<_, Option<String>>(12)"];
        for file in ["jobs/a.rs", "store/pg/a.rs", "postgres.rs", "fence.rs", "fence/sql.rs"] {
            let path = folder.path().join("crates/tenure/src").join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            for read in reads {
                fs::write(&path, read).unwrap();
                let error = rows_by_name(folder.path()).unwrap_err().to_string();
                assert!(error.contains(&format!("{file}:1:{read}")), "{error}");
            }
            fs::remove_file(&path).unwrap();
        }
    }

    #[test]
    fn duplicates_are_named() {
        let report = "warning[duplicate]: found 2 duplicate entries for crate 'syn'\n\
                      warning[duplicate]: found 3 duplicate entries for crate 'rand'\nbans ok\n";
        assert_eq!(duplicates(report), "more than one version: syn, rand");
        assert_eq!(duplicates("bans ok, licenses ok\n"), "");
    }
}
