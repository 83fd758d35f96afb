//! Options of a journal.

use std::path::PathBuf;
use std::time::Duration;

/// Location and treatment of a data directory.
#[derive(Clone, Debug)]
pub struct JournalOptions {
    /// The directory. It is created if it is missing; its parent must exist.
    pub dir: PathBuf,
    /// Longest lease that the server grants.
    pub max_lease: Duration,
    /// Size of a segment.
    pub segment_bytes: u64,
    /// Opens a directory in spite of missing and damaged files: all holds are lost, nothing is granted until the
    /// longest lease has passed, and fencing numbers continue to grow.
    pub accept_loss: bool,
    /// Fencing numbers start above this number.
    pub fence_floor: u64,
}

impl JournalOptions {
    /// Options with a longest lease of one day, segments of 64 MiB, and no loss accepted.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self {
            dir: dir.into(),
            max_lease: Duration::from_secs(24 * 60 * 60),
            segment_bytes: 64 << 20,
            accept_loss: false,
            fence_floor: 0,
        }
    }
}
