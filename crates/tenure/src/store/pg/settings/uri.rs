//! The URL form of libpq's connection strings: `postgres://user@host:5432,other:5433/app?sslmode=require`.

use tenure_core::escape::Escape;

use super::invalid::invalid;
use super::pairs::Pairs;
use crate::Result;
use crate::store::url_options;

/// Text after the scheme, if `text` is a URL.
pub(super) fn after_scheme(text: &str) -> Option<&str> {
    text.strip_prefix("postgresql://").or_else(|| text.strip_prefix("postgres://"))
}

/// Splits the text after the scheme into pairs, in the order in which libpq stores them. No error shows a value: any
/// part may belong to a password that was not escaped.
pub(super) fn parse(rest: &str) -> Result<Pairs> {
    let mut pairs = Pairs::new();
    let rest = match rest.find(['@', '/']).map(|at| rest.split_at(at)) {
        Some((credentials, rest)) if rest.starts_with('@') => {
            let (user, password) = credentials.split_once(':').unwrap_or((credentials, ""));
            store(&mut pairs, "user", user)?;
            store(&mut pairs, "password", password)?;
            &rest[1..]
        }
        _ => rest,
    };
    let rest = servers(rest, &mut pairs)?;
    let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
    let database = path.strip_prefix('/').unwrap_or(path);
    // libpq would take the rest of a password with a slash for the database, and the database is shown.
    if database.contains('@') {
        return Err(invalid("an @ follows the first / of the URL: write / as %2F and @ as %40"));
    }
    store(&mut pairs, "dbname", database)?;
    parameters(query, &mut pairs)?;
    Ok(pairs)
}

/// Reads `host:port,host:port`; returns the rest, which is empty or begins with `/` or `?`.
fn servers<'a>(text: &'a str, pairs: &mut Pairs) -> Result<&'a str> {
    let (mut hosts, mut ports) = (String::new(), String::new());
    let mut rest = text;
    loop {
        let (host, after) = match rest.strip_prefix('[') {
            Some(inner) => match inner.split_once(']') {
                Some((address, after)) if !address.is_empty() => (address, after),
                _ => return Err(invalid("an IPv6 address is written in brackets: [::1]")),
            },
            None => rest.split_at(rest.find([':', '/', '?', ',']).unwrap_or(rest.len())),
        };
        hosts.push_str(host);
        rest = after;
        if let Some(after) = rest.strip_prefix(':') {
            let (port, after) = after.split_at(after.find(['/', '?', ',']).unwrap_or(after.len()));
            ports.push_str(port);
            rest = after;
        }
        match rest.strip_prefix(',') {
            Some(after) => rest = after,
            None if rest.is_empty() || rest.starts_with(['/', '?']) => break,
            None => return Err(invalid("unexpected text after an IPv6 address in the URL")),
        }
        hosts.push(',');
        ports.push(',');
    }
    store(pairs, "host", &hosts)?;
    store(pairs, "port", &ports)?;
    Ok(rest)
}

fn parameters(query: &str, pairs: &mut Pairs) -> Result<()> {
    let query = query.strip_suffix('&').unwrap_or(query);
    if query.is_empty() {
        return Ok(());
    }
    for parameter in query.split('&') {
        let (name, value) = parameter.split_once('=').ok_or_else(|| {
            invalid(
                "an option in the URL has no value: write OPTION=VALUE, with %26 for & in a value",
            )
        })?;
        let name = decode("in the URL", name)?;
        if value.contains('=') {
            return Err(invalid(&format!("a second = {}: write it as %3D", shown(&name))));
        }
        let value = decode(&shown(&name), value)?;
        pairs.push(match (&*name, &*value) {
            // The spelling of other drivers, which libpq accepts in URLs.
            ("ssl", "true") => ("sslmode".to_owned(), "require".to_owned()),
            _ => (name, value),
        });
    }
    Ok(())
}

/// Adds a part of the URL before the options. An empty one counts as absent.
fn store(pairs: &mut Pairs, name: &str, value: &str) -> Result<()> {
    if !value.is_empty() {
        pairs.push((name.to_owned(), decode(name, value)?));
    }
    Ok(())
}

fn shown(name: &str) -> String {
    if url_options::is_shown(name) {
        format!("in the option {name}")
    } else {
        "in an option".to_owned()
    }
}

fn decode(place: &str, text: &str) -> Result<String> {
    let bytes = Escape::PERCENT.decode(text).filter(|bytes| !bytes.contains(&0));
    let decoded = bytes.and_then(|bytes| String::from_utf8(bytes).ok());
    decoded.ok_or_else(|| {
        invalid(&format!(
            "invalid %XX escape ({place}): write special characters as %XX, and % as %25"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_split_as_libpq_splits_them() {
        for (text, pairs) in [
            ("", &[][..]),
            ("h", &[("host", "h")]),
            (
                "u:p%40w@h:1/d",
                &[
                    ("user", "u"),
                    ("password", "p@w"),
                    ("host", "h"),
                    ("port", "1"),
                    ("dbname", "d"),
                ],
            ),
            ("u:a:b?c@h", &[("user", "u"), ("password", "a:b?c"), ("host", "h")]),
            ("a,b/", &[("host", "a,b"), ("port", ",")]),
            ("a:1,b:2?host=c,d", &[("host", "a,b"), ("port", "1,2"), ("host", "c,d")]),
            ("[::1]:5,[fe80::2]", &[("host", "::1,fe80::2"), ("port", "5,")]),
            ("%2Ftmp:6?user=x%20y", &[("host", "/tmp"), ("port", "6"), ("user", "x y")]),
            (":7", &[("port", "7")]),
            ("?ssl=true&dbname=", &[("sslmode", "require"), ("dbname", "")]),
        ] {
            let read = parse(text).unwrap();
            let read: Vec<_> = read.iter().map(|(name, value)| (&**name, &**value)).collect();
            assert_eq!(read, pairs, "{text}");
        }
        for (text, part) in [
            ("u:1/hunter2@h/d", "%2F"),
            ("[::1", "brackets"),
            ("[]", "brackets"),
            ("[::1]x", "IPv6"),
            ("?hunter2", "no value"),
            ("?a=b&&c=d", "no value"),
            ("?user=hunter2=x", "option user"),
            ("?user=hunter2%zz", "option user"),
            ("u:hunter2%zz@h", "password"),
            ("?user=%00", "option user"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
            assert!(!error.contains("hunter2"), "{error}");
        }
    }
}
