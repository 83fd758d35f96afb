//! Check that the book's table of contents lists every page of the docs.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail};

/// The table of contents.
const SUMMARY: &str = "SUMMARY.md";

pub(super) fn is_complete(docs: &Path) -> Result<()> {
    let summary = fs::read_to_string(docs.join(SUMMARY)).context("reading docs/SUMMARY.md")?;
    let mut missing = Vec::new();
    for entry in fs::read_dir(docs).context("reading docs")? {
        let file = entry.context("reading docs")?.path();
        let is_page = file.extension().is_some_and(|extension| extension == "md");
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if is_page && name != SUMMARY && !summary.contains(&format!("]({name})")) {
            missing.push(name);
        }
    }
    if !missing.is_empty() {
        missing.sort();
        bail!("not in docs/SUMMARY.md: {}", missing.join(", "));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_missing_from_the_summary_is_named() {
        let docs = std::env::temp_dir().join(format!("tenure-book-{}", std::process::id()));
        fs::create_dir_all(&docs).expect("a folder");
        for (name, text) in [(SUMMARY, "- [One](one.md)\n"), ("one.md", ""), ("two.md", "")] {
            fs::write(docs.join(name), text).expect("ours");
        }
        let error = is_complete(&docs).expect_err("two.md is not there").to_string();
        assert_eq!(error, "not in docs/SUMMARY.md: two.md");
        fs::remove_dir_all(&docs).expect("ours");
    }
}
