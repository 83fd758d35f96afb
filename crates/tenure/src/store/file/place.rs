//! The place of a claim that waits in a queue.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::claim::{ClaimState, Turn};
use super::hold;
use super::notification::POLL_INTERVAL;
use super::open_files::{LOCK_LIMIT, OpenFiles};
use crate::Result;
use crate::store::{Place, Waited};

/// First pause after the kernel's notification that a liveness file is being closed; each later pause is twice as long.
const FIRST_CLOSING_PAUSE: Duration = Duration::from_micros(50);
/// Longest of these pauses.
const LONGEST_CLOSING_PAUSE: Duration = Duration::from_secs(1);
/// Time for which a waiter relies on notifications before it reads the queue by itself.
const BACKSTOP_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct FilePlace(Arc<ClaimState>);

impl FilePlace {
    pub(super) fn new(claim: &Arc<ClaimState>) -> Self {
        Self(Arc::clone(claim))
    }
}

#[async_trait]
impl Place for FilePlace {
    async fn wait(&mut self, limit: Duration) -> Result<Waited> {
        let Self(claim) = self;
        let OpenFiles { clock, hub, .. } = &*claim.files;
        claim.files.check_process()?;
        let end = clock.now() + limit;
        let (mut blocked, mut pause, mut called) = (Vec::new(), None, false);
        loop {
            // If a predecessor woke us, notifications are being read.
            let read = called || hub.ensure_reader();
            let (by, ahead, watched) = match claim.take_turn(limit.min(LOCK_LIMIT), called).await? {
                Turn::Granted { token, waiter } => {
                    return Ok(Waited::Granted(hold::grant(claim, token, waiter)));
                }
                Turn::Gone => return Ok(Waited::Gone),
                // The queue was read before the watch existed: a claim that left in between did not wake us.
                Turn::Blocked { unseen: true, .. } => continue,
                Turn::Blocked { by, ahead, watched, .. } => (by, ahead, watched),
            };
            let now = clock.now();
            if now >= end {
                return Ok(Waited::StillQueued { ahead: Some(ahead) });
            }
            if by != blocked {
                (blocked, pause) = (by, None);
            }
            if claim.wake.take_closed() {
                pause = Some(FIRST_CLOSING_PAUSE);
            }
            let look = match pause {
                Some(pause) => now + pause,
                None if !watched || !read => now + POLL_INTERVAL,
                None => now + BACKSTOP_INTERVAL,
            };
            tokio::select! {
                biased;
                () = claim.wake.notified() => called = !claim.wake.take_changed(),
                () = clock.sleep_until(look.min(end)) => {
                    called = false;
                    pause = pause.map(|pause| (pause * 2).min(LONGEST_CLOSING_PAUSE));
                }
            }
        }
    }

    async fn abandon(&mut self, _limit: Duration) -> Result<()> {
        self.0.files.check_process()?;
        self.0.leave();
        Ok(())
    }
}
