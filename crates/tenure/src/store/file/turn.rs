//! The order of turns: which claims have to leave before another has its turn.

use super::format::QueueLine;
use super::layout::Folder;
use super::liveness;
use super::locked_queue::LockedQueue;
use crate::Result;
use crate::store::Mode;

/// Owners of the claims that have to leave before a claim of this mode has its turn; empty if it has come. Only those
/// that must be watched are returned, and dead ones are removed.
///
/// `watch` is called with each owner before it is checked.
pub(super) fn blockers(
    folder: &Folder,
    queue: &mut LockedQueue<'_>,
    seq: u64,
    mode: Mode,
    mut watch: impl FnMut(u64),
) -> Result<Vec<u64>> {
    loop {
        let lines = queue.lines();
        let ahead = &lines[..lines.partition_point(|line| line.seq < seq)];
        let last = ahead.len().saturating_sub(1);
        let candidates: Vec<QueueLine> = match mode {
            // As long as the claim directly before us is there, it is not our turn, whatever the others do.
            Mode::Exclusive => ahead[last..].to_vec(),
            Mode::Shared => {
                let exclusive = |line: &&QueueLine| line.mode == Mode::Exclusive;
                ahead.iter().rev().find(exclusive).copied().into_iter().collect()
            }
            Mode::Slot { limit } => {
                let limit = usize::try_from(limit.max(1)).unwrap_or(usize::MAX);
                match ahead.len() {
                    fewer if fewer < limit => Vec::new(),
                    full if full == limit => ahead.to_vec(),
                    // The claim directly before us waits too, and wakes us when it no longer does.
                    _ => ahead[last..].to_vec(),
                }
            }
        };
        let before = queue.lines().len();
        for line in &candidates {
            watch(line.owner);
            if !liveness::is_alive(folder, line.owner) {
                queue.remove(*line)?;
            }
        }
        if queue.lines().len() == before {
            return Ok(candidates.iter().map(|line| line.owner).collect());
        }
    }
}
