//! Results of a load: times as percentiles, counts as rates.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

/// Longest time that is recorded exactly; longer times are recorded as this one.
const MAX_NANOS: u64 = 3_600_000_000_000;

/// Histogram of times with three significant digits.
#[derive(Clone, Debug)]
pub struct Times(Histogram<u64>);

/// Percentiles of times, in microseconds.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Percentiles {
    /// Number of times.
    pub n: u64,
    /// Mean.
    pub mean_us: f64,
    /// Median.
    pub p50_us: f64,
    /// 90th percentile.
    pub p90_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// 99.9th percentile.
    pub p999_us: f64,
    /// Maximum.
    pub max_us: f64,
}

impl Default for Times {
    fn default() -> Self {
        Self(Histogram::new_with_max(MAX_NANOS, 3).expect("three digits up to an hour are valid"))
    }
}

impl Times {
    /// Records a time.
    pub fn add(&mut self, time: Duration) {
        self.0.saturating_record(u64::try_from(time.as_nanos()).unwrap_or(MAX_NANOS));
    }

    /// Discards all times, as at the end of a warm-up.
    pub fn clear(&mut self) {
        self.0.reset();
    }

    /// Percentiles of the recorded times.
    pub fn percentiles(&self) -> Percentiles {
        let at = |quantile| rounded(to_f64(self.0.value_at_quantile(quantile)) / 1e3);
        Percentiles {
            n: self.0.len(),
            mean_us: rounded(self.0.mean() / 1e3),
            p50_us: at(0.5),
            p90_us: at(0.9),
            p99_us: at(0.99),
            p999_us: at(0.999),
            max_us: rounded(to_f64(self.0.max()) / 1e3),
        }
    }
}

/// Rate per second.
pub fn rate(count: u64, time: Duration) -> f64 {
    (to_f64(count) / time.as_secs_f64()).round()
}

/// Microseconds per item; `None` for no items.
pub fn micros_each(time: Duration, count: u64) -> Option<f64> {
    (count > 0).then(|| rounded(time.as_secs_f64() * 1e6 / to_f64(count)))
}

/// Jain's fairness index: 1 if all shares are equal, 1/n if a single share has everything.
pub fn fairness(shares: impl Iterator<Item = u64> + Clone) -> f64 {
    let sum: f64 = shares.clone().map(to_f64).sum();
    let squares: f64 = shares.clone().map(|share| to_f64(share).powi(2)).sum();
    if squares > 0.0 { sum.powi(2) / (to_f64(shares.count() as u64) * squares) } else { 0.0 }
}

/// Rounds to a thousandth: further digits are noise.
pub fn rounded(figure: f64) -> f64 {
    (figure * 1e3).round() / 1e3
}

/// Converts a count to `f64`.
#[expect(clippy::cast_precision_loss, reason = "53 bits hold every count and time of a load")]
pub fn to_f64(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_those_of_what_was_added_since_the_last_clear() {
        let mut times = Times::default();
        times.add(Duration::from_secs(9));
        times.clear();
        (1..=1000).for_each(|micros| times.add(Duration::from_micros(micros)));
        let all = times.percentiles();
        assert_eq!(all.n, 1000);
        for (found, wanted) in [(all.p50_us, 500.0), (all.p99_us, 990.0), (all.max_us, 1000.0)] {
            assert!((found - wanted).abs() / wanted < 0.01, "{found} for {wanted}");
        }
    }

    #[test]
    fn fairness_is_one_for_equals_and_falls_to_a_share() {
        let near = |found: f64, wanted: f64| (found - wanted).abs() < 1e-9;
        assert!(near(fairness([5, 5, 5, 5].into_iter()), 1.0));
        assert!(near(fairness([20, 0, 0, 0].into_iter()), 0.25));
    }
}
