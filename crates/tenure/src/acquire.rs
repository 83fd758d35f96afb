//! The one acquire loop: drives the core's machine against a store, and goes on as the keeper of what it got.

use std::convert::Infallible;
use std::future::{Future, pending};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use tenure_core::acquire::{Acquire, AcquireCommand, AcquireInput, Answer};
use tenure_core::keeper::Granted;
use tenure_core::lease::Lease;
use tenure_core::{Key, Time};
use tokio::sync::oneshot;
use tracing::Instrument as _;

use crate::guard::{Guard, HoldCallbacks, HoldContext, Keep};
use crate::store::{
    self, Claim, Contended, Grant, Identity, Place, QueueKind, Store, Version, Waited,
};
use crate::telemetry::{self, Labels};
use crate::{Clock, Error, ErrorKind, Result};

/// Owns an acquisition from its first claim on, and then the hold. The caller has only the other end of a channel, so
/// that no request is ever cut off with it.
pub(crate) struct AcquireTask {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) clock: Clock,
    pub(crate) claim: Claim,
    pub(crate) lease: Lease,
    pub(crate) callbacks: HoldCallbacks,
    pub(crate) caller: Caller,
    pub(crate) machine: Acquire,
    pub(crate) labels: Labels,
}

impl AcquireTask {
    pub(crate) async fn run(self) {
        let (key, store) = (self.claim.key.clone(), Arc::clone(&self.store));
        let acquiring = tracing::debug_span!("lock.acquire", %key, %store);
        let Some(keep) = self.acquire().instrument(acquiring).await else { return };
        // The caller has waited long enough: it goes on before the keeping begins.
        tokio::task::yield_now().await;
        keep.run().instrument(tracing::debug_span!("lock.hold", %key, %store)).await;
    }

    /// What is to be kept, once the caller has its guard; `None` where it got none.
    async fn acquire(self) -> Option<Keep> {
        let Self { store, clock, mut claim, lease, callbacks, caller, machine, labels } = self;
        let (asked, pid) = (clock.now(), std::process::id());
        let wait = labels.waits(asked);
        let mut steering = AcquireDriver {
            store: Arc::clone(&store),
            key: claim.key.clone(),
            machine,
            clock,
            caller,
            found: AcquireFindings::default(),
            asked,
            labels,
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
        let AcquireDriver { clock, caller, found, labels, outcome, .. } = steering;
        let acquired = found.acquired.zip(has.grant);
        wait.over(if acquired.is_some() { "acquired" } else { outcome }, clock.now());
        let ((sent, deadline), grant) = acquired?;
        let granted = Granted { sent, deadline, handoff_requested: grant.handoff_requested };
        let Grant { token, grants, hold, .. } = grant;
        let (key, released) = (claim.key, AtomicBool::new(false));
        let scene = HoldContext {
            store,
            key,
            token,
            grants,
            lease,
            clock,
            callbacks,
            pid,
            released,
            labels,
        };
        let (guard, keep) = Keep::new(scene, granted, hold);
        // A guard that cannot be delivered is dropped here, and so released.
        caller.give(Ok(guard));
        Some(keep)
    }
}

/// What the acquisition has of the store.
#[derive(Default)]
struct AcquireState {
    place: Option<Box<dyn Place>>,
    grant: Option<Grant>,
}

impl AcquireState {
    /// Does what the machine asks and tells it the result; the command that cut it short, if one did.
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
        steering.handle(input);
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
                steering.handle(AcquireInput::Granted(counts));
            }
            Ok(Ok(Waited::Still { ahead })) => {
                let AcquireDriver { key, store, .. } = &*steering;
                tracing::trace!(name: "tenure.waiting", %key, %store, ahead);
                steering.handle(AcquireInput::StillQueued);
            }
            Ok(Ok(Waited::Gone)) => {
                self.place = None;
                steering.handle(AcquireInput::PlaceLost);
            }
            Ok(Err(error)) => steering.failed(error),
        }
        None
    }
}

/// Resolves when the key changes, where the store can tell. A watch that fails is no news: the backstop follows.
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
            steering.handle(input(result));
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
        Ok(Err(error)) if error.is_refusal() => steering.handle(AcquireInput::Refused),
        Ok(Err(error)) => steering.failed(error),
        Ok(Ok(_)) => steering.handle(done),
        Err(command) => return Some(command),
    }
    None
}

fn gone(claim: &Claim) -> Error {
    Error::new(ErrorKind::NotHeld, "nothing is left to give back").on(&claim.key)
}

/// The machine, its clock, and the caller to tell.
struct AcquireDriver {
    store: Arc<dyn Store>,
    key: Key,
    machine: Acquire,
    clock: Clock,
    caller: Caller,
    found: AcquireFindings,
    asked: Time,
    labels: Labels,
    /// How it ended, for who counts, unless it was acquired.
    outcome: &'static str,
}

/// What is known for the answer to the caller.
#[derive(Default)]
struct AcquireFindings {
    acquired: Option<(Time, Time)>,
    busy: Option<Contended>,
    error: Option<Error>,
}

/// The result of a request, or the command that cut it short.
type Raced<T> = std::result::Result<T, AcquireCommand>;

impl AcquireDriver {
    fn handle(&mut self, input: AcquireInput) {
        self.machine.handle(input, self.clock.now());
    }

    fn failed(&mut self, error: Error) {
        let Self { key, store, .. } = &*self;
        tracing::debug!(name: "tenure.request_failed", %key, %store, %error);
        self.machine.handle_failure(error.failure(), &error, self.clock.now());
        // What was seen of the key before may be long over.
        self.found.busy = None;
        if self.caller.fail_fast {
            self.outcome = telemetry::outcome(error.kind());
            self.caller.refuse(error);
            self.handle(AcquireInput::Cancel);
        } else {
            self.found.error = Some(error);
        }
    }

    /// The next request that the machine wants made. Answers for the caller are given on the way.
    fn next(&mut self) -> Option<AcquireCommand> {
        loop {
            match self.machine.poll_command()? {
                AcquireCommand::Answer(Answer::Acquired { sent, deadline }) => {
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

    /// The same as [`during`](Self::during), for a request of a kind that is measured.
    async fn timed<T>(&mut self, op: &'static str, request: impl Future<Output = T>) -> Raced<T> {
        let began = self.clock.now();
        let raced = self.during(request).await;
        self.labels.op(op, self.clock.now().since(began));
        raced
    }

    /// Sees a request through, while the time and the caller are watched.
    async fn during<T>(&mut self, request: impl Future<Output = T>) -> Raced<T> {
        let mut request = pin!(request);
        loop {
            let due = self.machine.poll_timeout().unwrap_or(Time::MAX);
            tokio::select! {
                biased;
                result = &mut request => return Ok(result),
                news = self.caller.news() => self.handle(news),
                () = self.clock.sleep_until(due) => self.machine.handle_timeout(self.clock.now()),
            }
            if let Some(command) = self.next() {
                return Err(command);
            }
        }
    }

    /// Waits for the time or the caller while no request is under way.
    async fn rest(&mut self) -> AcquireCommand {
        match self.during(pending::<Infallible>()).await {
            Err(command) => command,
            Ok(never) => match never {},
        }
    }

    fn explain(&mut self, answer: Answer) -> Error {
        let now = self.clock.now();
        let waited = now.since(self.asked);
        let holder = self.found.busy.as_ref().and_then(|busy| busy.holder.as_ref());
        let holder = holder.map(Identity::to_string);
        let held =
            holder.map_or_else(|| "held by another".to_owned(), |by| format!("held by {by}"));
        match (answer, self.found.error.take()) {
            (Answer::Contended, _) => {
                let note = self.found.busy.as_ref().and_then(|busy| busy.note.as_ref());
                let held = note.map_or_else(|| held.clone(), |note| format!("{held}: {note}"));
                let single = self.store.capabilities().queue == QueueKind::Single;
                Error::new(if single { ErrorKind::Contention } else { ErrorKind::Held }, held)
            }
            (Answer::Failed, Some(error)) => error,
            (Answer::Unknown { until }, error) => {
                let left = until.since(now);
                let message = format!(
                    "no clear answer after {waited:?}: the lock may be held for us for up to {left:?}; do not assume \
                     either"
                );
                let unknown = Error::new(ErrorKind::Unknown, message).with_may_be_held_for(left);
                match error {
                    Some(error) => unknown.because(error),
                    None => unknown,
                }
            }
            (_, Some(error)) if self.machine.is_failing() => {
                let message = format!("the store could not be reached for {waited:?}: is it up?");
                Error::new(ErrorKind::Unavailable, message).because(error)
            }
            (Answer::GaveUp, _) => {
                let message = format!("{held}, and the retry strategy gave up after {waited:?}");
                Error::new(ErrorKind::Timeout, message)
            }
            _ => Error::new(ErrorKind::Timeout, format!("{held}; gave up after {waited:?}")),
        }
    }
}

/// The other end of the channel that an acquire waits on.
pub(crate) struct Caller {
    reply: Option<oneshot::Sender<Result<Guard>>>,
    until: Option<oneshot::Receiver<Time>>,
    placed: Option<oneshot::Sender<()>>,
    /// Wants to hear of the first failure instead of waiting for a better answer.
    fail_fast: bool,
}

impl Caller {
    pub(crate) fn waiting(reply: oneshot::Sender<Result<Guard>>, fail_fast: bool) -> Self {
        Self { reply: Some(reply), until: None, placed: None, fail_fast }
    }

    pub(crate) fn enqueued(
        reply: oneshot::Sender<Result<Guard>>,
        until: oneshot::Receiver<Time>,
        placed: oneshot::Sender<()>,
    ) -> Self {
        Self { reply: Some(reply), until: Some(until), placed: Some(placed), fail_fast: false }
    }

    /// Says that the first answer of the store is in.
    fn placed(&mut self) {
        if let Some(placed) = self.placed.take() {
            // Nobody listens where the caller went away; `news` will say so.
            let _ = placed.send(());
        }
    }

    fn refuse(&mut self, error: Error) {
        if let Some(reply) = self.reply.take() {
            // Nobody to tell where the caller went away: nothing is held.
            let _ = reply.send(Err(error));
        }
    }

    fn give(mut self, guard: Result<Guard>) {
        if let Some(reply) = self.reply.take() {
            drop(reply.send(guard));
        }
    }

    /// Resolves when the caller says until when it waits, or has gone away.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses no news.
    async fn news(&mut self) -> AcquireInput {
        let Self { reply, until, .. } = self;
        let Some(open) = reply else { return pending().await };
        let told = async {
            match until {
                Some(until) => until.await,
                None => pending().await,
            }
        };
        tokio::select! {
            biased;
            () = open.closed() => {
                *reply = None;
                AcquireInput::Cancel
            }
            told = told => {
                *until = None;
                match told {
                    Ok(at) => AcquireInput::WaitUntil(Some(at)),
                    // A wait without a timeout: the request goes on as it is.
                    Err(_) => AcquireInput::WaitUntil(None),
                }
            }
        }
    }
}
