//! What can go wrong, by what the caller should do about it.

use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use tenure_core::acquire::RequestFailure;
use tenure_core::{Key, KeyError};

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failure: what was tried, on which key and store, and what to do.
///
/// Match on [`kind`](Error::kind); read the rest. The cause is in [`source`](StdError::source) and not repeated in the
/// message. No message ever holds a password or a handle.
pub struct Error(Box<ErrorInner>);

struct ErrorInner {
    kind: ErrorKind,
    message: String,
    key: Option<Key>,
    store: Option<String>,
    may_be_held_for: Option<Duration>,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

/// What a failure means for the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The caller's time ran out while another held the lock. Nothing is held.
    Timeout,
    /// Another holds the lock, and the caller did not want to wait. Nothing is held. On a store with one place to wait in
    /// that is [`Contention`](Self::Contention); [`is_held_by_another`](Self::is_held_by_another) knows both.
    Held,
    /// The hold to be renewed or released is not ours, or no longer.
    NotHeld,
    /// The hold ended against our will.
    Lost,
    /// Another was quicker at something that only one can have: the lock or the place to wait for it in an object store, a
    /// change by hand. Nothing is held. Try again, or wait.
    Contention,
    /// The outcome is unknown: the lock may be held for us until [`Error::until`]. Do not assume either.
    Unknown,
    /// The store cannot be reached or cannot answer now. Nothing was done; try again.
    Unavailable,
    /// The store cannot do this. See `Capabilities`.
    Unsupported,
    /// The store refused our credentials or rights. An operator must act.
    Denied,
    /// The request makes no sense as given. Correct it.
    Invalid,
    /// The store is not as it must be: a table or bucket is missing, foreign or damaged, the server cannot write. An operator
    /// must act.
    Misconfigured,
    /// The client, its runtime or its store was shut down.
    Shutdown,
    /// A callback panicked. Correct it; whatever called it goes on.
    Panicked,
}

impl ErrorKind {
    /// Whether a try was in vain because another has the lock, whatever the store: [`Held`](Self::Held), or
    /// [`Contention`](Self::Contention) where there is one place to wait in.
    pub fn is_held_by_another(self) -> bool {
        matches!(self, Self::Held | Self::Contention)
    }
}

impl Error {
    /// A failure of this kind; the message says what was tried and what to do, in lower case, without a full stop.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Box::new(ErrorInner {
            kind,
            message: message.into(),
            key: None,
            store: None,
            may_be_held_for: None,
            source: None,
        }))
    }

    /// The same failure, on this key.
    #[must_use]
    pub fn on(mut self, key: &Key) -> Self {
        self.0.key.get_or_insert_with(|| key.clone());
        self
    }

    /// The same failure, at this store; its `Display` names it without secrets.
    #[must_use]
    pub fn at(mut self, store: impl fmt::Display) -> Self {
        self.0.store.get_or_insert_with(|| store.to_string());
        self
    }

    /// The same failure, caused by `source`.
    #[must_use]
    pub fn because(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.0.source = Some(source.into());
        self
    }

    /// The same failure, after which the store may keep a hold for this long.
    #[must_use]
    pub fn with_may_be_held_for(mut self, until: Duration) -> Self {
        self.0.may_be_held_for = Some(until);
        self
    }

    /// What the failure means for the caller.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The key that was acted on.
    pub fn key(&self) -> Option<&Key> {
        self.0.key.as_ref()
    }

    /// The store that was acted on, without secrets.
    pub fn store(&self) -> Option<&str> {
        self.0.store.as_deref()
    }

    /// For [`ErrorKind::Unknown`]: how long, counted from this error, the store may keep the lock for us.
    pub fn may_be_held_for(&self) -> Option<Duration> {
        self.0.may_be_held_for
    }

    /// What the failure of a request means for the machine that asked for it.
    pub(crate) fn failure(&self) -> RequestFailure {
        match self.kind() {
            ErrorKind::Unknown | ErrorKind::Timeout => RequestFailure::Unknown,
            ErrorKind::Denied
            | ErrorKind::Invalid
            | ErrorKind::Misconfigured
            | ErrorKind::Unsupported
            // Told to who does not want to wait for it.
            | ErrorKind::Contention
            | ErrorKind::Shutdown => RequestFailure::Permanent,
            _ => RequestFailure::Transient,
        }
    }

    /// Whether the store says that a hold is not ours.
    pub(crate) fn is_refusal(&self) -> bool {
        matches!(self.kind(), ErrorKind::NotHeld | ErrorKind::Lost)
    }
}

impl From<KeyError> for Error {
    fn from(error: KeyError) -> Self {
        Self::new(ErrorKind::Invalid, error.to_string())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ErrorInner { key, store, message, .. } = &*self.0;
        match (key, store) {
            (Some(key), Some(store)) => write!(f, "{key} on {store}: {message}"),
            (Some(key), None) => write!(f, "{key}: {message}"),
            (None, Some(store)) => write!(f, "{store}: {message}"),
            (None, None) => f.write_str(message),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Error");
        debug.field("kind", &self.0.kind).field("message", &self.to_string());
        if let Some(until) = self.0.may_be_held_for {
            debug.field("until", &until);
        }
        if let Some(source) = &self.0.source {
            debug.field("source", source);
        }
        debug.finish()
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|source| source as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_what_was_tried_on_which_key_and_store_and_keeps_the_cause_apart() {
        let key = Key::new("reports").unwrap();
        let error = Error::new(ErrorKind::Unavailable, "cannot claim: is the server up?")
            .on(&key)
            .at("tenure://localhost:6388")
            .because(std::io::Error::other("connection refused"));
        assert_eq!(
            error.to_string(),
            "reports on tenure://localhost:6388: cannot claim: is the server up?"
        );
        assert_eq!(error.source().unwrap().to_string(), "connection refused");
        assert_eq!(error.kind(), ErrorKind::Unavailable);
    }

    #[test]
    fn the_first_key_and_store_named_are_the_nearest_to_the_fault() {
        let (one, two) = (Key::new("one").unwrap(), Key::new("two").unwrap());
        let error = Error::new(ErrorKind::Held, "held").on(&one).at("here").on(&two).at("there");
        assert_eq!(error.to_string(), "one on here: held");
    }
}
