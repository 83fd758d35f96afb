//! The scratch copy of the repository: mutations change it, and never the repository itself.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use super::list::Mutation;
use crate::command;

/// A copy of the repository's files.
pub(super) struct ScratchTree(PathBuf);

impl ScratchTree {
    /// Copies the files of `root` that git tracks, or would track, to `copy`.
    ///
    /// A file that is the same in the copy is not written: cargo would build its crate again. Files of an earlier copy
    /// that are gone from `root` are removed.
    pub(super) fn copy(root: &Path, copy: &Path) -> Result<Self> {
        let mut git = Command::new("git");
        git.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]);
        let listing = command::stdout(git.current_dir(root))?;
        let mut names = BTreeSet::new();
        for name in listing.split('\0').filter(|name| !name.is_empty()) {
            let (from, to) = (root.join(name), copy.join(name));
            // A tracked file may have been deleted, and a link to a folder is not copied.
            if !from.is_file() {
                continue;
            }
            names.insert(to.clone());
            let content = fs::read(&from).with_context(|| format!("reading {}", from.display()))?;
            if fs::read(&to).is_ok_and(|known| known == content) {
                continue;
            }
            let folder = to.parent().context("a file without a folder")?;
            fs::create_dir_all(folder).context("creating a folder of the copy")?;
            fs::copy(&from, &to).with_context(|| format!("copying {}", from.display()))?;
        }
        remove_others(copy, &names)?;
        Ok(Self(copy.to_owned()))
    }

    /// Applies a mutation until the result is dropped.
    pub(super) fn apply(&self, mutation: &Mutation) -> Result<Applied> {
        let path = self.0.join(&mutation.file);
        let original =
            fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        let changed = mutation.apply(&original)?;
        fs::write(&path, changed).with_context(|| format!("writing {}", path.display()))?;
        Ok(Applied { path, original })
    }
}

/// A mutation in the copy. Dropping it restores the file.
pub(super) struct Applied {
    path: PathBuf,
    original: String,
}

impl Drop for Applied {
    fn drop(&mut self) {
        if let Err(error) = fs::write(&self.path, &self.original) {
            eprintln!("warning: cannot restore {}: {error}", self.path.display());
        }
    }
}

/// Removes the files below `folder` that are not among `names`.
fn remove_others(folder: &Path, names: &BTreeSet<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            remove_others(&path, names)?;
        } else if !names.contains(&path) {
            fs::remove_file(&path).with_context(|| format!("removing {}", path.display()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::list::Edit;
    use super::*;
    use crate::stores::Folder;

    #[test]
    fn the_copy_follows_the_repository_and_keeps_equal_files() {
        let folder = Folder::create("mutations-tree").unwrap();
        let [root, copy] = ["root", "copy"].map(|name| folder.path().join(name));
        fs::create_dir_all(root.join("src")).unwrap();
        fs::write(root.join(".gitignore"), "/target\n").unwrap();
        for (name, text) in [("src/a.rs", "a"), ("src/b.rs", "b"), ("target", "built")] {
            fs::write(root.join(name), text).unwrap();
        }
        command::succeed(Command::new("git").arg("init").current_dir(&root)).unwrap();
        ScratchTree::copy(&root, &copy).unwrap();
        assert_eq!(fs::read_to_string(copy.join("src/a.rs")).unwrap(), "a");
        assert!(!copy.join("target").exists(), "an ignored file");

        let changed = |name: &str| fs::metadata(copy.join(name)).unwrap().modified().unwrap();
        let before = changed("src/a.rs");
        fs::remove_file(root.join("src/b.rs")).unwrap();
        fs::write(root.join("src/c.rs"), "c").unwrap();
        ScratchTree::copy(&root, &copy).unwrap();
        assert_eq!(changed("src/a.rs"), before);
        assert!(!copy.join("src/b.rs").exists());
        assert!(copy.join("src/c.rs").exists());
    }

    #[test]
    fn a_mutation_is_undone_when_it_is_dropped() {
        let folder = Folder::create("mutations-apply").unwrap();
        fs::write(folder.path().join("a.rs"), "let a = 1;").unwrap();
        let tree = ScratchTree(folder.path().to_owned());
        let mutation = Mutation {
            area: String::new(),
            name: String::new(),
            wrong: String::new(),
            file: "a.rs".to_owned(),
            edits: vec![Edit { find: "1".to_owned(), replace: "2".to_owned() }],
            checks: Vec::new(),
            survives: None,
        };
        let text = || fs::read_to_string(folder.path().join("a.rs")).unwrap();
        let applied = tree.apply(&mutation).unwrap();
        assert_eq!(text(), "let a = 2;");
        drop(applied);
        assert_eq!(text(), "let a = 1;");
    }
}
