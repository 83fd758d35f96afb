//! cargo-deny, in the build folder: the developer's own programs stay as they are.

use std::path::PathBuf;

use anyhow::Result;

use super::Tool;
use crate::{command, repo};

pub(crate) const CARGO_DENY: Tool = Tool { name: "cargo-deny", find, install };

const VERSION: &str = "0.20.2";

fn find() -> Option<PathBuf> {
    let ours = tools().ok()?.join("bin/cargo-deny");
    if ours.is_file() { Some(ours) } else { command::on_path("cargo-deny") }
}

/// Without optimisation: it builds in a third of the time and still checks the workspace within a second.
fn install() -> Result<()> {
    let tools = tools()?;
    let build = tools.join("build");
    let mut cargo = repo::cargo([
        "install",
        "cargo-deny",
        "--quiet",
        "--version",
        VERSION,
        "--locked",
        "--debug",
    ]);
    cargo.arg("--root").arg(&tools).env("CARGO_PROFILE_DEV_DEBUG", "0");
    command::show(cargo.env("CARGO_TARGET_DIR", &build))?;
    // Some hundred megabytes that nothing reads again.
    let _ = std::fs::remove_dir_all(build);
    Ok(())
}

fn tools() -> Result<PathBuf> {
    Ok(repo::target()?.join("tools"))
}
