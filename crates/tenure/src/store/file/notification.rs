//! Notifications of files from the kernel: closed, touched or removed.
//!
//! Without inotify, or with this user's instances used up, waiters poll ([`POLL_INTERVAL`]).

use std::time::Duration;

#[cfg(target_os = "linux")]
pub(super) use super::inotify::{Hub, Watch};
#[cfg(not(target_os = "linux"))]
pub(super) use super::polling::{Hub, Watch};
pub(super) use super::wake::{FileEvents, Wake};

/// Polling interval of a waiter without notifications.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(25);
/// Largest number of liveness files that an observer watches, and that a new waiter touches.
pub(super) const MAX_WATCHED: usize = 64;
