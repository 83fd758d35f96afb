//! The module that defines the item of a path.

use std::collections::BTreeSet;

use super::names::Mention;
use super::tree::{ModuleTree, ROOT};

/// Meaning of a path.
#[derive(Clone, Copy, Eq, Ord, PartialEq, PartialOrd)]
enum Meaning {
    /// The module itself.
    Module(usize),
    /// An item that the module defines, or a part of one.
    Item(usize),
    /// A macro that the module defines.
    Macro(usize),
}

/// Modules that define an item which `mention` can mean in `module`. Paths of other crates have none, and a path that
/// means a module has none either: an import of a module's name is no use of its items.
pub(super) fn definers(tree: &ModuleTree, module: usize, mention: &Mention) -> BTreeSet<usize> {
    let mut resolver = Resolver { tree, pending: Vec::new() };
    let meanings = match mention.path.split_last() {
        Some((last, above)) if !above.is_empty() && !mention.may_be_macro => {
            let above = resolver.resolve(module, above);
            resolver.descend(&above, last, false)
        }
        _ => resolver.resolve(module, &mention.path),
    };
    let items = meanings.into_iter().filter_map(|meaning| match meaning {
        Meaning::Item(module) => Some(module),
        Meaning::Macro(module) => mention.may_be_macro.then_some(module),
        Meaning::Module(_) => None,
    });
    items.collect()
}

struct Resolver<'a> {
    tree: &'a ModuleTree,
    /// Names under resolution: an import such as `use name::name` leads back to its own name.
    pending: Vec<(usize, String)>,
}

impl Resolver<'_> {
    fn resolve(&mut self, module: usize, path: &[String]) -> BTreeSet<Meaning> {
        let [first, rest @ ..] = path else { return [Meaning::Module(module)].into() };
        let mut meanings: BTreeSet<Meaning> = match first.as_str() {
            "crate" => [Meaning::Module(ROOT)].into(),
            "self" => [Meaning::Module(module)].into(),
            "super" => [Meaning::Module(self.tree.modules[module].parent)].into(),
            // A name that is not found is that of another crate, of the prelude or of a variable.
            name => self.look_up(module, name, true).unwrap_or_default(),
        };
        for name in rest {
            meanings = self.descend(&meanings, name, true);
        }
        meanings
    }

    /// Meanings of `name` below any of `meanings`, of macros only if `macros` is true.
    fn descend(
        &mut self,
        meanings: &BTreeSet<Meaning>,
        name: &str,
        macros: bool,
    ) -> BTreeSet<Meaning> {
        let modules = meanings.iter().filter(|meaning| matches!(meaning, Meaning::Module(_)));
        let modules = modules.copied().collect::<Vec<_>>();
        // Only a module, or else a type, has names below it. So a function of the same name as a module is not meant.
        if modules.is_empty() {
            return meanings.clone();
        }
        let mut found = BTreeSet::new();
        for meaning in modules {
            let Meaning::Module(module) = meaning else { continue };
            if name == "super" {
                found.insert(Meaning::Module(self.tree.modules[module].parent));
                continue;
            }
            // A name that is not found, although the code compiles, is defined there by a macro.
            let below = self.look_up(module, name, false);
            let is_macro = |below: &BTreeSet<Meaning>| {
                !below.is_empty() && below.iter().all(|found| matches!(found, Meaning::Macro(_)))
            };
            let below = below.filter(|below| macros || !is_macro(below));
            found.extend(below.unwrap_or_else(|| [Meaning::Item(module)].into()));
        }
        found
    }

    /// Meanings of `name` in `module`, or `None` if it has none there. The set is empty for an item of another
    /// crate.
    fn look_up(&mut self, module: usize, name: &str, inside: bool) -> Option<BTreeSet<Meaning>> {
        let key = (module, name.to_owned());
        let scope = &self.tree.modules[module];
        let mut meanings = BTreeSet::new();
        meanings.extend(scope.children.get(name).map(|child| Meaning::Module(*child)));
        meanings.extend(scope.items.contains(name).then_some(Meaning::Item(module)));
        meanings.extend(scope.macros.contains(name).then_some(Meaning::Macro(module)));
        let mut known = !meanings.is_empty();
        if self.pending.contains(&key) {
            return known.then_some(meanings);
        }
        self.pending.push(key);
        let visible = scope.imports.iter().filter(|import| inside || !import.in_block);
        let (globs, named): (Vec<_>, Vec<_>) = visible.partition(|import| import.name.is_none());
        for import in named.iter().filter(|import| import.name.as_deref() == Some(name)) {
            meanings.extend(self.resolve(module, &import.path));
            known = true;
        }
        // A glob brings in only names that are not declared otherwise.
        for glob in if known { &[][..] } else { &globs[..] } {
            for meaning in self.resolve(module, &glob.path) {
                if let Meaning::Module(from) = meaning
                    && let Some(found) = self.look_up(from, name, false)
                {
                    meanings.extend(found);
                    known = true;
                }
            }
        }
        self.pending.pop();
        known.then_some(meanings)
    }
}
