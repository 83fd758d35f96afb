//! The place to wait in: at the bell beside the lock, or in the record where the owner knows no bell.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::object::takeover::WriteStamp;
use tenure_core::object::{ObjectDecision, WaiterReads};
use tenure_core::{Rules, Time};

use super::format::{self, More};
use super::inner::{Inner, Known, OwnBell, Put, Ring, awaited};
use super::seam::{Trouble, Until, Version};
use crate::store::{Claim, Grant, LeaseStart, Place, Waited};
use crate::{Error, ErrorKind, Result};

/// How long a waiter looks often; who waits longer than that looks at most once a second.
const KEEN: Duration = Duration::from_secs(60);
const PATIENT: Duration = Duration::from_secs(1);
/// After its bell is gone, how long a waiter that leaves gives an owner that had heard it to hand over.
const HEARD: Duration = Duration::from_millis(200);
/// The longest that one look may take.
const LOOK_LIMIT: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct ObjectPlace {
    inner: Arc<Inner>,
    claim: Claim,
    name: String,
    id: String,
    known: Known,
    mark: Mark,
    /// When the mark was last made.
    marked: Time,
    since: Time,
    /// From when a grant counts that the last owner makes to us.
    looks: WaiterReads,
    /// A write of ours that may land yet, as long as the record is what it was written over.
    unsettled: Option<Over>,
}

/// The version that a write is to replace; `None` where there was nothing.
#[derive(Debug, PartialEq, Eq)]
struct Over(Option<Version>);

/// How others see that we wait.
#[derive(Clone, Debug)]
pub(super) enum Mark {
    /// At the bell, which we wrote as this version.
    Bell(Version),
    /// In the record.
    Record,
    /// Not at all: another has the place, and we wait for that as well.
    Nothing,
}

/// What one look came to.
enum Step {
    Granted(Grant),
    Waiting,
    /// Something changed: look again at once.
    Again,
}

impl ObjectPlace {
    pub(super) fn new(
        inner: &Arc<Inner>,
        claim: &Claim,
        name: String,
        known: Known,
        mark: Mark,
        sent: Time,
    ) -> Self {
        let now = inner.clock.now();
        let id = format::owner(&claim.by, claim.id);
        let (inner, claim) = (Arc::clone(inner), claim.clone());
        let (marked, since, looks) = (now, now, WaiterReads::new(&known.sight, sent, Rules::ALL));
        Self { inner, claim, name, id, known, mark, marked, since, looks, unsettled: None }
    }

    /// Notes how the store stamped our own last write.
    pub(super) fn stamped(&mut self, stamp: Option<WriteStamp>) {
        if let Some(stamp) = stamp {
            self.looks.record_write(stamp);
        }
    }

    /// Notes that our bell rings since `begun`.
    fn rings(&mut self, bell: OwnBell, begun: Time) {
        (self.mark, self.marked) = (Mark::Bell(bell.version), begun);
        self.stamped(bell.stamp);
    }

    /// Notes what a look found: what was to be written over another version will not land.
    fn found(&mut self, known: Known) {
        self.unsettled.take_if(|over| over.0 != known.version);
        self.known = known;
    }

    async fn step(&mut self) -> Result<Step> {
        let inner = Arc::clone(&self.inner);
        let until = inner.until(LOOK_LIMIT);
        let sent = inner.clock.now();
        let known = inner.look(&self.name, Some(&self.known), until).await?;
        self.found(known);
        let grain = inner.options.grain;
        // As of the reply: the version was there until then.
        let watch = self.looks.evidence(self.known.first, self.known.at);
        let sight = &self.known.sight;
        let claimed = sight.claim(&self.id, self.claim.ttl, More::default, grain, &watch);
        if claimed == ObjectDecision::AlreadyGranted {
            let counts = self.looks.lease_start(&self.known.sight, self.claim.ttl, sent, grain);
            return Ok(Step::Granted(self.granted(counts)));
        }
        self.looks.note_ungranted(&self.known.sight, sent);
        match claimed {
            ObjectDecision::Write(mut record) => {
                record.extra.info = Some((*self.claim.by).clone());
                // Whoever cuts this short leaves it open whether it lands.
                self.unsettled = Some(Over(self.known.version.clone()));
                let put = inner.put(&self.name, &self.known, record, until).await;
                self.unsettled.take_if(|_| !matches!(put, Ok(Put::Unclear(..))));
                match put? {
                    Put::Won(known) => {
                        self.known = *known;
                        Ok(Step::Granted(self.granted(LeaseStart::Since(sent))))
                    }
                    // A write that landed unheard is found by the next look.
                    Put::Lost | Put::Unclear(..) => Ok(Step::Again),
                    Put::Throttled => {
                        inner.cool(until).await;
                        Ok(Step::Again)
                    }
                }
            }
            // Who is named in the record goes first; the bell keeps our place behind it.
            ObjectDecision::WaiterAhead if !matches!(self.mark, Mark::Bell(_)) => self.unmarked(),
            _ => self.keep_mark(until).await,
        }
    }

    /// Makes our mark again before it ends, and where the lock's new owner would not see it.
    async fn keep_mark(&mut self, until: Until) -> Result<Step> {
        let inner = Arc::clone(&self.inner);
        let bells = self.known.sight.polls_bell();
        let named = self.known.sight.waiter();
        let unseen = match &self.mark {
            Mark::Bell(_) => !bells && named.is_none(),
            Mark::Record => bells || named.is_none_or(|waiter| waiter.id != self.id),
            Mark::Nothing => false,
        };
        let every = match &self.mark {
            Mark::Nothing => inner.options.poll,
            _ => inner.place_life() / 3,
        };
        if !unseen && inner.clock.now().since(self.marked) < every {
            return Ok(Step::Waiting);
        }
        if named.is_some_and(|waiter| waiter.id != self.id) && !bells {
            return Ok(Step::Waiting);
        }
        let begun = inner.clock.now();
        if bells {
            let Mark::Bell(over) = &self.mark else { return self.displaced(until).await };
            let over = Some(over.clone());
            match inner.ring(&self.name, over.as_ref(), &self.claim, until).await {
                Ok(Ring::Won(bell)) => self.rings(bell, begun),
                Ok(Ring::Lost) => return self.displaced(until).await,
                Err(Trouble::Throttled) => return Ok(Step::Waiting),
                Err(trouble) => return Err(trouble.explain(&*inner.bucket)),
            }
        } else {
            let Some(record) = &self.known.sight.record else { return Ok(Step::Again) };
            let life = self.known.now(begun) + inner.place_life();
            match inner
                .put(&self.name, &self.known, record.with_waiter(&self.id, life), until)
                .await?
            {
                Put::Won(known) => (self.known, self.mark) = (*known, Mark::Record),
                Put::Lost | Put::Unclear(..) => return Ok(Step::Again),
                Put::Throttled => return Ok(Step::Waiting),
            }
        }
        self.marked = begun;
        Ok(Step::Waiting)
    }

    /// Takes the bell as it is found: our own, by an earlier write; free; or of another, who took us for gone.
    async fn displaced(&mut self, until: Until) -> Result<Step> {
        let rung = self.inner.listen(&self.name, until).await?;
        let heir = rung.bell.as_ref().map(|bell| bell.heir.id.clone()).unwrap_or_default();
        let ours = heir == self.id;
        match rung.version {
            Some(version) if ours => {
                (self.mark, self.marked) = (Mark::Bell(version), self.inner.clock.now());
                Ok(Step::Waiting)
            }
            _ if rung.alive && !self.known.sight.owned_by(&heir) => self.unmarked(),
            over => match self.inner.ring(&self.name, over.as_ref(), &self.claim, until).await {
                Ok(Ring::Won(bell)) => {
                    self.rings(bell, self.inner.clock.now());
                    Ok(Step::Waiting)
                }
                Ok(Ring::Lost) => self.unmarked(),
                Err(Trouble::Throttled) => Ok(Step::Waiting),
                Err(trouble) => Err(trouble.explain(&*self.inner.bucket)),
            },
        }
    }

    /// Another has the place: who does not want to wait for that as well hears of it.
    fn unmarked(&mut self) -> Result<Step> {
        (self.mark, self.marked) = (Mark::Nothing, self.inner.clock.now());
        if self.claim.unless_awaited { Err(awaited(&self.known)) } else { Ok(Step::Waiting) }
    }

    fn granted(&self, counts: LeaseStart) -> Grant {
        self.inner.granted(&self.claim, self.name.clone(), self.known.clone(), counts)
    }

    fn pause(&self) -> Duration {
        let poll = match &self.mark {
            Mark::Nothing => self.inner.options.poll * 4,
            _ => self.inner.options.poll,
        };
        let waited = self.inner.clock.now().since(self.since);
        if waited < KEEN { poll } else { poll.max(PATIENT) }
    }

    /// Gives back what was granted meanwhile; whether there was something.
    async fn give_back(&mut self, until: Until) -> Result<bool> {
        let inner = Arc::clone(&self.inner);
        let known = inner.look(&self.name, None, until).await?;
        self.found(known);
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
            // Where another writes at the same moment, the mark ends by itself soon.
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
                Step::Granted(grant) => return Ok(Waited::Granted(grant)),
                Step::Again if clock.now() < end => {}
                Step::Again | Step::Waiting => {
                    let next = clock.now() + self.pause();
                    if next >= end {
                        clock.sleep_until(end).await;
                        let ahead = matches!(self.mark, Mark::Nothing).then_some(1).or(Some(0));
                        return Ok(Waited::Still { ahead });
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
            let rung = inner.listen(&self.name, until).await?;
            let ours = rung.bell.as_ref().is_some_and(|bell| bell.heir.id == self.id);
            if let (true, Some(version)) = (ours, &rung.version) {
                inner.silence(&self.name, version, until).await;
            }
            let mut given = self.give_back(until).await?;
            if !given && ours && self.known.sight.polls_bell() {
                // An owner that had heard the bell before may be about to hand over.
                inner.clock.sleep_until(inner.clock.now() + HEARD.min(inner.options.poll)).await;
                given = self.give_back(until).await?;
            }
            if given || self.unsettled.is_none() {
                return Ok(());
            }
            // Whoever claims again writes over the same version, and by that nothing else will.
            let message = "a write that was cut short may land yet";
            Err(Error::new(ErrorKind::Unknown, message))
        };
        let left: Result<()> = left.await;
        left.map_err(|error| error.on(&self.claim.key).at(&*inner))
    }
}
