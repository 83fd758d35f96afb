//! The list of imports that close a cycle and are still to be removed.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result};

use super::graph::Pair;

/// File with the list.
pub(super) const KNOWN: &str = "xtask/cycles.toml";

/// Known imports by crate.
pub(super) struct KnownImports {
    crates: BTreeMap<String, BTreeSet<Pair>>,
}

impl KnownImports {
    pub(super) fn parse(text: &str) -> Result<Self> {
        let lists = toml::from_str::<BTreeMap<String, Vec<String>>>(text)?;
        let mut crates = BTreeMap::new();
        for (name, list) in lists {
            let pairs = list.iter().map(|entry| {
                let pair = entry.split_once(" -> ");
                let (from, to) = pair.with_context(|| format!("{entry:?}: not \"from -> to\""))?;
                Ok((from.to_owned(), to.to_owned()))
            });
            crates.insert(name, pairs.collect::<Result<_>>()?);
        }
        Ok(Self { crates })
    }

    /// Known imports of a crate.
    pub(super) fn of(&self, name: &str) -> BTreeSet<Pair> {
        self.crates.get(name).cloned().unwrap_or_default()
    }

    /// A fault for each listed crate that is not among `crates`.
    pub(super) fn of_other_crates<'a>(&self, crates: impl Iterator<Item = &'a str>) -> Vec<String> {
        let crates = crates.collect::<BTreeSet<_>>();
        let others = self.crates.keys().filter(|name| !crates.contains(name.as_str()));
        others.map(|name| format!("{KNOWN}: {name}: no such crate")).collect()
    }
}
