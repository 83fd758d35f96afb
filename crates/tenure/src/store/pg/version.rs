//! Supported versions of the server.

use crate::{Error, ErrorKind, Result};

/// Oldest supported version, as `server_version_num` counts them.
const OLDEST: i32 = 130_000;

/// SQL of the version.
pub(crate) const VERSION: &str = "current_setting('server_version_num')::int4";

/// Refuses a server that is too old.
pub(crate) fn check(version: i32) -> Result<()> {
    if version >= OLDEST {
        return Ok(());
    }
    let (major, oldest) = (version / 10_000, OLDEST / 10_000);
    let message =
        format!("this server is PostgreSQL {major}, and {oldest} is the oldest supported version");
    Err(Error::new(ErrorKind::Unsupported, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_server_is_refused_in_one_sentence() {
        assert!(check(130_000).is_ok() && check(180_001).is_ok());
        for (version, major) in [(120_022, "PostgreSQL 12"), (90_603, "PostgreSQL 9")] {
            let error = check(version).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.to_string().contains(major), "{error}");
        }
    }
}
