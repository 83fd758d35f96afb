//! The timers of the election. Each belongs to the state that set it and ends with that state.

use crate::time::Time;

/// When the machine wants to be woken; [`Time::MAX`] stands for *never*.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ElectionTimers {
    /// The hold no longer counts.
    pub(super) deadline: Time,
    /// The release has taken too long.
    pub(super) bound: Time,
    /// The grace window closes.
    pub(super) grace: Time,
    /// The next claim.
    pub(super) attempt: Time,
    /// The next health check.
    pub(super) probe: Time,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
    Deadline,
    Bound,
    Grace,
    Attempt,
    Probe,
}

impl ElectionTimers {
    pub(super) const NONE: Self = Self {
        deadline: Time::MAX,
        bound: Time::MAX,
        grace: Time::MAX,
        attempt: Time::MAX,
        probe: Time::MAX,
    };

    pub(super) fn next(&self) -> Option<Time> {
        let first = self.deadline.min(self.bound).min(self.grace).min(self.attempt).min(self.probe);
        (first != Time::MAX).then_some(first)
    }

    /// Takes a timer that is due and that ends something. After a suspension several are: what the deadline says comes
    /// first, however much later than the others it was set.
    pub(super) fn take_end(&mut self, now: Time) -> Option<Due> {
        take(&mut self.deadline, Due::Deadline, now)
            .or_else(|| take(&mut self.bound, Due::Bound, now))
            .or_else(|| take(&mut self.grace, Due::Grace, now))
    }

    /// Takes a timer that is due, those that end something first.
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
