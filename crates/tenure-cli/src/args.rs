//! Arguments that several commands share. Each command declares its own in its file.
//!
//! The doc comments of the arguments are the text of `--help`.

pub(crate) mod election;
pub(crate) mod hold;
pub(crate) mod once;
pub(crate) mod output;
pub(crate) mod store;
pub(crate) mod value;
