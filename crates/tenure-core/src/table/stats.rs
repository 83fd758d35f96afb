//! What the table has done so far, counted: plain integers, for whoever wants to draw curves.

use std::time::Duration;

use super::types::Ending;

/// What the table has done since it was made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TableStats {
    /// Holds that were granted, at once or after a wait.
    pub granted: u64,
    /// Holds that were released.
    pub released: u64,
    /// Renewals.
    pub renewed: u64,
    /// Holds whose lease was over.
    pub expired: u64,
    /// Holds that were broken by hand.
    pub evicted: u64,
    /// Holds whose owner disconnected.
    pub disconnected: u64,
    /// Grants to two-phase claims that were abandoned.
    pub abandoned: u64,
    /// How long those waited whose turn came; who was granted at once is not among them.
    pub wait_times: Histogram,
    /// How long holds lasted that have ended.
    pub hold_times: Histogram,
    /// How much was left of a lease when it was renewed.
    pub lease_left: Histogram,
}

impl TableStats {
    pub(super) fn record_end(&mut self, how: Option<Ending>, held: Duration) {
        let count = match how {
            None => &mut self.released,
            Some(Ending::Expired) => &mut self.expired,
            Some(Ending::Evicted) => &mut self.evicted,
            Some(Ending::Disconnected) => &mut self.disconnected,
            Some(Ending::Abandoned) => &mut self.abandoned,
        };
        *count += 1;
        self.hold_times.record(held);
    }
}

/// How many spans were how long.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Histogram {
    counts: [u64; Self::BOUNDS + 1],
    /// All of them together, in microseconds.
    micros: u64,
}

impl Histogram {
    /// How many bounds there are: from a millisecond on, each four times the one before, to about an hour and ten minutes.
    pub const BOUNDS: usize = 12;
    /// The first bound is two to this many nanoseconds.
    const FIRST_BOUND_BITS: u32 = 20;

    pub(super) fn record(&mut self, span: Duration) {
        let nanos = u64::try_from(span.as_nanos()).unwrap_or(u64::MAX);
        // How many bits it takes says between which powers of two it lies.
        let bits = u64::BITS - nanos.saturating_sub(1).leading_zeros();
        let at =
            (bits.saturating_sub(Self::FIRST_BOUND_BITS) as usize).div_ceil(2).min(Self::BOUNDS);
        self.counts[at] += 1;
        self.micros = self.micros.saturating_add(nanos / 1_000);
    }

    /// Each bound with how many spans are no longer than it.
    pub fn bounds(&self) -> impl Iterator<Item = (Duration, u64)> {
        let mut below = 0;
        self.counts.iter().take(Self::BOUNDS).zip(0u32..).map(move |(count, at)| {
            below += count;
            (Duration::from_nanos(1 << (Self::FIRST_BOUND_BITS + 2 * at)), below)
        })
    }

    /// How many there were.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// All of them together.
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
        // The zero and the first bound, then with each bound the one just past the last, and itself.
        let expected: Vec<u64> = (0..Histogram::BOUNDS as u64).map(|at| 2 + 2 * at).collect();
        assert_eq!(counts, expected);
        assert_eq!(spans.count(), 2 * Histogram::BOUNDS as u64 + 2);
    }
}
