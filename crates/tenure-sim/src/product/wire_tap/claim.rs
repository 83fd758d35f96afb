//! Claims that the tap has read.

use std::time::Duration;

use tenure_core::table::KeySpace;

use crate::product::referee::HoldMode;

/// A key of the server: locks and semaphores have separate keys.
pub(super) type SpaceKey = (KeySpace, String);

/// A claim, as a client has sent it.
#[derive(Clone, Debug)]
pub(super) struct TappedClaim {
    pub(super) id: String,
    pub(super) key: SpaceKey,
    pub(super) mode: HoldMode,
    pub(super) lease: Duration,
    pub(super) detached: bool,
}
