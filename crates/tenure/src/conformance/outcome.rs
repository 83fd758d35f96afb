//! Checks of outcomes. A failed check says which method was called, what was expected of it, and what came.

use crate::store::{Answer, Claim, Grant, Place, Store};
use crate::{Error, ErrorKind, Result};

pub(super) trait Outcome<T> {
    /// Returns the value of a call of `method` that must succeed.
    fn succeeds(self, method: &str) -> T;

    /// Returns the error of a call of `method` that must fail with this kind.
    fn fails(self, expected: ErrorKind, method: &str) -> Error;

    /// Checks that a call of `method` succeeds, or fails with this kind.
    fn may_fail(self, tolerated: ErrorKind, method: &str);

    /// Returns the error of a call of `method` that must fail with one of these kinds.
    fn fails_with(self, expected: &[ErrorKind], method: &str) -> Error;
}

impl<T> Outcome<T> for Result<T> {
    #[track_caller]
    fn succeeds(self, method: &str) -> T {
        self.unwrap_or_else(|error| {
            panic!("expected Ok from {method}, got {:?}: {error}", error.kind())
        })
    }

    #[track_caller]
    fn fails(self, expected: ErrorKind, method: &str) -> Error {
        self.fails_with(&[expected], method)
    }

    #[track_caller]
    fn may_fail(self, tolerated: ErrorKind, method: &str) {
        if let Err(error) = self
            && error.kind() != tolerated
        {
            panic!("expected Ok or {tolerated:?} from {method}, got {:?}: {error}", error.kind());
        }
    }

    #[track_caller]
    fn fails_with(self, expected: &[ErrorKind], method: &str) -> Error {
        let got = match self {
            Err(error) if expected.contains(&error.kind()) => return error,
            Err(error) => format!("{:?}: {error}", error.kind()),
            Ok(_) => "Ok".to_owned(),
        };
        let kinds: Vec<_> = expected.iter().map(|kind| format!("{kind:?}")).collect();
        panic!("expected {} from {method}, got {got}", kinds.join(" or "))
    }
}

/// Makes a claim that must be granted.
pub(super) async fn grant(store: &dyn Store, claim: &Claim) -> Grant {
    match store.claim(claim, claim.ttl / 4).await.succeeds("Store::claim") {
        Answer::Granted(grant) => grant,
        other => panic!("expected Granted from Store::claim, got {other:?}"),
    }
}

/// Makes a claim that must be queued.
pub(super) async fn enqueue(store: &dyn Store, claim: &Claim) -> Box<dyn Place> {
    let claim = Claim { queue: true, ..claim.clone() };
    match store.claim(&claim, claim.ttl / 4).await.succeeds("Store::claim") {
        Answer::Queued(place) => place,
        other => panic!("expected Queued from Store::claim, got {other:?}"),
    }
}
