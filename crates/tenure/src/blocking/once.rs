//! Once per period, without async.

use std::time::{Duration, SystemTime};

use super::lock::Client;
use super::runtime::{same_as, wait, within};
use crate::once::Slot;
use crate::store::Identity;
use crate::{FencingToken, Lost, Result};

impl Client {
    /// Starts a request to run a task at most once per slot; see [`crate::Client::once`].
    pub fn once(&self, name: impl AsRef<str>) -> OnceRequest {
        OnceRequest(self.0.once(name))
    }
}

/// Request to run a task at most once per slot; see [`crate::once::OnceRequest`].
///
/// ```
/// use std::time::Duration;
/// use tenure::blocking::{Client, Once};
///
/// let client = Client::connect("memory:once-blocking-doc")?;
/// let hourly = || client.once("reports").per(Duration::from_secs(3600));
/// match hourly().begin()? {
///     Once::Run(run) => { /* the work */ run.done()? }
///     Once::Ran(by) => println!("run already, by {by:?}"),
/// }
/// assert!(matches!(hourly().begin()?, Once::Ran(_)));
/// # Ok::<(), tenure::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "a request does nothing until it is begun"]
pub struct OnceRequest(crate::once::OnceRequest);

impl OnceRequest {
    same_as! { "once::OnceRequest":
        per(period: Duration);
        slot(slot: impl Into<String>, keep: Duration);
        retry(on: bool);
        ttl(ttl: Duration);
        stop_grace(time: Duration);
        id(id: impl Into<String>);
        at(wall: SystemTime);
    }

    /// Decides if this process runs the slot.
    ///
    /// # Errors
    ///
    /// As [`crate::once::OnceRequest::begin`]. After any error, do not run the task.
    pub fn begin(self) -> Result<Once> {
        Ok(match wait(self.0.begin())?? {
            crate::once::Once::Run(run) => Once::Run(OnceRun(run)),
            crate::once::Once::Ran(by) => Once::Ran(by),
        })
    }
}

/// Decision for one slot; see [`crate::once::Once`].
#[derive(Debug)]
#[must_use = "a run that is dropped uses up its slot"]
pub enum Once {
    /// This process runs the slot. Report the outcome with [`OnceRun::done`] or [`OnceRun::failed`].
    Run(OnceRun),
    /// Another process has run the slot, or is running it; with its identity, if known.
    Ran(Option<Identity>),
}

/// Slot that this process is to run; see [`crate::once::OnceRun`]. Dropping it has the effect of
/// [`failed`](Self::failed), in the background.
#[derive(Debug)]
#[must_use = "report the outcome of the run with `done` or `failed`"]
pub struct OnceRun(crate::once::OnceRun);

impl OnceRun {
    /// Fencing token of the hold under which the slot is run.
    pub fn fencing_token(&self) -> FencingToken {
        self.0.guard().fencing_token()
    }

    /// True while the hold lasts: a local clock check, no I/O.
    pub fn is_held(&self) -> bool {
        self.0.guard().is_held()
    }

    /// Time until the local deadline of the hold.
    pub fn remaining(&self) -> Duration {
        self.0.guard().remaining()
    }

    /// Waits for the loss of the hold, for at most `timeout`; `None` if it is still held then.
    pub fn lost(&self, timeout: Duration) -> Option<Lost> {
        within(timeout, self.0.guard().lost())
    }

    /// Waits at most `timeout` until the work must begin to stop; true if it must.
    pub fn ending(&self, timeout: Duration) -> bool {
        within(timeout, self.0.guard().ending()).is_some()
    }

    /// The slot, if it belongs to a [period](OnceRequest::per).
    pub fn slot(&self) -> Option<Slot> {
        self.0.slot()
    }

    /// Records that the run succeeded: the slot is not run again.
    ///
    /// # Errors
    ///
    /// As [`crate::once::OnceRun::done`].
    pub fn done(self) -> Result<()> {
        wait(self.0.done())?
    }

    /// Records that the run failed.
    ///
    /// # Errors
    ///
    /// As [`crate::once::OnceRun::failed`].
    pub fn failed(self) -> Result<()> {
        wait(self.0.failed())?
    }
}
