//! The task of an election: drives the core's machine with the library's acquire loop and keeper.
//!
//! | the machine commands | the task does |
//! |---|---|
//! | `Claim` | acquires the key: waits for it, or tries once if a retry strategy polls |
//! | `Reacquire` | tries once, and if that fails asks the store which hold is in the way |
//! | `Probe` | reads the deadline that the keeper has moved |
//! | `Release` | releases the guard, and reports the result |
//! | `ReleaseUnused`, `Abort`, `Close` | drops the guard or the acquire: both release in the background |

use std::future::{Future, pending};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tenure_core::election::{
    self as core, Cause, ClaimNumber, Election as ElectionMachine, ElectionCommand, ElectionGrant,
    ElectionInput, ElectionState,
};
use tenure_core::{Machine as _, Time};
use tokio::sync::{mpsc, oneshot, watch};

use super::callbacks::EventDispatcher;
use super::claims::{ClaimFuture, ClaimOutcome, Claims};
use super::event::{because, cause_of, error_of, failure, loss_of};
use super::{AcquireFailed, Ended, Event, Leadership, StateChange, StopReason};
use crate::drive::Drive;
use crate::guard::{Guard, Lost, View};
use crate::race::{Either, race};
use crate::telemetry::{self, Labels};
use crate::{Error, ErrorKind, Loss, Result};

/// Requests of the handle to the task.
pub(super) enum ElectionCall {
    Start(oneshot::Sender<Result<()>>),
    Stop { timeout: Option<Duration>, reply: oneshot::Sender<Result<()>> },
    StepDown { timeout: Option<Duration>, reply: oneshot::Sender<Result<()>> },
    Flush(oneshot::Sender<()>),
}

/// State that the task publishes for the handle.
#[derive(Clone, Debug, Default)]
pub(super) struct Status {
    pub(super) state: ElectionState,
    /// Number of starts, so that a reader notices a run that ended and began again between two reads.
    pub(super) run: u64,
    pub(super) lead: Option<Leadership>,
    /// Reason for the end of the last run, if a run has ended.
    pub(super) stopped: Option<StopReason>,
}

type Releasing = Pin<Box<dyn Future<Output = Result<()>> + Send>>;

/// Operation in progress at the store.
enum InProgress {
    Nothing,
    Claiming {
        claim: ClaimNumber,
        again: bool,
        answer: ClaimFuture,
        renewals: mpsc::Receiver<Arc<Error>>,
    },
    Holding(HeldClaim),
    Releasing {
        claim: ClaimNumber,
        answer: Releasing,
    },
}

/// A hold that was reported to the machine.
struct HeldClaim {
    claim: ClaimNumber,
    guard: Guard,
    view: View,
    renewals: mpsc::Receiver<Arc<Error>>,
}

/// Result of the operation in progress.
enum ClaimEvent {
    Claimed(ClaimOutcome),
    /// The deadline has moved, or the hold was lost.
    Hold(Option<Loss>),
    RenewalFailed(Arc<Error>),
    Released(Result<()>),
}

impl InProgress {
    /// # Cancel safety
    ///
    /// Dropping the future loses no event.
    async fn news(&mut self) -> ClaimEvent {
        match self {
            Self::Nothing => pending().await,
            Self::Claiming { answer, .. } => ClaimEvent::Claimed(answer.await),
            Self::Releasing { answer, .. } => ClaimEvent::Released(answer.await),
            Self::Holding(HeldClaim { view, renewals, .. }) => {
                let failed = async {
                    match renewals.recv().await {
                        Some(error) => error,
                        // The keeper has ended: `view` reports it.
                        None => pending().await,
                    }
                };
                match race(view.changed(), failed).await {
                    Either::First(loss) => ClaimEvent::Hold(loss),
                    Either::Second(error) => ClaimEvent::RenewalFailed(error),
                }
            }
        }
    }
}

/// The published leadership, and the sender that ends it.
struct Lead {
    leadership: Leadership,
    end: watch::Sender<Option<Ended>>,
}

/// Resolves when the election is to shut down.
pub(super) type ShutdownSignal = Pin<Box<dyn Future<Output = ()> + Send>>;

pub(super) struct ElectionTask {
    pub(super) claims: Claims,
    pub(super) machine: ElectionMachine,
    pub(super) orders: mpsc::Receiver<ElectionCall>,
    pub(super) signal: Option<ShutdownSignal>,
    pub(super) status: watch::Sender<Status>,
}

impl ElectionTask {
    /// Runs until the handle was dropped and the last run has ended.
    pub(super) async fn run(self, teller: EventDispatcher) {
        let Self { claims, machine, orders, signal, status } = self;
        let labels = Labels::new(&*claims.store, "election");
        let mut driver = ElectionDriver {
            drive: Drive { machine, clock: claims.clock.clone(), labels },
            claims,
            status,
            teller,
            doing: InProgress::Nothing,
            lead: None,
            last: None,
            loss: None,
            stopping: false,
            replies: Replies::default(),
        };
        let mut calls = ElectionCalls { orders: Some(orders), signal, signalled: false };
        while calls.orders.is_some() || driver.drive.machine.state() != ElectionState::Stopped {
            let news = race(driver.doing.news(), driver.claims.outage.report());
            match driver.drive.until(calls.next(), news).await {
                Some(Either::First(Some(order))) => driver.order(order, calls.signalled),
                Some(Either::First(None)) => driver.stop(None),
                Some(Either::Second(Either::First(news))) => driver.heard(news),
                Some(Either::Second(Either::Second(never))) => match never {},
                None => {}
            }
            driver.follow();
            if driver.drive.machine.state() == ElectionState::Stopped {
                driver.claims.outage.clear();
            }
        }
    }
}

/// Sources of requests to the task: the handle, and the user's shutdown signal.
struct ElectionCalls {
    /// `None` once the handle was dropped.
    orders: Option<mpsc::Receiver<ElectionCall>>,
    signal: Option<ShutdownSignal>,
    /// True once the signal has fired, which it does at most once.
    signalled: bool,
}

impl ElectionCalls {
    /// The next request; `None` to stop, because the signal has fired or the handle was dropped.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses no request.
    async fn next(&mut self) -> Option<ElectionCall> {
        let Self { orders, signal, signalled } = self;
        let fired = async {
            match signal {
                Some(signal) => signal.await,
                None => pending().await,
            }
        };
        let ordered = async {
            match orders {
                Some(orders) => orders.recv().await,
                None => pending().await,
            }
        };
        match race(fired, ordered).await {
            Either::First(()) => {
                (*signal, *signalled) = (None, true);
                None
            }
            Either::Second(None) => {
                *orders = None;
                None
            }
            Either::Second(order) => order,
        }
    }
}

/// The state machine and everything that it drives.
struct ElectionDriver {
    claims: Claims,
    drive: Drive<ElectionMachine>,
    status: watch::Sender<Status>,
    teller: EventDispatcher,
    doing: InProgress,
    /// The current leadership.
    lead: Option<Lead>,
    /// The last leadership: its loss is reported, and remains of its hold may still be at the store.
    last: Option<Leadership>,
    /// Loss reported by the keeper, until it is passed on or the hold is reacquired.
    loss: Option<Lost>,
    /// A stop was requested and has not finished.
    stopping: bool,
    replies: Replies,
}

/// Callers that wait for the end of a release.
#[derive(Default)]
struct Replies {
    stop: Vec<oneshot::Sender<Result<()>>>,
    step_down: Vec<oneshot::Sender<Result<()>>>,
}

impl ElectionDriver {
    fn stop(&mut self, timeout: Option<Duration>) {
        self.stopping = self.drive.machine.state() != ElectionState::Stopped;
        self.drive.handle(ElectionInput::StopRequested { timeout });
    }

    fn order(&mut self, order: ElectionCall, signalled: bool) {
        match order {
            ElectionCall::Start(reply) => {
                let started = self.start(signalled);
                // Fails if the caller no longer waits.
                let _ = reply.send(started);
            }
            ElectionCall::Stop { timeout, reply } => {
                self.stop(timeout);
                self.replies.stop.push(reply);
            }
            ElectionCall::StepDown { timeout, reply } => {
                self.drive.handle(ElectionInput::ReleaseRequested { timeout });
                self.replies.step_down.push(reply);
            }
            ElectionCall::Flush(reply) => self.teller.flush(reply),
        }
    }

    fn start(&mut self, signalled: bool) -> Result<()> {
        let refused = |message: &str| {
            Error::new(ErrorKind::Shutdown, message).on(&self.claims.key).at(&self.claims.store)
        };
        if signalled {
            return Err(refused("the shutdown signal of this election has fired: build another"));
        }
        if self.stopping {
            return Err(refused("the election is shutting down: start it once it has stopped"));
        }
        if self.drive.machine.state() == ElectionState::Stopped {
            self.drive.handle(ElectionInput::Start);
            self.status.send_modify(|status| {
                status.run += 1;
                status.state = self.drive.machine.state();
            });
        }
        Ok(())
    }

    fn heard(&mut self, news: ClaimEvent) {
        match news {
            ClaimEvent::Claimed(claimed) => self.claimed(claimed),
            ClaimEvent::Hold(loss) => self.hold_news(loss),
            ClaimEvent::RenewalFailed(error) => self.renewal_failed(error),
            ClaimEvent::Released(released) => self.released(released),
        }
    }

    fn claimed(&mut self, claimed: ClaimOutcome) {
        let doing = std::mem::replace(&mut self.doing, InProgress::Nothing);
        let InProgress::Claiming { claim, again, renewals, .. } = doing else { return };
        let input = match (claimed, again) {
            (ClaimOutcome::Granted(guard), again) => {
                let view = guard.view();
                let grant =
                    ElectionGrant { token: guard.fencing_token(), deadline: view.deadline() };
                let term = view.term();
                self.doing = InProgress::Holding(HeldClaim { claim, guard, view, renewals });
                if again {
                    let before = self.last.as_ref().map(Leadership::term);
                    let another_held =
                        before.is_some_and(|before| before.another_term_before(term));
                    ElectionInput::ReacquireSucceeded { claim, grant, another_held }
                } else {
                    ElectionInput::AcquireSucceeded { claim, grant }
                }
            }
            (ClaimOutcome::Contended, false) => ElectionInput::AcquireFailed { claim },
            (ClaimOutcome::Contended, true) => {
                ElectionInput::ReacquireFailed { claim, cause: Cause::HeldByAnother }
            }
            (ClaimOutcome::Failed(error), again) => {
                let failure = failure(Arc::new(self.located(error)));
                if again {
                    ElectionInput::ReacquireFailed { claim, cause: Cause::Failed(failure) }
                } else {
                    ElectionInput::StoreError { claim: Some(claim), failure }
                }
            }
        };
        self.drive.handle(input);
    }

    fn hold_news(&mut self, ended: Option<Loss>) {
        let InProgress::Holding(HeldClaim { claim, view, .. }) = &self.doing else { return };
        let claim = *claim;
        match ended.map(|reason| view.lost_by(reason)) {
            None => self.hold_probed(),
            Some(lost) => {
                let cause = cause_of(&lost);
                self.loss = Some(lost);
                self.drive.handle(ElectionInput::HealthFailed { claim, cause });
            }
        }
    }

    fn renewal_failed(&mut self, error: Arc<Error>) {
        let InProgress::Holding(HeldClaim { claim, view, .. }) = &self.doing else { return };
        if view.deadline() == Time::MAX {
            // Only the keeper knows what a failure means for a hold without a deadline.
            return self.tell(Event::Error(error));
        }
        let failure = core::StoreFailure { kind: core::FailureKind::Unclear, ..failure(error) };
        self.drive.handle(ElectionInput::StoreError { claim: Some(*claim), failure });
    }

    fn released(&mut self, released: Result<()>) {
        let InProgress::Releasing { claim, .. } = self.doing else { return };
        self.doing = InProgress::Nothing;
        self.drive.handle(match released {
            Ok(()) => ElectionInput::ReleaseSucceeded { claim },
            Err(error) if error.is_refusal() => {
                ElectionInput::ReleaseFailed { claim, cause: Cause::NotHeld }
            }
            Err(error) => {
                let cause = Cause::Failed(failure(Arc::new(self.located(error))));
                ElectionInput::ReleaseFailed { claim, cause }
            }
        });
    }

    fn located(&self, error: Error) -> Error {
        error.on(&self.claims.key).at(&self.claims.store)
    }

    /// Executes the machine's output. The order matters: first the published state changes, then the events are sent,
    /// and only then are commands sent to the store. So a callback or subscriber never sees a state that is older than
    /// its event, and nothing acts as leader on a term whose end the machine has already decided.
    fn follow(&mut self) {
        loop {
            let events: Vec<_> = std::iter::from_fn(|| self.drive.machine.poll_event()).collect();
            self.publish(events.iter().find_map(stop_reason));
            let mut end = Ok(());
            for event in events {
                self.pass_on(event, &mut end);
            }
            self.answer(&end);
            if self.drive.machine.state() == ElectionState::Leader {
                self.loss = None;
            }
            match self.drive.machine.poll_command() {
                Some(command) => self.obey(command),
                None => break,
            }
        }
    }

    /// Publishes the state, and with it the reason if a run has ended: no reader sees the end without its reason.
    fn publish(&mut self, stopped: Option<StopReason>) {
        let state = self.drive.machine.state();
        let leads = state == ElectionState::Leader;
        let token = self.drive.machine.fencing_token();
        if let Some(Lead { leadership, end }) =
            self.lead.take_if(|lead| Some(lead.leadership.fencing_token()) != token)
        {
            end.send_replace(Some(if state == ElectionState::Releasing {
                Ended::Released
            } else {
                let lost = self.loss.clone();
                Ended::Lost(lost.unwrap_or_else(|| leadership.lost_by(Loss::Expired)))
            }));
        }
        if let (true, None, InProgress::Holding(held)) = (leads, &self.lead, &self.doing) {
            let (leadership, end) = Leadership::of(&held.guard);
            self.last = Some(leadership.clone());
            self.lead = Some(Lead { leadership, end });
        }
        let lead = self.lead.as_ref().map(|lead| &lead.leadership);
        self.status.send_if_modified(|status| {
            let token = |lead: Option<&Leadership>| lead.map(Leadership::fencing_token);
            let changed = status.state != state || token(status.lead.as_ref()) != token(lead);
            status.state = state;
            status.lead = lead.cloned();
            let ended = stopped.is_some();
            status.stopped = stopped.or_else(|| status.stopped.take());
            changed || ended
        });
    }

    /// Sends an event to callbacks and subscribers. `end` becomes the result for callers that wait for a release.
    fn pass_on(&mut self, event: core::ElectionEvent, end: &mut Result<(), Arc<Error>>) {
        let event = match event {
            core::ElectionEvent::Acquired { .. } => match &self.last {
                Some(leadership) => Event::Acquired(leadership.clone()),
                None => return,
            },
            core::ElectionEvent::Released => Event::Released,
            core::ElectionEvent::Lost { why } => {
                let Some(lost) = self.lost(&why) else { return };
                *end = Err(Arc::new(lost.clone().into()));
                Event::Lost(lost)
            }
            core::ElectionEvent::AcquireFailed { attempt, next_delay } => {
                Event::AcquireFailed(AcquireFailed { attempt, next_delay })
            }
            core::ElectionEvent::StateChange { from, to } => {
                Event::StateChange(StateChange { from, to })
            }
            core::ElectionEvent::Error { why } => {
                let error = self.error(&why);
                *end = Err(Arc::clone(&error));
                Event::Error(error)
            }
            core::ElectionEvent::Stopped { why } => {
                self.stopping = false;
                Event::Stopped(StopReason::of(&why))
            }
        };
        self.tell(event);
    }

    fn lost(&mut self, why: &Cause) -> Option<Lost> {
        let known = self.loss.take();
        known.or_else(|| self.last.as_ref().map(|last| last.lost_by(loss_of(why))))
    }

    fn error(&self, why: &Cause) -> Arc<Error> {
        match (why, &self.loss, &self.last) {
            (Cause::Failed(failure), ..) => error_of(failure),
            (Cause::TimedOut, ..) => {
                let message = "the release did not finish in time: it continues in the background, and the store ends \
                               the hold with its lease at the latest";
                let error =
                    Error::new(ErrorKind::Unknown, message).with_may_be_held_for(self.claims.ttl);
                Arc::new(self.located(error))
            }
            (_, Some(lost), _) => Arc::new(lost.clone().into()),
            (_, None, Some(last)) => Arc::new(last.lost_by(loss_of(why)).into()),
            (_, None, None) => Arc::new(self.located(Error::new(ErrorKind::Lost, why.to_string()))),
        }
    }

    fn tell(&mut self, event: Event) {
        let Claims { key, store, .. } = &self.claims;
        match &event {
            Event::Acquired(_) => telemetry::leader_changed(key, true),
            Event::Released | Event::Lost(_) => telemetry::leader_changed(key, false),
            // The participant takes part from here on; or it no longer leads, though `Lost` is not sent yet.
            Event::StateChange(
                StateChange { from: ElectionState::Stopped, .. }
                | StateChange { to: ElectionState::Reconnecting, .. },
            ) => telemetry::leads(key, false),
            Event::StateChange(StateChange {
                from: ElectionState::Reconnecting,
                to: ElectionState::Leader,
            }) => {
                telemetry::leads(key, true);
            }
            _ => {}
        }
        match &event {
            Event::Acquired(leadership) => {
                let token = leadership.fencing_token();
                tracing::info!(name: "tenure.election.acquired", %key, %store, %token);
            }
            Event::Released => tracing::info!(name: "tenure.election.released", %key, %store),
            Event::Lost(lost) => {
                tracing::warn!(name: "tenure.election.lost", %key, %store, token = %lost.token, reason = %lost.reason);
            }
            Event::AcquireFailed(AcquireFailed { attempt, next_delay }) => {
                tracing::debug!(name: "tenure.election.acquire_failed", %key, %store, attempt, ?next_delay);
            }
            Event::StateChange(StateChange { from, to }) => {
                tracing::debug!(name: "tenure.election.state_change", %key, %store, %from, %to);
            }
            Event::Error(error) => {
                tracing::warn!(name: "tenure.election.error", %key, %store, %error);
            }
            Event::Stopped(why) => {
                tracing::info!(name: "tenure.election.stopped", %key, %store, %why);
            }
            Event::Missed(_) => {}
        }
        self.teller.dispatch(event);
    }

    /// Replies to the callers that waited for this state.
    fn answer(&mut self, end: &Result<(), Arc<Error>>) {
        let state = self.drive.machine.state();
        if state == ElectionState::Stopped {
            for reply in self.replies.stop.drain(..) {
                // A hold that was lost before its release leaves nothing to wait for: for a stop that is a success.
                let lost = |error: &Arc<Error>| error.kind() == ErrorKind::Lost;
                let end =
                    end.as_ref().or_else(|error| if lost(error) { Ok(&()) } else { Err(error) });
                // Fails if the caller no longer waits.
                let _ = reply.send(end.map(|&()| ()).map_err(again));
            }
        }
        if state != ElectionState::Releasing {
            for reply in self.replies.step_down.drain(..) {
                let _ = reply.send(end.as_ref().map(|&()| ()).map_err(again));
            }
        }
    }

    fn obey(&mut self, command: ElectionCommand) {
        match command {
            ElectionCommand::Claim { claim } => {
                let (failed, renewals) = mpsc::channel(RENEWAL_ERRORS);
                let answer = self.claims.claim(failed);
                self.doing = InProgress::Claiming { claim, again: false, answer, renewals };
            }
            ElectionCommand::Reacquire { claim } => {
                let (failed, renewals) = mpsc::channel(RENEWAL_ERRORS);
                let token = self.last.as_ref().map(Leadership::fencing_token);
                let answer = self.claims.reclaim(token, failed);
                self.doing = InProgress::Claiming { claim, again: true, answer, renewals };
            }
            ElectionCommand::Probe { .. } => self.hold_probed(),
            ElectionCommand::Release { .. } => {
                let doing = std::mem::replace(&mut self.doing, InProgress::Nothing);
                if let InProgress::Holding(HeldClaim { claim, guard, .. }) = doing {
                    self.doing = InProgress::Releasing { claim, answer: Box::pin(guard.release()) };
                }
            }
            // The acquire and the keeper release in the background whatever was granted.
            ElectionCommand::ReleaseUnused { .. }
            | ElectionCommand::Abort { .. }
            | ElectionCommand::Close => {
                self.doing = InProgress::Nothing;
            }
        }
    }

    fn hold_probed(&mut self) {
        if let InProgress::Holding(HeldClaim { claim, view, .. }) = &self.doing {
            let (claim, deadline) = (*claim, view.deadline());
            self.drive.handle(ElectionInput::HealthOk { claim, deadline });
        }
    }
}

/// Reason for the end of a run, if the event is that end.
fn stop_reason(event: &core::ElectionEvent) -> Option<StopReason> {
    match event {
        core::ElectionEvent::Stopped { why } => Some(StopReason::of(why)),
        _ => None,
    }
}

/// Number of renewal errors that are buffered for the task.
const RENEWAL_ERRORS: usize = 16;

/// A copy of the error for another waiting caller.
fn again(error: &Arc<Error>) -> Error {
    let message = match error.kind() {
        ErrorKind::Lost => "leadership was lost before it could be released",
        _ => "it is not known whether the store has ended the hold",
    };
    let again = because(Error::new(error.kind(), message), error);
    let again = error.key().into_iter().fold(again, Error::on);
    match error.may_be_held_for() {
        Some(until) => again.with_may_be_held_for(until),
        None => again,
    }
}
