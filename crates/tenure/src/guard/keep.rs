//! The keeper task of a hold: renews it, watches its deadline, and releases it.

use std::future::{Future, ready};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tenure_core::keeper::{Granted, HoldEnd, Keeper, KeeperCommand, KeeperInput};
use tenure_core::{Machine as _, Time};
use tokio::sync::{oneshot, watch};

use super::view::{HoldContext, KeeperState, View};
use crate::drive::Drive;
use crate::race::{Either, race};
use crate::store::{Handle, Handoff, Hold, HoldEvent, Loss, Renewed, unsupported};
use crate::telemetry::{self, Labels};
use crate::{Error, ErrorKind, Result};

/// The task that keeps a hold: drives the core's keeper against the store.
pub(crate) struct Keep {
    hold: Box<dyn Hold>,
    steering: KeeperDriver,
}

impl Keep {
    /// Returns the keeper of a hold, a view of the hold, and the channel for the request of its guard.
    pub(super) fn new(
        about: HoldContext,
        granted: Granted,
        hold: Box<dyn Hold>,
        labels: Labels,
    ) -> (View, oneshot::Sender<KeeperRequest>, Self) {
        let look_every = match about.store.capabilities().handoff {
            Handoff::Polled { every } => Some(every),
            Handoff::None | Handoff::Pushed | Handoff::OnRenewal => None,
        };
        let keeper = Keeper::new(about.lease, granted, look_every, about.clock.now());
        let (deadline, at_deadline) = (keeper.deadline(), keeper.loss_at_deadline());
        let revision = hold.revision();
        let state = KeeperState {
            deadline,
            loss_at_deadline: at_deadline,
            lost: None,
            handoff_requested: false,
            revision,
        };
        let (publish, state) = watch::channel(state);
        let (order, orders) = oneshot::channel();
        let about = Arc::new(about);
        let HoldContext { key, store, token, .. } = &*about;
        tracing::debug!(name: "tenure.acquired", %key, %store, %token);
        labels.held();
        let view = View {
            context: Arc::clone(&about),
            state,
            #[cfg(unix)]
            keep_open: hold.keep_open(),
        };
        let orders = Some(orders);
        let since = about.clock.now();
        let drive = Drive { machine: keeper, clock: about.clock.clone(), labels };
        let steering = KeeperDriver { about, drive, state: publish, orders, order: None, since };
        (view, order, Self { hold, steering })
    }

    pub(crate) async fn run(mut self) {
        let Self { hold, steering } = &mut self;
        let ttl = steering.about.lease.ttl();
        let end = loop {
            match steering.next() {
                None => steering.rest(hold.event()).await,
                Some(KeeperCommand::Renew { limit }) => {
                    let renewed = steering.timed("renew", hold.renew(ttl, limit)).await;
                    // Wakes no receiver: a new revision alone is no event. If the deadline moved, `publish` wakes them.
                    steering.state.send_if_modified(|state| {
                        state.revision = hold.revision();
                        false
                    });
                    let loss = match &renewed {
                        Err(error) if error.is_refusal() => reported_loss(&mut **hold).await,
                        _ => None,
                    };
                    steering.renewed(renewed, loss);
                }
                Some(KeeperCommand::CheckHandoff { limit }) => {
                    let looked = steering.timed("look", hold.check_handoff(limit)).await;
                    let input = looked.map_or(KeeperInput::HandoffCheckFailed, |waiter| {
                        KeeperInput::HandoffChecked { handoff_requested: waiter }
                    });
                    steering.drive.handle(input);
                }
                Some(KeeperCommand::Release { limit }) => {
                    let released = steering.timed("release", hold.release(limit)).await;
                    steering.released(released);
                }
                Some(KeeperCommand::Done(end)) => break end,
                // `next` has already reported these to the guard.
                Some(KeeperCommand::Lost(_) | KeeperCommand::HandoffRequested) => {}
            }
        };
        self.end(end).await;
    }

    async fn end(self, end: HoldEnd) {
        let Self { mut hold, mut steering } = self;
        let (about, order) = (Arc::clone(&steering.about), steering.order.take());
        drop(steering);
        let HoldContext { key, store, token, clock, .. } = &*about;
        tracing::debug!(name: "tenure.ended", %key, %store, %token, ?end);
        let outcome = match end {
            HoldEnd::Released | HoldEnd::Detached => Ok(()),
            HoldEnd::Lost(reason) => Err(about.lost(reason).into()),
            HoldEnd::Unknown { until } => {
                let message = "no clear answer to the release until the lease was over";
                let error = Error::new(ErrorKind::Unknown, message).on(key).at(store);
                Err(error.with_may_be_held_for(until.since(clock.now())))
            }
        };
        // Sending a reply fails if the caller no longer waits, which is no error.
        match order {
            Some(KeeperRequest::Release(reply)) => drop(reply.send(outcome)),
            Some(KeeperRequest::Detach(reply)) => {
                let detached = match (outcome, hold.handle()) {
                    (Ok(()), Some(handle)) => {
                        let detached = hold.detach(about.lease.request_limit()).await;
                        // The hold knows if it ended with its connection.
                        let loss = reported_loss(&mut *hold).await.unwrap_or(Loss::Taken);
                        let explain = |error: Error| {
                            if error.is_refusal() { about.lost(loss).into() } else { error }
                        };
                        detached.map(|()| handle).map_err(explain)
                    }
                    (Ok(()), None) => {
                        Err(unsupported(&**store, "keep a hold without its process").on(key))
                    }
                    (Err(error), _) => Err(error),
                };
                drop(reply.send(detached));
            }
            Some(KeeperRequest::ReleasedInline) | None => {}
        }
    }
}

/// Request of the guard to the keeper. Dropping the guard without a request releases the hold.
pub(super) enum KeeperRequest {
    Release(oneshot::Sender<Result<()>>),
    /// The guard has released the hold itself.
    ReleasedInline,
    Detach(oneshot::Sender<Result<Handle>>),
}

impl KeeperRequest {
    fn refuse(self, error: Error) {
        // A reply cannot be sent if the caller dropped its future: then no caller waits for it.
        match self {
            Self::Release(reply) => drop(reply.send(Err(error))),
            Self::ReleasedInline => {}
            Self::Detach(reply) => drop(reply.send(Err(error))),
        }
    }
}

/// The keeper, and the channels to its guard.
struct KeeperDriver {
    about: Arc<HoldContext>,
    drive: Drive<Keeper>,
    state: watch::Sender<KeeperState>,
    orders: Option<oneshot::Receiver<KeeperRequest>>,
    order: Option<KeeperRequest>,
    /// Start of the keeper task.
    since: Time,
}

impl Drop for KeeperDriver {
    fn drop(&mut self) {
        // In `drop`, so that the end is also counted if the runtime shuts down and the task is cancelled.
        self.drive.labels.ended(self.drive.now().since(self.since));
    }
}

impl KeeperDriver {
    /// Same as [`during`](Self::during), and records the duration of the request.
    async fn timed<T>(&mut self, op: &'static str, request: impl Future<Output = T>) -> T {
        let began = self.drive.now();
        let result = self.during(request).await;
        self.drive.record(op, began);
        result
    }

    /// The next request that the keeper wants to make. Reports losses and hand-off requests to the guard on the way.
    fn next(&mut self) -> Option<KeeperCommand> {
        self.publish();
        loop {
            match self.drive.machine.poll_command()? {
                KeeperCommand::Lost(reason) => {
                    let HoldContext { key, store, token, .. } = &*self.about;
                    tracing::warn!(name: "tenure.lost", %key, %store, %token, %reason);
                    self.drive.labels.lost(telemetry::reason(reason));
                }
                KeeperCommand::HandoffRequested => self.hand_off(),
                command => return Some(command),
            }
        }
    }

    /// Waits for an event while no request is in flight.
    async fn rest(&mut self, event: impl Future<Output = HoldEvent>) {
        if let Some(event) = self.until(event).await {
            self.drive.handle(match event {
                HoldEvent::Lost(loss) => self.over(KeeperInput::HoldEnded(loss)),
                HoldEvent::HandoffRequested => KeeperInput::HandoffRequested,
            });
        }
    }

    /// Runs a request to its end. Meanwhile the deadline and the guard's requests are handled: neither waits for the
    /// request, and the request is never cut off in the middle of a write.
    async fn during<T>(&mut self, request: impl Future<Output = T>) -> T {
        let mut request = pin!(request);
        loop {
            if let Some(result) = self.until(&mut request).await {
                return result;
            }
            self.publish();
        }
    }

    /// The future's result; `None` if a timeout or a request of the guard came first, which the keeper has handled
    /// then.
    async fn until<T>(&mut self, future: impl Future<Output = T>) -> Option<T> {
        match self.drive.until(ordered(&mut self.orders), future).await? {
            Either::First(order) => {
                self.obey(order);
                None
            }
            Either::Second(result) => Some(result),
        }
    }

    /// Reason for the end of the hold: no loss if the guard has released the hold inline meanwhile. The store may
    /// report that end before the guard's message arrives.
    fn over(&self, loss: KeeperInput) -> KeeperInput {
        if self.about.released.load(Ordering::Acquire) { KeeperInput::Released } else { loss }
    }

    fn obey(&mut self, order: Option<KeeperRequest>) {
        if let Some(KeeperRequest::ReleasedInline) = order {
            return self.drive.handle(KeeperInput::Released);
        }
        // A request that arrives after the loss is refused at once: the caller need not wait until the keeper has
        // cleaned up at the store. The deadline may have passed since the last poll, so it is checked first.
        self.drive.handle_timeout();
        let lost = self.drive.machine.lost().map(|reason| self.about.lost(reason).into());
        self.order = match (order, lost) {
            (Some(order), Some(lost)) => {
                order.refuse(lost);
                None
            }
            (order, _) => order,
        };
        self.drive.handle(match self.order {
            Some(KeeperRequest::Detach(_)) => KeeperInput::Detach,
            _ => KeeperInput::Release,
        });
    }

    fn publish(&self) {
        let keeper = &self.drive.machine;
        let (deadline, lost) = (keeper.deadline(), keeper.lost());
        self.state.send_if_modified(|state| {
            let changed = state.deadline != deadline || state.lost != lost;
            (state.deadline, state.lost) = (deadline, lost);
            state.loss_at_deadline = keeper.loss_at_deadline();
            changed
        });
    }

    /// Handles the answer to a renewal. `loss` is the reason of a refusal, if the store has reported it.
    fn renewed(&mut self, renewed: Result<Renewed>, loss: Option<Loss>) {
        let HoldContext { key, store, callbacks, .. } = &*self.about;
        let labels = &self.drive.labels;
        let left = Some(self.drive.machine.deadline()).filter(|deadline| *deadline < Time::MAX);
        let left = left.map(|deadline| deadline.since(self.drive.now()));
        match &renewed {
            Ok(_) => labels.renewed("ok", left),
            Err(error) if error.is_refusal() => labels.renewed("refused", None),
            Err(_) => labels.renewed("failed", None),
        }
        match renewed {
            Ok(Renewed { handoff_requested }) => {
                tracing::trace!(name: "tenure.renewed", %key, %store);
                self.drive.handle(KeeperInput::Renewed { handoff_requested });
            }
            Err(error) if error.is_refusal() => {
                let reason = loss.map_or(KeeperInput::Refused, KeeperInput::HoldEnded);
                self.drive.handle(self.over(reason));
            }
            Err(error) => {
                tracing::warn!(name: "tenure.renew_failed", %key, %store, %error);
                let error = Arc::new(error);
                for callback in &callbacks.renewal_error {
                    let (callback, error) = (Arc::clone(callback), Arc::clone(&error));
                    tokio::spawn(async move { callback(&error) });
                }
                self.drive.handle(KeeperInput::RenewFailed);
            }
        }
    }

    fn released(&mut self, released: Result<()>) {
        match released {
            Ok(()) => self.drive.handle(KeeperInput::Released),
            Err(error) if error.is_refusal() => self.drive.handle(KeeperInput::Refused),
            Err(error) => {
                let HoldContext { key, store, .. } = &*self.about;
                tracing::warn!(name: "tenure.release_failed", %key, %store, %error);
                self.drive.handle(KeeperInput::ReleaseFailed);
            }
        }
    }

    fn hand_off(&self) {
        let HoldContext { key, store, token, callbacks, .. } = &*self.about;
        tracing::debug!(name: "tenure.handoff_requested", %key, %store, %token);
        self.state.send_modify(|state| state.handoff_requested = true);
        for callback in &callbacks.handoff_requested {
            let callback = Arc::clone(callback);
            tokio::spawn(async move { callback() });
        }
    }
}

/// Loss that the store has reported by now, if any: it is more exact than a refusal.
async fn reported_loss(hold: &mut dyn Hold) -> Option<Loss> {
    match race(hold.event(), ready(())).await {
        Either::First(HoldEvent::Lost(loss)) => Some(loss),
        _ => None,
    }
}

/// Waits for the guard's request, which comes at most once; `None` if the guard was dropped without one.
async fn ordered(orders: &mut Option<oneshot::Receiver<KeeperRequest>>) -> Option<KeeperRequest> {
    let Some(open) = orders else { return std::future::pending().await };
    let order = open.await.ok();
    *orders = None;
    order
}
