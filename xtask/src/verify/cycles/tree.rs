//! The modules of a crate, read from its source files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::{Context as _, Result, anyhow};
use syn::visit::Visit as _;
use syn::{Attribute, Expr, Item, ItemMod, Lit, Meta};

use super::names::{Import, Mention, NameCollector, attributes, defined_name, is_for_tests, plain};

/// Returns the text of a file, or `None` if there is no such file.
pub(super) type ReadFile<'a> = &'a dyn Fn(&Path) -> Result<Option<String>>;

/// Index of the crate root.
pub(super) const ROOT: usize = 0;

/// The modules of a crate, the root first.
pub(super) struct ModuleTree {
    pub(super) modules: Vec<Module>,
}

/// One module. If several files implement it, under different conditions, it has the names of all.
pub(super) struct Module {
    /// Path below the root, `crate` for the root.
    pub(super) path: String,
    pub(super) parent: usize,
    /// The module whose file contains this one: itself, unless it is inline.
    pub(super) owner: usize,
    pub(super) children: BTreeMap<String, usize>,
    /// Names defined here, except those of macros.
    pub(super) items: BTreeSet<String>,
    /// Names of macros defined here. An item may have the same name.
    pub(super) macros: BTreeSet<String>,
    pub(super) imports: Vec<Import>,
    pub(super) mentions: Vec<(Rc<Path>, Mention)>,
}

/// Position in the files while a module is read.
struct Location {
    file: Rc<Path>,
    /// Folder of the files of child modules.
    folder: PathBuf,
}

impl ModuleTree {
    /// Reads the crate whose root is `file`.
    pub(super) fn read(file: &Path, read: ReadFile<'_>) -> Result<Self> {
        let mut tree = Self { modules: Vec::new() };
        tree.add_module("crate".to_owned(), ROOT, ROOT);
        let folder = file.parent().unwrap_or(Path::new("")).to_owned();
        tree.read_file(ROOT, &Location { file: file.into(), folder }, read)?;
        Ok(tree)
    }

    fn add_module(&mut self, path: String, parent: usize, owner: usize) -> usize {
        self.modules.push(Module {
            path,
            parent,
            owner,
            children: BTreeMap::new(),
            items: BTreeSet::new(),
            macros: BTreeSet::new(),
            imports: Vec::new(),
            mentions: Vec::new(),
        });
        self.modules.len() - 1
    }

    /// The child of this name, added if it is new.
    fn child(&mut self, parent: usize, name: &str) -> usize {
        if let Some(child) = self.modules[parent].children.get(name) {
            return *child;
        }
        let path = match parent {
            ROOT => name.to_owned(),
            _ => format!("{}::{name}", self.modules[parent].path),
        };
        let owner = self.modules[parent].owner;
        let child = self.add_module(path, parent, owner);
        self.modules[parent].children.insert(name.to_owned(), child);
        child
    }

    fn read_file(&mut self, module: usize, location: &Location, read: ReadFile<'_>) -> Result<()> {
        let file = location.file.display().to_string();
        let text = read(&location.file)?.with_context(|| format!("{file}: no such file"))?;
        let parsed = syn::parse_file(&text)
            .map_err(|error| anyhow!("{file}:{}: {error}", error.span().start().line))?;
        self.modules[module].owner = module;
        self.add_items(module, &parsed.items, location, read)
    }

    fn add_items(
        &mut self,
        module: usize,
        items: &[Item],
        location: &Location,
        read: ReadFile<'_>,
    ) -> Result<()> {
        for item in items.iter().filter(|item| !is_for_tests(attributes(item))) {
            if let Item::Mod(item) = item {
                self.add_child(module, item, location, read)?;
                continue;
            }
            let mut names = NameCollector::default();
            names.visit_item(item);
            let module = &mut self.modules[module];
            let is_macro = matches!(item, Item::Macro(_));
            let defined = if is_macro { &mut module.macros } else { &mut module.items };
            defined.extend(defined_name(item));
            module.imports.append(&mut names.imports);
            let mentions = names.mentions.into_iter();
            module.mentions.extend(mentions.map(|mention| (Rc::clone(&location.file), mention)));
        }
        Ok(())
    }

    fn add_child(
        &mut self,
        parent: usize,
        item: &ItemMod,
        location: &Location,
        read: ReadFile<'_>,
    ) -> Result<()> {
        let name = plain(&item.ident);
        let child = self.child(parent, &name);
        if let Some((_, items)) = &item.content {
            let location =
                Location { file: Rc::clone(&location.file), folder: location.folder.join(name) };
            return self.add_items(child, items, &location, read);
        }
        let paths = PathAttributes::of(&item.attrs);
        let beside = location.file.parent().unwrap_or(Path::new(""));
        for path in &paths.files {
            let file = beside.join(path);
            let folder = file.parent().unwrap_or(Path::new("")).to_owned();
            self.read_file(child, &Location { file: file.into(), folder }, read)?;
        }
        if paths.replace_default {
            return Ok(());
        }
        let folder = location.folder.join(&name);
        let [file, nested] = [folder.with_extension("rs"), folder.join("mod.rs")];
        let file = if read(&file)?.is_some() { file } else { nested };
        self.read_file(child, &Location { file: file.into(), folder }, read)
    }
}

/// Files that attributes name for a module.
struct PathAttributes {
    files: Vec<String>,
    /// True if one of them applies in every build, so that the module has no file in the usual place.
    replace_default: bool,
}

impl PathAttributes {
    fn of(attributes: &[Attribute]) -> Self {
        let mut paths = Self { files: Vec::new(), replace_default: false };
        for attribute in attributes {
            if let Some(file) = path_value(&attribute.meta) {
                paths.files.push(file);
                paths.replace_default = true;
            } else if let Meta::List(list) = &attribute.meta
                && list.path.is_ident("cfg_attr")
            {
                let parser = syn::punctuated::Punctuated::<Meta, syn::Token![,]>::parse_terminated;
                let metas = list.parse_args_with(parser).unwrap_or_default();
                paths.files.extend(metas.iter().skip(1).filter_map(path_value));
            }
        }
        paths
    }
}

/// The file that `path = "…"` names.
fn path_value(meta: &Meta) -> Option<String> {
    let Meta::NameValue(pair) = meta else { return None };
    match &pair.value {
        Expr::Lit(literal) if pair.path.is_ident("path") => match &literal.lit {
            Lit::Str(text) => Some(text.value()),
            _ => None,
        },
        _ => None,
    }
}
