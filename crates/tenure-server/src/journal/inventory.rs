//! Names of the files in a directory.

use super::disk::Disk;
use super::error::JournalError;
use super::facts;
use super::format::FileKind;
use super::read::file_name;
use super::storage::QUARANTINE_DIR;

/// Files of the directory.
#[derive(Debug, Default)]
pub(super) struct Inventory {
    /// Sequences of the segments, ascending.
    pub(super) segments: Vec<u64>,
    /// Sequences of the snapshots, ascending.
    pub(super) snapshots: Vec<u64>,
    pub(super) unfinished: Vec<String>,
    /// True if a crash of an earlier run left a quarantine.
    pub(super) quarantine: bool,
    /// A file that no server wrote, if there is one.
    pub(super) foreign: Option<String>,
}

impl Inventory {
    pub(super) fn take(disk: &Disk) -> Result<Self, JournalError> {
        let mut inventory = Self::default();
        for name in disk.names()? {
            let sequence = |prefix| {
                let digits = name.strip_prefix(prefix)?;
                let sequence = u64::from_str_radix(digits, 16).ok()?;
                // Only the canonical spelling: two names must not mean the same sequence. The limit leaves room for
                // later sequences.
                (format!("{sequence:016x}") == digits && sequence < 1 << 62).then_some(sequence)
            };
            if let Some(sequence) = sequence("journal-") {
                inventory.segments.push(sequence);
            } else if let Some(sequence) = sequence("snapshot-") {
                inventory.snapshots.push(sequence);
            } else if let Some(whole) = name.strip_suffix(".tmp") {
                let ours = ["facts.", "journal-", "snapshot-"];
                if ours.iter().any(|prefix| whole.starts_with(prefix)) {
                    inventory.unfinished.push(name);
                }
            } else if name == QUARANTINE_DIR {
                inventory.quarantine = true;
            } else if !facts::FILE_NAMES.contains(&name.as_str()) {
                inventory.foreign = Some(name);
            }
        }
        inventory.segments.sort_unstable();
        inventory.snapshots.sort_unstable();
        Ok(inventory)
    }

    pub(super) fn names(&self) -> impl Iterator<Item = (u64, String)> {
        let segments = self.segments.iter().map(|at| (*at, file_name(FileKind::Segment, *at)));
        segments.chain(self.snapshots.iter().map(|at| (*at, file_name(FileKind::Snapshot, *at))))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.segments.is_empty() && self.snapshots.is_empty()
    }
}

/// Removes the files before sequence `start`, and unfinished files.
pub(super) fn remove_before(disk: &Disk, start: u64) -> Result<(), JournalError> {
    let inventory = Inventory::take(disk)?;
    for (_, name) in inventory.names().filter(|(sequence, _)| *sequence < start) {
        disk.remove(&name)?;
    }
    inventory.unfinished.iter().try_for_each(|name| disk.remove(name))
}
