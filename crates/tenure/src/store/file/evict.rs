//! Eviction: ends the hold of another process.

use std::time::Duration;

use tenure_core::Key;

use super::format::Mark;
use super::liveness;
use super::open_files::{FIRST_PAUSE, LOCK_LIMIT, LONGEST_PAUSE, OpenFiles};
use crate::Result;
use crate::store::KeySpace;

/// Time that an evicted holder has to release by itself.
const RELEASE_GRACE: Duration = Duration::from_millis(250);

/// Ends the hold with this token; false if no hold has it.
pub(super) async fn evict(
    files: &OpenFiles,
    key: &Key,
    space: KeySpace,
    token: u64,
) -> Result<bool> {
    if token == 0 || !files.has_queue(key, space) {
        return Ok(false);
    }
    let queue = files.queue(key, space)?;
    let marked = files.with_locked(&queue, LOCK_LIMIT, |queue| {
        let line = queue.lines().iter().find(|line| line.token == token).copied();
        line.map_or(Ok(()), |line| queue.mark(line, Mark::Evicted))?;
        Ok(line)
    });
    let Some(line) = marked.await?.flatten() else { return Ok(false) };
    liveness::touch(&files.folder, line.owner);
    let clock = &files.clock;
    let end = clock.now() + RELEASE_GRACE;
    let mut pause = FIRST_PAUSE;
    while clock.now() < end {
        let gone = !queue.read_lines()?.iter().any(|other| other.seq == line.seq);
        if gone {
            return Ok(true);
        }
        clock.sleep_until(clock.now() + pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
    let cut_off = files.with_locked(&queue, LOCK_LIMIT, |queue| {
        let still = queue.lines().iter().find(|other| other.seq == line.seq).copied();
        still.map_or(Ok(()), |line| queue.mark(line, Mark::CutOff))
    });
    cut_off.await?;
    liveness::touch(&files.folder, line.owner);
    Ok(true)
}
