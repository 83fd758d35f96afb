//! Programs from crates.io, installed in the build folder: the developer's own programs stay unchanged.

use std::path::PathBuf;

use anyhow::Result;

use super::Tool;
use crate::{command, repo};

pub(crate) const CARGO_DENY: Tool = Tool {
    name: "cargo-deny",
    find: || find("cargo-deny"),
    install: || install("cargo-deny", "0.20.2", &[]),
};

/// mdBook without its server and its search: the book is only built.
pub(crate) const MDBOOK: Tool = Tool {
    name: "mdbook",
    find: || find("mdbook"),
    install: || install("mdbook", "0.5.4", &["--no-default-features"]),
};

fn find(name: &str) -> Option<PathBuf> {
    let ours = tools().ok()?.join("bin").join(name);
    if ours.is_file() { Some(ours) } else { command::on_path(name) }
}

/// Installs a program without optimisation: it builds in a third of the time and still runs in under a second.
fn install(name: &str, version: &str, more: &[&str]) -> Result<()> {
    let tools = tools()?;
    let build = tools.join("build");
    let mut cargo =
        repo::cargo(["install", name, "--quiet", "--version", version, "--locked", "--debug"]);
    cargo.args(more).arg("--root").arg(&tools).env("CARGO_PROFILE_DEV_DEBUG", "0");
    command::show(cargo.env("CARGO_TARGET_DIR", &build))?;
    // Several hundred megabytes that are not needed again.
    let _ = std::fs::remove_dir_all(build);
    Ok(())
}

fn tools() -> Result<PathBuf> {
    Ok(repo::target()?.join("tools"))
}
