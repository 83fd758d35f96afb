//! A check with the oldest supported Rust: `rust-version` of the workspace.
//!
//! It takes minutes, since every dependency is compiled again. So it is part of a release and of the workflow `ci`, and
//! not of `cargo xtask verify`.

use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::{command, repo};

/// Installs the toolchain if it is missing, and checks every crate with it.
pub(super) fn check() -> Result<()> {
    let version = rust_version(&repo::metadata()?)?;
    let mut install = Command::new("rustup");
    install.args(["toolchain", "install", &version, "--profile", "minimal", "--no-self-update"]);
    command::show(&mut install).context("the oldest supported Rust is installed by rustup")?;
    let mut check = Command::new("rustup");
    check.args(["run", &version, "cargo", "check", "--locked", "--workspace", "--all-features"]);
    command::show(check.current_dir(repo::root()))
        .with_context(|| format!("checking with Rust {version}"))
}

/// `rust-version` of the library, which every package inherits: the step `manifests` of `verify` checks that.
fn rust_version(metadata: &Value) -> Result<String> {
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let mut ours = packages.filter(|package| package["name"] == "tenure");
    let version = ours.next().and_then(|package| package["rust_version"].as_str());
    Ok(version.context("cargo metadata names no rust_version of tenure")?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_version_is_that_of_the_manifest() {
        let metadata = json!({"packages": [{"name": "tenure", "rust_version": "1.2"}]});
        assert_eq!(rust_version(&metadata).unwrap(), "1.2");
        assert!(rust_version(&json!({"packages": []})).is_err());
    }
}
