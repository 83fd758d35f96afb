//! Look-ahead: prefetches the table entries of pipelined requests before the requests are served.
//!
//! In a large table most of an operation's time is spent waiting for memory. A client that pipelines has sent many
//! requests in one read, so the table can load the entries of all of them at once.
//!
//! Look-ahead must never change a reply, although its guesses can be wrong:
//!
//! - An earlier request of the same read may remove the key.
//! - The table may run an operation for which no entry was prefetched, such as the redemption of a two-phase grant.
//!   That operation uses up the next entry, and all later entries are off by one.
//! - [`upcoming_op`] does not parse arguments, so it also covers requests that turn out to be malformed.
//!
//! Therefore the table treats a prefetched entry as a hint. When the operation runs, it compares the entry's space and
//! key, and searches the index if they differ. A wrong guess costs time, never a wrong reply.

use tenure_core::table::{KeySpace, MAX_PREFETCH, UpcomingOp};
use tenure_core::wire::{Framed, Framer, Lines};

use super::Engine;

/// Number of keys below which the table fits into the CPU cache, so that look-ahead costs more than it saves.
const MIN_KEYS_FOR_LOOK_AHEAD: usize = 1 << 14;
/// Number of bytes below which a read has too few requests for look-ahead to pay.
const MIN_BYTES_FOR_LOOK_AHEAD: usize = 512;

impl Engine {
    /// Prefetches table entries for the requests at the start of `bytes`, and returns the number of requests covered.
    ///
    /// Returns `usize::MAX` if look-ahead does not pay: the caller then does not try again within the same read.
    pub(super) fn look_ahead(&mut self, bytes: &[u8]) -> usize {
        if bytes.len() < MIN_BYTES_FOR_LOOK_AHEAD
            || self.locks.table().sizes().keys < MIN_KEYS_FOR_LOOK_AHEAD
        {
            return usize::MAX;
        }
        let mut upcoming = Upcoming { bytes, framer: Framer::default(), requests: 0 };
        self.locks.prefetch((&mut upcoming).take(MAX_PREFETCH));
        upcoming.requests
    }
}

/// Iterator over the table operations of the upcoming requests, in order.
///
/// It has a framer of its own. The connection's framer must not move on before its requests are served.
struct Upcoming<'a> {
    bytes: &'a [u8],
    framer: Framer,
    /// Requests visited, including those without a table operation: the caller counts requests, not operations.
    requests: usize,
}

impl<'a> Iterator for Upcoming<'a> {
    type Item = UpcomingOp<'a>;

    fn next(&mut self) -> Option<UpcomingOp<'a>> {
        while let Framed::Request { lines, len } = self.framer.next(self.bytes) {
            self.bytes = &self.bytes[len..];
            self.requests += 1;
            if let Some(op) = upcoming_op(lines) {
                return Some(op);
            }
        }
        None
    }
}

/// Guesses the table operation of a request from its command, without parsing its arguments.
fn upcoming_op(lines: Lines<'_>) -> Option<UpcomingOp<'_>> {
    let (space, command) = match lines.command {
        [b's', command] => (KeySpace::Semaphore, command),
        [command] => (KeySpace::Lock, command),
        b"xn" => (KeySpace::Lock, &b'n'),
        b"sxn" => (KeySpace::Semaphore, &b'n'),
        _ => return None,
    };
    let is_renewal = *command == b'n';
    let has_key = matches!(command, b'l' | b'e' | b'w' | b'n' | b'r' | b'x');
    has_key.then_some(UpcomingOp { space, key: lines.key, is_renewal })
}
