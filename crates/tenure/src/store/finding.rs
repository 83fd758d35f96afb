//! Findings of the diagnosis of a store.

use std::fmt;

use crate::Error;

/// Name of the finding that reports whether the store answers.
pub(super) const REACHABLE: &str = "reachable";

/// Result of one check.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// Subject of the check, in a word or two.
    pub what: String,
    /// Severity of the finding.
    pub level: FindingLevel,
    /// Result of the check. Never contains a secret.
    pub detail: String,
    /// Recommended action, if there is one.
    pub advice: Option<String>,
}

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum FindingLevel {
    /// No problem.
    Ok,
    /// The store works, with a risk that the finding names.
    Warning,
    /// The store does not work.
    Failed,
}

impl Finding {
    /// A finding without a problem.
    pub fn ok(what: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::new(FindingLevel::Ok, what, detail)
    }

    /// A finding of a risk.
    pub fn warning(what: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::new(FindingLevel::Warning, what, detail)
    }

    /// A finding of a failure.
    pub fn failed(what: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::new(FindingLevel::Failed, what, detail)
    }

    /// A finding of a failure, described by the error and its causes.
    pub fn error(what: impl Into<String>, error: &Error) -> Self {
        Self::failed(what, error.chain())
    }

    /// Adds a recommended action.
    #[must_use]
    pub fn advise(mut self, advice: impl Into<String>) -> Self {
        self.advice = Some(advice.into());
        self
    }

    /// True if the store cannot be reached. Nothing else could be checked then.
    pub fn is_unreachable(&self) -> bool {
        self.what == REACHABLE && self.level == FindingLevel::Failed
    }

    fn new(level: FindingLevel, what: impl Into<String>, detail: impl Into<String>) -> Self {
        Self { what: what.into(), level, detail: detail.into(), advice: None }
    }
}

impl fmt::Display for FindingLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Failed => "failed",
        })
    }
}
