//! The archives of the published crates, each built alone: a file or a dependency that only the repository has fails here.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::{command, repo};

/// Packs every published crate, builds each from its archive with all features, and copies the archives to `folder`.
///
/// Cargo takes the crates that one of them depends on from their own archives, so none needs to be published yet.
pub(super) fn package(target: &Path, folder: &Path) -> Result<Vec<PathBuf>> {
    let published = published(&repo::metadata()?);
    ensure!(!published.is_empty(), "cargo metadata names no published package");
    let mut cargo = repo::cargo(["package", "--locked", "--all-features"]);
    // A dirty tree is refused: what is in no commit must not be in a release.
    for (name, _) in &published {
        cargo.args(["--package", name]);
    }
    command::show(&mut cargo)?;
    let mut archives = Vec::new();
    for (name, version) in &published {
        let file = format!("{name}-{version}.crate");
        let to = folder.join(&file);
        fs::copy(target.join("package").join(&file), &to)
            .with_context(|| format!("copying {file}"))?;
        archives.push(to);
    }
    Ok(archives)
}

/// Name and version of the packages without `publish = false`.
fn published(metadata: &Value) -> Vec<(String, String)> {
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let published = packages.filter(|package| package["publish"].is_null());
    let text = |value: &Value| value.as_str().map(str::to_owned);
    published
        .filter_map(|package| Some((text(&package["name"])?, text(&package["version"])?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_package_with_publish_false_is_not_packed() {
        let metadata = json!({"packages": [
            {"name": "tenure", "version": "1.2.3", "publish": null},
            {"name": "xtask", "version": "1.2.3", "publish": []},
        ]});
        assert_eq!(published(&metadata), [("tenure".to_owned(), "1.2.3".to_owned())]);
    }

    #[test]
    fn every_published_crate_has_the_licences_and_a_readme() {
        for (name, _) in published(&repo::metadata().expect("metadata")) {
            let folder = repo::root().join("crates").join(&name);
            for file in ["LICENSE-APACHE", "LICENSE-MIT", "README.md"] {
                assert!(folder.join(file).is_file(), "{name} has no {file}");
            }
        }
    }
}
