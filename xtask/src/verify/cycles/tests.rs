use std::path::Path;

use super::graph::ImportGraph;
use super::{faults, report};

/// The imports of a crate with these files below `src`, as `from -> to`.
fn imports(files: &[(&str, &str)]) -> Vec<String> {
    let pairs = graph(files).imports.into_keys();
    pairs.map(|(from, to)| format!("{from} -> {to}")).collect()
}

/// The groups of modules that import each other.
fn cycles(files: &[(&str, &str)]) -> Vec<Vec<String>> {
    let graph = graph(files);
    let groups = graph.components().into_iter();
    groups.map(|group| group.into_iter().map(str::to_owned).collect()).collect()
}

fn graph(files: &[(&str, &str)]) -> ImportGraph {
    let read = |file: &Path| {
        let name = file.strip_prefix("src").expect("a file below src").to_str();
        let found = files.iter().find(|(path, _)| Some(*path) == name);
        Ok(found.map(|(_, text)| (*text).to_owned()))
    };
    ImportGraph::read(Path::new("src/lib.rs"), &read).expect("files that parse")
}

const NO_CYCLE: [Vec<String>; 0] = [];

const TWO: &[(&str, &str)] = &[
    ("lib.rs", "mod a;\nmod b;\n"),
    ("a.rs", "use crate::b::B;\npub struct A;\n"),
    ("b.rs", "pub struct B;\n\nimpl From<super::a::A> for B {}\n"),
];

#[test]
fn two_modules_that_import_each_other_are_a_cycle() {
    assert_eq!(cycles(TWO), [["a", "b"]]);
}

#[test]
fn the_report_names_a_place_for_each_import() {
    let report = report("x", &graph(TWO), false);
    let expected = "x: 1 groups of modules that import each other\n\
                    \x20 2 modules: a, b\n\
                    \x20   a -> b\n\
                    \x20       src/a.rs:1: crate::b::B\n\
                    \x20   b -> a\n\
                    \x20       src/b.rs:3: super::a::A\n";
    assert_eq!(report, expected);
}

#[test]
fn three_modules_in_a_ring_are_a_cycle_and_a_module_above_is_not_in_it() {
    let files = [
        ("lib.rs", "mod a; mod b; mod c; mod top; mod bottom;"),
        ("a.rs", "use crate::b; pub fn a() { b::b() }"),
        ("b.rs", "pub fn b() { crate::c::c(); super::bottom::low() }"),
        ("c.rs", "pub fn c() { println!(\"{}\", crate::a::a()) }"),
        ("top.rs", "use super::{a::a, c::{self as third}};"),
        ("bottom.rs", "pub fn low() {}"),
    ];
    assert_eq!(cycles(&files), [["a", "b", "c"]]);
    assert!(!graph(&files).shortest_cycle(&["top"].into()).iter().any(|_| true));
}

#[test]
fn the_shortest_cycle_of_a_group_is_reported() {
    let files = [
        ("lib.rs", "mod a; mod b; mod c;"),
        ("a.rs", "use crate::b::B; pub struct A;"),
        ("b.rs", "use crate::c::C; pub struct B;"),
        ("c.rs", "use crate::{a::A, b::B}; pub struct C;"),
    ];
    let graph = graph(&files);
    let cycle = graph.shortest_cycle(&["a", "b", "c"].into());
    let pairs = cycle.iter().map(|((from, to), _)| (from.as_str(), to.as_str()));
    assert_eq!(pairs.collect::<Vec<_>>(), [("b", "c"), ("c", "b")]);
}

#[test]
fn a_re_export_counts_as_an_import_of_the_defining_module() {
    let files = [
        ("lib.rs", "mod error; mod store; pub use error::Error; pub use store::*;"),
        ("error.rs", "pub struct Error;"),
        ("store.rs", "mod file; pub use self::file::FileStore as Files; use crate::Error;"),
        ("store/file.rs", "use super::Error as E; pub struct FileStore; use crate::Files;"),
    ];
    assert_eq!(cycles(&files), NO_CYCLE);
    let expected =
        ["crate -> error", "store -> error", "store -> store::file", "store::file -> error"];
    assert_eq!(imports(&files), expected);
}

#[test]
fn a_child_that_imports_an_item_of_its_parent_closes_a_cycle() {
    let files = [
        ("lib.rs", "mod a; pub struct Top; fn f() { a::b::low() }"),
        ("a.rs", "pub mod b; use b::B; pub struct A;"),
        ("a/b.rs", "use super::A; pub struct B; pub fn low() -> crate::Top {}"),
    ];
    assert_eq!(cycles(&files), [["a", "a::b", "crate"]]);
}

#[test]
fn code_for_tests_imports_nothing() {
    let files = [
        ("lib.rs", "mod a; mod b;"),
        (
            "a.rs",
            "use crate::b::B; pub struct A;\n\
             #[cfg(test)] mod tests; #[cfg(test)] mod more { use crate::b::B; }",
        ),
        ("a/tests.rs", "use super::*; use crate::b::B;"),
        (
            "b.rs",
            "pub struct B;\n\
             #[cfg(test)] use crate::a::A;\n\
             #[cfg(all(unix, test))] fn f() -> crate::a::A {}\n\
             impl B { #[cfg(test)] fn f() -> crate::a::A {} }\n\
             #[test] fn g() { crate::a::A; }",
        ),
    ];
    assert_eq!(imports(&files), ["a -> b"]);
}

#[test]
fn code_that_is_not_only_for_tests_counts() {
    let files = [
        ("lib.rs", "mod a; mod b;"),
        ("a.rs", "#[cfg(any(test, unix))] use crate::b::B; pub struct A;"),
        ("b.rs", "#[cfg(not(test))] use crate::a::A; pub struct B;"),
    ];
    assert_eq!(cycles(&files), [["a", "b"]]);
}

#[test]
fn an_inline_module_is_part_of_its_file() {
    let files = [
        ("lib.rs", "mod a; mod b;"),
        ("a.rs", "pub mod inner { use super::A; use super::super::b::B; pub struct I; } struct A;"),
        ("b.rs", "use crate::a::inner::I; pub struct B;"),
    ];
    assert_eq!(cycles(&files), [["a", "b"]]);
}

#[test]
fn globs_count_for_the_names_that_are_used() {
    let files = [
        ("lib.rs", "mod a; mod b; mod c;"),
        ("a.rs", "use crate::b::*; use crate::c::*; fn f(x: B) {}"),
        ("b.rs", "pub struct B;"),
        ("c.rs", "pub struct C; use crate::a;"),
    ];
    assert_eq!(imports(&files), ["a -> b"]);
}

#[test]
fn other_crates_and_names_of_modules_are_no_imports() {
    let files = [
        ("lib.rs", "mod a; mod b; pub use anyhow::Result;"),
        ("a.rs", "use std::fmt; use ::b::X; use crate::{b, Result}; fn f() { fmt::b(); b.c() }"),
        ("b.rs", "use super::a;"),
    ];
    assert_eq!(imports(&files), [""; 0]);
}

#[test]
fn a_name_that_a_macro_defines_belongs_to_its_module() {
    let files =
        [("lib.rs", "mod a; mod b;"), ("a.rs", "use crate::b::Made;"), ("b.rs", "ids! { Made }")];
    assert_eq!(imports(&files), ["a -> b"]);
}

#[test]
fn a_macro_may_define_a_function_of_its_own_name() {
    let files = [
        (
            "lib.rs",
            "macro_rules! cases { () => { pub fn cases() {} } } use cases; mod a; mod b;\n\
             fn all() { a::cases() }",
        ),
        ("a.rs", "use crate::cases; cases! {}"),
        ("b.rs", "crate::cases! {}"),
    ];
    assert_eq!(imports(&files), ["a -> crate", "b -> crate", "crate -> a"]);
}

#[test]
fn paths_in_macros_and_attributes_count() {
    let files = [
        ("lib.rs", "mod a; mod b; mod c;"),
        ("a.rs", "macro_rules! m { () => { $crate::b::f() } }"),
        ("b.rs", "pub fn f() {}"),
        ("c.rs", "struct C { #[arg(value_parser = crate::b::f)] field: u8 }"),
    ];
    assert_eq!(imports(&files), ["a -> b", "c -> b"]);
}

#[test]
fn a_module_may_have_the_name_of_a_function_or_of_its_own_item() {
    let files = [
        ("lib.rs", "mod a; mod b;"),
        ("a.rs", "mod keep; pub fn keep() { keep::start() } use keep::keep as k;"),
        ("a/keep.rs", "pub fn start() {} pub fn keep() {}"),
        ("b.rs", "use crate::a::keep; mod b { } use self::b::b;"),
    ];
    assert_eq!(imports(&files), ["a -> a::keep", "b -> a"]);
}

#[test]
fn the_attribute_path_names_the_file_of_a_module() {
    let files = [
        (
            "lib.rs",
            "#[path = \"other/place.rs\"] mod a; #[cfg_attr(unix, path = \"u/b.rs\")] mod b; mod c;",
        ),
        ("other/place.rs", "use crate::c::C;"),
        ("b.rs", "use crate::c::C;"),
        ("u/b.rs", "pub struct B;"),
        ("c/mod.rs", "use crate::b::B; pub struct C;"),
    ];
    assert_eq!(imports(&files), ["a -> c", "b -> c", "c -> b"]);
}

#[test]
fn the_step_fails_on_each_crate_with_a_cycle() {
    let without = [TWO[0], TWO[1], ("b.rs", "pub struct B;")];
    let crates = [("x", TWO), ("y", &without), ("z", TWO)];
    let crates = crates.map(|(name, files)| (name.to_owned(), graph(files)));
    let reports = [report("x", &crates[0].1, false), report("z", &crates[2].1, false)];
    assert_eq!(faults(&crates), reports.map(|report| report.trim_end().to_owned()));
}
