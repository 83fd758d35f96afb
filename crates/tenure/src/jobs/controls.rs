//! Settings of a queue that operators change while it runs: its pause, and the tables of its settings and schedules.
//!
//! They are rows of the table `tenure_queues`, in the schema of the queue's table, and tenure's own. Workers read the row
//! once per [`CONTROL_INTERVAL`], not with every claim: a queue without settings costs its claims nothing. A change is
//! also announced on the channel of the queue, so that workers that listen read it at once.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tenure_core::Time;

use crate::mutex::Mutex;
use crate::store::pg::shape::TableShape;

/// Name of the table.
pub(super) const QUEUES_TABLE: &str = "tenure_queues";

pub(super) const QUEUES_SHAPE: TableShape = TableShape {
    what: "The settings of tenure's queues in this schema",
    version: "tenure queues, version 1",
    columns: &[
        // Name of the queue's table, without its schema.
        ("queue", "text", "NOT NULL"),
        ("paused_at", "timestamp with time zone", ""),
        ("pause_reason", "text", ""),
        // Time of the last run of the retention, and the id that the next one continues after.
        ("pruned_at", "timestamp with time zone", ""),
        ("prune_after", "text", ""),
    ],
    key: "queue",
    rights: "SELECT, INSERT, UPDATE, DELETE",
    unlogged: false,
};

/// Name of the table of schedules.
pub(super) const SCHEDULES_TABLE: &str = "tenure_schedules";

pub(super) const SCHEDULES_SHAPE: TableShape = TableShape {
    what: "The schedules of tenure's queues in this schema",
    version: "tenure schedules, version 1",
    columns: &[
        ("queue", "text", "NOT NULL"),
        ("name", "text", "NOT NULL"),
        ("cron", "text", "NOT NULL"),
        ("time_zone", "text", "NOT NULL"),
        ("catch_up", "text", "NOT NULL"),
        ("payload", "text", "NOT NULL"),
        ("priority", "integer", "NOT NULL"),
        ("max_attempts", "integer", "NOT NULL"),
        ("next_at", "timestamp with time zone", "NOT NULL"),
        ("last_at", "timestamp with time zone", ""),
    ],
    key: "queue, name",
    rights: "SELECT, INSERT, UPDATE, DELETE",
    unlogged: false,
};

/// Interval at which a worker reads the settings.
pub(super) const CONTROL_INTERVAL: Duration = Duration::from_secs(1);
/// Payload of the notification of changed settings.
pub(super) const CONTROLS_CHANGED: &str = "tenure:controls";

/// Pause of a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueuePause {
    /// Beginning of the pause, by the database's clock.
    pub since: Option<SystemTime>,
    /// Reason that the operator gave.
    pub reason: Option<String>,
}

/// Settings that a worker knows.
#[derive(Debug)]
pub(super) struct Controls {
    pub(super) state: Mutex<ControlState>,
    callbacks: PauseCallbacks,
}

#[derive(Debug)]
pub(super) struct ControlState {
    /// Place of the settings; `None` if there is no such table, or it was not looked for yet.
    pub(super) place: Option<ControlPlace>,
    paused: Option<QueuePause>,
    /// True if a schedule of the queue was due when the settings were read.
    pub(super) has_due_schedules: bool,
    pub(super) next_reading: Time,
}

/// The row of a queue's settings.
#[derive(Clone, Debug)]
pub(super) struct ControlPlace {
    /// Quoted name of the schema.
    pub(super) schema: String,
    /// Name of the queue in the column `queue`.
    pub(super) queue: String,
    /// True if the table of schedules exists, too.
    pub(super) has_schedules: bool,
}

impl ControlPlace {
    pub(super) fn table(&self) -> String {
        format!("{}.{QUEUES_TABLE}", self.schema)
    }
}

/// Callbacks for the beginning and the end of a pause.
#[derive(Clone, Default)]
pub(super) struct PauseCallbacks(Vec<Arc<OnPause>>);

type OnPause = dyn Fn(Option<&QueuePause>) + Send + Sync;

impl PauseCallbacks {
    pub(super) fn push(&mut self, f: impl Fn(Option<&QueuePause>) + Send + Sync + 'static) {
        self.0.push(Arc::new(f));
    }

    fn call(&self, pause: Option<&QueuePause>) {
        for callback in &self.0 {
            if std::panic::catch_unwind(AssertUnwindSafe(|| callback(pause))).is_err() {
                tracing::error!("a callback panicked; the queue goes on");
            }
        }
    }
}

impl std::fmt::Debug for PauseCallbacks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("PauseCallbacks").field(&self.0.len()).finish()
    }
}

impl Controls {
    pub(super) fn new(callbacks: PauseCallbacks, now: Time) -> Self {
        let state =
            ControlState { place: None, paused: None, has_due_schedules: false, next_reading: now };
        Self { state: Mutex::new(state), callbacks }
    }

    pub(super) fn is_paused(&self) -> bool {
        self.state.lock().paused.is_some()
    }

    /// True once for each reading that found a schedule due.
    #[cfg(feature = "schedules")]
    pub(super) fn take_due_schedules(&self) -> bool {
        std::mem::take(&mut self.state.lock().has_due_schedules)
    }

    /// Time at which the settings must be read again.
    pub(super) fn next_reading(&self) -> Time {
        self.state.lock().next_reading
    }

    /// Makes the next claim read the settings.
    pub(super) fn read_soon(&self, now: Time) {
        self.state.lock().next_reading = now;
    }

    /// True once per interval: the caller must read the settings.
    pub(super) fn are_due(&self, now: Time) -> bool {
        let mut state = self.state.lock();
        let due = now >= state.next_reading;
        if due {
            state.next_reading = now + CONTROL_INTERVAL;
        }
        due
    }

    /// Keeps the settings that were read, and reports a pause that began or ended.
    pub(super) fn note(&self, paused: Option<&QueuePause>) {
        let before = std::mem::replace(&mut self.state.lock().paused, paused.cloned());
        if before.as_ref() != paused {
            self.callbacks.call(paused);
        }
    }
}
