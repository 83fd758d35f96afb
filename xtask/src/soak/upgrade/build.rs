//! The two programs: one of an earlier commit, one of the present tree.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use super::log::Version;
use crate::{command, repo};

/// The programs of a soak: copies, so that a build during the soak does not change them.
pub(super) struct Programs {
    old: PathBuf,
    new: PathBuf,
    /// The command that runs under locks: a copy of xtask.
    pub(super) child: PathBuf,
    /// Description of both versions, for the report.
    pub(super) about: String,
}

/// Origin of a program.
pub(super) enum Source<'a> {
    /// A commit of this repository.
    Commit(&'a str),
    /// The present files of the repository.
    Tree,
    /// A program that was built before.
    Program(&'a Path),
}

impl Programs {
    /// Builds the programs where necessary, and copies them to `folder`.
    pub(super) fn prepare(
        folder: &Path,
        old: &Source<'_>,
        new: &Source<'_>,
        debug: bool,
    ) -> Result<Self> {
        let copy = |name: &str, from: &Path| {
            fs::create_dir_all(folder.join(name)).context("creating a folder for a program")?;
            let to = folder.join(name).join("tenure");
            fs::copy(from, &to).with_context(|| format!("copying {}", from.display()))?;
            Ok::<_, anyhow::Error>(to)
        };
        let (old_built, old_about) = old.build(debug)?;
        let (new_built, new_about) = new.build(debug)?;
        let this = std::env::current_exe().context("finding this program")?;
        Ok(Self {
            old: copy("old", &old_built)?,
            new: copy("new", &new_built)?,
            child: copy("child", &this)?,
            about: format!("old: {old_about}; new: {new_about}"),
        })
    }

    pub(super) fn path(&self, version: Version) -> &Path {
        match version {
            Version::Old => &self.old,
            Version::New => &self.new,
        }
    }

    /// A call of `tenure`, without the environment variables of the developer's own stores.
    pub(super) fn tenure(&self, version: Version) -> Command {
        let mut command = Command::new(self.path(version));
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            let foreign = ["TENURE_", "DFLOCKD_", "PG", "NATS_", "AWS_", "AZURE_"];
            if foreign.iter().any(|prefix| text.starts_with(prefix)) {
                command.env_remove(name);
            }
        }
        command
    }
}

impl Source<'_> {
    /// Builds the program if necessary; returns its path and its description.
    fn build(&self, debug: bool) -> Result<(PathBuf, String)> {
        match self {
            Self::Program(path) => {
                let path =
                    path.canonicalize().with_context(|| format!("finding {}", path.display()))?;
                let about = path.display().to_string();
                Ok((path, about))
            }
            Self::Tree => {
                let mut cargo = repo::cargo(["build", "--quiet", "--locked"]);
                command::show(cargo.args(["--package", "tenure-cli"]).args(release(debug)))?;
                let about = git(&["describe", "--always", "--dirty", "--exclude=*"])?;
                Ok((
                    repo::target()?.join(profile(debug)).join("tenure"),
                    format!("tree at {about}"),
                ))
            }
            Self::Commit(commit) => {
                let named = format!("{commit}^{{commit}}");
                let hash = git(&["rev-parse", "--verify", &named]).with_context(|| {
                    format!(
                        "{commit} is not in this clone; a shallow one needs `git fetch --unshallow`"
                    )
                })?;
                let program = build_commit(&hash, debug)?;
                Ok((program, format!("commit {}", &hash[..hash.len().min(10)])))
            }
        }
    }
}

/// Builds the program of a commit. The result is cached: a commit does not change.
///
/// Its files come from `git archive`, not from a worktree: an interrupt would leave the worktree registered in git.
fn build_commit(hash: &str, debug: bool) -> Result<PathBuf> {
    let folder = repo::target()?.join("upgrade");
    let program = folder.join(format!("tenure-{hash}-{}", profile(debug)));
    if program.is_file() {
        return Ok(program);
    }
    let source = folder.join("source");
    if source.exists() {
        fs::remove_dir_all(&source).context("removing what an earlier build left")?;
    }
    fs::create_dir_all(&source).context("creating a folder for the earlier commit")?;
    let archive = folder.join("source.tar");
    let output = format!("--output={}", archive.display());
    git(&["archive", "--format=tar", &output, hash])?;
    command::succeed(Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(&source))?;
    let built = folder.join("build");
    let mut cargo = repo::cargo(["build", "--quiet", "--locked", "--package", "tenure-cli"]);
    cargo.args(release(debug)).arg("--target-dir").arg(&built).current_dir(&source);
    command::show(&mut cargo)?;
    // The copy gets its final name only when it is complete, so that an interrupt leaves no truncated program there.
    let part = folder.join("tenure.part");
    fs::copy(built.join(profile(debug)).join("tenure"), &part).context("keeping the program")?;
    fs::rename(&part, &program).context("keeping the program")?;
    fs::remove_dir_all(&source).context("removing the files of the earlier commit")?;
    fs::remove_file(&archive).context("removing the archive of the earlier commit")?;
    Ok(program)
}

fn git(arguments: &[&str]) -> Result<String> {
    let printed = command::stdout(Command::new("git").args(arguments).current_dir(repo::root()))?;
    Ok(printed.trim().to_owned())
}

fn release(debug: bool) -> Option<&'static str> {
    (!debug).then_some("--release")
}

fn profile(debug: bool) -> &'static str {
    if debug { "debug" } else { "release" }
}
