//! State of keys, as a store shows it.

use std::time::{Duration, SystemTime};

use tenure_core::table::KeySpace;
use tenure_core::{FencingToken, Key};

use super::identity::Identity;

/// State of a key at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeyState {
    /// The key.
    pub key: Key,
    /// Key space of the key.
    pub space: KeySpace,
    /// Holders, in the order of their grants.
    pub holders: Vec<HolderState>,
    /// Waiters, the next in line first.
    pub waiters: Vec<WaiterState>,
    /// Version of this state.
    pub version: Version,
}

impl KeyState {
    /// Creates the state of a key without holders and waiters.
    pub fn free(key: Key, space: KeySpace, version: Version) -> Self {
        Self { key, space, holders: Vec::new(), waiters: Vec::new(), version }
    }

    /// True if the key has holders or waiters.
    pub fn is_in_use(&self) -> bool {
        !self.holders.is_empty() || !self.waiters.is_empty()
    }
}

/// Holder of a key, as shown by [`Store::inspect`](super::Store::inspect).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HolderState {
    /// Identity of the holder, if the store knows it.
    pub by: Option<Identity>,
    /// Fencing token of the hold; [`FencingToken::NONE`](crate::FencingToken::NONE) without [`Capabilities::identities`](super::Capabilities::identities) or
    /// [`Capabilities::ordered_tokens`](super::Capabilities::ordered_tokens).
    pub token: FencingToken,
    /// Time since the grant.
    pub held_for: Option<Duration>,
    /// Time until the lease ends unless it is renewed, by the store's clock.
    pub lease_left: Option<Duration>,
    /// Revision of the record that represents the hold, on NATS; see [`Guard::revision`](crate::Guard::revision).
    pub revision: Option<u64>,
}

impl HolderState {
    /// Creates a holder of which only identity and token are known.
    pub fn new(by: Option<Identity>, token: FencingToken) -> Self {
        Self { by, token, held_for: None, lease_left: None, revision: None }
    }
}

/// Waiter for a key, as shown by [`Store::inspect`](super::Store::inspect).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WaiterState {
    /// Identity of the waiter, if the store knows it.
    pub by: Option<Identity>,
    /// Time since the waiter joined the queue.
    pub waited_for: Option<Duration>,
}

impl WaiterState {
    /// Creates a waiter of which only the identity is known.
    pub fn new(by: Option<Identity>) -> Self {
        Self { by, waited_for: None }
    }
}

/// Version of the state of a key: equal as long as [`Store::inspect`](super::Store::inspect) shows the same holders and waiters.
///
/// A renewal does not change it. A value may recur with the same state, for example whenever the key is free; the holds
/// of two grants are never the same, whatever their claims. Versions have no order, and are compared only with versions
/// of the same key from the same store value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Version(pub u128);

/// Event in the history of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HistoryEvent {
    /// Time of the event, by the store's wall clock.
    pub at: SystemTime,
    /// Kind of event: `waiting`, `granted`, `released`, `expired`, `broken`, `disconnected`, `handoff_requested`,
    /// `abandoned` (a claim was abandoned after its grant), `gave_up` (a waiter left the queue or timed out).
    pub kind: String,
    /// Fencing token of the hold concerned; [`FencingToken::NONE`](crate::FencingToken::NONE) for an event of a waiter.
    pub token: FencingToken,
    /// Identity of the holder or waiter concerned, if the store knows it.
    pub by: Option<Identity>,
    /// Reason that the operator gave for breaking the hold, or for the hand-off request.
    pub reason: Option<String>,
}

impl HistoryEvent {
    /// Creates an event without identity and reason.
    pub fn new(at: SystemTime, kind: impl Into<String>, token: FencingToken) -> Self {
        Self { at, kind: kind.into(), token, by: None, reason: None }
    }
}
