//! Jobs as rows of a table: the state of a job from its columns, the order of claims, and the leases of many jobs.
//!
//! The states and the order match the plain SQL that teams use on such tables, so both kinds of workers can share a
//! table. The leases are those of [`lease`](crate::lease), for many holds at once: see [`HeartbeatSchedule`].

mod heart;
mod leases_ahead;
mod progress;
mod rates;
mod schedule;
mod set_aside;

use std::cmp::Ordering;
use std::fmt;
use std::str::FromStr;

pub use heart::{HeartbeatSchedule, RenewalBatch, RenewalEvent, RenewalOutcome};
pub use leases_ahead::{LEASE_MARK, LeaseAhead, LeasesAhead, recorded_lease, worker_name};
pub use progress::{MAX_PROGRESS_BYTES, ProgressLines, progress_text};
pub use rates::{QueueRates, RateWindow};
pub use schedule::{CatchUp, MAX_CAUGHT_UP, MISSED_AFTER};
pub use set_aside::SetAside;

use crate::keeper::Loss;

/// Holder name of a delayed job. For the plain SQL the delay is a lease like any other, and it ends by itself. No
/// worker may use this name, because its jobs would look delayed.
pub const DELAYED_HOLDER: &str = "~retry";

/// State of a job, derived from its row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum JobState {
    /// Can be claimed.
    Available,
    /// Can be claimed at a later time: the job was enqueued with a delay, or waits for a retry.
    Delayed,
    /// Claimed, and its lease has not ended.
    Running,
    /// Claimed, and its lease has ended: its worker is gone or late.
    Expired,
    /// Completed. Final.
    Completed,
    /// Failed, with its error. Final, unless an operator retries the job.
    Failed,
}

/// Columns that determine the state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JobColumns<'a> {
    /// `completed_at` is set.
    pub completed: bool,
    /// `failed_at` is set.
    pub failed: bool,
    /// `locked_until`, in the same unit and with the same origin as `now`.
    pub locked_until: Option<i64>,
    /// `locked_by`.
    pub locked_by: Option<&'a str>,
}

impl JobState {
    /// All states, in the order in which a job passes through them.
    pub const ALL: [Self; 6] = [
        Self::Available,
        Self::Delayed,
        Self::Running,
        Self::Expired,
        Self::Completed,
        Self::Failed,
    ];

    /// State at `now`, on the database's clock. The final states take precedence over the lease.
    ///
    /// ```
    /// use tenure_core::jobs::{JobColumns, JobState};
    ///
    /// let row = JobColumns { locked_until: Some(100), locked_by: Some("worker 7"), ..JobColumns::default() };
    /// assert_eq!(JobState::of(&row, 99), JobState::Running);
    /// assert_eq!(JobState::of(&row, 100), JobState::Expired);
    /// assert_eq!(JobState::of(&JobColumns { completed: true, ..row }, 99), JobState::Completed);
    /// ```
    pub fn of(columns: &JobColumns<'_>, now: i64) -> Self {
        let delayed = columns.locked_by == Some(DELAYED_HOLDER);
        match columns.locked_until {
            _ if columns.completed => Self::Completed,
            _ if columns.failed => Self::Failed,
            Some(until) if until > now && delayed => Self::Delayed,
            Some(until) if until > now => Self::Running,
            // The delay is over. The job had no worker, so it is available and not expired.
            Some(_) if delayed => Self::Available,
            Some(_) => Self::Expired,
            None => Self::Available,
        }
    }

    /// True if the job can no longer be claimed.
    pub const fn is_final(self) -> bool {
        matches!(self, Self::Completed | Self::Failed)
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Available => "AVAILABLE",
            Self::Delayed => "DELAYED",
            Self::Running => "RUNNING",
            Self::Expired => "EXPIRED",
            Self::Completed => "COMPLETED",
            Self::Failed => "FAILED",
        }
    }
}

impl fmt::Display for JobState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Outcome of a renewal that the row refused, by the row's final state. `same_token` is true if the row still has the
/// token of the claim, so that no other worker has claimed the job since.
///
/// Only a completion is final: a failed job may be retried by an operator, and claimed again.
///
/// ```
/// use tenure_core::jobs::{RenewalOutcome, refused_renewal};
/// use tenure_core::keeper::Loss;
///
/// assert_eq!(refused_renewal(true, false, true), RenewalOutcome::Completed);
/// assert_eq!(refused_renewal(true, false, false), RenewalOutcome::Refused(Loss::Taken));
/// assert_eq!(refused_renewal(false, true, false), RenewalOutcome::Refused(Loss::Cancelled));
/// ```
pub const fn refused_renewal(completed: bool, failed: bool, same_token: bool) -> RenewalOutcome {
    match (completed, failed) {
        (true, _) if same_token => RenewalOutcome::Completed,
        // A cancel raises the token, and a failure by SQL does not. In both cases no worker holds the job.
        (false, true) => RenewalOutcome::Refused(Loss::Cancelled),
        _ => RenewalOutcome::Refused(Loss::Taken),
    }
}

/// Text that names no state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownJobState;

impl fmt::Display for UnknownJobState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "unknown job state: use available, delayed, running, expired, completed or failed",
        )
    }
}

impl std::error::Error for UnknownJobState {}

impl FromStr for JobState {
    type Err = UnknownJobState;

    fn from_str(word: &str) -> Result<Self, UnknownJobState> {
        Self::ALL
            .into_iter()
            .find(|state| state.name().eq_ignore_ascii_case(word))
            .ok_or(UnknownJobState)
    }
}

/// Position of a job in the order of claims.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobOrder<I> {
    /// Higher priorities come first.
    pub priority: i64,
    /// Older jobs come first.
    pub created_at: i64,
    /// Tie-breaker.
    pub id: I,
}

impl<I: Ord> Ord for JobOrder<I> {
    /// Order of claims: priority descending, then creation ascending, then id.
    fn cmp(&self, other: &Self) -> Ordering {
        let by_age = || self.created_at.cmp(&other.created_at);
        let by_id = || self.id.cmp(&other.id);
        other.priority.cmp(&self.priority).then_with(by_age).then_with(by_id)
    }
}

impl<I: Ord> PartialOrd for JobOrder<I> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(locked_until: Option<i64>, locked_by: Option<&str>) -> JobColumns<'_> {
        JobColumns { locked_until, locked_by, ..JobColumns::default() }
    }

    #[test]
    fn every_combination_of_columns_has_its_state() {
        let (past, now, ahead) = (Some(9), 10, Some(11));
        for (columns, state) in [
            (row(None, None), JobState::Available),
            (row(None, Some("w")), JobState::Available),
            (row(past, Some("w")), JobState::Expired),
            (row(past, None), JobState::Expired),
            (row(Some(now), Some("w")), JobState::Expired),
            (row(ahead, Some("w")), JobState::Running),
            (row(ahead, None), JobState::Running),
            (row(ahead, Some(DELAYED_HOLDER)), JobState::Delayed),
            (row(past, Some(DELAYED_HOLDER)), JobState::Available),
        ] {
            assert_eq!(JobState::of(&columns, now), state, "{columns:?}");
            let completed = JobColumns { completed: true, ..columns };
            assert_eq!(JobState::of(&completed, now), JobState::Completed);
            assert_eq!(
                JobState::of(&JobColumns { failed: true, ..columns }, now),
                JobState::Failed
            );
            let both = JobColumns { failed: true, ..completed };
            assert_eq!(JobState::of(&both, now), JobState::Completed, "the first that applies");
        }
    }

    #[test]
    fn states_are_read_as_they_are_written() {
        for state in JobState::ALL {
            assert_eq!(state.to_string().parse(), Ok(state));
            assert_eq!(state.to_string().to_lowercase().parse(), Ok(state));
            assert_eq!(state.is_final(), matches!(state, JobState::Completed | JobState::Failed));
        }
        assert_eq!("done".parse::<JobState>(), Err(UnknownJobState));
    }

    #[test]
    fn the_more_important_come_first_then_the_older() {
        let place = |priority, created_at, id| JobOrder { priority, created_at, id };
        let mut places = [place(0, 5, 1), place(9, 9, 2), place(0, 5, 0), place(0, 1, 7)];
        places.sort();
        assert_eq!(places.map(|place| place.id), [2, 7, 0, 1]);
    }
}
