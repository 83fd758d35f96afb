//! Import cycles between the modules of a crate.
//!
//! A module imports another if it names an item that is defined there, no matter through which re-export. Code for tests
//! and calls of methods do not count. Modules without cycles can be read from the bottom up.

mod graph;
mod names;
mod resolve;
mod tree;

#[cfg(test)]
mod tests;

use std::fmt::Write as _;
use std::io::{ErrorKind, Write as _};
use std::path::Path;
use std::process::ExitCode;
use std::{fs, io};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use self::graph::ImportGraph;
use crate::repo;

#[derive(clap::Args)]
pub(crate) struct CyclesArgs {
    /// Fail if there is a cycle, as `verify` does
    #[arg(long, conflicts_with_all = ["all", "krate"])]
    check: bool,
    /// Print every import between the modules of a cycle, not just the shortest cycle
    #[arg(long)]
    all: bool,
    /// The crate to print; every crate if absent
    #[arg(value_name = "CRATE")]
    krate: Option<String>,
}

/// Prints the cycles.
pub(crate) fn run(arguments: &CyclesArgs) -> Result<ExitCode> {
    if arguments.check {
        check()?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut crates = crates()?;
    if let Some(name) = &arguments.krate {
        crates.retain(|(krate, _)| krate == name);
        if crates.is_empty() {
            bail!("{name}: no such crate in this workspace");
        }
    }
    for (name, graph) in &crates {
        let text = report(name, graph, arguments.all);
        // A reader such as `head` may close the pipe early.
        let _ = io::stdout().write_all(text.as_bytes());
    }
    Ok(ExitCode::SUCCESS)
}

/// Fails if a crate has a cycle.
pub(super) fn check() -> Result<()> {
    let faults = faults(&crates()?);
    if !faults.is_empty() {
        bail!("{}", faults.join("\n"));
    }
    Ok(())
}

/// A report of each crate that has a cycle.
fn faults(crates: &[(String, ImportGraph)]) -> Vec<String> {
    let cyclic = crates.iter().filter(|(_, graph)| !graph.components().is_empty());
    cyclic.map(|(name, graph)| report(name, graph, false).trim_end().to_owned()).collect()
}

/// The cycles of a crate, for people.
fn report(name: &str, graph: &ImportGraph, all: bool) -> String {
    let components = graph.components();
    let mut text =
        format!("{name}: {} groups of modules that import each other\n", components.len());
    for members in &components {
        let names = members.iter().copied().collect::<Vec<_>>().join(", ");
        let _ = writeln!(text, "  {} modules: {names}", members.len());
        let imports: Vec<_> = if all {
            graph.imports_among(members).collect()
        } else {
            graph.shortest_cycle(members)
        };
        for ((from, to), evidence) in imports {
            let _ = writeln!(text, "    {from} -> {to}\n        {evidence}");
        }
    }
    text
}

/// The libraries and programs of the workspace, by name of the package. The program of a package that has a library as
/// well is `package/program`.
fn crates() -> Result<Vec<(String, ImportGraph)>> {
    let metadata = repo::metadata()?;
    let mut crates = Vec::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let name = package["name"].as_str().context("cargo metadata: a package without name")?;
        let targets = package["targets"].as_array().map(Vec::as_slice).unwrap_or_default();
        let has_library = targets.iter().any(|target| is_kind(target, "lib"));
        for target in targets {
            let name = match (is_kind(target, "lib"), is_kind(target, "bin")) {
                (true, _) => name.to_owned(),
                (_, true) if !has_library => name.to_owned(),
                (_, true) => format!("{name}/{}", target["name"].as_str().unwrap_or("main")),
                _ => continue,
            };
            let file = target["src_path"].as_str().context("cargo metadata: no src_path")?;
            let file = Path::new(file);
            let file = file.strip_prefix(repo::root()).unwrap_or(file);
            crates.push((name, ImportGraph::read(file, &read)?));
        }
    }
    Ok(crates)
}

fn is_kind(target: &Value, kind: &str) -> bool {
    target["kind"].as_array().into_iter().flatten().any(|found| found == kind)
}

/// The text of a file of the repository, or `None` if there is no such file.
fn read(file: &Path) -> Result<Option<String>> {
    match fs::read_to_string(repo::root().join(file)) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("reading {}", file.display())),
    }
}
