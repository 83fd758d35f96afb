//! The acquire loop: drives the acquire machine of `tenure-core` against a store, then continues as the keeper.

use std::convert::Infallible;
use std::future::{Future, pending};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tenure_core::acquire::{Acquire, AcquireAnswer, AcquireCommand, AcquireInput, RequestFailure};
use tenure_core::keeper::Granted;
use tenure_core::lease::Lease;
use tenure_core::{Key, Machine as _, Time};
use tokio::sync::oneshot;
use tracing::Instrument as _;

use crate::drive::Drive;
use crate::guard::{Guard, HoldCallbacks, HoldContext, Keep};
use crate::outage::OutageMonitor;
use crate::race::{Either, race};
use crate::store::{self, Claim, Contended, Grant, Identity, Place, Store, Version, Waited};
use crate::telemetry::{self, Labels};
use crate::{Clock, Error, ErrorKind, Result};

/// Task that owns an acquisition from its first claim on, and then the hold.
///
/// The caller has only the other end of a channel: dropping the caller's future never cuts off a request to the store.
pub(crate) struct AcquireTask {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) clock: Clock,
    pub(crate) claim: Claim,
    pub(crate) lease: Lease,
    pub(crate) callbacks: HoldCallbacks,
    pub(crate) caller: Caller,
    pub(crate) machine: Acquire,
    pub(crate) labels: Labels,
    pub(crate) outage: OutageMonitor,
    /// Treats a denial by a store that worked before as permanent.
    pub(crate) fail_fast: bool,
}

impl AcquireTask {
    pub(crate) async fn run(self) {
        let (key, store) = (self.claim.key.clone(), Arc::clone(&self.store));
        let acquiring = tracing::debug_span!("lock.acquire", %key, %store);
        let Some(keep) = self.acquire().instrument(acquiring).await else { return };
        // The caller is runnable now. Let it run before the first work of the keeper.
        tokio::task::yield_now().await;
        keep.run().instrument(tracing::debug_span!("lock.hold", %key, %store)).await;
    }

    /// Runs the acquisition to its end. Returns the keeper once the guard is delivered; `None` if nothing was acquired.
    async fn acquire(self) -> Option<Keep> {
        let Self { store, clock, mut claim, lease, callbacks, caller, machine, labels, .. } = self;
        let (outage, fail_fast) = (self.outage, self.fail_fast);
        let (asked, pid) = (clock.now(), std::process::id());
        let wait = labels.waits(asked);
        let mut steering = AcquireDriver {
            store: Arc::clone(&store),
            key: claim.key.clone(),
            outage,
            fail_fast,
            drive: Drive { machine, clock, labels },
            caller,
            found: AcquireFindings::default(),
            asked,
            outcome: "cancelled",
        };
        let mut has = AcquireState::default();
        let mut next = None;
        loop {
            let command = match next.take().or_else(|| steering.next()) {
                Some(command) => command,
                None => steering.rest().await,
            };
            match command {
                AcquireCommand::Finish => break,
                AcquireCommand::Claim { queue, .. } => claim.queue = queue,
                _ => {}
            }
            next = has.obey(command, &store, &claim, &mut steering).await;
        }
        let AcquireDriver { drive: Drive { clock, labels, .. }, caller, found, outcome, .. } =
            steering;
        let acquired = found.acquired.zip(has.grant);
        wait.over(if acquired.is_some() { "acquired" } else { outcome }, clock.now());
        if has.may_be_marked {
            let withdrawing = withdraw(Arc::clone(&store), claim.clone(), lease.request_limit());
            if acquired.is_some() {
                // Beside the keeper, whose first renewal must not wait for it.
                tokio::spawn(withdrawing);
            } else {
                withdrawing.await;
            }
        }
        let ((sent, deadline), grant) = acquired?;
        let granted = Granted { sent, deadline, handoff_requested: grant.handoff_requested };
        let Grant { token, grants, hold, .. } = grant;
        let (key, released) = (claim.key, AtomicBool::new(false));
        let scene =
            HoldContext { store, key, token, grants, lease, clock, callbacks, pid, released };
        let (guard, keep) = Guard::new(scene, granted, hold, labels);
        // If the caller has gone away, the guard is dropped here, and the keeper releases the hold.
        caller.give(Ok(guard));
        Some(keep)
    }
}

/// Place or grant that the acquisition has at the store.
#[derive(Default)]
struct AcquireState {
    place: Option<Box<dyn Place>>,
    grant: Option<Grant>,
    /// True if a claim that waits was answered with `Contended`: the store may have marked it.
    may_be_marked: bool,
}

impl AcquireState {
    /// Executes a command of the machine and reports the result to it. Returns the command that interrupted the
    /// request, if any.
    async fn obey(
        &mut self,
        command: AcquireCommand,
        store: &Arc<dyn Store>,
        claim: &Claim,
        steering: &mut AcquireDriver,
    ) -> Option<AcquireCommand> {
        match command {
            AcquireCommand::Claim { limit, .. } => {
                let answer = steering.timed("claim", store.claim(claim, limit)).await;
                if let Ok(Ok(store::Answer::Contended(_))) = &answer {
                    self.may_be_marked |= claim.queue;
                }
                self.claimed(answer, steering)
            }
            AcquireCommand::Wait { limit } => {
                let waited = match &mut self.place {
                    Some(place) => steering.during(place.wait(limit)).await,
                    None => Ok(Ok(Waited::Gone)),
                };
                self.waited(waited, steering)
            }
            AcquireCommand::Watch => {
                let seen = steering.found.busy.as_ref().map(|busy| busy.version);
                let watched = steering.during(watch(store, claim, seen)).await;
                settle(watched, steering, |()| AcquireInput::Changed)
            }
            AcquireCommand::Confirm { limit } => {
                let renewed = match &mut self.grant {
                    Some(grant) => {
                        steering.timed("renew", grant.hold.renew(claim.ttl, limit)).await
                    }
                    None => Ok(Err(gone(claim))),
                };
                settle_result(renewed, steering, AcquireInput::Confirmed)
            }
            AcquireCommand::Release { limit } => {
                let released = match &mut self.grant {
                    Some(grant) => steering.timed("release", grant.hold.release(limit)).await,
                    None => Ok(Err(gone(claim))),
                };
                settle_result(released, steering, AcquireInput::Released)
            }
            AcquireCommand::Abandon { limit } => {
                let left = match &mut self.place {
                    Some(place) => steering.timed("abandon", place.abandon(limit)).await,
                    None => Ok(Err(gone(claim))),
                };
                settle_result(left, steering, AcquireInput::Released)
            }
            AcquireCommand::Answer(_) | AcquireCommand::Finish => None,
        }
    }

    fn claimed(
        &mut self,
        answer: Raced<Result<store::Answer>>,
        steering: &mut AcquireDriver,
    ) -> Option<AcquireCommand> {
        let input = match answer {
            Err(command) => return Some(command),
            Ok(Ok(store::Answer::Granted(grant))) => {
                let counts = grant.lease_start;
                self.grant = Some(grant);
                AcquireInput::Granted(counts)
            }
            Ok(Ok(store::Answer::Queued(place))) => {
                self.place = Some(place);
                AcquireInput::Queued
            }
            Ok(Ok(store::Answer::Contended(busy))) => {
                let retry_after = busy.retry_after;
                steering.found.busy = Some(busy);
                AcquireInput::Contended { retry_after }
            }
            Ok(Err(error)) => {
                steering.failed(error);
                steering.caller.placed();
                return None;
            }
        };
        steering.drive.handle(input);
        steering.caller.placed();
        None
    }

    fn waited(
        &mut self,
        waited: Raced<Result<Waited>>,
        steering: &mut AcquireDriver,
    ) -> Option<AcquireCommand> {
        match waited {
            Err(command) => return Some(command),
            Ok(Ok(Waited::Granted(grant))) => {
                let counts = grant.lease_start;
                self.grant = Some(grant);
                self.place = None;
                steering.drive.handle(AcquireInput::Granted(counts));
            }
            Ok(Ok(Waited::StillQueued { ahead })) => {
                let AcquireDriver { key, store, .. } = &*steering;
                tracing::trace!(name: "tenure.waiting", %key, %store, ahead);
                steering.drive.handle(AcquireInput::StillQueued);
            }
            Ok(Ok(Waited::Gone)) => {
                self.place = None;
                steering.drive.handle(AcquireInput::PlaceLost);
            }
            Ok(Err(error)) => steering.failed(error),
        }
        None
    }
}

/// Removes the mark of a claim that has ended.
async fn withdraw(store: Arc<dyn Store>, claim: Claim, limit: Duration) {
    if let Err(error) = store.withdraw(&claim, limit).await {
        tracing::debug!(name: "tenure.withdraw_failed", key = %claim.key, %store, %error);
    }
}

/// Resolves when the key changes, if the store pushes changes. A failed watch never resolves: the machine claims again
/// after its backstop interval.
async fn watch(store: &Arc<dyn Store>, claim: &Claim, seen: Option<Version>) {
    if let Some(seen) = seen.filter(|_| store.capabilities().push) {
        match store.changed(&claim.key, claim.mode.space(), seen).await {
            Ok(()) => return,
            Err(error) => {
                tracing::debug!(name: "tenure.watch_failed", key = %claim.key, %store, %error);
            }
        }
    }
    pending::<()>().await;
}

fn settle<T>(
    raced: Raced<T>,
    steering: &mut AcquireDriver,
    input: impl FnOnce(T) -> AcquireInput,
) -> Option<AcquireCommand> {
    match raced {
        Err(command) => Some(command),
        Ok(result) => {
            steering.drive.handle(input(result));
            None
        }
    }
}

fn settle_result<T>(
    raced: Raced<Result<T>>,
    steering: &mut AcquireDriver,
    done: AcquireInput,
) -> Option<AcquireCommand> {
    match raced {
        Ok(Err(error)) if error.is_refusal() => steering.drive.handle(AcquireInput::Refused),
        Ok(Err(error)) => steering.failed(error),
        Ok(Ok(_)) => steering.drive.handle(done),
        Err(command) => return Some(command),
    }
    None
}

fn gone(claim: &Claim) -> Error {
    Error::new(ErrorKind::NotHeld, "nothing is left to release").on(&claim.key)
}

/// Driver of the machine, with the caller and the facts for the caller's answer.
struct AcquireDriver {
    store: Arc<dyn Store>,
    key: Key,
    drive: Drive<Acquire>,
    outage: OutageMonitor,
    fail_fast: bool,
    caller: Caller,
    found: AcquireFindings,
    asked: Time,
    /// Outcome for metrics, unless the lock was acquired.
    outcome: &'static str,
}

/// Facts for the answer to the caller.
#[derive(Default)]
struct AcquireFindings {
    acquired: Option<(Time, Time)>,
    busy: Option<Contended>,
    error: Option<Error>,
}

/// Result of a request, or the command that interrupted it.
type Raced<T> = std::result::Result<T, AcquireCommand>;

impl AcquireDriver {
    fn failed(&mut self, error: Error) {
        let error = if self.fail_fast { error.into_permanent() } else { error };
        let Self { key, store, .. } = &*self;
        tracing::debug!(name: "tenure.request_failed", %key, %store, %error);
        let (now, failure) = (self.drive.now(), error.failure());
        self.drive.machine.handle_failure(failure, &error, now);
        if failure != RequestFailure::Permanent && self.caller.is_waiting() {
            self.outage.failed(&error);
        }
        // The holder that an earlier answer named may have released the lock meanwhile: do not name it in an error.
        self.found.busy = None;
        if self.caller.fail_on_error {
            self.outcome = telemetry::outcome(error.kind());
            self.caller.refuse(error);
            self.drive.handle(AcquireInput::Cancel);
        } else {
            self.found.error = Some(error);
        }
    }

    /// Returns the next request of the machine. Delivers answers for the caller on the way.
    fn next(&mut self) -> Option<AcquireCommand> {
        loop {
            match self.drive.machine.poll_command()? {
                AcquireCommand::Answer(AcquireAnswer::Acquired { sent, deadline }) => {
                    self.found.acquired = Some((sent, deadline));
                }
                AcquireCommand::Answer(answer) => {
                    let error = self.explain(answer).on(&self.key).at(&self.store);
                    self.outcome = telemetry::outcome(error.kind());
                    self.caller.refuse(error);
                }
                command => return Some(command),
            }
        }
    }

    /// As [`during`](Self::during), and records the duration of the request.
    async fn timed<T>(
        &mut self,
        op: &'static str,
        request: impl Future<Output = Result<T>>,
    ) -> Raced<Result<T>> {
        let began = self.drive.now();
        // The cleanup after the answer is not reported: the caller no longer waits for the store.
        let reported = self.caller.is_waiting();
        if reported {
            self.outage.sent();
        }
        let raced = self.during(request).await;
        self.drive.record(op, began);
        match &raced {
            _ if !reported => {}
            Ok(Ok(_)) => self.outage.answered(),
            // A refusal is an answer too.
            Ok(Err(error)) if error.is_refusal() => self.outage.answered(),
            _ => {}
        }
        raced
    }

    /// Polls a request to its end, while it watches the timers of the machine and the caller.
    ///
    /// Only a wait or a watch is interrupted by a command, and both are cancel safe: while any other request is in
    /// flight, the machine issues no command but answers for the caller.
    async fn during<T>(&mut self, request: impl Future<Output = T>) -> Raced<T> {
        let mut request = pin!(request);
        loop {
            // Before the request as well: the failure of a claim may have queued a watch, and then, because the caller
            // fails fast, the end. The watch would wait forever.
            if let Some(command) = self.next() {
                return Err(command);
            }
            let (waits, outage) = (self.caller.is_waiting(), &self.outage);
            let report =
                async { if waits { outage.report().await } else { pending::<Infallible>().await } };
            let news = race(self.caller.news(), report);
            match self.drive.until(&mut request, news).await {
                Some(Either::First(result)) => return Ok(result),
                Some(Either::Second(Either::First(news))) => self.drive.handle(news),
                Some(Either::Second(Either::Second(never))) => match never {},
                None => {}
            }
        }
    }

    /// Waits for a timer or the caller while no request is in flight.
    async fn rest(&mut self) -> AcquireCommand {
        match self.during(pending::<Infallible>()).await {
            Err(command) => command,
            Ok(never) => match never {},
        }
    }

    fn explain(&mut self, answer: AcquireAnswer) -> Error {
        let now = self.drive.now();
        let waited = now.since(self.asked);
        let holder = self.found.busy.as_ref().and_then(|busy| busy.holder.as_ref());
        let holder = holder.map(Identity::to_string);
        let held = holder
            .map_or_else(|| "held by another process".to_owned(), |by| format!("held by {by}"));
        match (answer, self.found.error.take()) {
            (AcquireAnswer::Contended, _) => {
                let note = self.found.busy.as_ref().and_then(|busy| busy.note.as_ref());
                let held = note.map_or_else(|| held.clone(), |note| format!("{held}: {note}"));
                Error::new(ErrorKind::Held, held)
            }
            (AcquireAnswer::Failed, Some(error)) => error,
            (AcquireAnswer::Unknown { until }, error) => {
                let left = until.since(now);
                let message = format!(
                    "no clear answer after {waited:.1?}: the lock may be held for this process for up to \
                     {left:.1?}; do not assume either"
                );
                let unknown = Error::new(ErrorKind::Unknown, message).with_may_be_held_for(left);
                match error {
                    Some(error) => unknown.because(error),
                    None => unknown,
                }
            }
            (_, Some(error)) if self.drive.machine.is_failing() => Error::away(waited, error),
            (AcquireAnswer::GaveUp, _) => {
                let message = format!("{held}, and the retry strategy gave up after {waited:.1?}");
                Error::new(ErrorKind::Timeout, message)
            }
            _ => Error::new(ErrorKind::Timeout, format!("{held}; gave up after {waited:.1?}")),
        }
    }
}

/// Sending end of the channel on which the caller of an acquire waits.
pub(crate) struct Caller {
    reply: Option<oneshot::Sender<Result<Guard>>>,
    until: Option<oneshot::Receiver<Time>>,
    placed: Option<oneshot::Sender<()>>,
    /// True if the first failed request ends the acquire.
    fail_on_error: bool,
}

impl Caller {
    pub(crate) fn waiting(reply: oneshot::Sender<Result<Guard>>, fail_on_error: bool) -> Self {
        Self { reply: Some(reply), until: None, placed: None, fail_on_error }
    }

    pub(crate) fn enqueued(
        reply: oneshot::Sender<Result<Guard>>,
        until: oneshot::Receiver<Time>,
        placed: oneshot::Sender<()>,
    ) -> Self {
        Self { reply: Some(reply), until: Some(until), placed: Some(placed), fail_on_error: false }
    }

    /// True until the caller has its answer or has gone away.
    fn is_waiting(&self) -> bool {
        self.reply.is_some()
    }

    /// Reports that the first answer of the store has arrived.
    fn placed(&mut self) {
        if let Some(placed) = self.placed.take() {
            // A send fails only if the caller has gone away; `news` reports that.
            let _ = placed.send(());
        }
    }

    fn refuse(&mut self, error: Error) {
        if let Some(reply) = self.reply.take() {
            // A send fails only if the caller has gone away. Nothing is held, so nothing is lost.
            let _ = reply.send(Err(error));
        }
    }

    fn give(mut self, guard: Result<Guard>) {
        if let Some(reply) = self.reply.take() {
            drop(reply.send(guard));
        }
    }

    /// Resolves when the caller sets the deadline of its wait, or has gone away.
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time: the next call returns what was missed.
    async fn news(&mut self) -> AcquireInput {
        let Self { reply, until, .. } = self;
        let Some(open) = reply else { return pending().await };
        let told = async {
            match until {
                Some(until) => until.await,
                None => pending().await,
            }
        };
        match race(open.closed(), told).await {
            Either::First(()) => {
                *reply = None;
                AcquireInput::Cancel
            }
            Either::Second(told) => {
                *until = None;
                // Without a timeout, the channel is closed: the request continues without a deadline.
                AcquireInput::WaitUntil(told.ok())
            }
        }
    }
}
