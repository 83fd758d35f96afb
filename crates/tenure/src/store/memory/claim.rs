//! Client-side state of a claim.

use std::fmt;
use std::sync::Arc;

use tenure_core::Key;
use tenure_core::table::Owner;
use tokio::sync::Notify;

use super::state::MemoryShared;
use crate::store::KeySpace;
use crate::{Error, ErrorKind};

/// Shared state of a claim. When the last reference is dropped, the claim loses its place or its hold, as if its
/// process had died.
pub(super) struct ClaimState {
    pub(super) shared: Arc<MemoryShared>,
    pub(super) owner: Owner,
    pub(super) key: Key,
    pub(super) space: KeySpace,
    pub(super) wake: Arc<Notify>,
}

impl ClaimState {
    pub(super) fn not_held(&self) -> Error {
        Error::new(ErrorKind::NotHeld, "the hold has ended").on(&self.key).at(&self.shared)
    }
}

impl Drop for ClaimState {
    fn drop(&mut self) {
        self.shared.with(|state, now| state.remove_if_unused(self.owner, now));
    }
}

impl fmt::Debug for ClaimState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {}", self.key, self.shared)
    }
}
