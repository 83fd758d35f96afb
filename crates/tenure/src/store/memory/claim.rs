//! Client-side state of a claim.

use std::fmt;
use std::sync::Arc;

use tenure_core::Key;
use tenure_core::table::Owner;
use tokio::sync::Notify;

use super::state::{MemoryShared, OwnedClaim};
use crate::store::KeySpace;
use crate::{Error, ErrorKind};

/// Owner of a claim. When the last owner is dropped, the claim loses its place or its hold, as if its process had died.
///
/// Dropping it locks the store: it must not be dropped while the store is locked.
pub(super) struct ClaimState {
    pub(super) shared: Arc<MemoryShared>,
    pub(super) owner: Owner,
    pub(super) key: Key,
    pub(super) space: KeySpace,
    pub(super) wake: Arc<Notify>,
}

impl ClaimState {
    pub(super) fn new(shared: &Arc<MemoryShared>, claim: OwnedClaim) -> Arc<Self> {
        let OwnedClaim { owner, key, space, wake, .. } = claim;
        Arc::new(Self { shared: Arc::clone(shared), owner, key, space, wake })
    }

    pub(super) fn not_held(&self) -> Error {
        Error::new(ErrorKind::NotHeld, "the hold has ended").on(&self.key).at(&self.shared)
    }
}

impl Drop for ClaimState {
    fn drop(&mut self) {
        self.shared.with(|state, now| state.disown(self.owner, now));
    }
}

impl fmt::Debug for ClaimState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {}", self.key, self.shared)
    }
}
