//! Names of tables.

use sha2::{Digest as _, Sha256};

use crate::{Error, ErrorKind, Result};

/// Maximum length of an identifier in PostgreSQL, in bytes.
const MAX_IDENTIFIER_BYTES: usize = 63;

/// Name of a table, with or without its schema.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Table {
    schema: Option<String>,
    name: String,
}

impl Table {
    /// Creates the name from an identifier that is known to be valid.
    pub(crate) fn named(name: &str) -> Self {
        Self { schema: None, name: name.to_owned() }
    }

    /// Parses `name` or `schema.name`. Plain identifiers need no quotes, and are named in SQL as users see them. Other
    /// names are in double quotes, as in SQL. `how` is the option that the error message shows before the name.
    pub(crate) fn parse(text: &str, how: &str) -> Result<Self> {
        let parsed = identifier(text).and_then(|(first, rest)| match rest.strip_prefix('.') {
            None if rest.is_empty() => Some((None, first)),
            None => None,
            Some(rest) => identifier(rest)
                .filter(|(_, rest)| rest.is_empty())
                .map(|(name, _)| (Some(first), name)),
        });
        let Some((schema, name)) = parsed else {
            let message = format!(
                "invalid table name: give it as {how}NAME or {how}SCHEMA.NAME, of lower-case letters, digits and \
                 underscores, or in double quotes of letters, digits, underscores, hyphens and spaces"
            );
            return Err(Error::new(ErrorKind::Invalid, message));
        };
        Ok(Self { schema: schema.map(str::to_owned), name: name.to_owned() })
    }

    /// Quoted name, for SQL.
    pub(crate) fn quoted(&self) -> String {
        match &self.schema {
            Some(schema) => format!("\"{schema}\".\"{}\"", self.name),
            None => format!("\"{}\"", self.name),
        }
    }

    /// Table of the waiters for the locks in this table. If its name would be too long, it is shortened, and has a hash
    /// of the whole name: two tables of locks must not share their waiters.
    pub(crate) fn waiters(&self) -> Self {
        const SUFFIX: &str = "_waiters";
        let name = if self.name.len() + SUFFIX.len() <= MAX_IDENTIFIER_BYTES {
            format!("{}{SUFFIX}", self.name)
        } else {
            let hash = Sha256::digest(&self.name);
            let hash = u32::from_be_bytes([hash[0], hash[1], hash[2], hash[3]]);
            let suffix = format!("_{hash:08x}{SUFFIX}");
            format!("{}{suffix}", &self.name[..MAX_IDENTIFIER_BYTES - suffix.len()])
        };
        Self { schema: self.schema.clone(), name }
    }

    /// Name as users write it.
    pub(crate) fn shown(&self) -> String {
        let shown =
            |name: &str| if is_plain(name) { name.to_owned() } else { format!("\"{name}\"") };
        match &self.schema {
            Some(schema) => format!("{}.{}", shown(schema), shown(&self.name)),
            None => shown(&self.name),
        }
    }

    /// Name without the schema.
    #[cfg(feature = "jobs")]
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Schema, if the name has one.
    pub(crate) fn schema(&self) -> Option<&str> {
        self.schema.as_deref()
    }

    /// Notification channel for releases. Of a long name its end is used, which differs between tables of one schema.
    pub(crate) fn channel(&self) -> String {
        let shown = match &self.schema {
            Some(schema) => format!("{schema}.{}", self.name),
            None => self.name.clone(),
        };
        shown[shown.len().saturating_sub(MAX_IDENTIFIER_BYTES)..].to_owned()
    }

    pub(crate) fn channel_literal(&self) -> String {
        format!("'{}'", self.channel())
    }
}

/// Parses the name of a column, as in SQL. Returns it without its quotes.
#[cfg(feature = "jobs")]
pub(super) fn parse_column(text: &str) -> Option<&str> {
    identifier(text).filter(|(_, rest)| rest.is_empty()).map(|(name, _)| name)
}

/// The identifier at the start of a text, without its quotes, and the rest of the text.
fn identifier(text: &str) -> Option<(&str, &str)> {
    if let Some(quoted) = text.strip_prefix('"') {
        return quoted.split_once('"').filter(|(name, _)| can_be_quoted(name));
    }
    let (name, rest) = text.split_at(text.find('.').unwrap_or(text.len()));
    is_plain(name).then_some((name, rest))
}

/// True if the name can stand between double quotes, and between the single quotes of our SQL, as it is.
fn can_be_quoted(name: &str) -> bool {
    let fits = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b' ');
    (1..=MAX_IDENTIFIER_BYTES).contains(&name.len()) && name.bytes().all(fits)
}

fn is_plain(name: &str) -> bool {
    let rest = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_';
    name.len() <= MAX_IDENTIFIER_BYTES
        && name.bytes().next().is_some_and(|b| b.is_ascii_lowercase() || b == b'_')
        && name.bytes().all(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_plain_and_shown_as_they_are_meant() {
        let table = Table::parse("app.locks", "").unwrap();
        assert_eq!(
            (table.quoted().as_str(), table.shown().as_str()),
            ("\"app\".\"locks\"", "app.locks")
        );
        assert_eq!(Table::parse("tenure_locks", "").unwrap(), Table::named("tenure_locks"));
        for text in ["", ".", "a.", ".a", "a.b.c", "a b", "A", "1a", "a\"", "a'b", &"x".repeat(64)]
        {
            assert_eq!(Table::parse(text, "").unwrap_err().kind(), ErrorKind::Invalid, "{text:?}");
        }
        for text in [
            "Jobs\"",
            "\"Jobs",
            "\"\"",
            "\"a'b\"",
            "\"a\"\"b\"",
            "\"a\".",
            "\"a\"b",
            "\"a$b\"",
            "\"ä\"",
        ] {
            assert_eq!(Table::parse(text, "").unwrap_err().kind(), ErrorKind::Invalid, "{text:?}");
        }
        let mixed = Table::parse("\"My App\".\"sync-Jobs\"", "").unwrap();
        assert_eq!(
            (mixed.quoted(), mixed.channel()),
            (mixed.shown(), "My App.sync-Jobs".to_owned())
        );
        assert_eq!(Table::parse("\"locks\"", "").unwrap().shown(), "locks");
        let long = Table::parse(&format!("{}.{}", "s".repeat(63), "t".repeat(63)), "").unwrap();
        assert_eq!(long.channel().len(), MAX_IDENTIFIER_BYTES);
        assert_eq!(table.waiters().shown(), "app.locks_waiters");
        assert_eq!(long.waiters().name.len(), MAX_IDENTIFIER_BYTES);
        let fits = "t".repeat(55);
        assert_eq!(Table::named(&fits).waiters().name, format!("{fits}_waiters"));
        let waiters = |last: &str| Table::named(&format!("{fits}{last}")).waiters().name;
        assert_ne!(waiters("_a"), waiters("_b"));
        // Participants of all versions must agree on it.
        assert_eq!(waiters("_a"), format!("{}_b5856208_waiters", "t".repeat(46)));
    }
}
