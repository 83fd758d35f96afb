//! Entries that were prefetched for coming operations.

use super::types::KeySpace;

/// Most operations that one [`prefetch`](super::LockTable::prefetch) considers. With many more, the first would be evicted from the
/// nearest cache before its turn.
pub const MAX_PREFETCH: usize = 64;

/// Coming operations and the probable entries of their keys.
#[derive(Debug)]
pub(super) struct Prefetched {
    pub(super) keys: Vec<PrefetchedKey>,
    pub(super) next: usize,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct PrefetchedKey {
    pub(super) space: KeySpace,
    pub(super) is_renewal: bool,
    pub(super) hash: u32,
    /// Entry that probably has the key, or [`NONE`](super::slab::NONE).
    pub(super) id: u32,
}

impl Prefetched {
    pub(super) const NOTHING: Self = Self { keys: Vec::new(), next: 0 };

    /// Probable entry of the next operation's key.
    pub(super) fn next(&mut self) -> Option<u32> {
        let prefetched = self.keys.get(self.next)?;
        self.next += 1;
        Some(prefetched.id)
    }
}
