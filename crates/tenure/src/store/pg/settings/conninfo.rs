//! The connection strings of libpq: `host=localhost dbname=app`.

use tenure_core::escape::Escape;

use super::invalid;
use crate::Result;

/// Converts a connection string to a URL that has everything in its options.
pub(super) fn as_url(text: &str) -> Result<String> {
    let mut url = String::from("postgres://?");
    let mut rest = text.trim_start();
    while !rest.is_empty() {
        let (name, after) = rest.split_once('=').ok_or_else(unreadable)?;
        let name = name.trim_end();
        if name.is_empty() || !name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_') {
            return Err(unreadable());
        }
        let (value, after) = value(after.trim_start()).ok_or_else(unreadable)?;
        if !url.ends_with('?') {
            url.push('&');
        }
        url.push_str(name);
        url.push('=');
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric();
        url.push_str(&Escape::PERCENT.encode(value.as_bytes(), is_plain));
        rest = after.trim_start();
    }
    Ok(url)
}

/// Splits off a value, which ends at a blank or is quoted; returns it and the rest.
fn value(text: &str) -> Option<(String, &str)> {
    let quoted = text.starts_with('\'');
    let mut value = String::new();
    let mut chars = text.char_indices().skip(usize::from(quoted));
    while let Some((at, c)) = chars.next() {
        match c {
            '\\' => value.push(chars.next()?.1),
            '\'' if quoted => return Some((value, &text[at + 1..])),
            c if c.is_whitespace() && !quoted => return Some((value, &text[at..])),
            c => value.push(c),
        }
    }
    (!quoted).then_some((value, ""))
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
        for (text, url) in [
            ("host=localhost dbname=app", "postgres://?host=localhost&dbname=app"),
            ("  user = 'a b'  password='it\\'s'", "postgres://?user=a%20b&password=it%27s"),
            ("password=a\\ b port=1", "postgres://?password=a%20b&port=1"),
            ("user='' host=h", "postgres://?user=&host=h"),
        ] {
            assert_eq!(as_url(text).unwrap(), url, "{text}");
        }
        for text in ["hunter2", "a b=c", "password='hunter2", "=x", "HOST=hunter2", "a=b hunter2"] {
            let error = as_url(text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{text}");
            assert!(!error.to_string().contains("hunter2"), "{error}");
        }
    }
}
