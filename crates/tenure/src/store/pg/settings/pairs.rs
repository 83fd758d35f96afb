//! Keywords with their values, and the environment.

/// Keywords and their values. A later value of a keyword replaces an earlier one.
pub(super) type Pairs = Vec<(String, String)>;

/// Access to the environment; an empty variable counts as unset.
pub(super) type Variables = dyn Fn(&str) -> Option<String> + Send + Sync;
