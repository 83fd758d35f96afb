//! Names in a piece of parsed code: the names that it imports and the paths that it mentions.

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Attribute, Meta, UseTree};

/// A name that a `use` declaration brings into scope.
pub(super) struct Import {
    /// The name in scope; `None` for a glob.
    pub(super) name: Option<String>,
    pub(super) path: Vec<String>,
    /// True inside a function body: such a name is not visible to other modules.
    pub(super) in_block: bool,
}

/// A path in the code.
pub(super) struct Mention {
    pub(super) path: Vec<String>,
    pub(super) line: usize,
    /// True if the path can mean a macro: it is imported, called with `!`, or among the tokens of a macro.
    pub(super) may_be_macro: bool,
}

/// Collects imports and mentions, except those in code for tests.
#[derive(Default)]
pub(super) struct NameCollector {
    pub(super) imports: Vec<Import>,
    pub(super) mentions: Vec<Mention>,
    blocks: usize,
}

impl NameCollector {
    fn mention(&mut self, path: Vec<String>, line: usize, may_be_macro: bool) {
        self.mentions.push(Mention { path, line, may_be_macro });
    }

    fn mention_path(&mut self, path: &syn::Path, may_be_macro: bool) {
        if path.leading_colon.is_none()
            && let Some(first) = path.segments.first()
        {
            let names = path.segments.iter().map(|segment| plain(&segment.ident)).collect();
            self.mention(names, line_of(&first.ident), may_be_macro);
        }
    }

    /// Adds the leaves of a `use` tree below `prefix`.
    fn add_use(&mut self, tree: &UseTree, prefix: &[String]) {
        let below = |name: &syn::Ident| {
            let mut path = prefix.to_vec();
            // `a::{self}` is `a`. A leading `self` is kept, since it has a meaning of its own.
            if name != "self" || prefix.is_empty() {
                path.push(plain(name));
            }
            path
        };
        let (path, name, line) = match tree {
            UseTree::Path(tree) => return self.add_use(&tree.tree, &below(&tree.ident)),
            UseTree::Group(group) => {
                return group.items.iter().for_each(|tree| self.add_use(tree, prefix));
            }
            UseTree::Name(leaf) => {
                let path = below(&leaf.ident);
                let name = path.last().cloned();
                (path, name, line_of(&leaf.ident))
            }
            UseTree::Rename(leaf) => {
                (below(&leaf.ident), Some(plain(&leaf.rename)), line_of(&leaf.ident))
            }
            UseTree::Glob(glob) => (prefix.to_vec(), None, glob.star_token.spans[0].start().line),
        };
        self.imports.push(Import { name, path: path.clone(), in_block: self.blocks > 0 });
        self.mention(path, line, true);
    }

    /// Adds the paths among the tokens of a macro. Their grammar is unknown, so a lower-case word on its own is taken
    /// for a variable or a field.
    fn add_tokens(&mut self, tokens: TokenStream) {
        let tokens = tokens.into_iter().collect::<Vec<_>>();
        let is_colon = |at: usize| matches!(tokens.get(at), Some(TokenTree::Punct(punct)) if punct.as_char() == ':');
        let mut at = 0;
        while at < tokens.len() {
            match &tokens[at] {
                TokenTree::Group(group) => self.add_tokens(group.stream()),
                TokenTree::Ident(first) => {
                    let mut path = vec![plain(first)];
                    while is_colon(at + 1) && is_colon(at + 2) {
                        let Some(TokenTree::Ident(next)) = tokens.get(at + 3) else { break };
                        path.push(plain(next));
                        at += 3;
                    }
                    if path.len() > 1 || path[0].starts_with(char::is_uppercase) {
                        self.mention(path, line_of(first), true);
                    }
                }
                TokenTree::Punct(_) | TokenTree::Literal(_) => {}
            }
            at += 1;
        }
    }
}

impl<'ast> Visit<'ast> for NameCollector {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        if !is_for_tests(attributes(item)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item(&mut self, item: &'ast syn::ImplItem) {
        let attributes = match item {
            syn::ImplItem::Const(item) => &item.attrs,
            syn::ImplItem::Fn(item) => &item.attrs,
            syn::ImplItem::Type(item) => &item.attrs,
            syn::ImplItem::Macro(item) => &item.attrs,
            _ => return,
        };
        if !is_for_tests(attributes) {
            visit::visit_impl_item(self, item);
        }
    }

    fn visit_local(&mut self, local: &'ast syn::Local) {
        if !is_for_tests(&local.attrs) {
            visit::visit_local(self, local);
        }
    }

    fn visit_field(&mut self, field: &'ast syn::Field) {
        if !is_for_tests(&field.attrs) {
            visit::visit_field(self, field);
        }
    }

    fn visit_variant(&mut self, variant: &'ast syn::Variant) {
        if !is_for_tests(&variant.attrs) {
            visit::visit_variant(self, variant);
        }
    }

    fn visit_block(&mut self, block: &'ast syn::Block) {
        self.blocks += 1;
        visit::visit_block(self, block);
        self.blocks -= 1;
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        // `use ::name` names another crate.
        if item.leading_colon.is_none() {
            self.add_use(&item.tree, &[]);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.mention_path(path, false);
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.mention_path(&call.path, true);
        self.add_tokens(call.tokens.clone());
    }

    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        // Attributes without a list, such as doc comments, contain no path of ours.
        if let Meta::List(list) = &attribute.meta {
            self.add_tokens(list.tokens.clone());
        }
    }
}

/// True if the attributes restrict an item to the build of the tests.
pub(super) fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::Path(path) => path.is_ident("test"),
        Meta::List(list) if list.path.is_ident("cfg") => {
            list.parse_args::<Meta>().is_ok_and(|condition| requires_tests(&condition))
        }
        _ => false,
    })
}

/// True for `test`, and for `all(…)` with such a condition in it.
fn requires_tests(condition: &Meta) -> bool {
    match condition {
        Meta::Path(path) => path.is_ident("test"),
        Meta::List(list) if list.path.is_ident("all") => list
            .parse_args_with(syn::punctuated::Punctuated::<Meta, syn::Token![,]>::parse_terminated)
            .is_ok_and(|conditions| conditions.iter().any(requires_tests)),
        _ => false,
    }
}

/// The attributes of an item.
pub(super) fn attributes(item: &syn::Item) -> &[Attribute] {
    use syn::Item;
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::ExternCrate(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::TraitAlias(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// The name that an item defines in its module.
pub(super) fn defined_name(item: &syn::Item) -> Option<String> {
    use syn::Item;
    let name = match item {
        Item::Const(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        Item::Macro(item) => item.ident.as_ref()?,
        Item::Static(item) => &item.ident,
        Item::Struct(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::TraitAlias(item) => &item.ident,
        Item::Type(item) => &item.ident,
        Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(plain(name))
}

/// An identifier without the mark of a raw one.
pub(super) fn plain(name: &syn::Ident) -> String {
    let name = name.to_string();
    name.strip_prefix("r#").map_or(name.clone(), str::to_owned)
}

fn line_of(name: &syn::Ident) -> usize {
    name.span().start().line
}
