//! `cargo xtask language`: figures of the whole tree, and the offending lines of some paths.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Result, bail};

use super::clean::is_clean;
use super::tree::{File, SCHEME, Tree, places};
use super::words::{self, Passage};
use crate::repo;

/// Findings in the files at or below `path`, one per line.
pub(super) fn listing(tree: &Tree, path: &Path) -> Result<String> {
    let path = path.strip_prefix(repo::root()).unwrap_or(path);
    let path = path.strip_prefix(".").unwrap_or(path);
    let is_listed = |file: &&File| Path::new(&file.path).starts_with(path);
    if !tree.files.iter().any(|file| is_listed(&file)) {
        bail!("{}: no file that the language check reads", path.display());
    }
    let mut text = String::new();
    for line in tree.files.iter().filter(is_listed).flat_map(File::findings) {
        let _ = writeln!(text, "{line}");
    }
    for (name, definitions) in tree.repeated().values().flatten() {
        if definitions.iter().any(|(file, _)| is_listed(file)) {
            let places = places(definitions);
            let _ = writeln!(text, "{places}: type name {name} is defined more than once");
        }
    }
    Ok(text)
}

impl File {
    /// Each finding of the file with its line.
    pub(super) fn findings(&self) -> Vec<String> {
        let words = self.hits.iter().map(|hit| {
            let rule = hit.rule;
            (hit.line, format!("\"{}\" ({})", rule.phrase, rule.instead))
        });
        let questions = self.questions.iter().map(|line| {
            (*line, "opens with a question word (begin with a noun phrase or a verb)".to_owned())
        });
        let mut findings = words.chain(questions).collect::<Vec<_>>();
        findings.sort();
        let findings = findings.into_iter();
        findings
            .map(|(line, text)| format!("{}:{line}: {text}: {}", self.path, self.line(line)))
            .collect()
    }
}

/// The figures that the project has goals for, then the counts per ceiling.
pub(super) fn figures(tree: &Tree) -> String {
    let docs = tree.files.iter().flat_map(|file| &file.docs).collect::<Vec<_>>();
    let book = tree.files.iter().filter(|file| file.group() == "docs");
    let book = book.flat_map(|file| &file.paragraphs).collect::<Vec<_>>();
    let questions = tree.files.iter().map(|file| file.questions.len()).sum();
    let names = tree.definitions();
    let repeated = tree.repeated();
    let lines = |passages: &[&Passage]| passages.iter().map(|passage| lines(passage)).sum();
    let persons = |passages: &[&Passage]| passages.iter().map(|passage| persons(passage)).sum();
    let rows = [
        ("doc lines with person words", persons(&docs), lines(&docs), 0.5),
        ("doc comments that open with a question word", questions, docs.len(), 3.0),
        ("type names repeated within a crate", own_names(&repeated), own_names(&names), 8.0),
        ("book lines with person words", persons(&book), lines(&book), 1.0),
    ];
    let mut text = String::new();
    for (name, found, of, goal) in rows {
        let share = percent(found, of);
        let _ = writeln!(text, "{name:<44} {found:>4} of {of:>5} {share:>6.2} %, goal {goal} %");
    }
    let _ = writeln!(text, "\n{:<18} {:>6} {:>9} {:>8}", "", "words", "questions", "repeated");
    let group_of = |file: &File| {
        if is_clean(&file.path) { "ceiling 0".to_owned() } else { file.group().to_owned() }
    };
    for group in tree.files.iter().map(group_of).collect::<BTreeSet<_>>() {
        let files = || tree.files.iter().filter(|file| group_of(file) == group);
        let words: usize = files().map(|file| file.hits.len()).sum();
        let questions: usize = files().map(|file| file.questions.len()).sum();
        let repeated = repeated.get(group.as_str()).map_or(0, BTreeMap::len);
        let _ = writeln!(text, "{group:<18} {words:>6} {questions:>9} {repeated:>8}");
    }
    text
}

/// Number of names, by crate, without those of the module scheme.
fn own_names<T>(crates: &BTreeMap<&str, BTreeMap<&str, T>>) -> usize {
    crates.values().flat_map(BTreeMap::keys).filter(|name| !SCHEME.contains(name)).count()
}

/// Number of lines that are not blank.
fn lines(passage: &Passage) -> usize {
    passage.iter().filter(|line| !line.text.trim().is_empty()).count()
}

/// Number of lines with a word that stands for a person.
fn persons(passage: &Passage) -> usize {
    let hits = words::hits(passage).into_iter().filter(|hit| hit.rule.person);
    hits.map(|hit| hit.line).collect::<BTreeSet<_>>().len()
}

#[expect(clippy::cast_precision_loss, reason = "counts of lines are far below 2^52")]
fn percent(found: usize, of: usize) -> f64 {
    100.0 * found as f64 / of.max(1) as f64
}
