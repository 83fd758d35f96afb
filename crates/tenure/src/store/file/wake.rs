//! The notifier of a watcher, and the events of a file that it can watch for.

use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Notify;

/// Notifier of a watcher.
#[derive(Debug, Default)]
pub(super) struct Wake {
    notify: Notify,
    closed: AtomicBool,
    changed: AtomicBool,
}

impl Wake {
    /// Resolves when there was a notification since the last call.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses no notification.
    pub(super) async fn notified(&self) {
        self.notify.notified().await;
    }

    #[cfg(target_os = "linux")]
    pub(super) fn wake(&self) {
        self.notify.notify_one();
    }

    /// Wakes the watcher for an event. `changed`: the event is not a departure. `closed`: the file was closed.
    #[cfg(target_os = "linux")]
    pub(super) fn wake_for(&self, changed: bool, closed: bool) {
        // The flags are set before the wake-up: the watcher reads them as soon as it is awake.
        if changed {
            self.changed.store(true, Ordering::Release);
        }
        if closed {
            self.closed.store(true, Ordering::Release);
        }
        self.wake();
    }

    /// True if a watched file was closed since the last call. The kernel notifies some microseconds before it drops the
    /// file's lock.
    pub(super) fn take_closed(&self) -> bool {
        self.closed.swap(false, Ordering::AcqRel)
    }

    /// True if there was a notification since the last call that is not a departure: a file may have been removed.
    pub(super) fn take_changed(&self) -> bool {
        self.changed.swap(false, Ordering::AcqRel)
    }
}

/// Kinds of notification about a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileEvents {
    /// Touched, closed after being open for writing, or removed.
    Changed,
    /// The same, or read. The owner of a liveness file reads it to announce its departure, because no other notification
    /// is as cheap.
    ChangedOrRead,
    /// As [`Self::Changed`], or written to.
    ChangedOrWritten,
}
