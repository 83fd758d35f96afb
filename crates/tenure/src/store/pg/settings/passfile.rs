//! Passwords of `.pgpass` files.

use std::path::Path;

use super::servers::{DEFAULT_SOCKET_DIR, PgServer, ServerHost};

/// Size above which a file is not read.
const MAX_PASSFILE_BYTES: u64 = 1 << 20;

/// Text of a password file; `None` if there is no such file. A file that other users may read is ignored.
pub(super) fn read(path: &Path) -> Option<String> {
    let metadata = std::fs::metadata(path).ok()?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        if metadata.is_file() && metadata.permissions().mode() & 0o077 != 0 {
            tracing::warn!(name: "tenure.passfile_ignored", path = %path.display(), "other users may read it");
            return None;
        }
    }
    if !metadata.is_file() || metadata.len() > MAX_PASSFILE_BYTES {
        return None;
    }
    let bytes = std::fs::read(path).ok()?;
    // One line in another encoding must not hide the other lines.
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// Password of the first line that fits.
pub(super) fn find(text: &str, server: &PgServer, database: &str, user: &str) -> Option<String> {
    let host = match &server.host {
        ServerHost::Name(name) => name.clone(),
        ServerHost::Socket(folder) if folder == Path::new(DEFAULT_SOCKET_DIR) => {
            "localhost".to_owned()
        }
        ServerHost::Socket(folder) => folder.display().to_string(),
    };
    let port = server.port.to_string();
    text.lines().find_map(|line| password(line, [&host, &port, database, user]))
}

/// Password of a line `host:port:database:user:password` if the line fits. A field `*` fits anything, `\` escapes the
/// next character, and the password ends at a colon that is not escaped.
fn password(line: &str, wanted: [&str; 4]) -> Option<String> {
    if line.starts_with('#') {
        return None;
    }
    let rest = wanted.into_iter().try_fold(line, after_field)?;
    let mut password = String::new();
    let mut chars = rest.chars();
    while let Some(c) = chars.next().filter(|c| *c != ':') {
        password.push(if c == '\\' { chars.next().unwrap_or(c) } else { c });
    }
    Some(password)
}

/// Rest of the line after its first field, if that fits.
fn after_field<'a>(line: &'a str, wanted: &str) -> Option<&'a str> {
    if let Some(rest) = line.strip_prefix("*:") {
        return Some(rest);
    }
    let (mut chars, mut wanted) = (line.chars(), wanted.chars());
    loop {
        match (chars.next()?, wanted.next()) {
            (':', None) => return Some(chars.as_str()),
            ('\\', Some(c)) if chars.next() == Some(c) => {}
            (written, Some(c)) if written != '\\' && written == c => {}
            _ => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_passfile_match_as_they_are_written() {
        let wanted = ["h", "5432", "db", "u:1"];
        for (line, found) in [
            (r"h:5432:db:u\:1:a\\b\:c", Some(r"a\b:c")),
            (r"h:5432:db:u\:1:a:rest", Some("a")),
            ("*:*:*:*:x", Some("x")),
            ("*:*:*:*:", Some("")),
            ("#h:5432:db:u\\:1:x", None),
            ("h:5433:db:*:x", None),
            ("hh:5432:db:*:x", None),
            ("h:5432:db", None),
            (r"\*:5432:db:*:x", None),
            ("", None),
        ] {
            assert_eq!(password(line, wanted).as_deref(), found, "{line:?}");
        }
    }
}
