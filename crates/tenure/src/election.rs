//! Leader election: a lock that somebody always tries to hold, and word of who does.
//!
//! An [`Election`] is one participant. Of all participants of a key at most one leads at a time, by the same promise as
//! a lock: [`Election::is_leader`] compares the clock with a deadline that ends before another can lead. What it does in
//! which state is a table that the docs print; the states are those of [`State`].
//!
//! ```
//! use std::time::Duration;
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
//! let client = tenure::Client::connect("memory:").await?;
//! let election = client
//!     .election("reports/scheduler")
//!     .ttl(Duration::from_secs(15))
//!     .on_acquired(|leadership| println!("leading with token {}", leadership.fencing_token()))
//!     .on_lost(|lost| eprintln!("{lost}"))
//!     .start()
//!     .await?;
//! if election.wait_for_leadership(Duration::from_secs(10)).await? {
//!     assert!(election.is_leader());
//!     election.step_down(None).await?;
//! }
//! election.shutdown(Duration::from_secs(5)).await?;
//! # Ok(()) }
//! ```

mod builder;
mod callbacks;
mod claims;
mod event;
mod leader;
mod leadership;
mod task;

use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tenure_core::election::{Election as Machine, ElectionConfig};
use tenure_core::retry::Retry;
use tenure_core::{FencingToken, Key, Random};
use tokio::runtime::Handle as Runtime;
use tokio::sync::{broadcast, mpsc, oneshot, watch};

pub use self::builder::ElectionRequest;
use self::builder::ShutdownSignal;
pub use self::callbacks::{AsyncCallback, CallbackOutput, SyncCallback};
use self::callbacks::{ElectionCallbacks, EventDispatcher};
use self::claims::Claims;
pub use self::event::{AcquireFailed, Event, Events, StateChange, StopReason};
pub use self::leader::Leader;
pub use self::leadership::{Ended, Leadership};
use self::task::{ElectionCommand, ElectionTask, Status};
use crate::request::shut_down_error;
use crate::{Clock, Error, ErrorKind, Result, identity};
pub use tenure_core::election::ElectionState;

/// One participant of an election. Dropping it shuts it down, in the background, and releases what it holds.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
/// # let client = tenure::Client::connect("memory:").await?;
/// let election = client.election("scheduler").start().await?;
/// election.wait_for_leadership(None).await?;
/// while let Some(leadership) = election.leadership() {
///     // One step of the leader's work; dropped as soon as the lead ends.
///     leadership.run(async { println!("as leader {}", leadership.fencing_token()) }).await?;
///     # break;
/// }
/// election.shutdown(None).await?; // another leads at once
/// # Ok(()) }
/// ```
///
/// See [the module](self) for callbacks.
#[must_use = "dropping an election shuts it down"]
pub struct Election {
    key: Key,
    clock: Clock,
    ttl: Duration,
    config: ElectionConfig,
    status: watch::Receiver<Status>,
    /// The task listens for the end of this channel: that is what dropping the handle says.
    orders: mpsc::Sender<ElectionCommand>,
    events: broadcast::Sender<Event>,
    /// What has yet to run; none once it was started.
    not_started: Mutex<Option<NotStarted>>,
}

/// What the first start sets going.
struct NotStarted {
    task: ElectionTask,
    callbacks: ElectionCallbacks,
}

/// How many orders may wait for the task, which never keeps them waiting for long.
const MAX_PENDING_ORDERS: usize = 16;

impl Election {
    fn new(
        claims: Claims,
        config: ElectionConfig,
        retry: Box<dyn Retry>,
        signal: Option<ShutdownSignal>,
        callbacks: ElectionCallbacks,
    ) -> Result<Self> {
        let (key, clock, ttl) = (claims.key.clone(), claims.clock.clone(), claims.ttl);
        let random = Random::new(u64::from_be_bytes(identity::random()?));
        let (publish, status) = watch::channel(Status::default());
        let (orders, listen) = mpsc::channel(MAX_PENDING_ORDERS);
        let machine = Machine::new(config, retry);
        let task =
            ElectionTask { claims, machine, random, orders: listen, signal, status: publish };
        let not_started = Mutex::new(Some(NotStarted { task, callbacks }));
        let events = Events::channel();
        Ok(Self { key, clock, ttl, config, status, orders, events, not_started })
    }

    /// Begins to take part. While it does, starting again changes nothing; after a stop it begins a new run.
    ///
    /// # Errors
    ///
    /// `Invalid` outside of a tokio runtime; `Shutdown` while it is shutting down, after its shutdown signal has fired,
    /// and after its runtime has ended.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future may leave it started or not.
    pub async fn start(&self) -> Result<()> {
        self.spawn()?;
        self.order(ElectionCommand::Start).await
    }

    /// Ends the run: releases what is held, then stops. Where it does not run, that is so already.
    ///
    /// `timeout` is a hard bound, 10 s where it is `None`: past it the release goes on in the background and the election
    /// is stopped all the same. Callbacks that have not been called by then are called later; unless this is called by
    /// one of them, it waits for them.
    ///
    /// # Errors
    ///
    /// `Unknown` where the release did not finish in time: the store may keep others out until the lease ends. `Shutdown`
    /// where its runtime has ended.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future stops it all the same, if it was polled.
    pub async fn shutdown(&self, timeout: impl Into<Option<Duration>>) -> Result<()> {
        if !self.was_started() {
            return Ok(());
        }
        let bound = timeout.into().unwrap_or(self.config.shutdown_timeout);
        let end = self.clock.now() + bound;
        let timeout = Some(bound);
        tokio::select! {
            biased;
            stopped = self.order(|reply| ElectionCommand::Stop { timeout, reply }) => stopped?,
            () = self.clock.sleep_until(end) => return Err(self.too_late(bound)),
        }
        if !callbacks::in_callback() {
            let (reply, flushed) = oneshot::channel();
            let flush = async {
                // Where the task is gone the callbacks are too.
                if self.orders.send(ElectionCommand::Flush(reply)).await.is_ok() {
                    let _ = flushed.await;
                }
            };
            tokio::select! {
                biased;
                () = flush => {}
                () = self.clock.sleep_until(end) => {}
            }
        }
        Ok(())
    }

    /// Gives leadership up, and claims nothing until the cool-down is over, so that another leads. Who does not lead
    /// cools down all the same.
    ///
    /// `timeout` is a hard bound, 5 s where it is `None`: past it the release goes on in the background.
    ///
    /// # Errors
    ///
    /// `Unknown` where the release did not finish in time: the store may keep others out until the lease ends. `Lost`
    /// where the hold ended before it could be given up. `Shutdown` where its runtime has ended.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future steps down all the same, if it was polled.
    pub async fn step_down(&self, timeout: impl Into<Option<Duration>>) -> Result<()> {
        if !self.was_started() {
            return Ok(());
        }
        let bound = timeout.into().unwrap_or(self.config.step_down_timeout);
        let timeout = Some(bound);
        tokio::select! {
            biased;
            stepped = self.order(|reply| ElectionCommand::StepDown { timeout, reply }) => stepped,
            () = self.clock.sleep_until(self.clock.now() + bound) => Err(self.too_late(bound)),
        }
    }

    /// Waits until this participant leads: true as soon as it does, false where `timeout` is over first. Without a
    /// `timeout`, waits for as long as it runs.
    ///
    /// # Errors
    ///
    /// `Shutdown` where it does not run, or stops meanwhile; the source says why where that was an error.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing.
    pub async fn wait_for_leadership(&self, timeout: impl Into<Option<Duration>>) -> Result<bool> {
        let end =
            timeout.into().map_or(tenure_core::Time::MAX, |timeout| self.clock.now() + timeout);
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
                    return Err(shut_down_error(&self.key));
                }
            }
        };
        tokio::select! {
            biased;
            led = led => led,
            () = self.clock.sleep_until(end) => Ok(false),
        }
    }

    /// Where this participant stands. Ask [`is_leader`](Self::is_leader) before acting as the leader.
    pub fn state(&self) -> ElectionState {
        let status = self.status.borrow();
        let gone = self.was_started() && self.status.has_changed().is_err();
        if gone { ElectionState::Stopped } else { status.state }
    }

    /// Whether this participant leads at this moment, by the clock and not by what is published.
    pub fn is_leader(&self) -> bool {
        self.leadership().is_some()
    }

    /// The fencing token, while this participant leads.
    pub fn fencing_token(&self) -> Option<FencingToken> {
        self.leadership().map(|leadership| leadership.fencing_token())
    }

    /// The hold by which this participant leads at this moment.
    pub fn leadership(&self) -> Option<Leadership> {
        self.status.borrow().lead.clone().filter(Leadership::is_held)
    }

    /// Everything that this election tells from now on. Several readers each get everything; a slow one holds nobody up
    /// (see [`Events`]).
    pub fn events(&self) -> Events {
        Events::of(&self.events)
    }

    /// The key that the election is about.
    pub fn key(&self) -> &Key {
        &self.key
    }

    fn was_started(&self) -> bool {
        self.not_started.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Sets the task going, once.
    fn spawn(&self) -> Result<()> {
        let runtime = Runtime::try_current().map_err(|error| {
            let message = "an election needs a tokio runtime: start it from within one";
            Error::new(ErrorKind::Invalid, message).on(&self.key).because(error)
        })?;
        let waiting = self.not_started.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(NotStarted { task, callbacks }) = waiting {
            runtime.spawn(task.run(EventDispatcher::start(callbacks, self.events.clone())));
        }
        Ok(())
    }

    async fn order(
        &self,
        order: impl FnOnce(oneshot::Sender<Result<()>>) -> ElectionCommand,
    ) -> Result<()> {
        let (reply, answer) = oneshot::channel();
        let gone = || shut_down_error(&self.key);
        self.orders.send(order(reply)).await.map_err(|_| gone())?;
        answer.await.unwrap_or_else(|_| Err(gone()))
    }

    fn too_late(&self, bound: Duration) -> Error {
        let message =
            format!("the release did not finish within {bound:?}: it goes on in the background");
        Error::new(ErrorKind::Unknown, message).on(&self.key).with_may_be_held_for(self.ttl)
    }

    fn stopped(&self, why: Option<&StopReason>) -> Error {
        let stopped = |message: String| Error::new(ErrorKind::Shutdown, message).on(&self.key);
        match why {
            None => stopped("the election does not run: start it first".to_owned()),
            Some(StopReason::Failed(error)) => {
                event::because(stopped("the election has stopped with an error".to_owned()), error)
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
