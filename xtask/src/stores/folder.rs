//! Temporary folders, each named after the process that owns it.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use nix::unistd::Pid;

/// A folder `tenure-NAME-PID` for temporary files, removed on drop.
pub(crate) struct Folder(PathBuf);

impl Folder {
    /// Creates the folder of this process.
    pub(crate) fn create(name: &str) -> Result<Self> {
        Self::create_for(name, &Pid::this().to_string())
    }

    /// Removes the folders of that name whose process has ended: a killed xtask leaves its folder behind.
    pub(crate) fn sweep(name: &str) {
        let prefix = format!("tenure-{name}-");
        let folders = fs::read_dir(std::env::temp_dir()).into_iter().flatten().flatten();
        for folder in folders {
            let file_name = folder.file_name();
            let owner = file_name.to_str().and_then(|name| name.strip_prefix(&prefix));
            if owner.is_some_and(is_gone) {
                let _ = fs::remove_dir_all(folder.path());
            }
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    fn create_for(name: &str, owner: &str) -> Result<Self> {
        let path = std::env::temp_dir().join(format!("tenure-{name}-{owner}"));
        // Other users may traverse the folder, as the user of a store must, but not list it.
        let created = DirBuilder::new().mode(0o711).create(&path);
        created.with_context(|| format!("creating {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            eprintln!("warning: cannot remove {}: {error}", self.0.display());
        }
    }
}

/// True if `owner` is the id of a process that does not exist. A folder without a process id in its name is not ours
/// to remove.
fn is_gone(owner: &str) -> bool {
    let Ok(pid) = owner.parse::<i32>() else { return false };
    pid > 0 && nix::sys::signal::kill(Pid::from_raw(pid), None) == Err(nix::errno::Errno::ESRCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_goes_with_its_owner() {
        let folder = Folder::create("folder").unwrap();
        let path = folder.path().to_owned();
        fs::write(path.join("file"), "text").unwrap();
        assert!(Folder::create("folder").is_err(), "one owner has one folder of a name");
        drop(folder);
        assert!(!path.exists());
    }

    #[test]
    fn a_sweep_removes_only_folders_of_ended_processes() {
        let mut gone = std::process::Command::new("true").spawn().unwrap();
        gone.wait().unwrap();
        let left_behind = Folder::create_for("sweep", &gone.id().to_string()).unwrap();
        let ours = Folder::create("sweep").unwrap();
        let unrelated = Folder::create_for("sweep", "notes").unwrap();

        Folder::sweep("sweep");

        assert!(!left_behind.path().exists());
        assert!(ours.path().exists());
        assert!(unrelated.path().exists());
        std::mem::forget(left_behind);
    }
}
