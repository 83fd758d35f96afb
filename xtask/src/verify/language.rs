//! Language of the project: banned words and repeated type names, with limits that may only fall.
//!
//! CONTRIBUTING.md says how doc comments, strings and pages are written. Each crate, and each group of pages, has a ceiling for
//! the places that do not follow it. A count below its ceiling fails as well, so that the ceiling follows it down.

mod clean;
mod report;
mod source;
mod tokens;
mod tree;
mod words;

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use toml::{Table, Value};

use self::clean::{CLEAN, is_clean, matches};
use self::tree::{File, Tree, places};
use crate::repo;

/// File with the ceilings and the repeated type names.
const LIMITS: &str = "xtask/language.toml";

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Compare the counts with their ceilings, as `verify` does
    #[arg(long, conflicts_with = "paths")]
    check: bool,
    /// List the offending lines of these files and folders (`.` for all) instead of the figures
    paths: Vec<PathBuf>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    if arguments.check {
        check()?;
        return Ok(ExitCode::SUCCESS);
    }
    let tree = Tree::read(repo::root())?;
    if arguments.paths.is_empty() {
        print!("{}", report::figures(&tree));
        return Ok(ExitCode::SUCCESS);
    }
    for path in &arguments.paths {
        let listing = report::listing(&tree, path)?;
        // A reader such as `head` may close the pipe early.
        let _ = std::io::stdout().write_all(listing.as_bytes());
    }
    Ok(ExitCode::SUCCESS)
}

/// Compares the tree with its limits.
pub(super) fn check() -> Result<()> {
    let root = repo::root();
    let reading = || format!("reading {LIMITS}");
    let limits = fs::read_to_string(root.join(LIMITS)).with_context(reading)?;
    let limits = limits.parse().with_context(reading)?;
    let faults = faults(&Tree::read(root)?, &limits);
    if !faults.is_empty() {
        bail!("{}", faults.join("\n"));
    }
    Ok(())
}

fn faults(tree: &Tree, limits: &Table) -> Vec<String> {
    let mut faults = clean_faults(tree);
    faults.extend(ceiling_faults(tree, limits, "words", "banned words", |file| file.hits.len()));
    let what = "doc comments that open with a question word";
    faults.extend(ceiling_faults(tree, limits, "questions", what, |file| file.questions.len()));
    faults.extend(name_faults(tree, limits));
    faults
}

/// Every finding in the files that must be clean. An entry that matches no file is a fault too.
fn clean_faults(tree: &Tree) -> Vec<String> {
    let unmatched =
        CLEAN.iter().filter(|pattern| !tree.files.iter().any(|file| matches(pattern, &file.path)));
    let mut faults = unmatched
        .map(|pattern| {
            format!("{pattern}: no such file; correct CLEAN in verify/language/clean.rs")
        })
        .collect::<Vec<_>>();
    for file in tree.files.iter().filter(|file| is_clean(&file.path)) {
        faults.extend(file.findings());
    }
    faults
}

/// Groups whose count differs from its ceiling in `table`. A group without a ceiling has 0.
fn ceiling_faults(
    tree: &Tree,
    limits: &Table,
    table: &str,
    what: &str,
    count: fn(&File) -> usize,
) -> Vec<String> {
    let mut groups = BTreeMap::new();
    for file in tree.files.iter().filter(|file| !is_clean(&file.path)) {
        groups.entry(file.group()).or_insert((0, 0)).0 += count(file);
    }
    let mut faults = Vec::new();
    for (group, ceiling) in limits.get(table).and_then(Value::as_table).into_iter().flatten() {
        let ceiling = ceiling.as_integer().and_then(|ceiling| usize::try_from(ceiling).ok());
        match (groups.get_mut(group.as_str()), ceiling) {
            (Some(group), Some(ceiling)) => group.1 = ceiling,
            (None, _) => faults.push(format!("{LIMITS}: [{table}] {group}: no such crate or page")),
            (_, None) => faults.push(format!("{LIMITS}: [{table}] {group}: not a count")),
        }
    }
    for (group, (found, ceiling)) in groups {
        if found > ceiling {
            faults.push(format!(
                "{group}: {found} {what}, at most {ceiling} allowed; `cargo xtask language PATH` lists them"
            ));
        } else if found < ceiling {
            faults.push(format!(
                "{group}: only {found} {what}; lower its ceiling in {LIMITS}, [{table}]: {group:?} = {found}"
            ));
        }
    }
    faults
}

/// Names that are repeated without being listed, and names that are listed without being repeated.
fn name_faults(tree: &Tree, limits: &Table) -> Vec<String> {
    let mut repeated = tree.repeated();
    let mut faults = Vec::new();
    for (group, names) in limits.get("repeated").and_then(Value::as_table).into_iter().flatten() {
        for name in names.as_array().into_iter().flatten().filter_map(Value::as_str) {
            let found = repeated.get_mut(group.as_str()).and_then(|names| names.remove(name));
            if found.is_none() {
                faults.push(format!(
                    "{group}: type name {name} is no longer repeated; remove it from {LIMITS}, [repeated]"
                ));
            }
        }
    }
    // The listed names are removed by now.
    for (group, names) in repeated {
        for (name, definitions) in names {
            let places = places(&definitions);
            faults.push(format!(
                "{group}: type name {name} is defined more than once, rename: {places}"
            ));
        }
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree of these files, and of clean files where the check requires some.
    fn tree(files: &[(&str, &str)]) -> Tree {
        let clean = CLEAN.iter().map(|pattern| (pattern.replace('*', "lib"), String::new()));
        let files = files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned()));
        Tree { files: clean.chain(files).map(|(path, text)| File::scan(path, text)).collect() }
    }

    fn judge(files: &[(&str, &str)], limits: &str) -> Vec<String> {
        faults(&tree(files), &limits.parse().expect("our own limits"))
    }

    const A: (&str, &str) = ("crates/a/src/x.rs", "/// Who waits for nobody.\nstruct X;\n");
    const TWICE: (&str, &str) = ("crates/a/src/y.rs", "struct Y;\nmod y {\n    struct Y;\n}\n");

    #[test]
    fn counts_at_their_ceilings_are_fine() {
        assert_eq!(judge(&[A], "[words]\na = 2\n[questions]\na = 1\n"), [""; 0]);
    }

    #[test]
    fn a_count_above_its_ceiling_is_a_fault() {
        let faults = judge(&[A], "[words]\na = 1\n");
        assert_eq!(faults.len(), 2, "{faults:?}");
        assert!(faults[0].starts_with("a: 2 banned words, at most 1 allowed"), "{faults:?}");
        assert!(faults[1].starts_with("a: 1 doc comments that open"), "{faults:?}");
    }

    #[test]
    fn a_count_below_its_ceiling_prints_the_line_to_write() {
        let faults = judge(&[A], "[words]\na = 3\n[questions]\na = 1\n");
        assert_eq!(faults.len(), 1, "{faults:?}");
        assert!(faults[0].ends_with("\"a\" = 2"), "{faults:?}");
    }

    #[test]
    fn a_ceiling_of_nothing_is_a_fault() {
        let faults = judge(&[], "[words]\ngone = 1\n");
        assert_eq!(faults, ["xtask/language.toml: [words] gone: no such crate or page"]);
        let faults = judge(&[("docs/a.md", "")], "[words]\ndocs = \"many\"\n");
        assert_eq!(faults, ["xtask/language.toml: [words] docs: not a count"]);
    }

    #[test]
    fn files_that_must_be_clean_have_no_ceiling() {
        let file = ("crates/tenure/src/clock.rs", "\n/// A clock of nobody.\nstruct Clock;\n");
        let faults = judge(&[file], "");
        assert_eq!(faults.len(), 1, "{faults:?}");
        assert!(faults[0].starts_with("crates/tenure/src/clock.rs:2: \"nobody\""), "{faults:?}");
        assert!(!is_clean("crates/tenure/src/store/file.rs"));
    }

    #[test]
    fn an_entry_of_clean_files_that_matches_none_is_a_fault() {
        assert_eq!(faults(&Tree { files: vec![] }, &Table::new()).len(), CLEAN.len());
    }

    #[test]
    fn strings_of_tests_and_of_xtask_are_not_counted() {
        let text = "const A: &str = \"nobody waits\";\nstruct Y;\nstruct Y;\n";
        assert_eq!(judge(&[("crates/a/src/b/tests.rs", text)], ""), [""; 0]);
        assert_eq!(judge(&[("xtask/src/b.rs", text)], "[repeated]\nxtask = [\"Y\"]"), [""; 0]);
        assert_eq!(judge(&[("crates/a/src/b.rs", text)], "[repeated]\na = [\"Y\"]").len(), 1);
    }

    #[test]
    fn repeated_type_names_are_listed_or_faults() {
        assert_eq!(judge(&[TWICE], "[repeated]\na = [\"Y\"]"), [""; 0]);
        let faults = judge(&[TWICE], "");
        assert_eq!(faults.len(), 1, "{faults:?}");
        assert!(faults[0].contains("type name Y") && faults[0].contains("y.rs:3"), "{faults:?}");
    }

    #[test]
    fn a_listed_name_that_is_not_repeated_is_a_fault() {
        let faults = judge(&[TWICE], "[repeated]\na = [\"X\", \"Y\"]\nb = [\"Z\"]");
        assert_eq!(faults.len(), 2, "{faults:?}");
        assert!(faults[0].contains("type name X is no longer repeated"), "{faults:?}");
    }

    #[test]
    fn each_store_may_define_the_names_of_the_scheme_once() {
        let hold = |path| (path, "struct Hold;\n");
        let [one, two, both, top] = [
            hold("crates/a/src/store/one/hold.rs"),
            hold("crates/a/src/store/two.rs"),
            hold("crates/a/src/store/one.rs"),
            hold("crates/a/src/guard.rs"),
        ];
        assert_eq!(judge(&[one, two, top], ""), [""; 0]);
        assert_eq!(judge(&[one, two, both], "").len(), 1);
        assert_eq!(judge(&[top, hold("crates/a/src/request.rs")], "").len(), 1);
    }
}
