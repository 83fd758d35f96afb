//! Blocking API of elections.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use super::runtime::{same_as, same_callbacks_as, wait, within};
use crate::election::{
    AcquireFailed, CallbackOutput, ElectionState, Ended, Event, StateChange, StopReason,
};
use crate::retry::Retry;
use crate::store::HolderState;
use crate::{Error, FencingToken, Key, Lost, Result, StoreOutage};

/// Settings of an election participant; see [`crate::ElectionRequest`].
#[derive(Debug)]
#[must_use = "an election does nothing until it is started"]
pub struct ElectionRequest(pub(super) crate::ElectionRequest);

impl ElectionRequest {
    same_as! { "ElectionRequest":
        ttl(ttl: Duration);
        stop_grace(time: Duration);
        health_interval(interval: Duration);
        retry(retry: impl Retry + 'static);
        reconnect_grace(grace: Duration);
        auto_reacquire(on: bool);
        cool_down(time: Duration);
        id(id: impl Into<String>);
        note(note: impl Into<String>);
        fail_fast();
        shutdown_on(signal: impl Future + Send + 'static);
        on_outage(f: impl Fn(&StoreOutage) + Send + Sync + 'static);
    }

    same_callbacks_as! { "ElectionRequest":
        on_released();
        on_lost(Lost);
        on_acquire_failed(AcquireFailed);
        on_state_change(StateChange);
        on_error(Arc<Error>);
        on_stopped(StopReason);
    }

    /// Calls `f` when this participant becomes the leader.
    pub fn on_acquired<R: CallbackOutput<How>, How>(
        self,
        f: impl Fn(Leadership) -> R + Send + Sync + 'static,
    ) -> Self {
        Self(self.0.on_acquired(move |leadership| f(Leadership(leadership))))
    }

    /// Builds the election without starting it.
    ///
    /// # Errors
    ///
    /// As [`crate::ElectionRequest::build`].
    pub fn build(self) -> Result<Election> {
        self.0.build().map(Election)
    }

    /// Starts to take part.
    ///
    /// # Errors
    ///
    /// As [`crate::ElectionRequest::start`].
    pub fn start(self) -> Result<Election> {
        wait(self.0.start())?.map(Election)
    }
}

/// A participant of an election; see [`crate::Election`]. Dropping it shuts it down in the background.
///
/// ```
/// use std::time::Duration;
///
/// let client = tenure::blocking::Client::connect("memory:")?;
/// let election = client.election("scheduler").start()?;
/// if election.wait_for_leadership(Duration::from_secs(10))? {
///     while election.is_leader() {
///         // one step of the leader's work
///         # break;
///     }
/// }
/// election.shutdown(Duration::from_secs(5))?;
/// # Ok::<(), tenure::Error>(())
/// ```
#[derive(Debug)]
pub struct Election(crate::Election);

impl Election {
    same_callbacks_as! { &"Election":
        on_released();
        on_lost(Lost);
        on_acquire_failed(AcquireFailed);
        on_state_change(StateChange);
        on_error(Arc<Error>);
        on_stopped(StopReason);
    }

    /// Calls `f` when this participant becomes the leader; see [`crate::Election::on_acquired`].
    pub fn on_acquired<R: CallbackOutput<How>, How>(
        &self,
        f: impl Fn(Leadership) -> R + Send + Sync + 'static,
    ) {
        self.0.on_acquired(move |leadership| f(Leadership(leadership)));
    }

    /// Takes part again after a stop; does nothing while the election runs.
    ///
    /// # Errors
    ///
    /// As [`crate::Election::start`].
    pub fn start(&self) -> Result<()> {
        wait(self.0.start())?
    }

    /// Releases the hold and stops, within the timeout.
    ///
    /// # Errors
    ///
    /// As [`crate::Election::shutdown`].
    pub fn shutdown(&self, timeout: impl Into<Option<Duration>>) -> Result<()> {
        wait(self.0.shutdown(timeout))?
    }

    /// Gives up leadership, within the timeout, and claims nothing for a while, so that another participant leads.
    ///
    /// # Errors
    ///
    /// As [`crate::Election::step_down`].
    pub fn step_down(&self, timeout: impl Into<Option<Duration>>) -> Result<()> {
        wait(self.0.step_down(timeout))?
    }

    /// Waits until this participant leads; false if the timeout is over first.
    ///
    /// # Errors
    ///
    /// As [`crate::Election::wait_for_leadership`].
    pub fn wait_for_leadership(&self, timeout: impl Into<Option<Duration>>) -> Result<bool> {
        wait(self.0.wait_for_leadership(timeout))?
    }

    /// State of this participant.
    pub fn state(&self) -> ElectionState {
        self.0.state()
    }

    /// True while this participant leads: a local clock check, no I/O.
    pub fn is_leader(&self) -> bool {
        self.0.is_leader()
    }

    /// Fencing token of the current term; `None` while this participant does not lead.
    pub fn fencing_token(&self) -> Option<FencingToken> {
        self.0.fencing_token()
    }

    /// The current term; `None` while this participant does not lead.
    pub fn leadership(&self) -> Option<Leadership> {
        self.0.leadership().map(Leadership)
    }

    /// Subscribes to the events from now on.
    pub fn events(&self) -> Events {
        Events(self.0.events())
    }

    /// Key of the election.
    pub fn key(&self) -> &Key {
        self.0.key()
    }
}

/// Events of an election; see [`crate::election::Events`].
#[derive(Debug)]
pub struct Events(crate::election::Events);

impl Iterator for Events {
    type Item = Event;

    /// Waits for the next event; `None` once the election was dropped and its last run has ended.
    fn next(&mut self) -> Option<Event> {
        pollster::block_on(self.0.next())
    }
}

/// A term of leadership; see [`crate::Leadership`].
#[derive(Clone, Debug)]
pub struct Leadership(crate::Leadership);

impl Leadership {
    /// Key of the election.
    pub fn key(&self) -> &Key {
        self.0.key()
    }

    /// Fencing token: grows with every term.
    pub fn fencing_token(&self) -> FencingToken {
        self.0.fencing_token()
    }

    /// Revision of the record in a NATS bucket; see [`crate::Guard::revision`].
    pub fn revision(&self) -> Option<u64> {
        self.0.revision()
    }

    /// True while the term lasts: a local clock check, no I/O.
    pub fn is_held(&self) -> bool {
        self.0.is_held()
    }

    /// Time until the local deadline of the term.
    pub fn remaining(&self) -> Duration {
        self.0.remaining()
    }

    /// Waits at most `timeout` for the end of the term; `None` if the term still lasts then.
    pub fn ended(&self, timeout: Duration) -> Option<Ended> {
        within(timeout, self.0.ended())
    }

    /// Waits at most `timeout` until the leader's work must begin to stop; true if it must.
    pub fn ending(&self, timeout: Duration) -> bool {
        within(timeout, self.0.ending()).is_some()
    }

    /// Waits at most `timeout` until a follower waits to lead; true if one does.
    pub fn handoff_requested(&self, timeout: Duration) -> bool {
        within(timeout, self.0.handoff_requested()).is_some()
    }

    /// A descriptor that keeps the hold; see [`crate::Leadership::keep_open`].
    ///
    /// # Errors
    ///
    /// As [`crate::Leadership::keep_open`].
    #[cfg(unix)]
    pub fn keep_open(&self) -> Result<Option<std::os::fd::OwnedFd>> {
        self.0.keep_open()
    }
}

/// Observer of an election's leader; see [`crate::Leader`].
#[derive(Debug)]
pub struct Leader(pub(super) crate::Leader);

impl Leader {
    /// Longest interval between two queries; see [`crate::Leader::poll_every`].
    #[must_use]
    pub fn poll_every(self, time: Duration) -> Self {
        Self(self.0.poll_every(time))
    }

    /// The current leader; `None` if there is no leader.
    ///
    /// # Errors
    ///
    /// As [`crate::Leader::current`].
    pub fn current(&self) -> Result<Option<HolderState>> {
        wait(self.0.current())?
    }

    /// Waits until the leader differs from the last one returned.
    ///
    /// # Errors
    ///
    /// As [`crate::Leader::changed`].
    pub fn changed(&mut self) -> Result<Option<HolderState>> {
        wait(self.0.changed())?
    }
}
