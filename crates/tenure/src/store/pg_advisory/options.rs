//! Options of the store's URL.

use std::time::Duration;

use crate::store::pg::table::Table;
use crate::{Error, ErrorKind, Result};

/// Longest time for which one statement blocks.
const MAX_WAIT_MILLIS: u64 = 600_000;
/// Maximum number of sessions that block for one key.
const MAX_QUEUE: u8 = 64;

/// Form of the keys of a store: its key space in the server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum KeyForm {
    /// Two 32-bit numbers.
    #[default]
    Pair,
    /// One 64-bit number.
    Bigint,
}

#[derive(Debug)]
pub(super) struct AdvisoryOptions {
    pub(super) form: KeyForm,
    /// Maximum time for which one statement blocks.
    pub(super) wait: Duration,
    /// Number of sessions, of all processes, that may block for one key.
    pub(super) queue: u8,
    /// Table in which terms are counted.
    pub(super) terms: Option<Table>,
}

impl Default for AdvisoryOptions {
    fn default() -> Self {
        Self { form: KeyForm::default(), wait: Duration::from_secs(15), queue: 4, terms: None }
    }
}

impl AdvisoryOptions {
    /// Names of all options.
    pub(super) const NAMES: &[&str] = &["key", "wait", "queue", "terms"];

    pub(super) fn parse(given: Vec<(String, String)>) -> Result<Self> {
        let mut options = Self::default();
        for (name, value) in given {
            match &*name {
                "key" => options.form = parse_form(&value)?,
                "wait" => options.wait = parse_wait(&value)?,
                "queue" => options.queue = parse_queue(&value)?,
                _ => options.terms = Some(Table::parse(&value, "terms=")?),
            }
        }
        Ok(options)
    }
}

fn parse_form(text: &str) -> Result<KeyForm> {
    match text {
        "pair" => Ok(KeyForm::Pair),
        "bigint" => Ok(KeyForm::Bigint),
        _ => {
            let message = "invalid key: give key=pair for two 32-bit numbers, or key=bigint for one of 64 bits";
            Err(Error::new(ErrorKind::Invalid, message))
        }
    }
}

fn parse_wait(text: &str) -> Result<Duration> {
    let ms = text.trim_end_matches("ms").parse().ok();
    let message = "invalid wait: give a time between 1ms and 600000ms, as in wait=15000ms";
    ms.filter(|ms| (1..=MAX_WAIT_MILLIS).contains(ms))
        .map(Duration::from_millis)
        .ok_or_else(|| Error::new(ErrorKind::Invalid, message))
}

fn parse_queue(text: &str) -> Result<u8> {
    let message = "invalid queue: give a number between 1 and 64, as in queue=4";
    text.parse()
        .ok()
        .filter(|queue| (1..=MAX_QUEUE).contains(queue))
        .ok_or_else(|| Error::new(ErrorKind::Invalid, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_have_limits() {
        let given = |name: &str, value: &str| vec![(name.to_owned(), value.to_owned())];
        let parsed = AdvisoryOptions::parse(given("queue", "64")).unwrap();
        assert_eq!((parsed.queue, parsed.wait), (64, Duration::from_secs(15)));
        let parsed = AdvisoryOptions::parse(given("wait", "1ms")).unwrap();
        assert_eq!((parsed.queue, parsed.wait), (4, Duration::from_millis(1)));
        assert_eq!(parsed.form, KeyForm::Pair);
        let parsed = AdvisoryOptions::parse(given("key", "bigint")).unwrap();
        assert_eq!(parsed.form, KeyForm::Bigint);
        for (name, value) in [
            ("wait", "0"),
            ("wait", "600001ms"),
            ("queue", "0"),
            ("queue", "65"),
            ("queue", "-1"),
            ("key", ""),
            ("key", "BIGINT"),
        ] {
            let error = AdvisoryOptions::parse(given(name, value)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{name}={value}");
        }
    }
}
