//! The place of the only waiter: at the bell beside the lock, or in the record if the owner does not poll bells.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::object::takeover::WriteStamp;
use tenure_core::object::{ObjectDecision, WaiterReads};
use tenure_core::{Rules, Time};

use super::bucket::{BucketDeadline, BucketError, ObjectVersion};
use super::format::{self, RecordExtra};
use super::hold::grant;
use super::inner::{KnownLock, ObjectInner, OwnBell, PutResult, Ring, contention_error};
use crate::store::{Claim, Grant, LeaseStart, Place, Waited};
use crate::{Error, ErrorKind, Result};

/// Time for which a waiter polls at the configured interval; after that it polls at most once per second.
const FAST_POLL_PERIOD: Duration = Duration::from_secs(60);
const SLOW_POLL: Duration = Duration::from_secs(1);
/// Time that a leaving waiter allows, after clearing its bell, for a hand-off that the owner has already begun.
const HANDOFF_GRACE: Duration = Duration::from_millis(200);
/// Timeout of one step of the wait.
const READ_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct ObjectPlace {
    inner: Arc<ObjectInner>,
    claim: Claim,
    name: String,
    id: String,
    known: KnownLock,
    mark: WaiterMark,
    /// Time at which the mark was last written.
    marked: Time,
    /// Start of the wait.
    since: Time,
    /// Our own reads so far, from which the start of a lease that the last owner grants us is derived.
    own_reads: WaiterReads,
    /// A write of ours that may still land, as long as the record has the version that it replaces.
    unsettled: Option<OverwrittenVersion>,
}

/// Version that a write replaces; `None` if there was no object.
#[derive(Debug, PartialEq, Eq)]
struct OverwrittenVersion(Option<ObjectVersion>);

/// Mark by which other clients see that we wait.
#[derive(Clone, Debug)]
pub(super) enum WaiterMark {
    /// The bell, which we wrote at this version.
    Bell(ObjectVersion),
    /// A field in the record.
    Record,
    /// No mark: another client has the place, and we wait for the place too.
    Nothing,
}

/// Result of one step of the wait.
enum WaitStep {
    Granted(Grant),
    Waiting,
    /// Something changed: repeat at once.
    Again,
}

impl ObjectPlace {
    pub(super) fn new(
        inner: &Arc<ObjectInner>,
        claim: &Claim,
        name: String,
        known: KnownLock,
        mark: WaiterMark,
        sent: Time,
    ) -> Self {
        let now = inner.clock.now();
        let id = format::owner(&claim.by, claim.id);
        let (inner, claim) = (Arc::clone(inner), claim.clone());
        let (marked, since, own_reads) =
            (now, now, WaiterReads::new(&known.sight, sent, Rules::ALL));
        Self { inner, claim, name, id, known, mark, marked, since, own_reads, unsettled: None }
    }

    /// Remembers the times of our own last write.
    pub(super) fn stamped(&mut self, stamp: Option<WriteStamp>) {
        if let Some(stamp) = stamp {
            self.own_reads.record_write(stamp);
        }
    }

    /// Remembers that we rang the bell at `begun`.
    fn note_bell(&mut self, bell: OwnBell, begun: Time) {
        (self.mark, self.marked) = (WaiterMark::Bell(bell.version), begun);
        self.stamped(bell.stamp);
    }

    /// Remembers a read. An unsettled write over another version can no longer land.
    fn note_read(&mut self, known: KnownLock) {
        self.unsettled.take_if(|over| over.0 != known.version);
        self.known = known;
    }

    async fn step(&mut self) -> Result<WaitStep> {
        let inner = Arc::clone(&self.inner);
        let until = inner.until(READ_TIMEOUT);
        let sent = inner.clock.now();
        let known = inner.read_lock(&self.name, Some(&self.known), until).await?;
        self.note_read(known);
        let grain = inner.options.grain;
        // As of the reply: until then the version was certainly there.
        let watch = self.own_reads.evidence(self.known.first, self.known.at);
        let sight = &self.known.sight;
        let claimed = sight.claim(&self.id, self.claim.ttl, RecordExtra::default, grain, &watch);
        if claimed == ObjectDecision::AlreadyGranted {
            let lease_start =
                self.own_reads.lease_start(&self.known.sight, self.claim.ttl, sent, grain);
            return Ok(WaitStep::Granted(self.granted(lease_start)));
        }
        self.own_reads.note_ungranted(&self.known.sight, sent);
        match claimed {
            ObjectDecision::Write(mut record) => {
                record.extra.info = Some((*self.claim.by).clone());
                // Set before the await: if this future is dropped there, the write may still land.
                self.unsettled = Some(OverwrittenVersion(self.known.version.clone()));
                let put = inner.put(&self.name, &self.known, record, until).await;
                self.unsettled.take_if(|_| !matches!(put, Ok(PutResult::Unclear(..))));
                match put? {
                    PutResult::Won(known) => {
                        self.known = *known;
                        Ok(WaitStep::Granted(self.granted(LeaseStart::Since(sent))))
                    }
                    // If the unclear write has landed, the next read finds the grant.
                    PutResult::Lost | PutResult::Unclear(..) => Ok(WaitStep::Again),
                    PutResult::Throttled => {
                        inner.wait_write_interval(until).await;
                        Ok(WaitStep::Again)
                    }
                }
            }
            // The waiter named in the record goes first. A bell keeps our place behind it; without one we have no
            // place.
            ObjectDecision::WaiterAhead if !matches!(self.mark, WaiterMark::Bell(_)) => {
                self.without_mark()
            }
            _ => self.keep_mark(until).await,
        }
    }

    /// Rewrites our mark before it expires, and when a new owner of the lock would not see it.
    async fn keep_mark(&mut self, until: BucketDeadline) -> Result<WaitStep> {
        let inner = Arc::clone(&self.inner);
        let bells = self.known.sight.polls_bell();
        let named = self.known.sight.waiter();
        let unseen = match &self.mark {
            WaiterMark::Bell(_) => !bells && named.is_none(),
            WaiterMark::Record => bells || named.is_none_or(|waiter| waiter.id != self.id),
            WaiterMark::Nothing => false,
        };
        let every = match &self.mark {
            WaiterMark::Nothing => inner.options.poll,
            _ => inner.place_life() / 3,
        };
        if !unseen && inner.clock.now().since(self.marked) < every {
            return Ok(WaitStep::Waiting);
        }
        if named.is_some_and(|waiter| waiter.id != self.id) && !bells {
            return Ok(WaitStep::Waiting);
        }
        let begun = inner.clock.now();
        if bells {
            let WaiterMark::Bell(over) = &self.mark else { return self.retake_bell(until).await };
            let over = Some(over.clone());
            match inner.ring(&self.name, over.as_ref(), &self.claim, until).await {
                Ok(Ring::Won(bell)) => self.note_bell(bell, begun),
                Ok(Ring::Lost) => return self.retake_bell(until).await,
                Err(BucketError::Throttled) => return Ok(WaitStep::Waiting),
                Err(error) => return Err(error.explain(&*inner.bucket)),
            }
        } else {
            let Some(record) = &self.known.sight.record else { return Ok(WaitStep::Again) };
            let life = self.known.now(begun) + inner.place_life();
            match inner
                .put(&self.name, &self.known, record.with_waiter(&self.id, life), until)
                .await?
            {
                PutResult::Won(known) => (self.known, self.mark) = (*known, WaiterMark::Record),
                PutResult::Lost | PutResult::Unclear(..) => return Ok(WaitStep::Again),
                PutResult::Throttled => return Ok(WaitStep::Waiting),
            }
        }
        self.marked = begun;
        Ok(WaitStep::Waiting)
    }

    /// Takes the bell in the state that it is found in: ours, by an earlier write; free; or another client's, which
    /// took the place when our mark expired.
    async fn retake_bell(&mut self, until: BucketDeadline) -> Result<WaitStep> {
        let rung = self.inner.read_bell(&self.name, until).await?;
        let next_holder =
            rung.bell.as_ref().map(|bell| bell.next_holder.id.clone()).unwrap_or_default();
        let ours = next_holder == self.id;
        match rung.version {
            Some(version) if ours => {
                (self.mark, self.marked) = (WaiterMark::Bell(version), self.inner.clock.now());
                Ok(WaitStep::Waiting)
            }
            _ if rung.alive && !self.known.sight.owned_by(&next_holder) => self.without_mark(),
            over => match self.inner.ring(&self.name, over.as_ref(), &self.claim, until).await {
                Ok(Ring::Won(bell)) => {
                    self.note_bell(bell, self.inner.clock.now());
                    Ok(WaitStep::Waiting)
                }
                Ok(Ring::Lost) => self.without_mark(),
                Err(BucketError::Throttled) => Ok(WaitStep::Waiting),
                Err(error) => Err(error.explain(&*self.inner.bucket)),
            },
        }
    }

    /// Waits on without a mark, because another client has the place.
    ///
    /// # Errors
    ///
    /// `Contention` for a claim that must not wait for the place.
    fn without_mark(&mut self) -> Result<WaitStep> {
        (self.mark, self.marked) = (WaiterMark::Nothing, self.inner.clock.now());
        if self.claim.fail_if_contended {
            Err(contention_error(&self.known))
        } else {
            Ok(WaitStep::Waiting)
        }
    }

    fn granted(&self, lease_start: LeaseStart) -> Grant {
        grant(&self.inner, &self.claim, self.name.clone(), self.known.clone(), lease_start)
    }

    fn pause(&self) -> Duration {
        let poll = match &self.mark {
            WaiterMark::Nothing => self.inner.options.poll * 4,
            _ => self.inner.options.poll,
        };
        let waited = self.inner.clock.now().since(self.since);
        if waited < FAST_POLL_PERIOD { poll } else { poll.max(SLOW_POLL) }
    }

    /// Releases a grant that we got in the meantime, and removes our mark from the record. True if there was a grant.
    async fn release_late_grant(&mut self, until: BucketDeadline) -> Result<bool> {
        let inner = Arc::clone(&self.inner);
        let known = inner.read_lock(&self.name, None, until).await?;
        self.note_read(known);
        if self.known.sight.owned_by(&self.id) {
            let mut grant = self.granted(LeaseStart::FromConfirm);
            let limit = until.0.since(inner.clock.now());
            return match grant.hold.release(limit).await {
                Err(error) if error.kind() != ErrorKind::NotHeld => Err(error),
                _ => Ok(true),
            };
        }
        let left =
            self.known.sight.record.as_ref().and_then(|record| record.without_waiter(&self.id));
        if let Some(left) = left {
            // If another write comes first, the mark stays and soon expires.
            inner.put(&self.name, &self.known, left, until).await?;
        }
        Ok(false)
    }
}

#[async_trait]
impl Place for ObjectPlace {
    async fn wait(&mut self, limit: Duration) -> Result<Waited> {
        let clock = self.inner.clock.clone();
        let end = clock.now() + limit;
        loop {
            match self.step().await.map_err(|error| error.on(&self.claim.key).at(&*self.inner))? {
                WaitStep::Granted(grant) => return Ok(Waited::Granted(grant)),
                WaitStep::Again if clock.now() < end => {}
                WaitStep::Again | WaitStep::Waiting => {
                    let next = clock.now() + self.pause();
                    if next >= end {
                        clock.sleep_until(end).await;
                        let ahead =
                            matches!(self.mark, WaiterMark::Nothing).then_some(1).or(Some(0));
                        return Ok(Waited::StillQueued { ahead });
                    }
                    clock.sleep_until(next).await;
                }
            }
        }
    }

    async fn abandon(&mut self, limit: Duration) -> Result<()> {
        let inner = Arc::clone(&self.inner);
        let until = inner.until(limit);
        let left = async {
            let rung = inner.read_bell(&self.name, until).await?;
            let ours = rung.bell.as_ref().is_some_and(|bell| bell.next_holder.id == self.id);
            if let (true, Some(version)) = (ours, &rung.version) {
                inner.clear_bell(&self.name, version, until).await;
            }
            let mut released = self.release_late_grant(until).await?;
            if !released && ours && self.known.sight.polls_bell() {
                // An owner that read the bell before we cleared it may still hand the lock to us.
                inner
                    .clock
                    .sleep_until(inner.clock.now() + HANDOFF_GRACE.min(inner.options.poll))
                    .await;
                released = self.release_late_grant(until).await?;
            }
            if released || self.unsettled.is_none() {
                return Ok(());
            }
            // Repeating the claim settles it: the repetition writes over the same version, after which the unsettled
            // write cannot land.
            let message = "an interrupted write may still land";
            Err(Error::new(ErrorKind::Unknown, message))
        };
        let left: Result<()> = left.await;
        left.map_err(|error| error.on(&self.claim.key).at(&*inner))
    }
}
