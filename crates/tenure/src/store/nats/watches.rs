//! The running watches of a store.

use std::collections::HashMap;
use std::sync::MutexGuard;

use tokio::sync::watch;

use crate::mutex::Mutex;

/// Running watches of a store by subject. A watch runs as long as it has receivers.
#[derive(Default)]
pub(super) struct Watches(Mutex<HashMap<String, watch::Receiver<u64>>>);

impl Watches {
    /// Records a watch that has started.
    pub(super) fn insert(&self, subject: &str, changes: watch::Receiver<u64>) {
        self.lock().insert(subject.to_owned(), changes);
    }

    /// Receiver of a watch that runs already.
    pub(super) fn running(&self, subject: &str) -> Option<watch::Receiver<u64>> {
        let mut watches = self.lock();
        // A receiver whose sender is gone belongs to a watch that ended.
        watches.retain(|_, changes| changes.has_changed().is_ok());
        watches.get(subject).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, watch::Receiver<u64>>> {
        self.0.lock()
    }
}
