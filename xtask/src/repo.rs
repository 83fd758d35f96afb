//! Paths of the repository, and cargo calls in it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::command;

/// The top folder of the repository.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask lives in a folder of the repository")
}

/// A cargo call in the repository's top folder.
pub(crate) fn cargo<const N: usize>(arguments: [&str; N]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments).current_dir(root());
    // `cargo run` sets variables that describe the package xtask. If they were passed on, build scripts that watch them
    // would run again on each switch between `cargo test` and `cargo xtask test`.
    for (name, _) in std::env::vars_os().filter(|(name, _)| describes_xtask(name)) {
        command.env_remove(name);
    }
    command
}

/// Output of `cargo metadata` for the workspace, without dependencies.
pub(crate) fn metadata() -> Result<Value> {
    let mut cargo = cargo(["metadata", "--format-version=1", "--no-deps", "--locked"]);
    let json = command::stdout(&mut cargo)?;
    serde_json::from_str(&json).context("parsing the output of cargo metadata")
}

/// The build folder, which `CARGO_TARGET_DIR` may have moved.
pub(crate) fn target() -> Result<PathBuf> {
    let metadata = metadata()?;
    let folder = metadata["target_directory"].as_str();
    Ok(folder.context("cargo metadata names no target_directory")?.into())
}

fn describes_xtask(name: &OsString) -> bool {
    let name = name.to_string_lossy();
    name.starts_with("CARGO_PKG_")
        || name.starts_with("CARGO_MANIFEST_")
        || name == "CARGO_BIN_NAME"
        || name == "CARGO_CRATE_NAME"
}
