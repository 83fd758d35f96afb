//! The participant of an election, as its owner sees it: commands to its task, and the state that the task publishes.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tenure_core::election::{Election as ElectionMachine, ElectionConfig};
use tenure_core::retry::Retry;
use tenure_core::{FencingToken, Key, Time};
use tokio::runtime::Handle as Runtime;
use tokio::sync::{broadcast, mpsc, oneshot, watch};

use super::callbacks::{ElectionCallbacks, EventDispatcher, in_callback};
use super::claims::Claims;
use super::event::because;
use super::task::{ElectionCall, ElectionTask, ShutdownSignal, Status};
use super::{ElectionState, Event, Events, Leadership, StopReason};
use crate::mutex::Mutex;
use crate::race::before;
use crate::{Clock, Error, ErrorKind, Result, identity};

/// A participant of an election. Dropping it shuts it down in the background and releases its hold.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
/// # let client = tenure::Client::connect("memory:").await?;
/// let election = client.election("scheduler").start().await?;
/// election.wait_for_leadership(None).await?;
/// while let Some(leadership) = election.leadership() {
///     // One step of the leader's work; dropped as soon as the leadership ends.
///     leadership.run(async { println!("as leader {}", leadership.fencing_token()) }).await?;
///     # break;
/// }
/// election.shutdown(None).await?; // another participant leads at once
/// # Ok(()) }
/// ```
///
/// See [`ElectionRequest`](super::ElectionRequest#callbacks) for callbacks.
#[must_use = "dropping an election shuts it down"]
pub struct Election {
    key: Key,
    clock: Clock,
    ttl: Duration,
    config: ElectionConfig,
    status: watch::Receiver<Status>,
    /// Commands to the task. Dropping the handle closes this channel, and the task shuts down when it closes.
    orders: mpsc::Sender<ElectionCall>,
    events: broadcast::Sender<Event>,
    callbacks: Arc<ElectionCallbacks>,
    /// The task; `None` once it was spawned.
    not_started: Mutex<Option<ElectionTask>>,
}

/// Capacity of the command channel. The task never keeps commands waiting for long.
const MAX_PENDING_ORDERS: usize = 16;

impl Election {
    /// Returns an election that has not started.
    pub(super) fn new(
        claims: Claims,
        config: ElectionConfig,
        retry: Box<dyn Retry>,
        signal: Option<ShutdownSignal>,
        callbacks: ElectionCallbacks,
    ) -> Result<Self> {
        let (key, clock, ttl) = (claims.key.clone(), claims.clock.clone(), claims.ttl);
        let seed = u64::from_be_bytes(identity::random()?);
        let (publish, status) = watch::channel(Status::default());
        let (orders, listen) = mpsc::channel(MAX_PENDING_ORDERS);
        let machine = ElectionMachine::new(config, retry, seed);
        let task = ElectionTask { claims, machine, orders: listen, signal, status: publish };
        let not_started = Mutex::new(Some(task));
        let events = Events::channel();
        let callbacks = Arc::new(callbacks);
        Ok(Self { key, clock, ttl, config, status, orders, events, callbacks, not_started })
    }

    pub(super) fn callbacks(&self) -> &ElectionCallbacks {
        &self.callbacks
    }

    /// Starts to take part. Does nothing while the election runs; after a stop, begins a new run.
    ///
    /// # Errors
    ///
    /// `Invalid` outside a tokio runtime; `Shutdown` during a shutdown, after the shutdown signal has fired,
    /// and after its runtime has ended.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the election either started or not started.
    pub async fn start(&self) -> Result<()> {
        self.spawn()?;
        self.order(ElectionCall::Start).await
    }

    /// Ends the run: releases the hold, then stops. Returns at once if the election does not run.
    ///
    /// `timeout` is a hard bound, 10 s if it is `None`. When it is over, the election counts as stopped and the release
    /// continues in the background. Within the bound, `shutdown` also waits for callbacks that have not run yet, unless
    /// it was itself called from a callback; callbacks that remain run later.
    ///
    /// # Errors
    ///
    /// `Unknown` if the release did not finish in time: the store may exclude other participants until the lease ends.
    /// `Shutdown` if the runtime of the election has ended.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future does not stop the shutdown, once the future was polled.
    pub async fn shutdown(&self, timeout: impl Into<Option<Duration>>) -> Result<()> {
        if !self.was_started() {
            return Ok(());
        }
        let bound = timeout.into().unwrap_or(self.config.shutdown_timeout);
        let end = self.clock.now() + bound;
        let timeout = Some(bound);
        let stopped = self.order(|reply| ElectionCall::Stop { timeout, reply });
        before(&self.clock, end, stopped).await.unwrap_or_else(|| Err(self.too_late(bound)))?;
        if !in_callback() {
            let (reply, flushed) = oneshot::channel();
            let flush = async {
                // If the task has ended, its callbacks have ended too.
                if self.orders.send(ElectionCall::Flush(reply)).await.is_ok() {
                    let _ = flushed.await;
                }
            };
            before(&self.clock, end, flush).await;
        }
        Ok(())
    }

    /// Gives up leadership and claims nothing until the cool-down is over, so that another participant leads. A
    /// participant that does not lead cools down as well.
    ///
    /// `timeout` is a hard bound, 5 s if it is `None`; after that the release continues in the background.
    ///
    /// # Errors
    ///
    /// `Unknown` if the release did not finish in time: the store may exclude other participants until the lease ends.
    /// `Lost` if the hold ended before it could be released. `Shutdown` if the runtime of the election has ended.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future does not stop the step-down, once the future was polled.
    pub async fn step_down(&self, timeout: impl Into<Option<Duration>>) -> Result<()> {
        if !self.was_started() {
            return Ok(());
        }
        let bound = timeout.into().unwrap_or(self.config.step_down_timeout);
        let (timeout, end) = (Some(bound), self.clock.now() + bound);
        let stepped = self.order(|reply| ElectionCall::StepDown { timeout, reply });
        before(&self.clock, end, stepped).await.unwrap_or_else(|| Err(self.too_late(bound)))
    }

    /// Waits until this participant leads. Returns true when it leads, false if `timeout` is over first. Without a
    /// `timeout`, waits until the run ends.
    ///
    /// # Errors
    ///
    /// `Shutdown` if the election does not run or stops meanwhile; the source is the error that stopped it, if any.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future has no effect on the election.
    pub async fn wait_for_leadership(&self, timeout: impl Into<Option<Duration>>) -> Result<bool> {
        let end = timeout.into().map_or(Time::MAX, |timeout| self.clock.now() + timeout);
        let mut status = self.status.clone();
        let run = status.borrow().run;
        let led = async {
            loop {
                {
                    let now = status.borrow_and_update();
                    if now.state == ElectionState::Stopped || now.run != run {
                        return Err(self.stopped(now.stopped.as_ref()));
                    }
                    if now.lead.as_ref().is_some_and(Leadership::is_held) {
                        return Ok(true);
                    }
                }
                if status.changed().await.is_err() {
                    return Err(Error::task_ended(&self.key));
                }
            }
        };
        before(&self.clock, end, led).await.unwrap_or(Ok(false))
    }

    /// State of this participant. Before acting as the leader, check [`is_leader`](Self::is_leader).
    pub fn state(&self) -> ElectionState {
        let status = self.status.borrow();
        let gone = self.was_started() && self.status.has_changed().is_err();
        if gone { ElectionState::Stopped } else { status.state }
    }

    /// True while this participant leads: a check of the local clock against the deadline, not of the published state.
    pub fn is_leader(&self) -> bool {
        self.leadership().is_some()
    }

    /// Fencing token of the current term; `None` while this participant does not lead.
    pub fn fencing_token(&self) -> Option<FencingToken> {
        self.leadership().map(|leadership| leadership.fencing_token())
    }

    /// Leadership of the current term; `None` while this participant does not lead.
    pub fn leadership(&self) -> Option<Leadership> {
        self.status.borrow().lead.clone().filter(Leadership::is_held)
    }

    /// Subscribes to the events of this election from now on. Every subscriber receives every event; a slow subscriber
    /// delays neither the election nor another subscriber (see [`Events`]).
    pub fn events(&self) -> Events {
        Events::of(&self.events)
    }

    /// Key of the election.
    pub fn key(&self) -> &Key {
        &self.key
    }

    fn was_started(&self) -> bool {
        self.not_started.lock().is_none()
    }

    /// Spawns the task on the first call.
    fn spawn(&self) -> Result<()> {
        let runtime = Runtime::try_current().map_err(|error| {
            let message = "an election needs a tokio runtime: start it from within one";
            Error::new(ErrorKind::Invalid, message).on(&self.key).because(error)
        })?;
        let waiting = self.not_started.lock().take();
        if let Some(task) = waiting {
            let callbacks = Arc::clone(&self.callbacks);
            runtime.spawn(task.run(EventDispatcher::start(callbacks, self.events.clone())));
        }
        Ok(())
    }

    async fn order(
        &self,
        order: impl FnOnce(oneshot::Sender<Result<()>>) -> ElectionCall,
    ) -> Result<()> {
        let (reply, answer) = oneshot::channel();
        let gone = || Error::task_ended(&self.key);
        self.orders.send(order(reply)).await.map_err(|_| gone())?;
        answer.await.unwrap_or_else(|_| Err(gone()))
    }

    fn too_late(&self, bound: Duration) -> Error {
        let message =
            format!("the release did not finish within {bound:?}: it continues in the background");
        Error::new(ErrorKind::Unknown, message).on(&self.key).with_may_be_held_for(self.ttl)
    }

    fn stopped(&self, why: Option<&StopReason>) -> Error {
        let stopped = |message: String| Error::new(ErrorKind::Shutdown, message).on(&self.key);
        match why {
            None => stopped("the election is not running: start it first".to_owned()),
            Some(StopReason::Failed(error)) => {
                because(stopped("the election has stopped with an error".to_owned()), error)
            }
            Some(why) => stopped(format!("the election has stopped: {why}")),
        }
    }
}

impl fmt::Debug for Election {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Election")
            .field("key", &self.key)
            .field("state", &self.state())
            .field("fencing_token", &self.fencing_token())
            .finish_non_exhaustive()
    }
}
