//! The table's name, and the SQL that makes it.

use crate::{Error, ErrorKind, Result};

/// The table unless the URL names another.
const DEFAULT: &str = "tenure_locks";
/// The longest identifier of PostgreSQL, in bytes.
const LONGEST: usize = 63;

/// A table, with or without its schema.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Table {
    schema: Option<String>,
    name: String,
}

impl Default for Table {
    fn default() -> Self {
        Self { schema: None, name: DEFAULT.to_owned() }
    }
}

impl Table {
    /// Reads `name` or `schema.name`: plain identifiers, so that what is shown is what is meant.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let (schema, name) = match text.split_once('.') {
            Some((schema, name)) => (Some(schema), name),
            None => (None, text),
        };
        if !schema.into_iter().chain([name]).all(plain) {
            let message = "the table's name is none: give it as table=NAME or table=SCHEMA.NAME, of small letters, \
                           digits and underscores";
            return Err(Error::new(ErrorKind::Invalid, message));
        }
        Ok(Self { schema: schema.map(str::to_owned), name: name.to_owned() })
    }

    pub(super) fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// As it stands in SQL.
    pub(super) fn quoted(&self) -> String {
        match &self.schema {
            Some(schema) => format!("\"{schema}\".\"{}\"", self.name),
            None => format!("\"{}\"", self.name),
        }
    }

    /// As people write it.
    pub(super) fn shown(&self) -> String {
        match &self.schema {
            Some(schema) => format!("{schema}.{}", self.name),
            None => self.name.clone(),
        }
    }

    /// The schema to create it in, where the name says one.
    pub(super) fn schema(&self) -> Option<&str> {
        self.schema.as_deref()
    }

    /// Where releases are told: the end of a long name, which is what tells tables apart.
    pub(super) fn channel(&self) -> String {
        let shown = self.shown();
        shown[shown.len().saturating_sub(LONGEST)..].to_owned()
    }

    pub(super) fn channel_literal(&self) -> String {
        format!("'{}'", self.channel())
    }
}

fn plain(name: &str) -> bool {
    let rest = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_';
    name.len() <= LONGEST
        && name.bytes().next().is_some_and(|b| b.is_ascii_lowercase() || b == b'_')
        && name.bytes().all(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_plain_and_shown_as_they_are_meant() {
        let table = Table::parse("app.locks").unwrap();
        assert_eq!(
            (table.quoted().as_str(), table.shown().as_str()),
            ("\"app\".\"locks\"", "app.locks")
        );
        assert!(Table::parse("tenure_locks").unwrap().is_default());
        for text in ["", ".", "a.", ".a", "a.b.c", "a b", "A", "1a", "a\"", "a'b", &"x".repeat(64)]
        {
            assert_eq!(Table::parse(text).unwrap_err().kind(), ErrorKind::Invalid, "{text:?}");
        }
        let long = Table::parse(&format!("{}.{}", "s".repeat(63), "t".repeat(63))).unwrap();
        assert_eq!(long.channel().len(), LONGEST);
    }
}
