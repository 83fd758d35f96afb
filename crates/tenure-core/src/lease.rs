//! Lease arithmetic: until when a hold is valid, when to renew it, and which settings can be kept at all.

use std::fmt;
use std::time::Duration;

use crate::{Rules, Time};

/// What a user asks of a lease, before it is known to be possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseTerms {
    /// How long a hold lasts unless renewed.
    pub ttl: Duration,
    /// Renewals per ttl, at least 2; `None` lets the hold end with its first ttl.
    pub keep_alive: Option<u32>,
    /// The time that the protected work needs to stop.
    pub stop_grace: Duration,
    /// The longest time to hold, however well renewals go.
    pub max_hold: Option<Duration>,
    /// The smallest ttl that the store can keep.
    pub min_ttl: Duration,
}

impl LeaseTerms {
    /// Renewal three times a ttl, no time to stop, no end, any store.
    pub const fn new(ttl: Duration) -> Self {
        Self {
            ttl,
            keep_alive: Some(3),
            stop_grace: Duration::ZERO,
            max_hold: None,
            min_ttl: Duration::ZERO,
        }
    }
}

/// A lease whose numbers fit together: renewal, time-out and the time to stop all end before the hold does.
///
/// ```
/// use std::time::Duration;
/// use tenure_core::lease::{Lease, LeaseTerms};
/// use tenure_core::Time;
///
/// let lease = Lease::new(LeaseTerms::new(Duration::from_secs(30)))?;
/// let sent = Time::ZERO;
/// assert_eq!(lease.deadline(sent, sent), Time::ZERO + Duration::from_secs(25));
/// assert_eq!(lease.renew_at(sent), Time::ZERO + Duration::from_secs(10));
/// # Ok::<(), tenure_core::lease::LeaseError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lease {
    ttl: Duration,
    renew_every: Option<Duration>,
    stop_grace: Duration,
    max_hold: Option<Duration>,
    rules: Rules,
}

impl Lease {
    /// The longest ttl: a hold that nobody can end for longer is a mistake of units.
    pub const MAX_TTL: Duration = Duration::from_secs(366 * 24 * 60 * 60);
    /// The smallest margin between the holder's end of a lease and the store's.
    pub const MIN_MARGIN: Duration = Duration::from_millis(50);
    /// The shortest pause between two renewals: a shorter one would keep the holder and the store busy with nothing else.
    pub const MIN_INTERVAL: Duration = Duration::from_millis(5);

    /// Checks that renewal, time-out and time to stop fit into the ttl.
    ///
    /// # Errors
    ///
    /// Names the values that conflict and what would do.
    pub fn new(terms: LeaseTerms) -> Result<Self, LeaseError> {
        let LeaseTerms { ttl, keep_alive, stop_grace, max_hold, min_ttl } = terms;
        if ttl < min_ttl || ttl.is_zero() {
            return Err(LeaseError::TooShort { ttl, min_ttl });
        }
        if ttl > Self::MAX_TTL {
            return Err(LeaseError::TooLong { ttl });
        }
        if let Some(factor @ 0..2) = keep_alive {
            return Err(LeaseError::Factor { factor });
        }
        if max_hold.is_some_and(|max| max.is_zero()) {
            return Err(LeaseError::ZeroMaxHold);
        }
        // The work is told to stop kill_after before the end of the hold: here that would be before it began.
        if let Some(max_hold) = max_hold.filter(|max| *max <= stop_grace) {
            return Err(LeaseError::MaxHoldTooShort { max_hold, stop_grace });
        }
        let renew_every = keep_alive.map(|factor| ttl / factor);
        let lease = Self { ttl, renew_every, stop_grace, max_hold, rules: Rules::ALL };
        let needed = match renew_every {
            Some(every) => every + lease.request_limit(),
            None => Duration::ZERO,
        };
        if needed.saturating_add(stop_grace) > ttl.saturating_sub(lease.margin()) {
            return Err(LeaseError::Conflict { lease });
        }
        if let Some(factor) = keep_alive.filter(|factor| ttl / *factor < Self::MIN_INTERVAL) {
            return Err(LeaseError::TooOften { ttl, factor });
        }
        Ok(lease)
    }

    /// The same lease under other rules, for the simulator.
    #[must_use]
    pub const fn with_rules(self, rules: Rules) -> Self {
        Self { rules, ..self }
    }

    /// How long a hold lasts at the store unless renewed.
    pub const fn ttl(&self) -> Duration {
        self.ttl
    }

    /// The rules that this lease is counted by.
    pub const fn rules(&self) -> Rules {
        self.rules
    }

    /// The time that the protected work needs to stop.
    pub const fn stop_grace(&self) -> Duration {
        self.stop_grace
    }

    /// The pause between two renewals; `None` where the hold is not renewed.
    pub const fn renew_every(&self) -> Option<Duration> {
        self.renew_every
    }

    /// What the holder gives away at the end: a sixth of the ttl covers both clocks being slewed by 8.3 % in opposite
    /// directions, and the rest covers what a timer is late.
    pub fn margin(&self) -> Duration {
        if self.rules.keep_margin { margin(self.ttl) } else { Duration::ZERO }
    }

    /// The longest that a request which does not wait for another holder may take.
    pub fn request_limit(&self) -> Duration {
        self.ttl / 4
    }

    /// The longest that a look for waiters may take: a renewal that falls due meanwhile still has its time.
    pub fn handoff_check_limit(&self) -> Duration {
        self.ttl / 12
    }

    /// The pause after a renewal that failed quickly: several more fit before the deadline.
    pub fn retry_pause(&self) -> Duration {
        (self.ttl / 24).max(Self::MIN_INTERVAL)
    }

    /// When a hold ends for its holder, if the request that was granted went out at `sent` and its reply came at
    /// `replied`.
    pub fn deadline(&self, sent: Time, replied: Time) -> Time {
        let from = if self.rules.count_from_request { sent } else { replied };
        from + self.ttl.saturating_sub(self.margin())
    }

    /// When a hold that was renewed by a request sent at `sent` is due for its next renewal.
    pub fn renew_at(&self, sent: Time) -> Time {
        self.renew_every.map_or(Time::MAX, |every| sent + every)
    }

    /// The end that `max_hold` sets for a hold granted at `granted`.
    pub fn hard_end(&self, granted: Time) -> Time {
        self.max_hold.map_or(Time::MAX, |max| granted + max)
    }

    /// Until when a request sent at `sent`, of which nothing was heard, may keep the lock at the store.
    pub fn settled_at(&self, sent: Time) -> Time {
        sent + self.request_limit() + self.ttl + margin(self.ttl)
    }
}

/// The margin of a lease of `ttl`: max(ttl / 6, 50 ms).
pub fn margin(ttl: Duration) -> Duration {
    (ttl / 6).max(Lease::MIN_MARGIN)
}

/// Why a lease cannot be kept as asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseError {
    /// Shorter than the store's smallest.
    TooShort {
        /// What was asked.
        ttl: Duration,
        /// What the store can keep.
        min_ttl: Duration,
    },
    /// Longer than [`Lease::MAX_TTL`].
    TooLong {
        /// What was asked.
        ttl: Duration,
    },
    /// Fewer than two renewals per ttl.
    Factor {
        /// What was asked.
        factor: u32,
    },
    /// Renewals that follow each other faster than [`Lease::MIN_INTERVAL`].
    TooOften {
        /// What is renewed.
        ttl: Duration,
        /// What was asked.
        factor: u32,
    },
    /// A longest hold of nothing.
    ZeroMaxHold,
    /// A longest hold that is over before the work has had its time to stop.
    MaxHoldTooShort {
        /// What was asked.
        max_hold: Duration,
        /// The time that the work needs to stop.
        stop_grace: Duration,
    },
    /// Renewal, time-out and time to stop do not fit.
    Conflict {
        /// The lease as it would have been.
        lease: Lease,
    },
}

impl fmt::Display for LeaseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooShort { ttl, min_ttl } if min_ttl.is_zero() => {
                write!(f, "a ttl of {ttl:?} is no lease: give one of at least 120ms")
            }
            Self::TooShort { ttl, min_ttl } => {
                write!(
                    f,
                    "the ttl of {ttl:?} is below {min_ttl:?}, the smallest that this store can keep"
                )
            }
            Self::TooLong { ttl } => {
                write!(f, "the ttl of {ttl:?} is above the longest, {:?}", Lease::MAX_TTL)
            }
            Self::Factor { factor } => write!(
                f,
                "a keep-alive factor of {factor} leaves no second try before the lease ends: give at least 2"
            ),
            Self::TooOften { ttl, factor } => write!(
                f,
                "a keep-alive factor of {factor} renews a ttl of {ttl:?} more often than every {:?}: give at most {}",
                Lease::MIN_INTERVAL,
                ttl.as_nanos() / Lease::MIN_INTERVAL.as_nanos()
            ),
            Self::ZeroMaxHold => {
                write!(f, "max_hold is 0: leave it out, or give the longest time to hold")
            }
            Self::MaxHoldTooShort { max_hold, stop_grace: kill_after } => write!(
                f,
                "max-hold {max_hold:?} is no longer than kill-after {kill_after:?}, so that the work would be stopped as soon \
                 as it begins: give a longer max-hold or a shorter kill-after"
            ),
            Self::Conflict { lease } => conflict(lease, f),
        }
    }
}

fn conflict(lease: &Lease, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let (ttl, margin, kill) = (lease.ttl, lease.margin(), lease.stop_grace);
    match lease.renew_every {
        Some(every) => write!(
            f,
            "a ttl of {ttl:?} is too short for its own keeping: renewal every {every:?} + time-out {:?} + kill-after \
             {kill:?} exceed ttl - margin ({ttl:?} - {margin:?}); give a longer ttl or a shorter kill-after",
            lease.request_limit()
        ),
        None => write!(
            f,
            "a ttl of {ttl:?} leaves no time to work: kill-after {kill:?} + margin {margin:?} exceed it; give a \
             longer ttl or a shorter kill-after"
        ),
    }
}

impl std::error::Error for LeaseError {}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    fn terms(ttl: Duration) -> LeaseTerms {
        LeaseTerms::new(ttl)
    }

    #[test]
    fn the_deadline_counts_from_the_request_and_leaves_a_sixth() {
        let lease = Lease::new(terms(ms(6_000))).unwrap();
        let (sent, replied) = (Time::ZERO + ms(100), Time::ZERO + ms(900));
        assert_eq!(lease.deadline(sent, replied), Time::ZERO + ms(5_100));
        assert_eq!(lease.renew_at(sent), Time::ZERO + ms(2_100));
    }

    #[test]
    fn a_short_lease_leaves_at_least_50_ms() {
        let lease = Lease::new(terms(ms(150))).unwrap();
        assert_eq!(lease.margin(), ms(50));
        assert_eq!(lease.deadline(Time::ZERO, Time::ZERO), Time::ZERO + ms(100));
    }

    /// Contract 1: both sides slewed by 8.3 % in opposite directions, the holder's end still comes first.
    #[test]
    fn the_margin_covers_the_worst_drift() {
        for ttl in [ms(300), ms(3_000), ms(15_000), ms(3_600_000)] {
            let valid = Lease::new(terms(ttl)).unwrap().deadline(Time::ZERO, Time::ZERO);
            let holder_end = valid.since(Time::ZERO).as_secs_f64() / (1.0 - 0.083);
            let store_end = ttl.as_secs_f64() / (1.0 + 0.083);
            assert!(holder_end < store_end, "{ttl:?}: {holder_end} >= {store_end}");
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_with_the_values() {
        let kill = LeaseTerms { stop_grace: ms(5_000), ..terms(ms(15_000)) };
        for (bad, parts) in [
            (terms(Duration::ZERO), &["0ns"][..]),
            (terms(ms(100)), &["100ms", "50ms", "25ms"]),
            (LeaseTerms { min_ttl: ms(10_000), ..terms(ms(9_999)) }, &["9.999s", "10s"]),
            (terms(Duration::MAX), &["longest"]),
            (LeaseTerms { keep_alive: Some(1), ..terms(ms(9_000)) }, &["factor of 1"]),
            (LeaseTerms { keep_alive: Some(0), ..terms(ms(9_000)) }, &["factor of 0"]),
            (
                LeaseTerms { keep_alive: Some(u32::MAX), ..terms(ms(9_000)) },
                &["factor of 4294967295", "9s", "5ms", "at most 1800"],
            ),
            (LeaseTerms { max_hold: Some(Duration::ZERO), ..terms(ms(9_000)) }, &["max_hold"]),
            (
                LeaseTerms {
                    max_hold: Some(ms(2_000)),
                    stop_grace: ms(3_000),
                    ..terms(ms(15_000))
                },
                &["max-hold 2s", "kill-after 3s"],
            ),
            (
                LeaseTerms {
                    max_hold: Some(ms(3_000)),
                    stop_grace: ms(3_000),
                    ..terms(ms(15_000))
                },
                &["max-hold 3s", "kill-after 3s"],
            ),
            (kill, &["5s", "3.75s", "15s", "2.5s", "kill-after"]),
            (
                LeaseTerms { stop_grace: Duration::MAX, keep_alive: None, ..terms(ms(900)) },
                &["900ms"],
            ),
        ] {
            let message = Lease::new(bad).unwrap_err().to_string();
            for part in parts {
                assert!(message.contains(part), "{bad:?}: {message} lacks {part}");
            }
        }
        assert!(Lease::new(LeaseTerms { stop_grace: ms(3_000), ..terms(ms(15_000)) }).is_ok());
        assert!(Lease::new(LeaseTerms { keep_alive: None, ..terms(ms(100)) }).is_ok());
        assert!(Lease::new(terms(ms(120))).is_ok());
        assert!(Lease::new(LeaseTerms { keep_alive: Some(1_800), ..terms(ms(9_000)) }).is_ok());
    }
}
