//! The workflow files against the schema of workflows: a wrong one fails only after it was pushed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::{command, repo};

/// Checks every workflow file. `modules` is the folder of check-jsonschema, which contains the schema: no network.
pub(super) fn check(modules: &Path) -> Result<String> {
    let files = files(&repo::root().join(".github/workflows"))?;
    let mut check = Command::new("python3");
    check.args(["-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]);
    check.args(&files).env("PYTHONPATH", modules).current_dir(repo::root());
    command::succeed(&mut check)?;
    Ok(format!("{} files", files.len()))
}

/// The workflow files in a folder. Fails if there are none: an empty check would pass unnoticed.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))?;
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.with_context(|| format!("reading {}", folder.display()))?.path();
        if path.extension().is_some_and(|extension| extension == "yml" || extension == "yaml") {
            files.push(path);
        }
    }
    ensure!(!files.is_empty(), "{} contains no workflow", folder.display());
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_workflows_are_found_and_an_empty_folder_is_an_error() {
        let names = files(&repo::root().join(".github/workflows")).unwrap();
        assert!(names.iter().any(|path| path.ends_with("ci.yml")), "{names:?}");
        assert!(files(&repo::root().join("docs")).is_err());
    }
}
