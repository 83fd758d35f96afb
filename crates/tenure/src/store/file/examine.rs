//! Checks of `tenure doctor` that only the file store can make: its folder, and the file system below it.

use super::layout::Folder;
use crate::store::Finding;

/// Findings about the processes that share the folder's locks, and about its file system.
pub(super) fn findings(folder: &Folder) -> Vec<Finding> {
    vec![scope(folder), file_system(folder)]
}

/// Finding about the folder, which *is* the store: processes that use another folder have other locks of the same
/// names.
fn scope(folder: &Folder) -> Finding {
    let users = if folder.is_shared() { "every user that may write to it" } else { "this user" };
    let path = folder.path().display();
    Finding::ok("folder", format!("{path}: locks for this host, {users}"))
}

fn file_system(folder: &Folder) -> Finding {
    match folder.network_file_system() {
        Ok(None) => {
            Finding::ok("file system", "local: its locks exclude every process of this host")
        }
        Ok(Some(name)) => Finding::warning(
            "file system",
            format!("{name}, a network file system: two processes may hold the same lock"),
        )
        .advise("name a folder on a local disk, or use another store between hosts"),
        Err(error) => Finding::error("file system", &error),
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::Options;
    use super::*;
    use crate::store::FindingLevel;

    #[test]
    fn the_folder_and_its_users_are_named() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("locks");
        let private = Folder::open(&path, Options::default()).unwrap();
        let findings = findings(&private);
        assert!(findings.iter().all(|finding| finding.level == FindingLevel::Ok), "{findings:?}");
        assert!(findings[0].detail.contains(path.to_str().unwrap()), "{findings:?}");
        assert!(findings[0].detail.ends_with("this user"), "{findings:?}");
        let shared = Folder::open(&path, Options { shared: true, ..Options::default() }).unwrap();
        assert!(scope(&shared).detail.ends_with("write to it"), "{:?}", scope(&shared));
    }
}
