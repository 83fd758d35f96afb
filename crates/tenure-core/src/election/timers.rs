//! Timers of the election. Each belongs to the state that set it and ends with that state.

use crate::time::Time;

/// Instants of the machine's timers; [`Time::MAX`] means *never*.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ElectionTimers {
    /// End of the hold's validity.
    pub(super) deadline: Time,
    /// Time limit of the release.
    pub(super) release_limit: Time,
    /// End of the grace window.
    pub(super) grace: Time,
    /// Next claim.
    pub(super) attempt: Time,
    /// Next health check.
    pub(super) probe: Time,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
    Deadline,
    ReleaseLimit,
    Grace,
    Attempt,
    Probe,
}

impl ElectionTimers {
    pub(super) const NONE: Self = Self {
        deadline: Time::MAX,
        release_limit: Time::MAX,
        grace: Time::MAX,
        attempt: Time::MAX,
        probe: Time::MAX,
    };

    pub(super) fn next(&self) -> Option<Time> {
        let first =
            self.deadline.min(self.release_limit).min(self.grace).min(self.attempt).min(self.probe);
        (first != Time::MAX).then_some(first)
    }

    /// Takes a due timer that ends something. After a suspension several may be due: the deadline comes first, even if
    /// it was due after the others.
    pub(super) fn take_end(&mut self, now: Time) -> Option<Due> {
        take(&mut self.deadline, Due::Deadline, now)
            .or_else(|| take(&mut self.release_limit, Due::ReleaseLimit, now))
            .or_else(|| take(&mut self.grace, Due::Grace, now))
    }

    /// Takes a due timer, those that end something first.
    pub(super) fn take(&mut self, now: Time) -> Option<Due> {
        self.take_end(now)
            .or_else(|| take(&mut self.attempt, Due::Attempt, now))
            .or_else(|| take(&mut self.probe, Due::Probe, now))
    }
}

fn take(timer: &mut Time, due: Due, now: Time) -> Option<Due> {
    if *timer == Time::MAX || *timer > now {
        return None;
    }
    *timer = Time::MAX;
    Some(due)
}
