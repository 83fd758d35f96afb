//! Counters and histograms of the table: plain integers, for metrics.

use std::time::Duration;

use super::types::Ending;

/// Counters since the table was created.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TableStats {
    /// Grants, immediate or after a wait.
    pub granted: u64,
    /// Holds that were released.
    pub released: u64,
    /// Renewals.
    pub renewed: u64,
    /// Holds that expired.
    pub expired: u64,
    /// Holds that an operator ended.
    pub evicted: u64,
    /// Holds whose owner disconnected.
    pub disconnected: u64,
    /// Grants to two-phase claims that were abandoned.
    pub abandoned: u64,
    /// Wait times of granted waiters; immediate grants are not counted.
    pub wait_times: Histogram,
    /// Durations of ended holds.
    pub hold_times: Histogram,
    /// Remaining lease at each renewal.
    pub lease_left: Histogram,
}

impl TableStats {
    pub(super) fn record_end(&mut self, how: Ending, held: Duration) {
        let count = match how {
            Ending::Released => &mut self.released,
            Ending::Expired => &mut self.expired,
            Ending::Evicted => &mut self.evicted,
            Ending::Disconnected => &mut self.disconnected,
            Ending::Abandoned => &mut self.abandoned,
        };
        *count += 1;
        self.hold_times.record(held);
    }
}

/// Histogram of durations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Histogram {
    counts: [u64; Self::BOUNDS + 1],
    /// Sum of all durations, in microseconds.
    micros: u64,
}

impl Histogram {
    /// Number of bounds: the first is about a millisecond, each is four times the previous, the last is about an hour
    /// and ten minutes.
    pub const BOUNDS: usize = 12;
    /// The first bound is 2 to this power, in nanoseconds.
    const FIRST_BOUND_BITS: u32 = 20;

    pub(super) fn record(&mut self, span: Duration) {
        let nanos = u64::try_from(span.as_nanos()).unwrap_or(u64::MAX);
        // The number of significant bits gives the powers of two between which the duration lies.
        let bits = u64::BITS - nanos.saturating_sub(1).leading_zeros();
        let at =
            (bits.saturating_sub(Self::FIRST_BOUND_BITS) as usize).div_ceil(2).min(Self::BOUNDS);
        self.counts[at] += 1;
        self.micros = self.micros.saturating_add(nanos / 1_000);
    }

    /// Each bound with the number of durations up to it.
    pub fn bounds(&self) -> impl Iterator<Item = (Duration, u64)> {
        let mut below = 0;
        self.counts.iter().take(Self::BOUNDS).zip(0u32..).map(move |(count, at)| {
            below += count;
            (Duration::from_nanos(1 << (Self::FIRST_BOUND_BITS + 2 * at)), below)
        })
    }

    /// Number of durations.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Sum of all durations.
    pub fn sum(&self) -> Duration {
        Duration::from_micros(self.micros)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_counts_for_every_bound_that_it_does_not_pass() {
        let mut spans = Histogram::default();
        let bounds: Vec<Duration> = spans.bounds().map(|(bound, _)| bound).collect();
        assert_eq!(bounds.len(), Histogram::BOUNDS);
        assert!(bounds.windows(2).all(|pair| pair[0] * 4 == pair[1]), "{bounds:?}");
        for bound in &bounds {
            spans.record(*bound);
            spans.record(*bound + Duration::from_nanos(1));
        }
        spans.record(Duration::ZERO);
        spans.record(Duration::MAX);
        let counts: Vec<u64> = spans.bounds().map(|(_, count)| count).collect();
        // Zero and the first bound; then each bound adds itself and the duration just past the previous bound.
        let expected: Vec<u64> = (0..Histogram::BOUNDS as u64).map(|at| 2 + 2 * at).collect();
        assert_eq!(counts, expected);
        assert_eq!(spans.count(), 2 * Histogram::BOUNDS as u64 + 2);
    }
}
