//! `cargo xtask pages`: the pages of the documentation that are printed from the code.

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context as _, Result};

use crate::repo;

/// Each page with the function that prints it.
const PAGES: &[GeneratedPage] =
    &[("docs/election-table.md", tenure_core::election::table::markdown)];

/// A file of the repository, and what it should hold.
type GeneratedPage = (&'static str, fn() -> String);

#[derive(clap::Args)]
pub(crate) struct PagesArgs {
    /// Write nothing; fail when a page is not what the code says
    #[arg(long)]
    check: bool,
}

pub(crate) fn run(arguments: &PagesArgs) -> Result<ExitCode> {
    if arguments.check {
        check()?;
        return Ok(ExitCode::SUCCESS);
    }
    for path in refresh(repo::root(), PAGES)? {
        println!("wrote {path}");
    }
    println!("{} generated pages are fresh", PAGES.len());
    Ok(ExitCode::SUCCESS)
}

/// Fails when a page is not what the code says.
pub(crate) fn check() -> Result<()> {
    let stale = stale(repo::root(), PAGES)?;
    if !stale.is_empty() {
        let paths = stale.iter().map(|(path, _)| *path).collect::<Vec<_>>();
        anyhow::bail!("stale: {}; run `cargo xtask pages` and commit the result", paths.join(", "));
    }
    Ok(())
}

/// Writes the stale pages only, so that a fresh page keeps its modification time.
fn refresh(root: &Path, pages: &[GeneratedPage]) -> Result<Vec<&'static str>> {
    let stale = stale(root, pages)?;
    for (path, text) in &stale {
        let file = root.join(path);
        let folder = file.parent().expect("a page lies in a folder");
        fs::create_dir_all(folder).with_context(|| format!("creating the folder of {path}"))?;
        fs::write(&file, text).with_context(|| format!("writing {path}"))?;
    }
    Ok(stale.into_iter().map(|(path, _)| path).collect())
}

/// The pages that are missing or differ, with the text they should hold.
fn stale(root: &Path, pages: &[GeneratedPage]) -> Result<Vec<(&'static str, String)>> {
    let mut stale = Vec::new();
    for (path, print) in pages {
        let wanted = print();
        match fs::read_to_string(root.join(path)) {
            Ok(text) if text == wanted => {}
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("reading {path}"));
            }
            _ => stale.push((*path, wanted)),
        }
    }
    Ok(stale)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stores::Folder;

    const TWO: &[GeneratedPage] =
        &[("docs/a.md", || "# A\n".to_owned()), ("docs/deep/b.md", || "# B\n".to_owned())];

    #[test]
    fn missing_and_differing_pages_are_stale_until_written() {
        let folder = Folder::create("pages").unwrap();
        let root = folder.path();
        let paths = |root| stale(root, TWO).unwrap().into_iter().map(|(path, _)| path).collect();

        let before: Vec<_> = paths(root);
        assert_eq!(before, ["docs/a.md", "docs/deep/b.md"]);
        assert_eq!(refresh(root, TWO).unwrap(), before);
        let after: Vec<_> = paths(root);
        assert!(after.is_empty(), "{after:?}");

        fs::write(root.join("docs/a.md"), "# A by hand\n").unwrap();
        let edited: Vec<_> = paths(root);
        assert_eq!(edited, ["docs/a.md"]);
        assert_eq!(refresh(root, TWO).unwrap(), ["docs/a.md"]);
        assert_eq!(fs::read_to_string(root.join("docs/a.md")).unwrap(), "# A\n");
    }

    #[test]
    fn a_page_that_cannot_be_read_is_an_error_and_not_stale() {
        let folder = Folder::create("pages-unreadable").unwrap();
        fs::create_dir_all(folder.path().join("docs/a.md")).unwrap();
        assert!(stale(folder.path(), TWO).is_err());
    }
}
