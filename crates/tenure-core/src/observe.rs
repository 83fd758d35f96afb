//! Take-over by observation: the only way to judge a silent holder without a clock that both sides share.

use std::time::Duration;

use crate::lease::margin;
use crate::{Rules, Time};

/// Version of a record that a challenger has seen, and the time since which it has not changed.
///
/// A record may be taken over once its version has not changed for the recorded lease plus the margin. The time counts
/// on the challenger's monotonic clock from *after* the reply that first showed the version (contract 5). The holder
/// wrote that version before the reply was made, so its own deadline has passed by then, however wrong either wall
/// clock is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Observation<V> {
    seen: Option<(V, Time)>,
    rules: Rules,
}

impl<V: PartialEq> Observation<V> {
    /// No version seen yet.
    pub const fn new(rules: Rules) -> Self {
        Self { seen: None, rules }
    }

    /// Records a read that was sent at `sent`, answered at `replied`, and showed `version` with a recorded lease of
    /// `ttl`. Returns the instant at which that version may be taken over, unless it changes before.
    pub fn observe(&mut self, version: V, ttl: Duration, sent: Time, replied: Time) -> Time {
        let first = self.first_seen(version, sent, replied);
        let margin = if self.rules.keep_margin { margin(ttl) } else { Duration::ZERO };
        first + ttl + margin
    }

    /// Records a read, and returns the instant since which its version has been seen.
    pub fn first_seen(&mut self, version: V, sent: Time, replied: Time) -> Time {
        match &self.seen {
            Some((known, first)) if *known == version => *first,
            _ => {
                let first = if self.rules.observe_from_reply { replied } else { sent };
                self.seen = Some((version, first));
                first
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Time {
        Time::ZERO + Duration::from_millis(ms)
    }

    #[test]
    fn a_version_counts_from_the_reply_that_first_showed_it() {
        let ttl = Duration::from_millis(600);
        let mut seen = Observation::new(Rules::ALL);
        assert_eq!(seen.observe(1, ttl, at(0), at(40)), at(740));
        assert_eq!(seen.observe(1, ttl, at(100), at(140)), at(740));
        assert_eq!(seen.observe(2, ttl, at(200), at(240)), at(940));
        assert_eq!(
            seen.observe(1, ttl, at(300), at(340)),
            at(1_040),
            "a version that recurs counts as new"
        );
    }
}
