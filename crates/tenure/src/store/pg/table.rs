//! Names of tables.

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

    /// Parses `name` or `schema.name`. Only plain identifiers are accepted: they need no quotes, so the text that users
    /// see names the same table in SQL. `how` is the option that the error message shows before the name.
    pub(crate) fn parse(text: &str, how: &str) -> Result<Self> {
        let (schema, name) = match text.split_once('.') {
            Some((schema, name)) => (Some(schema), name),
            None => (None, text),
        };
        if !schema.into_iter().chain([name]).all(is_plain) {
            let message = format!(
                "invalid table name: give it as {how}NAME or {how}SCHEMA.NAME, of lower-case letters, digits and \
                 underscores"
            );
            return Err(Error::new(ErrorKind::Invalid, message));
        }
        Ok(Self { schema: schema.map(str::to_owned), name: name.to_owned() })
    }

    /// Quoted name, for SQL.
    pub(crate) fn quoted(&self) -> String {
        match &self.schema {
            Some(schema) => format!("\"{schema}\".\"{}\"", self.name),
            None => format!("\"{}\"", self.name),
        }
    }

    /// Name as users write it.
    pub(crate) fn shown(&self) -> String {
        match &self.schema {
            Some(schema) => format!("{schema}.{}", self.name),
            None => self.name.clone(),
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
        let shown = self.shown();
        shown[shown.len().saturating_sub(MAX_IDENTIFIER_BYTES)..].to_owned()
    }

    pub(crate) fn channel_literal(&self) -> String {
        format!("'{}'", self.channel())
    }
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
        let long = Table::parse(&format!("{}.{}", "s".repeat(63), "t".repeat(63)), "").unwrap();
        assert_eq!(long.channel().len(), MAX_IDENTIFIER_BYTES);
    }
}
