//! Rows that cannot be read or claimed: left out by claims, and reported once.

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use tenure_core::Time;
use tenure_core::jobs::SetAside;

use crate::Error;
use crate::mutex::Mutex;
use crate::store::pg::failure;

/// A job that claims leave out, because its row cannot be read or claimed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct JobSetAside {
    /// Table of the queue.
    pub queue: String,
    /// Id of the job.
    pub id: String,
    /// Reason, with the server's own message if the server refused the claim.
    pub reason: String,
}

impl fmt::Display for JobSetAside {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { queue, id, reason } = self;
        write!(f, "job {id} of {queue} is set aside: {reason}; the other jobs go on")
    }
}

/// Rows of a queue that are set aside, and the callbacks that hear of them. Clones have the same callbacks and rows of
/// their own.
#[derive(Default)]
pub(super) struct RowsSetAside {
    rows: Mutex<SetAside>,
    callbacks: Vec<Arc<OnSetAside>>,
}

type OnSetAside = dyn Fn(&JobSetAside) + Send + Sync;

impl RowsSetAside {
    pub(super) fn on_report(&mut self, f: impl Fn(&JobSetAside) + Send + Sync + 'static) {
        self.callbacks.push(Arc::new(f));
    }

    /// Ids of the rows that claims leave out.
    pub(super) fn ids(&self, now: Time) -> Vec<String> {
        self.rows.lock().ids(now)
    }

    /// Sets a row aside, and reports it if that is news.
    pub(super) fn add(&self, job: &JobSetAside, now: Time) {
        let is_new = self.rows.lock().add(&job.id, now);
        if !is_new {
            return;
        }
        let JobSetAside { queue, id, reason } = job;
        tracing::warn!(name: "tenure.job_set_aside", queue, id, reason);
        for callback in &self.callbacks {
            if std::panic::catch_unwind(AssertUnwindSafe(|| callback(job))).is_err() {
                tracing::error!("a callback panicked; the queue goes on");
            }
        }
    }
}

impl Clone for RowsSetAside {
    fn clone(&self) -> Self {
        Self { rows: Mutex::default(), callbacks: self.callbacks.clone() }
    }
}

impl fmt::Debug for RowsSetAside {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} callbacks", self.callbacks.len())
    }
}

/// True if the server refused a statement because of a value in a row: a constraint, a trigger of the user's, or a value
/// out of range. The same statement may succeed on other rows.
pub(super) fn is_fault_of_row(error: &Error) -> bool {
    const CLASSES: [&str; 6] = ["22", "23", "38", "39", "44", "P0"];
    failure::code(error).is_some_and(|code| CLASSES.iter().any(|class| code.starts_with(class)))
}
