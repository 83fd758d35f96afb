//! Lease arithmetic: validity, renewal times, and checks of the settings.

use std::fmt;
use std::time::Duration;

use crate::{Rules, Time};

/// Requested lease settings, not yet validated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseTerms {
    /// Time that a hold lasts unless renewed.
    pub ttl: Duration,
    /// Renewals per ttl, at least 2; `None` lets the hold expire after its first ttl.
    pub keep_alive: Option<u32>,
    /// Time that the protected work needs to stop.
    pub stop_grace: Duration,
    /// Longest time to hold, even if every renewal succeeds.
    pub max_hold: Option<Duration>,
    /// Smallest ttl that the store supports.
    pub min_ttl: Duration,
}

impl LeaseTerms {
    /// Three renewals per ttl, no stop grace, no maximum hold, no minimum of the store.
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

/// Validated lease: renewal, time-out and stop grace all end before the hold does.
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
    /// Longest ttl. A longer one is rejected as a probable mistake of units. If its holder died, only an operator could
    /// end the hold.
    pub const MAX_TTL: Duration = Duration::from_secs(366 * 24 * 60 * 60);
    /// Smallest margin between the holder's deadline and the end of the lease at the store.
    pub const MIN_MARGIN: Duration = Duration::from_millis(50);
    /// Shortest pause between two renewals. A shorter one would occupy the holder and the store with nothing but
    /// renewals.
    pub const MIN_INTERVAL: Duration = Duration::from_millis(5);

    /// Checks that a ttl is in the range that a store with this minimum supports.
    ///
    /// # Errors
    ///
    /// [`LeaseError::TooShort`] or [`LeaseError::TooLong`].
    pub fn check_ttl(ttl: Duration, min_ttl: Duration) -> Result<(), LeaseError> {
        if ttl < min_ttl || ttl.is_zero() {
            return Err(LeaseError::TooShort { ttl, min_ttl });
        }
        if ttl > Self::MAX_TTL { Err(LeaseError::TooLong { ttl }) } else { Ok(()) }
    }

    /// Checks that renewal, time-out and stop grace fit into the ttl.
    ///
    /// # Errors
    ///
    /// Returns the conflicting values and a correction.
    pub fn new(terms: LeaseTerms) -> Result<Self, LeaseError> {
        let LeaseTerms { ttl, keep_alive, stop_grace, max_hold, min_ttl } = terms;
        Self::check_ttl(ttl, min_ttl)?;
        if let Some(factor @ 0..2) = keep_alive {
            return Err(LeaseError::TooFewRenewals { factor });
        }
        if max_hold.is_some_and(|max| max.is_zero()) {
            return Err(LeaseError::ZeroMaxHold);
        }
        // The work is stopped `stop_grace` before the end of the hold. Here that is before the work begins.
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

    /// The same lease under different rules, for the simulator.
    #[must_use]
    pub const fn with_rules(self, rules: Rules) -> Self {
        Self { rules, ..self }
    }

    /// Time that a hold lasts at the store unless renewed.
    pub const fn ttl(&self) -> Duration {
        self.ttl
    }

    /// Safety rules that this lease obeys.
    pub const fn rules(&self) -> Rules {
        self.rules
    }

    /// Time that the protected work needs to stop.
    pub const fn stop_grace(&self) -> Duration {
        self.stop_grace
    }

    /// Pause between two renewals; `None` if the hold is not renewed.
    pub const fn renew_every(&self) -> Option<Duration> {
        self.renew_every
    }

    /// Time by which the holder's deadline precedes the end of the lease at the store. A sixth of the ttl covers both
    /// clocks being slewed by 8.3 % in opposite directions; the minimum covers late timers.
    pub fn margin(&self) -> Duration {
        if self.rules.keep_margin { margin(self.ttl) } else { Duration::ZERO }
    }

    /// Longest time limit of a request, however long the ttl is: a store that does not answer for this long is away.
    pub const MAX_REQUEST_LIMIT: Duration = Duration::from_secs(30);

    /// Time limit of a request that does not wait for another holder.
    pub fn request_limit(&self) -> Duration {
        Self::request_limit_of(self.ttl)
    }

    /// The [`request_limit`](Self::request_limit) of a lease of `ttl`.
    pub fn request_limit_of(ttl: Duration) -> Duration {
        (ttl / 4).min(Self::MAX_REQUEST_LIMIT)
    }

    /// Time limit of a check for waiters. A renewal that has to wait for the end of the check is still in time.
    pub fn handoff_check_limit(&self) -> Duration {
        self.ttl / 12
    }

    /// Longest pause before a failed request is repeated, however long the ttl is.
    pub const MAX_RETRY_PAUSE: Duration = Duration::from_secs(5);

    /// Pause after a renewal that failed quickly: at most the interval between two renewals. Several retries fit before
    /// the deadline.
    pub fn retry_pause(&self) -> Duration {
        let interval = self.renew_every.unwrap_or(Self::MAX_RETRY_PAUSE);
        let most = interval.clamp(Self::MIN_INTERVAL, Self::MAX_RETRY_PAUSE);
        (self.ttl / 24).clamp(Self::MIN_INTERVAL, most)
    }

    /// Deadline of a hold whose granted request was sent at `sent` and whose reply came at `replied`.
    pub fn deadline(&self, sent: Time, replied: Time) -> Time {
        // The store starts its lease between `sent` and `replied`, at an instant unknown here. Counting from `replied`
        // would end after the store's lease whenever the reply is slower than the margin. `sent` may be any instant at
        // which the store had not granted yet. With `LeaseStart::Since` it is not the start of a request.
        let from = if self.rules.count_from_request { sent } else { replied };
        from + self.ttl.saturating_sub(self.margin())
    }

    /// Instant of the next renewal of a hold that was last renewed by a request sent at `sent`.
    pub fn renew_at(&self, sent: Time) -> Time {
        self.renew_every.map_or(Time::MAX, |every| sent + every)
    }

    /// End that `max_hold` sets for a hold granted at `granted`.
    pub fn hard_end(&self, granted: Time) -> Time {
        self.max_hold.map_or(Time::MAX, |max| granted + max)
    }

    /// Instant at which the outcome of an unanswered request sent at `sent` no longer matters: a hold that the request
    /// obtained at the store has expired.
    pub fn settled_at(&self, sent: Time) -> Time {
        // The request may take effect as late as its time limit allows, and the lease then lasts a ttl at the store.
        // The margin covers a store whose clock runs slow. It is added even if the rules switch `keep_margin` off.
        sent + self.request_limit() + self.ttl + margin(self.ttl)
    }
}

/// Margin of a lease of `ttl`: max(ttl / 6, 50 ms).
pub fn margin(ttl: Duration) -> Duration {
    (ttl / 6).max(Lease::MIN_MARGIN)
}

/// Reason for which lease settings are rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseError {
    /// The ttl is below the store's minimum.
    TooShort {
        /// Requested ttl.
        ttl: Duration,
        /// Smallest ttl that the store supports.
        min_ttl: Duration,
    },
    /// The ttl is above [`Lease::MAX_TTL`].
    TooLong {
        /// Requested ttl.
        ttl: Duration,
    },
    /// Fewer than two renewals per ttl.
    TooFewRenewals {
        /// Requested renewals per ttl.
        factor: u32,
    },
    /// The pause between renewals is below [`Lease::MIN_INTERVAL`].
    TooOften {
        /// Requested ttl.
        ttl: Duration,
        /// Requested renewals per ttl.
        factor: u32,
    },
    /// The maximum hold is zero.
    ZeroMaxHold,
    /// The maximum hold is not longer than the time that the work needs to stop.
    MaxHoldTooShort {
        /// Requested maximum hold.
        max_hold: Duration,
        /// Time that the work needs to stop.
        stop_grace: Duration,
    },
    /// Renewal, time-out and stop grace do not fit into the ttl.
    Conflict {
        /// Rejected lease.
        lease: Lease,
    },
}

impl fmt::Display for LeaseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // From 120 ms on, three renewals per ttl fit: a third (interval) + a quarter (time-out) + 50 ms (margin).
            Self::TooShort { ttl, min_ttl } if min_ttl.is_zero() => {
                write!(f, "invalid ttl {ttl:?}: give at least 120ms")
            }
            Self::TooShort { ttl, min_ttl } => {
                write!(f, "the ttl of {ttl:?} is below this store's minimum of {min_ttl:?}")
            }
            Self::TooLong { ttl } => {
                write!(f, "the ttl of {ttl:?} is above the maximum of {:?}", Lease::MAX_TTL)
            }
            Self::TooFewRenewals { factor } => write!(
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
            Self::MaxHoldTooShort { max_hold, stop_grace } => write!(
                f,
                "max-hold {max_hold:?} must be longer than kill-after {stop_grace:?}, or the work stops as soon as it \
                 begins: give a longer max-hold or a shorter kill-after"
            ),
            Self::Conflict { lease } => conflict(lease, f),
        }
    }
}

/// Message of a conflict. It calls the stop grace *kill-after*, as the command's option does.
fn conflict(lease: &Lease, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let (ttl, margin, grace) = (lease.ttl, lease.margin(), lease.stop_grace);
    match lease.renew_every {
        Some(every) => write!(
            f,
            "a ttl of {ttl:?} is too short to be renewed in time: renewal every {every:?} + time-out {:?} + kill-after \
             {grace:?} exceed ttl - margin ({ttl:?} - {margin:?}); give a longer ttl or a shorter kill-after",
            lease.request_limit()
        ),
        None => write!(
            f,
            "a ttl of {ttl:?} leaves no time to work: kill-after {grace:?} + margin {margin:?} exceed it; give a \
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

    #[test]
    fn a_request_is_given_up_after_a_quarter_of_the_ttl_and_at_most_30_s() {
        for (ttl, limit) in [(4_000, 1_000), (120_000, 30_000), (86_400_000, 30_000)] {
            assert_eq!(Lease::new(terms(ms(ttl))).unwrap().request_limit(), ms(limit));
        }
    }

    /// Contract 1: with both sides slewed by 8.3 % in opposite directions, the holder's deadline still comes first.
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
    fn inconsistent_lease_terms_are_rejected_with_their_values() {
        let kill = LeaseTerms { stop_grace: ms(5_000), ..terms(ms(15_000)) };
        for (bad, parts) in [
            (terms(Duration::ZERO), &["0ns"][..]),
            (terms(ms(100)), &["100ms", "50ms", "25ms"]),
            (LeaseTerms { min_ttl: ms(10_000), ..terms(ms(9_999)) }, &["9.999s", "10s"]),
            (terms(Duration::MAX), &["above the maximum"]),
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
