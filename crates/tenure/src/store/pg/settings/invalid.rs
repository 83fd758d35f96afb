//! Errors of settings.

use crate::{Error, ErrorKind};

/// Refuses settings, with the reason.
pub(super) fn invalid(what: &str) -> Error {
    Error::new(ErrorKind::Invalid, format!("postgres: {what}"))
}
