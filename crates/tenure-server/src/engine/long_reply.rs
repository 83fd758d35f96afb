//! Progress of a reply that is written in slices, so that a large table does not delay other requests.

use tenure_core::table::KeySpace;

/// Progress of a reply that is written in slices.
#[derive(Debug)]
pub(super) struct LongReply {
    /// Index into [`SECTIONS`]; beyond its end for a [`pause`](Self::pause).
    pub(super) section: usize,
    /// Table slot at which the next slice begins.
    pub(super) next_slot: usize,
    /// True until the section has its first element.
    pub(super) section_is_empty: bool,
    /// True once the opening brace was written.
    pub(super) begun: bool,
    /// Number of connections when the request arrived.
    pub(super) connections: usize,
}

impl LongReply {
    pub(super) fn new(connections: usize) -> Self {
        Self { section: 0, next_slot: 0, section_is_empty: true, begun: false, connections }
    }

    /// Reply without content, to block a connection until its output was sent.
    pub(super) fn pause() -> Self {
        Self { section: SECTIONS.len() + 1, begun: true, ..Self::new(0) }
    }
}

/// Lists of the reply: name, key space, and true for the list of idle keys.
pub(super) const SECTIONS: [(&str, KeySpace, bool); 4] = [
    ("locks", KeySpace::Lock, false),
    ("semaphores", KeySpace::Semaphore, false),
    ("idle_locks", KeySpace::Lock, true),
    ("idle_semaphores", KeySpace::Semaphore, true),
];
