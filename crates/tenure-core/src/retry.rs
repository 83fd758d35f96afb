//! Retry strategies: the pause before the next attempt, or the decision to give up.
//!
//! A strategy is a pure function of past attempts and of one random number that the caller draws, so every schedule can
//! be replayed. To write your own, implement [`Retry`].

use std::error::Error;
use std::fmt;
use std::time::Duration;

/// Input of a strategy.
#[derive(Clone, Copy, Debug)]
pub struct RetryContext<'a> {
    /// Attempt that has just failed, counted from 1.
    pub attempt: u32,
    /// Time since the first attempt of this round.
    pub elapsed: Duration,
    /// Error of the attempt; `None` if another client held the lock.
    pub last_error: Option<&'a (dyn Error + 'static)>,
}

/// Strategy for the pause after a failed attempt.
///
/// ```
/// use std::time::Duration;
/// use tenure_core::retry::{Retry, RetryContext};
///
/// /// Three quick attempts, then no more.
/// #[derive(Debug)]
/// struct Thrice;
///
/// impl Retry for Thrice {
///     fn next_delay(&mut self, context: &RetryContext<'_>, _random: f64) -> Option<Duration> {
///         (context.attempt < 3).then_some(Duration::from_millis(50))
///     }
///     fn reset(&mut self) {}
/// }
/// ```
pub trait Retry: fmt::Debug + Send {
    /// Returns the pause before the next attempt, or `None` to give up. `random` is uniform in `[0, 1)`.
    fn next_delay(&mut self, context: &RetryContext<'_>, random: f64) -> Option<Duration>;

    /// Resets the state after an attempt that succeeded.
    fn reset(&mut self);
}

/// Pause that starts at `base` and grows by `multiplier` with each attempt, up to `max`, less a random part.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExponentialBackoff {
    /// Pause after the first attempt.
    pub base: Duration,
    /// Longest pause.
    pub max: Duration,
    /// Factor between two successive pauses.
    pub multiplier: f64,
    /// Largest random reduction of a pause, as a fraction from 0 to 1. It spreads participants that failed at the same
    /// time.
    pub jitter: f64,
}

impl Default for ExponentialBackoff {
    fn default() -> Self {
        Self {
            base: Duration::from_secs(1),
            max: Duration::from_secs(30),
            multiplier: 2.0,
            jitter: 0.1,
        }
    }
}

impl Retry for ExponentialBackoff {
    fn next_delay(&mut self, context: &RetryContext<'_>, random: f64) -> Option<Duration> {
        let step = i32::try_from(context.attempt.saturating_sub(1)).unwrap_or(i32::MAX);
        let grown = self.base.as_secs_f64() * self.multiplier.powi(step);
        let capped = bounded(grown, self.max);
        let kept = 1.0 - self.jitter.clamp(0.0, 1.0) * random.clamp(0.0, 1.0);
        Some(bounded(capped.as_secs_f64() * kept, capped))
    }

    fn reset(&mut self) {}
}

/// Constant pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FixedInterval {
    /// Pause after each attempt.
    pub interval: Duration,
}

impl Default for FixedInterval {
    fn default() -> Self {
        Self { interval: Duration::from_secs(5) }
    }
}

impl Retry for FixedInterval {
    fn next_delay(&mut self, _: &RetryContext<'_>, _random: f64) -> Option<Duration> {
        Some(self.interval)
    }

    fn reset(&mut self) {}
}

/// Random pause between `base` and three times the previous pause, up to `max`. It spreads many clients the most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecorrelatedJitter {
    base: Duration,
    max: Duration,
    previous: Duration,
}

impl DecorrelatedJitter {
    /// Creates a strategy with pauses from `base` to `max`.
    pub fn new(base: Duration, max: Duration) -> Self {
        Self { base, max, previous: base }
    }
}

impl Default for DecorrelatedJitter {
    fn default() -> Self {
        Self::new(Duration::from_secs(1), Duration::from_secs(30))
    }
}

impl Retry for DecorrelatedJitter {
    fn next_delay(&mut self, _: &RetryContext<'_>, random: f64) -> Option<Duration> {
        let low = self.base.as_secs_f64();
        let high = (self.previous.as_secs_f64() * 3.0).max(low);
        self.previous = bounded(low + (high - low) * random.clamp(0.0, 1.0), self.max);
        Some(self.previous)
    }

    fn reset(&mut self) {
        self.previous = self.base;
    }
}

/// Duration of `seconds`, limited to the range from 0 to `max`. NaN and overflow give `max`.
fn bounded(seconds: f64, max: Duration) -> Duration {
    if seconds.is_nan() {
        return max;
    }
    Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(max).min(max)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(attempt: u32) -> RetryContext<'static> {
        RetryContext { attempt, elapsed: Duration::ZERO, last_error: None }
    }

    #[test]
    fn exponential_doubles_up_to_its_cap() {
        let mut retry = ExponentialBackoff { jitter: 0.0, ..ExponentialBackoff::default() };
        let seconds: Vec<_> =
            (1..=7).map(|n| retry.next_delay(&after(n), 0.5).unwrap().as_secs()).collect();
        assert_eq!(seconds, [1, 2, 4, 8, 16, 30, 30]);
    }

    #[test]
    fn no_attempt_number_overflows() {
        for attempt in [0, 1_025, 1_000_000, u32::MAX] {
            let mut retry = ExponentialBackoff { jitter: 0.0, ..ExponentialBackoff::default() };
            let delay = retry.next_delay(&after(attempt), 0.0).unwrap();
            assert!(delay <= retry.max, "{attempt}: {delay:?}");
            assert!(attempt == 0 || delay == retry.max, "{attempt}: {delay:?}");
        }
    }

    #[test]
    fn nonsense_parameters_give_a_bounded_pause() {
        for multiplier in [f64::NAN, f64::INFINITY, -3.0, 0.0] {
            let mut retry = ExponentialBackoff { multiplier, ..ExponentialBackoff::default() };
            for n in 1..50 {
                assert!(retry.next_delay(&after(n), 0.9).unwrap() <= retry.max);
            }
        }
        let endless = ExponentialBackoff {
            base: Duration::MAX,
            max: Duration::MAX,
            ..ExponentialBackoff::default()
        };
        for jitter in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1.0, 0.0] {
            let mut retry = ExponentialBackoff { jitter, ..endless };
            assert_eq!(retry.next_delay(&after(1), 0.0), Some(Duration::MAX), "{jitter}");
        }
    }

    #[test]
    fn jitter_only_shortens_and_by_its_share_at_most() {
        let mut retry = ExponentialBackoff::default();
        assert_eq!(retry.next_delay(&after(1), 0.0).unwrap(), Duration::from_secs(1));
        assert_eq!(retry.next_delay(&after(1), 1.0).unwrap(), Duration::from_millis(900));
    }

    #[test]
    fn decorrelated_jitter_stays_in_its_range_and_starts_over_after_a_reset() {
        let mut retry = DecorrelatedJitter::default();
        let mut highest = Duration::ZERO;
        for n in 1..20 {
            highest = retry.next_delay(&after(n), 0.999).unwrap();
            assert!((Duration::from_secs(1)..=Duration::from_secs(30)).contains(&highest));
        }
        assert_eq!(highest, Duration::from_secs(30));
        retry.reset();
        assert!(retry.next_delay(&after(1), 0.999).unwrap() < Duration::from_secs(3));
    }

    #[test]
    fn a_fixed_interval_is_fixed() {
        let mut retry = FixedInterval::default();
        assert_eq!(retry.next_delay(&after(1), 0.1), Some(Duration::from_secs(5)));
        assert_eq!(retry.next_delay(&after(9_999), 0.9), Some(Duration::from_secs(5)));
    }
}
