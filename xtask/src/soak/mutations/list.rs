//! The list of mutations: `xtask/mutations/*.toml`, one file per area.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;

use super::check::{MutationCheck, SimulatedWorld};
use crate::repo;

/// Folder of the list.
const FOLDER: &str = "xtask/mutations";

/// Mutations that seeds of a simulator must find, within the number of seeds that the list gives. All but one are found
/// by seeds of the product's simulator.
pub(super) const FOUND_BY_SEEDS: [&str; 7] = [
    "clock-read-once-per-turn",
    "close-by-the-server-counts-as-release",
    "confirmation-left-out-after-a-wait",
    "grant-answered-before-its-journal-write",
    "release-overtakes-a-renewal",
    "restart-forgets-the-embargo",
    "waiter-is-not-woken",
];

/// A wrong change of one file, and the checks that are to notice it.
#[derive(Clone, Debug)]
pub(super) struct Mutation {
    /// Name of the list's file.
    pub(super) area: String,
    pub(super) name: String,
    /// One line: the behaviour of the changed code.
    pub(super) wrong: String,
    /// Path in the repository.
    pub(super) file: String,
    /// Texts to replace, each of which the file contains exactly once.
    pub(super) edits: Vec<Edit>,
    /// Checks, the cheapest first.
    pub(super) checks: Vec<MutationCheck>,
    /// Reason for which no check can notice the change.
    pub(super) survives: Option<String>,
}

/// Replacement of one text.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Edit {
    pub(super) find: String,
    pub(super) replace: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ListFile {
    mutation: Vec<MutationEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MutationEntry {
    name: String,
    wrong: String,
    file: String,
    find: String,
    replace: String,
    /// Further edits of the same file.
    #[serde(default)]
    more: Vec<Edit>,
    noticed_by: Vec<String>,
    /// Number of seeds within which a simulator is to find the change.
    seeds: Option<u32>,
    /// The simulator that is to find it: that of the product by default. The other one is for mistakes that the product
    /// cannot show.
    #[serde(default)]
    world: SimulatedWorld,
    survives: Option<String>,
}

/// Reads the list of the repository.
pub(super) fn read() -> Result<Vec<Mutation>> {
    let folder = repo::root().join(FOLDER);
    let entries = fs::read_dir(&folder).with_context(|| format!("reading {FOLDER}"))?;
    let paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    let mut mutations = Vec::new();
    // Sorted: the order of a folder is not fixed.
    for path in paths.into_iter().collect::<BTreeSet<_>>() {
        let area = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let text = fs::read_to_string(&path);
        let parsed = text.map_err(anyhow::Error::from).and_then(|text| parse(&area, &text));
        mutations.extend(parsed.with_context(|| format!("reading {FOLDER}/{area}.toml"))?);
    }
    Ok(mutations)
}

fn parse(area: &str, text: &str) -> Result<Vec<Mutation>> {
    let file: ListFile = toml::from_str(text)?;
    let mutation = |entry: MutationEntry| {
        let tests = entry.noticed_by.iter().map(|name| MutationCheck::parse(name));
        let world = entry.world;
        let seeds = entry.seeds.map(|count| Ok(MutationCheck::Seeds { world, count }));
        let checks = tests.chain(seeds).collect::<Result<Vec<_>>>();
        let first = Edit { find: entry.find, replace: entry.replace };
        Ok(Mutation {
            area: area.to_owned(),
            checks: checks.with_context(|| format!("mutation {}", entry.name))?,
            name: entry.name,
            wrong: entry.wrong,
            file: entry.file,
            edits: [vec![first], entry.more].concat(),
            survives: entry.survives,
        })
    };
    file.mutation.into_iter().map(mutation).collect()
}

/// Errors of the list, found without a build: `root` is the folder that the files are in.
pub(super) fn faults(mutations: &[Mutation], root: &Path) -> Vec<String> {
    let mut names = BTreeSet::new();
    let mut faults = Vec::new();
    for mutation in mutations {
        if !names.insert(&mutation.name) {
            faults.push(format!("{}: another mutation has this name", mutation.name));
        }
        if mutation.checks.is_empty() {
            faults.push(format!("{}: no check is to notice it", mutation.name));
        }
        let applied = fs::read_to_string(root.join(&mutation.file))
            .with_context(|| format!("reading {}", mutation.file))
            .and_then(|text| mutation.apply(&text));
        faults.extend(applied.err().map(|error| format!("{}: {error:#}", mutation.name)));
    }
    faults
}

impl Mutation {
    /// True if the mutation counts as noticed only if this check notices it too.
    pub(super) fn must_be_found_by(&self, check: &MutationCheck) -> bool {
        matches!(check, MutationCheck::Seeds { .. }) && FOUND_BY_SEEDS.contains(&&*self.name)
    }

    /// The text of the file with the change.
    pub(super) fn apply(&self, text: &str) -> Result<String> {
        let mut changed = text.to_owned();
        for Edit { find, replace } in &self.edits {
            if find == replace {
                bail!("an edit changes nothing");
            }
            match changed.matches(find).count() {
                1 => changed = changed.replacen(find, replace, 1),
                count => bail!("{} contains this text {count} times, not once: {find}", self.file),
            }
        }
        Ok(changed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIN_MUTATIONS: usize = 50;

    /// The one mutation of [`FOUND_BY_SEEDS`] that the product cannot show: the keeper task of the library awaits each
    /// request to its end, whatever the keeper commands. The simulator of the rules must find it.
    const FOUND_BY_RULES: &str = "release-overtakes-a-renewal";

    #[test]
    fn every_mutation_of_the_list_can_be_applied() {
        let mutations = read().unwrap();
        let faults = faults(&mutations, repo::root());
        assert!(faults.is_empty(), "{}", faults.join("\n"));
        assert!(mutations.len() >= MIN_MUTATIONS, "{} mutations", mutations.len());
    }

    #[test]
    fn the_simulator_is_to_find_seven_of_them() {
        let mutations = read().unwrap();
        for name in FOUND_BY_SEEDS {
            let mutation = mutations.iter().find(|mutation| mutation.name == name);
            let checks = &mutation.unwrap_or_else(|| panic!("{name} is not in the list")).checks;
            let wanted = match name {
                FOUND_BY_RULES => SimulatedWorld::Rules,
                _ => SimulatedWorld::Product,
            };
            let seeds = |check: &MutationCheck| match check {
                MutationCheck::Seeds { world, count: 1..=1000 } => *world == wanted,
                _ => false,
            };
            assert!(checks.iter().any(seeds), "{name}");
        }
    }

    const ONE: &str = r#"
        [[mutation]]
        name = "one"
        wrong = "two is one"
        file = "xtask/src/file.rs"
        find = "two"
        replace = "one"
        noticed_by = ["xtask/lib"]
    "#;

    #[test]
    fn a_mutation_may_have_several_edits() {
        let text = format!("{ONE}\n[[mutation.more]]\nfind = 'three'\nreplace = 'four'\n");
        let both = parse("area", &text).unwrap().remove(0);
        assert_eq!(both.apply("two three").unwrap(), "one four");
        assert!(both.apply("two").unwrap_err().to_string().contains("three"));
    }

    #[test]
    fn a_text_that_occurs_never_or_twice_is_a_fault() {
        let one = parse("area", ONE).unwrap().remove(0);
        assert_eq!(one.apply("let two = 2;").unwrap(), "let one = 2;");
        for (text, count) in [("let three = 3;", "0 times"), ("two + two", "2 times")] {
            let error = one.apply(text).unwrap_err().to_string();
            assert!(error.contains(count), "{error}");
        }
    }

    #[test]
    fn faults_name_the_mutation() {
        let folder = crate::stores::Folder::create("mutations-test").unwrap();
        let file = folder.path().join("xtask/src/file.rs");
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, "two").unwrap();
        let one = parse("area", ONE).unwrap().remove(0);
        assert!(faults(std::slice::from_ref(&one), folder.path()).is_empty());

        let gone = Mutation { file: "gone.rs".to_owned(), ..one.clone() };
        let mut same = Mutation { name: "same".to_owned(), ..one.clone() };
        same.edits[0].find = "one".to_owned();
        let faults = faults(&[one, gone, same], folder.path());
        assert_eq!(faults.len(), 3, "{faults:?}");
        assert!(faults[0].contains("another mutation has this name"), "{faults:?}");
        assert!(faults[1].contains("reading gone.rs"), "{faults:?}");
        assert!(faults[2].starts_with("same: an edit changes nothing"), "{faults:?}");
    }

    #[test]
    fn an_unknown_field_or_check_is_refused() {
        assert!(parse("area", &ONE.replace("wrong", "text")).is_err());
        assert!(parse("area", &ONE.replace("xtask/lib", "xtask")).is_err());
    }
}
