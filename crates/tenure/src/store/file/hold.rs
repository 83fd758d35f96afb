//! The hold of a granted claim.

use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::FencingToken;

use super::claim::ClaimState;
use super::format::{Mark, QueueLine};
use super::notification::POLL_INTERVAL;
use super::open_files::OpenFiles;
use crate::Result;
use crate::store::{
    Grant, Handle, Hold, HoldEvent, KeepOpen, LeaseStart, Loss, ReleaseInline, Renewed,
};

/// Grant of a claim that has its token. `waiter`: another claim waits.
pub(super) fn grant(claim: &Arc<ClaimState>, token: u64, waiter: bool) -> Grant {
    claim.set_awaited(waiter);
    let hold = FileHold { claim: Arc::clone(claim), unread: false, told: false };
    Grant {
        token: FencingToken::new(0, token),
        lease_start: LeaseStart::NoLease,
        handoff_requested: waiter,
        grants: None,
        hold: Box::new(hold),
    }
}

#[derive(Debug)]
struct FileHold {
    claim: Arc<ClaimState>,
    /// True if a notification has arrived whose cause was not examined yet.
    unread: bool,
    /// True once a hand-off request was reported.
    told: bool,
}

#[async_trait]
impl Hold for FileHold {
    async fn renew(&mut self, _ttl: Duration, _limit: Duration) -> Result<Renewed> {
        let ClaimState { files, queue, .. } = &*self.claim;
        files.check_process()?;
        let now = files.now();
        if self.claim.is_alive(now) != Some(true) || !queue.is_current(now) {
            return Err(self.claim.not_held());
        }
        let lines = queue.read_lines()?;
        match self.claim.find(&lines) {
            Some(_) => Ok(Renewed { handoff_requested: self.is_awaited(&lines) }),
            None => Err(self.claim.not_held()),
        }
    }

    async fn check_handoff(&mut self, _limit: Duration) -> Result<bool> {
        Ok(self.is_awaited(&self.claim.queue.read_lines()?))
    }

    async fn event(&mut self) -> HoldEvent {
        let OpenFiles { clock, hub, .. } = &*Arc::clone(&self.claim.files);
        // Checks that were left out when the promise was taken, so that the grant did not wait for them.
        self.unread |= self.claim.is_unsettled();
        loop {
            let watched = self.claim.is_watched();
            let read = hub.ensure_reader() && watched;
            if self.unread {
                match self.look_around() {
                    Ok(Some(HoldEvent::HandoffRequested)) if self.told => {}
                    Ok(Some(event)) => {
                        self.unread = false;
                        self.told = true;
                        return event;
                    }
                    Ok(None) => {}
                    Err(error) => {
                        let key = &self.claim.queue.key;
                        tracing::debug!(name: "tenure.watch_failed", %key, %error);
                        clock.sleep_until(clock.now() + POLL_INTERVAL).await;
                        continue;
                    }
                }
                self.unread = false;
            }
            if read {
                self.claim.wake.notified().await;
            } else {
                clock.sleep_until(clock.now() + POLL_INTERVAL).await;
            }
            self.unread = true;
        }
    }

    async fn release(&mut self, _limit: Duration) -> Result<()> {
        self.claim.files.check_process()?;
        if self.claim.leave() { Ok(()) } else { Err(self.claim.not_held()) }
    }

    fn handle(&self) -> Option<Handle> {
        None
    }

    async fn detach(&mut self, _limit: Duration) -> Result<()> {
        Ok(())
    }

    fn release_inline(&self) -> Option<Weak<dyn ReleaseInline>> {
        let claim: Arc<dyn ReleaseInline> = Arc::clone(&self.claim) as _;
        Some(Arc::downgrade(&claim))
    }

    fn keep_open(&self) -> Option<Weak<dyn KeepOpen>> {
        let claim: Arc<dyn KeepOpen> = Arc::clone(&self.claim) as _;
        Some(Arc::downgrade(&claim))
    }
}

impl FileHold {
    /// Finds the cause of a notification.
    fn look_around(&self) -> Result<Option<HoldEvent>> {
        let ClaimState { queue, files, .. } = &*self.claim;
        files.check_process()?;
        let now = files.now();
        match self.claim.is_alive(now) {
            Some(true) if queue.is_current(now) => {}
            Some(_) => return Ok(Some(HoldEvent::Lost(Loss::Taken))),
            // Released by ourselves, or reported already.
            None => return Ok(None),
        }
        let lines = queue.read_lines()?;
        // A claim that was cut off is not listed.
        if self.claim.find(&lines).is_none_or(|line| line.mark != Mark::None) {
            self.claim.leave();
            return Ok(Some(HoldEvent::Lost(Loss::Evicted)));
        }
        self.claim.settle();
        Ok(self.is_awaited(&lines).then_some(HoldEvent::HandoffRequested))
    }

    /// True if one of these lines waits.
    fn is_awaited(&self, lines: &[QueueLine]) -> bool {
        let awaited = lines.iter().any(|line| line.token == 0);
        self.claim.set_awaited(awaited);
        awaited
    }
}
