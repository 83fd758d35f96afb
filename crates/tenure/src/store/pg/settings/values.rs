//! Values of the keywords, by libpq's precedence: the text, the service, the environment.

use super::invalid::invalid;
use super::keywords::{self, KEYWORDS, Keyword, KeywordEffect};
use super::pairs::{Pairs, Variables};
use super::service;
use crate::Result;

/// Values of the keywords at one moment.
pub(super) struct Values<'a> {
    given: &'a Pairs,
    /// Pairs of the named service.
    service: Pairs,
    variable: &'a Variables,
}

impl<'a> Values<'a> {
    /// Reads the service file, if a service is named. Fails if a value is one that we must not ignore.
    pub(super) fn read(given: &'a Pairs, variable: &'a Variables) -> Result<Self> {
        let mut values = Self { given, service: Pairs::new(), variable };
        if let Some(name) = values.get("service") {
            values.service = service::read(&name, variable)?;
        }
        for keyword in KEYWORDS {
            let KeywordEffect::RefusedUnless(accepted, reason) = keyword.effect else { continue };
            if let Some(value) = values.get(keyword.name)
                && !accepted.contains(&&*value)
            {
                return Err(invalid(&format!("unsupported {}: {reason}", keyword.name)));
            }
        }
        Ok(values)
    }

    /// Value of a keyword. An empty value counts as absent, but hides the values of lower precedence.
    pub(super) fn get(&self, name: &str) -> Option<String> {
        self.raw(name).filter(|value| !value.is_empty())
    }

    fn raw(&self, name: &str) -> Option<String> {
        let keyword = keywords::find(name)?;
        let found = self.given.iter().rev().find(|(given, _)| given == name);
        // Within a service the first line wins.
        let found = found.or_else(|| self.service.iter().find(|(given, _)| given == name));
        match found {
            Some((_, value)) => Some(value.clone()),
            None => self.environment_value(keyword),
        }
    }

    fn environment_value(&self, keyword: &Keyword) -> Option<String> {
        let value = keyword.variable.and_then(self.variable);
        // The older form of PGSSLMODE=require. To ignore it would send passwords unencrypted.
        let older = || (self.variable)("PGREQUIRESSL").filter(|value| value.starts_with('1'));
        match keyword.name {
            "sslmode" => value.or_else(|| older().map(|_| "require".to_owned())),
            _ => value,
        }
    }

    /// Whole number; surrounding blanks are ignored as libpq does.
    pub(super) fn number(&self, name: &str) -> Result<Option<i32>> {
        let parsed = self.get(name).map(|text| text.trim().parse());
        parsed.transpose().map_err(|_| invalid(&format!("invalid {name}: give a whole number")))
    }

    /// One of several words; the index of the word.
    pub(super) fn word(&self, name: &str, words: &[&str]) -> Result<Option<usize>> {
        let Some(given) = self.get(name) else { return Ok(None) };
        let found = words.iter().position(|word| *word == given);
        let message = || format!("invalid {name}; supported: {}", words.join(", "));
        found.map(Some).ok_or_else(|| invalid(&message()))
    }

    /// Path in the user's folder for settings of PostgreSQL, if there is such a file.
    pub(super) fn home_file(&self, path: &str) -> Option<std::path::PathBuf> {
        let path = std::path::Path::new(&(self.variable)("HOME")?).join(path);
        path.is_file().then_some(path)
    }
}
