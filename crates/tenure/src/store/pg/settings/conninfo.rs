//! The keyword form of libpq's connection strings: `host=localhost dbname=app`.

use super::invalid::invalid;
use super::pairs::Pairs;
use crate::Result;

/// Splits a connection string into its pairs, with the quoting and the escapes of libpq.
pub(super) fn parse(text: &str) -> Result<Pairs> {
    let mut pairs = Pairs::new();
    let mut rest = text.trim_start_matches(is_space);
    while !rest.is_empty() {
        let end = rest.find(|c| c == '=' || is_space(c)).ok_or_else(unreadable)?;
        let (name, after) = rest.split_at(end);
        let after = after.trim_start_matches(is_space).strip_prefix('=').ok_or_else(unreadable)?;
        if name.is_empty() {
            return Err(unreadable());
        }
        let (value, after) = value(after.trim_start_matches(is_space))?;
        pairs.push((name.to_owned(), value));
        rest = after.trim_start_matches(is_space);
    }
    Ok(pairs)
}

/// Splits off a value, which ends at a blank or is quoted; returns the value and the rest.
fn value(text: &str) -> Result<(String, &str)> {
    let quoted = text.starts_with('\'');
    let mut value = String::new();
    let mut chars = text.char_indices().skip(usize::from(quoted));
    while let Some((at, c)) = chars.next() {
        match c {
            // A backslash at the very end stands for nothing.
            '\\' => value.extend(chars.next().map(|(_, escaped)| escaped)),
            '\'' if quoted => return Ok((value, &text[at + 1..])),
            c if is_space(c) && !quoted => return Ok((value, &text[at..])),
            c => value.push(c),
        }
    }
    if quoted {
        Err(invalid("a quoted value does not end: close it with '"))
    } else {
        Ok((value, ""))
    }
}

/// Blanks in the sense of C.
fn is_space(c: char) -> bool {
    c.is_ascii_whitespace() || c == '\u{b}'
}

fn unreadable() -> crate::Error {
    invalid(
        "the server must be given as a URL, postgres://USER@HOST:PORT/DATABASE, or as pairs, host=HOST dbname=DATABASE",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    #[test]
    fn pairs_are_read_as_libpq_reads_them() {
        for (text, pairs) in [
            ("host=localhost dbname=app", &[("host", "localhost"), ("dbname", "app")][..]),
            ("  user = 'a b'  password='it\\'s'", &[("user", "a b"), ("password", "it's")]),
            ("password=a\\ b\tport=1", &[("password", "a b"), ("port", "1")]),
            ("user='' host=h", &[("user", ""), ("host", "h")]),
            ("user='a'host=h", &[("user", "a"), ("host", "h")]),
            ("host=a'b port=1\\", &[("host", "a'b"), ("port", "1")]),
            ("host=a,b port=1,2", &[("host", "a,b"), ("port", "1,2")]),
            ("user= host=h", &[("user", "host=h")]),
            ("", &[]),
        ] {
            let read = parse(text).unwrap();
            let read: Vec<_> = read.iter().map(|(name, value)| (&**name, &**value)).collect();
            assert_eq!(read, pairs, "{text}");
        }
        for text in ["hunter2", "a b=c", "password='hunter2", "=x", "a=b hunter2"] {
            let error = parse(text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{text}");
            assert!(!error.to_string().contains("hunter2"), "{error}");
        }
    }
}
