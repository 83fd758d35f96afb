//! The tests that were skipped. The harness counts them as passed, so they record themselves in a file.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::repo;

/// The file in which skipped tests record themselves: a line per test, `TEST: REASON`.
pub(super) struct Skips(PathBuf);

impl Skips {
    /// Removes the file of an earlier run.
    pub(super) fn begin() -> Result<Self> {
        let file = repo::target()?.join("skipped-tests.txt");
        match fs::remove_file(&file) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(error).with_context(|| format!("removing {}", file.display()))
            }
            _ => Ok(Self(file)),
        }
    }

    pub(super) fn file(&self) -> &Path {
        &self.0
    }

    /// A line per reason, with the number of tests, and their names below it.
    pub(super) fn summary(&self) -> Result<Vec<String>> {
        match fs::read_to_string(&self.0) {
            Ok(text) => Ok(summary(&text)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error).context("reading the skipped tests"),
        }
    }
}

fn summary(lines: &str) -> Vec<String> {
    let mut by_reason = BTreeMap::<_, Vec<_>>::new();
    for line in lines.lines() {
        let (test, reason) = line.split_once(": ").unwrap_or((line, "no reason given"));
        by_reason.entry(reason).or_default().push(test);
    }
    let line = |(reason, tests): (&str, Vec<&str>)| {
        let count = tests.len();
        let noun = if count == 1 { "test" } else { "tests" };
        format!("{count} {noun} skipped: {reason}\n  {}", tests.join(", "))
    };
    by_reason.into_iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skipped_tests_are_counted_by_reason() {
        let text = "nats::a: X is not set\nb: no disk: here\nnats::c: X is not set\n";
        let expected = [
            "2 tests skipped: X is not set\n  nats::a, nats::c",
            "1 test skipped: no disk: here\n  b",
        ];
        assert_eq!(summary(text), expected);
        assert!(summary("").is_empty());
    }
}
