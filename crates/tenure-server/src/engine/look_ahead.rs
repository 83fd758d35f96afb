//! The requests of one read, seen before they are served.

use tenure_core::table::{KeySpace, MAX_PREFETCH, UpcomingOp};
use tenure_core::wire::{Framed, Framer, Lines};

use super::Engine;

/// With fewer keys the table is in the cache, and looking ahead costs more than it saves.
const MIN_KEYS_FOR_LOOK_AHEAD: usize = 1 << 14;
/// Fewer bytes are fewer requests than it pays for.
const MIN_BYTES_FOR_LOOK_AHEAD: usize = 512;

impl Engine {
    /// Prepares the table for the requests that `bytes` begin with, where that pays, and says for how many.
    pub(super) fn look_ahead(&mut self, bytes: &[u8]) -> usize {
        if bytes.len() < MIN_BYTES_FOR_LOOK_AHEAD
            || self.table.sizes().keys < MIN_KEYS_FOR_LOOK_AHEAD
        {
            return usize::MAX;
        }
        let mut upcoming = Upcoming { bytes, framer: Framer::default(), count: 0 };
        self.table.prefetch((&mut upcoming).take(MAX_PREFETCH));
        upcoming.count
    }
}

/// What the table will be asked, in order.
struct Upcoming<'a> {
    bytes: &'a [u8],
    framer: Framer,
    /// Requests so far, also those that the table has no part in.
    count: usize,
}

impl<'a> Iterator for Upcoming<'a> {
    type Item = UpcomingOp<'a>;

    fn next(&mut self) -> Option<UpcomingOp<'a>> {
        while let Framed::Request { lines, len } = self.framer.next(self.bytes) {
            self.bytes = &self.bytes[len..];
            self.count += 1;
            if let Some(coming) = coming(lines) {
                return Some(coming);
            }
        }
        None
    }
}

/// What a request will ask of the table. A guess will do.
fn coming(lines: Lines<'_>) -> Option<UpcomingOp<'_>> {
    let (space, command) = match lines.command {
        [b's', command] => (KeySpace::Semaphore, command),
        [command] => (KeySpace::Lock, command),
        b"xn" => (KeySpace::Lock, &b'n'),
        b"sxn" => (KeySpace::Semaphore, &b'n'),
        _ => return None,
    };
    let renews = *command == b'n';
    let keyed = matches!(command, b'l' | b'e' | b'w' | b'n' | b'r' | b'x');
    keyed.then_some(UpcomingOp { space, key: lines.key, is_renewal: renews })
}
