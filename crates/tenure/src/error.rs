//! The error type. Its kinds tell the caller how to react.

use std::error::Error as StdError;
use std::fmt;
#[cfg(feature = "postgres")]
use std::sync::Arc;
use std::time::Duration;

use tenure_core::acquire::RequestFailure;
use tenure_core::{Key, KeyError};

/// Result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Failed operation: its kind, key, store and cause, and a message that says what to do.
///
/// Programs match on [`kind`](Error::kind); the message is for users. The cause is in [`source`](StdError::source), and
/// the message does not repeat it. No message contains a password or a handle.
pub struct Error(Box<ErrorInner>);

struct ErrorInner {
    kind: ErrorKind,
    message: String,
    key: Option<Key>,
    store: Option<String>,
    may_be_held_for: Option<Duration>,
    /// The failure may end by itself, although its kind says otherwise.
    transient: bool,
    /// The store could be reached, and answered with this error.
    answer: bool,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

/// Kind of a failure, by its meaning for the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The timeout passed while another holder had the lock. Nothing is held.
    Timeout,
    /// Another holder has the lock, and the caller did not want to wait. Nothing is held.
    Held,
    /// The caller does not have the hold that it tried to renew or release, or no longer has it.
    NotHeld,
    /// The hold ended without a release.
    Lost,
    /// A competing request was first. In an object store, that request took the lock or the only place in its queue.
    /// For an operator, concurrent writes prevented the change. Nothing is held. Try again, or wait.
    Contention,
    /// The outcome is unknown: the store may hold the lock for the caller for up to [`Error::may_be_held_for`]. Do not
    /// assume that the lock is held, and do not assume that the lock is free.
    Unknown,
    /// The store cannot be reached or cannot answer now. The request had no effect. Try again.
    Unavailable,
    /// The store does not support this operation. See [`Capabilities`](crate::store::Capabilities).
    Unsupported,
    /// The store rejected the credentials or the permissions. An operator must act.
    Denied,
    /// The request is invalid. Correct it.
    Invalid,
    /// The store is misconfigured: a table or bucket is missing, foreign or damaged, or the server cannot write. An
    /// operator must act.
    Misconfigured,
    /// The client, its runtime or its store was shut down.
    Shutdown,
    /// A callback panicked. Correct the callback; the task that called it continues.
    Panicked,
    /// A callback returned an error, which is the source of this one.
    CallbackFailed,
}

impl ErrorKind {
    /// True if an attempt to acquire failed because another holder has the lock ([`Held`](Self::Held)), or because
    /// another waiter has the only place in its queue ([`Contention`](Self::Contention)).
    pub fn is_held_by_another(self) -> bool {
        matches!(self, Self::Held | Self::Contention)
    }
}

impl Error {
    /// Creates an error. The message says what was tried and what to do, in lower case, without a full stop.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Box::new(ErrorInner {
            kind,
            message: message.into(),
            key: None,
            store: None,
            may_be_held_for: None,
            transient: false,
            answer: false,
            source: None,
        }))
    }

    /// Adds the key that was acted on, unless the error has a key.
    #[must_use]
    pub fn on(mut self, key: &Key) -> Self {
        self.0.key.get_or_insert_with(|| key.clone());
        self
    }

    /// Adds the store that was acted on, unless the error has a store. The `Display` of `store` must not print secrets.
    #[must_use]
    pub fn at(mut self, store: impl fmt::Display) -> Self {
        self.0.store.get_or_insert_with(|| store.to_string());
        self
    }

    /// Sets the cause.
    #[must_use]
    pub fn because(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.0.source = Some(source.into());
        self
    }

    /// Sets the time for which the store may hold the lock for the caller after this error.
    #[must_use]
    pub fn with_may_be_held_for(mut self, time: Duration) -> Self {
        self.0.may_be_held_for = Some(time);
        self
    }

    /// Kind of the failure: match on this.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Key that was acted on.
    pub fn key(&self) -> Option<&Key> {
        self.0.key.as_ref()
    }

    /// Store that was acted on, as a URL without secrets.
    pub fn store(&self) -> Option<&str> {
        self.0.store.as_deref()
    }

    /// Maximum time, counted from this error, for which the store may hold the lock for the caller. Set only with
    /// [`ErrorKind::Unknown`].
    pub fn may_be_held_for(&self) -> Option<Duration> {
        self.0.may_be_held_for
    }

    /// The message with the messages of all causes, separated by colons: one line for logs and terminals. A cause
    /// whose message is part of another one is left out.
    pub fn chain(&self) -> String {
        Self::chain_of(self)
    }

    /// As [`chain`](Self::chain), for an error of any type.
    pub fn chain_of(error: &dyn StdError) -> String {
        let mut text = error.to_string();
        let mut cause = error.source();
        while let Some(next) = cause {
            let message = next.to_string();
            // Some libraries repeat the message of the cause in their own.
            if !text.contains(&message) {
                text = format!("{text}: {message}");
            }
            cause = next.source();
        }
        text
    }

    /// Error of a store that was away for as long as the caller wanted to wait.
    pub(crate) fn away(waited: Duration, error: Self) -> Self {
        let message = format!("the store could not be reached for {waited:.1?}: is it up?");
        Self::new(ErrorKind::Unavailable, message).because(error)
    }

    /// Error of a task that ended without a reply.
    pub(crate) fn task_ended(key: &Key) -> Self {
        let message = "the task of the lock has ended: its runtime was shut down, or it panicked";
        Self::new(ErrorKind::Shutdown, message).on(key)
    }

    /// Marks a failure that may end by itself, although its kind says otherwise: a store that worked before denies
    /// access.
    #[cfg(feature = "postgres")]
    pub(crate) fn into_transient(mut self) -> Self {
        self.0.transient = true;
        self
    }

    /// Reverses the mark of [`into_transient`](Self::into_transient), for a caller that does not want to wait.
    pub(crate) fn into_permanent(mut self) -> Self {
        self.0.transient = false;
        self
    }

    /// True if [`into_transient`](Self::into_transient) marked the failure.
    #[cfg(feature = "jobs")]
    pub(crate) fn is_marked_transient(&self) -> bool {
        self.0.transient
    }

    /// Marks an error with which the store itself answered: it can be reached, and is up.
    #[cfg(feature = "postgres")]
    pub(crate) fn into_answer(mut self) -> Self {
        self.0.answer = true;
        self
    }

    /// True if [`into_answer`](Self::into_answer) marked the error.
    pub(crate) fn is_answer(&self) -> bool {
        self.0.answer
    }

    /// Copy of an error for one of several callers, of the same kind and with the same mark.
    #[cfg(feature = "postgres")]
    pub(crate) fn copy_of(cause: &Arc<Self>, message: &str) -> Self {
        let mut copy = Self::new(cause.kind(), message).because(Arc::clone(cause));
        copy.0.transient = cause.0.transient;
        copy.0.answer = cause.0.answer;
        copy
    }

    /// Classifies the failure of a request for the state machine that issued it.
    pub(crate) fn failure(&self) -> RequestFailure {
        match self.kind() {
            _ if self.0.transient => RequestFailure::Transient,
            ErrorKind::Unknown | ErrorKind::Timeout => RequestFailure::Unknown,
            ErrorKind::Denied
            | ErrorKind::Invalid
            | ErrorKind::Misconfigured
            | ErrorKind::Unsupported
            // A claim fails with `Contention` only if it has `fail_if_contended`: its caller does not want to wait.
            | ErrorKind::Contention
            | ErrorKind::Shutdown => RequestFailure::Permanent,
            _ => RequestFailure::Transient,
        }
    }

    /// True if the store reports that the hold has ended or never existed.
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
        if let Some(time) = self.0.may_be_held_for {
            debug.field("may_be_held_for", &time);
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
    fn display_names_key_and_store_and_leaves_the_cause_to_source() {
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
        assert_eq!(error.chain(), format!("{error}: connection refused"));
        assert_eq!(error.kind(), ErrorKind::Unavailable);
    }

    #[test]
    fn first_key_and_store_are_kept() {
        let (one, two) = (Key::new("one").unwrap(), Key::new("two").unwrap());
        let error = Error::new(ErrorKind::Held, "held").on(&one).at("here").on(&two).at("there");
        assert_eq!(error.to_string(), "one on here: held");
    }

    #[test]
    fn error_chain_lists_each_cause_once() {
        let error = Error::new(ErrorKind::Unavailable, "cannot connect")
            .because(Error::new(ErrorKind::Unavailable, "connection refused"));
        assert_eq!(error.chain(), "cannot connect: connection refused");
        let error = Error::new(ErrorKind::Unavailable, "no: refused")
            .because(Error::new(ErrorKind::Unavailable, "refused"));
        assert_eq!(error.chain(), "no: refused");
        let error = std::io::Error::other(error);
        assert_eq!(Error::chain_of(&error), "no: refused");
    }
}
