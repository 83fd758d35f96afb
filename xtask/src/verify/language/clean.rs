//! Files that must be clean.

/// Files whose ceiling is 0 and stands in no file.
pub(super) const CLEAN: &[&str] =
    &["crates/tenure/src/*.rs", "crates/tenure-cli/src/args.rs", "README.md", "docs/start.md"];

/// True if `path` matches an entry of [`CLEAN`].
pub(super) fn is_clean(path: &str) -> bool {
    CLEAN.iter().any(|pattern| matches(pattern, path))
}

/// True if `path` is `pattern`, in which `*` stands for a file's name.
pub(super) fn matches(pattern: &str, path: &str) -> bool {
    let Some((before, after)) = pattern.split_once('*') else { return pattern == path };
    let name = path.strip_prefix(before).and_then(|rest| rest.strip_suffix(after));
    name.is_some_and(|name| !name.contains('/'))
}
