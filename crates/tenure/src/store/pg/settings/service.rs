//! Named sets of connection settings: the service files of libpq.

use std::fs;
use std::path::{Path, PathBuf};

use super::invalid::invalid;
use super::keywords;
use super::pairs::{Pairs, Variables};
use crate::Result;
use crate::store::url_options;

/// Folders of the system-wide file, unless `PGSYSCONFDIR` names one: Debian's and Red Hat's.
const SYSTEM_FOLDERS: &[&str] = &["/etc/postgresql-common", "/etc/sysconfig/pgsql"];
const SYSTEM_FILE: &str = "pg_service.conf";
/// Size above which a file is not read.
const MAX_SERVICE_FILE_BYTES: u64 = 1 << 20;

/// Reads the pairs of a service: from `PGSERVICEFILE` or the user's file, or else from the system's file.
pub(super) fn read(service: &str, variable: &Variables) -> Result<Pairs> {
    let own = match variable("PGSERVICEFILE").map(PathBuf::from) {
        Some(path) if !path.is_file() => return Err(unreadable(&path, "there is no such file")),
        Some(path) => Some(path),
        None => variable("HOME").map(|home| Path::new(&home).join(".pg_service.conf")),
    };
    let system = match variable("PGSYSCONFDIR") {
        Some(folder) => vec![Path::new(&folder).join(SYSTEM_FILE)],
        None => SYSTEM_FOLDERS.iter().map(|folder| Path::new(folder).join(SYSTEM_FILE)).collect(),
    };
    for path in own.into_iter().chain(system).filter(|path| path.is_file()) {
        if let Some(pairs) = find(service, &text(&path)?, &path)? {
            return Ok(pairs);
        }
    }
    Err(invalid(&format!(
        "there is no service {service:?}: define it in ~/.pg_service.conf, or name another file in $PGSERVICEFILE"
    )))
}

fn text(path: &Path) -> Result<String> {
    let size = fs::metadata(path).map_err(|error| unreadable(path, &error.to_string()))?.len();
    if size > MAX_SERVICE_FILE_BYTES {
        return Err(unreadable(path, "the file is too large"));
    }
    fs::read_to_string(path).map_err(|error| unreadable(path, &error.to_string()))
}

/// Pairs of the section `[service]`; `None` if there is no such section. Errors show no value.
fn find(service: &str, text: &str, path: &Path) -> Result<Option<Pairs>> {
    let mut found: Option<Pairs> = None;
    for (at, line) in text.lines().enumerate() {
        let line = line.trim_matches(|c: char| c.is_ascii_whitespace() || c == '\u{b}');
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(section) = line.strip_prefix('[') {
            if found.is_some() {
                break;
            }
            let named = section.strip_prefix(service).is_some_and(|rest| rest.starts_with(']'));
            found = named.then(Pairs::new);
            continue;
        }
        let Some(pairs) = &mut found else { continue };
        let fault = |what: &str| Err(unreadable(path, &format!("line {}: {what}", at + 1)));
        match line.split_once('=') {
            None if line.starts_with("ldap") => {
                return fault("services in LDAP are not supported");
            }
            None => return fault("expected KEYWORD=VALUE"),
            Some(("service", _)) => return fault("a service cannot name another service"),
            Some((name, value)) if keywords::find(name).is_some() => {
                pairs.push((name.to_owned(), value.to_owned()));
            }
            Some((name, _)) if url_options::is_shown(name) => {
                return fault(&format!("unknown keyword {name:?}"));
            }
            Some(_) => return fault("unknown keyword"),
        }
    }
    Ok(found)
}

fn unreadable(path: &Path, why: &str) -> crate::Error {
    invalid(&format!("cannot use the service file {}: {why}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# ours\nhost=ignored before any section\n[one]\nhost=a,b\n  port=1,2  \nuser=x=y\n\n\
                        [one_more]\nhost=c\n[broken]\nhost=d\ncolour=hunter2\n[plain]\nhunter2\n[nested]\nservice=one\n";

    #[test]
    fn a_section_ends_at_the_next_one() {
        let find = |service: &str| find(service, TEXT, Path::new("f"));
        let pairs = find("one").unwrap().unwrap();
        let pairs: Vec<_> = pairs.iter().map(|(name, value)| (&**name, &**value)).collect();
        assert_eq!(pairs, [("host", "a,b"), ("port", "1,2"), ("user", "x=y")]);
        assert_eq!(find("one_more").unwrap().unwrap().len(), 1);
        assert!(find("two").unwrap().is_none());
        for (service, part) in
            [("broken", "colour"), ("plain", "line 14"), ("nested", "another service")]
        {
            let error = find(service).unwrap_err().to_string();
            assert!(error.contains(part) && !error.contains("hunter2"), "{error}");
        }
    }
}
