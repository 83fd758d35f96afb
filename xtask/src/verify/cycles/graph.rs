//! The imports between the modules of a crate, and the cycles that they form.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::path::Path;

use anyhow::Result;

use super::resolve::definers;
use super::tree::{ModuleTree, ReadFile};

/// Two modules: the first imports from the second.
pub(super) type Pair = (String, String);

/// The imports between the modules of a crate.
pub(super) struct ImportGraph {
    pub(super) imports: BTreeMap<Pair, Evidence>,
}

/// A place that imports.
pub(super) struct Evidence {
    file: String,
    line: usize,
    path: String,
}

impl fmt::Display for Evidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file, self.line, self.path)
    }
}

impl ImportGraph {
    /// Reads the crate whose root is `file`.
    pub(super) fn read(file: &Path, read: ReadFile<'_>) -> Result<Self> {
        let tree = ModuleTree::read(file, read)?;
        let mut imports = BTreeMap::new();
        for (index, module) in tree.modules.iter().enumerate() {
            for (file, mention) in &module.mentions {
                for definer in definers(&tree, index, mention) {
                    let [from, to] = [module.owner, tree.modules[definer].owner];
                    if from == to {
                        continue;
                    }
                    let pair = (tree.modules[from].path.clone(), tree.modules[to].path.clone());
                    imports.entry(pair).or_insert_with(|| Evidence {
                        file: file.display().to_string(),
                        line: mention.line,
                        path: mention.path.join("::"),
                    });
                }
            }
        }
        Ok(Self { imports })
    }

    /// Groups of modules of which each imports every other, directly or not.
    pub(super) fn components(&self) -> Vec<BTreeSet<&str>> {
        let reachable = self.names().map(|name| (name, self.reachable(name)));
        let reachable = reachable.collect::<BTreeMap<_, _>>();
        let mut components = Vec::<BTreeSet<_>>::new();
        for (name, below) in &reachable {
            let is_placed = components.iter().any(|component| component.contains(name));
            // A module that is not reachable from itself is on no cycle.
            if is_placed || !below.contains(name) {
                continue;
            }
            let members = below.iter().filter(|other| reachable[*other].contains(name));
            components.push(members.copied().collect());
        }
        components
    }

    /// The shortest cycle among `members`, as the imports that it consists of.
    pub(super) fn shortest_cycle(&self, members: &BTreeSet<&str>) -> Vec<(&Pair, &Evidence)> {
        let cycles = members.iter().filter_map(|start| self.cycle_through(start));
        cycles.min_by_key(Vec::len).unwrap_or_default()
    }

    /// The imports between `members`.
    pub(super) fn imports_among(
        &self,
        members: &BTreeSet<&str>,
    ) -> impl Iterator<Item = (&Pair, &Evidence)> {
        let is_member = |name: &String| members.contains(name.as_str());
        self.imports.iter().filter(move |((from, to), _)| is_member(from) && is_member(to))
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        let names = self.imports.keys().flat_map(|(from, to)| [from.as_str(), to.as_str()]);
        names.collect::<BTreeSet<_>>().into_iter()
    }

    fn imports_of(&self, name: &str) -> impl Iterator<Item = (&Pair, &Evidence)> {
        let first = (name.to_owned(), String::new());
        self.imports.range(first..).take_while(move |((from, _), _)| from == name)
    }

    /// Modules that `start` imports, directly or not.
    fn reachable(&self, start: &str) -> BTreeSet<&str> {
        let mut found = BTreeSet::new();
        let mut open = vec![start.to_owned()];
        while let Some(name) = open.pop() {
            for ((_, to), _) in self.imports_of(&name) {
                if found.insert(to.as_str()) {
                    open.push(to.clone());
                }
            }
        }
        found
    }

    /// The shortest cycle through `start`: a search by breadth, then the way back from its end.
    fn cycle_through(&self, start: &str) -> Option<Vec<(&Pair, &Evidence)>> {
        let mut arrivals = BTreeMap::<&str, (&Pair, &Evidence)>::new();
        let mut open = VecDeque::from([start.to_owned()]);
        while let Some(name) = open.pop_front() {
            for import in self.imports_of(&name) {
                let to = import.0.1.as_str();
                if !arrivals.contains_key(to) {
                    arrivals.insert(to, import);
                    open.push_back(to.to_owned());
                }
            }
        }
        let mut cycle = vec![*arrivals.get(start)?];
        while let Some((from, _)) = cycle.last().map(|(pair, _)| *pair)
            && from != start
        {
            cycle.push(arrivals[from.as_str()]);
        }
        cycle.reverse();
        Some(cycle)
    }
}
