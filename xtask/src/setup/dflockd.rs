//! The Python client of dflockd, installed in the build folder: our server must be compatible with it.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use super::Tool;
use crate::{command, repo};

pub(crate) const DFLOCKD: Tool = Tool { name: "dflockd", find, install };

const VERSION: &str = "0.5.0";

fn find() -> Option<PathBuf> {
    Some(folder().ok()?.join("dflockd/client.py")).filter(|client| client.is_file())
}

/// Installs the client. It declares a later Python than it needs, hence `--ignore-requires-python`.
fn install() -> Result<()> {
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--ignore-requires-python"]);
    pip.arg("--target").arg(folder()?).arg(format!("dflockd=={VERSION}"));
    command::show(&mut pip)
}

fn folder() -> Result<PathBuf> {
    Ok(repo::target()?.join("tools/dflockd"))
}
