//! check-jsonschema, with the schemas that it contains, installed in the build folder.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use super::Tool;
use crate::{command, repo};

/// The folder of its Python modules is the path of this tool.
pub(crate) const CHECK_JSONSCHEMA: Tool = Tool { name: "jsonschema", find, install };

const VERSION: &str = "0.39.0";

fn find() -> Option<PathBuf> {
    folder().ok().filter(|folder| folder.join("check_jsonschema/__main__.py").is_file())
}

fn install() -> Result<()> {
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
    pip.args(["--root-user-action=ignore", "--target"]).arg(folder()?);
    command::show(pip.arg(format!("check-jsonschema=={VERSION}")))
}

fn folder() -> Result<PathBuf> {
    Ok(repo::target()?.join("tools").join(format!("check-jsonschema-{VERSION}")))
}
