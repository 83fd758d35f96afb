//! Files that the language check reads, and its findings in each.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use super::source::RustFile;
use super::words::{self, Hit, Passage};

/// Type names of the module scheme, which every store may define once.
pub(super) const SCHEME: &[&str] = &["ClaimState", "Hold", "Options", "Place"];

/// Markdown files outside the book.
const PAGES: &[&str] = &["ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "README.md"];

/// Every file that the language check reads.
pub(super) struct Tree {
    pub(super) files: Vec<File>,
}

/// Definitions of types, as file and line, by crate and name.
pub(super) type Definitions<'a> = BTreeMap<&'a str, BTreeMap<&'a str, Vec<Definition<'a>>>>;

/// File and line of a type's definition.
pub(super) type Definition<'a> = (&'a File, usize);

/// Findings in one file.
pub(super) struct File {
    /// Path below the root of the repository, with `/`.
    pub(super) path: String,
    pub(super) text: String,
    /// Doc comments, without fenced code.
    pub(super) docs: Vec<Passage>,
    /// Paragraphs of a page, without fenced code.
    pub(super) paragraphs: Vec<Passage>,
    /// Banned words in doc comments, strings and paragraphs.
    pub(super) hits: Vec<Hit>,
    /// First lines of the doc comments that open with a question word.
    pub(super) questions: Vec<usize>,
    /// Types defined outside tests, with their lines.
    pub(super) types: Vec<(usize, String)>,
}

impl Tree {
    pub(super) fn read(root: &Path) -> Result<Self> {
        let mut paths = PAGES.iter().map(|page| root.join(page)).collect::<Vec<_>>();
        paths.extend(below(&root.join("docs"), "md")?);
        for folder in children(&root.join("crates"))?.into_iter().chain([root.join("xtask")]) {
            paths.extend(below(&folder.join("src"), "rs")?);
        }
        let mut files = Vec::new();
        for path in paths {
            let text =
                fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
            let path =
                path.strip_prefix(root).unwrap_or(&path).to_string_lossy().replace('\\', "/");
            files.push(File::scan(path, text));
        }
        files.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(Self { files })
    }

    /// Definitions of each type name, by crate and name.
    pub(super) fn definitions(&self) -> Definitions<'_> {
        let mut crates = Definitions::new();
        for file in &self.files {
            for (line, name) in &file.types {
                let names = crates.entry(file.group()).or_default();
                names.entry(name).or_default().push((file, *line));
            }
        }
        crates
    }

    /// Definitions of the type names that a crate defines more often than it may.
    pub(super) fn repeated(&self) -> Definitions<'_> {
        let mut crates = self.definitions();
        for names in crates.values_mut() {
            names.retain(|name, definitions| is_repeated(name, definitions));
        }
        crates
    }
}

/// True if a crate defines `name` more often than it may: once, or once per store for a name of the scheme.
fn is_repeated(name: &str, definitions: &[Definition<'_>]) -> bool {
    if !SCHEME.contains(&name) {
        return definitions.len() > 1;
    }
    let mut stores = BTreeSet::new();
    definitions.iter().any(|(file, _)| !stores.insert(file.store()))
}

impl File {
    pub(super) fn scan(path: String, text: String) -> Self {
        let (mut source, mut paragraphs) = (RustFile::default(), vec![]);
        if Path::new(&path).extension() == Some("md".as_ref()) {
            paragraphs = words::paragraphs(&text);
        } else {
            source = RustFile::scan(&text);
            if is_test(&path) {
                source.strings.clear();
                source.types.clear();
            }
            if path.starts_with("xtask/") {
                source.strings.clear();
            }
        }
        let passages = source.docs.iter().chain(&source.strings).chain(&paragraphs);
        let mut hits = passages.flat_map(|passage| words::hits(passage)).collect::<Vec<_>>();
        hits.sort_by_key(|hit| hit.line);
        let questions = source.docs.iter().filter(|doc| words::is_question(doc));
        let questions = questions.map(|doc| doc[0].number).collect();
        Self { path, text, docs: source.docs, paragraphs, hits, questions, types: source.types }
    }

    /// Name of the group that the file shares a ceiling with: its crate, `docs`, or the page itself.
    pub(super) fn group(&self) -> &str {
        let path = self.path.strip_prefix("crates/").unwrap_or(&self.path);
        path.split('/').next().unwrap_or(path)
    }

    /// Name of the store that the file belongs to; empty outside the stores.
    fn store(&self) -> &str {
        let inside = self.path.split_once("/src/store/").map(|(_, inside)| inside);
        inside.and_then(|inside| inside.split(['/', '.']).next()).unwrap_or_default()
    }

    pub(super) fn line(&self, number: usize) -> &str {
        self.text.lines().nth(number - 1).unwrap_or_default().trim()
    }
}

/// Places of some definitions, for a message.
pub(super) fn places(definitions: &[Definition<'_>]) -> String {
    let places = definitions.iter().map(|(file, line)| format!("{}:{line}", file.path));
    places.collect::<Vec<_>>().join(", ")
}

/// True for a file that is compiled for tests only.
fn is_test(path: &str) -> bool {
    path.ends_with("/tests.rs") || path.contains("/tests/")
}

/// Every file in or below `folder` whose name ends in `extension`.
fn below(folder: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in children(folder)? {
        if path.is_dir() {
            files.extend(below(&path, extension)?);
        } else if path.extension().is_some_and(|found| found == extension) {
            files.push(path);
        }
    }
    Ok(files)
}

fn children(folder: &Path) -> Result<Vec<PathBuf>> {
    let reading = || format!("reading {}", folder.display());
    let entries = fs::read_dir(folder).with_context(reading)?;
    let paths = entries.map(|entry| Ok(entry.with_context(reading)?.path()));
    paths.collect()
}
