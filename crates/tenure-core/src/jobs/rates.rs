//! Rates of a queue, from the counts that a monitor reads.

use std::collections::VecDeque;
use std::time::Duration;

use crate::Time;

/// Time over which rates are averaged.
const RATE_WINDOW: Duration = Duration::from_secs(10);
/// Longest pause between two readings that belong to one window. After a longer pause the average would hide the
/// present rate.
const MAX_READING_GAP: Duration = Duration::from_secs(60);

/// Jobs per second that were completed and that failed, over the last seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct QueueRates {
    /// Jobs completed per second.
    pub completed: f64,
    /// Jobs marked as failed per second.
    pub failed: f64,
}

/// Averages the growth of two counts over the last 10 seconds.
///
/// A count falls when rows are deleted, or when an operator retries failed jobs. A fall counts as no growth, so rates are
/// never negative; jobs that ended in the same interval are then missed.
#[derive(Clone, Debug, Default)]
pub struct RateWindow {
    last: Option<Reading>,
    /// Growth since the previous reading, each with the time that the growth took.
    growth: VecDeque<Growth>,
}

#[derive(Clone, Copy, Debug)]
struct Reading {
    at: Time,
    completed: u64,
    failed: u64,
}

#[derive(Clone, Copy, Debug)]
struct Growth {
    end: Time,
    span: Duration,
    completed: u64,
    failed: u64,
}

impl RateWindow {
    /// Records the numbers of completed and failed jobs at `now`.
    pub fn record(&mut self, completed: u64, failed: u64, now: Time) {
        let reading = Reading { at: now, completed, failed };
        let Some(last) = self.last.replace(reading) else { return };
        let span = now.since(last.at);
        if span > MAX_READING_GAP {
            self.growth.clear();
            return;
        }
        self.growth.push_back(Growth {
            end: now,
            span,
            completed: completed.saturating_sub(last.completed),
            failed: failed.saturating_sub(last.failed),
        });
        // The newest growth stays, however long it took: a slow store is read less often than the window is long.
        while self.growth.len() > 1
            && self.growth.front().is_some_and(|first| now.since(first.end) >= RATE_WINDOW)
        {
            self.growth.pop_front();
        }
    }

    /// Rates over the window; `None` before the second reading, and after a long pause.
    pub fn rates(&self) -> Option<QueueRates> {
        let seconds: f64 = self.growth.iter().map(|growth| growth.span.as_secs_f64()).sum();
        // Counts stay far below 2^53, where a float is exact.
        #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
        let per_second =
            |count: fn(&Growth) -> u64| self.growth.iter().map(count).sum::<u64>() as f64 / seconds;
        (seconds > 0.0).then(|| QueueRates {
            completed: per_second(|growth| growth.completed),
            failed: per_second(|growth| growth.failed),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Time {
        Time::ZERO + Duration::from_secs(seconds)
    }

    #[test]
    fn two_readings_make_a_rate() {
        let mut window = RateWindow::default();
        assert_eq!(window.rates(), None);
        window.record(100, 7, at(1));
        assert_eq!(window.rates(), None);
        window.record(120, 8, at(3));
        assert_eq!(window.rates(), Some(QueueRates { completed: 10.0, failed: 0.5 }));
    }

    #[test]
    fn old_growth_leaves_the_window() {
        let mut window = RateWindow::default();
        window.record(0, 0, at(0));
        window.record(1_000, 0, at(1));
        for second in 2..=12 {
            window.record(1_000, 0, at(second));
        }
        assert_eq!(window.rates(), Some(QueueRates::default()));
    }

    #[test]
    fn deleted_rows_make_no_negative_rate() {
        let mut window = RateWindow::default();
        window.record(1_000, 5, at(0));
        window.record(10, 0, at(1));
        window.record(14, 0, at(2));
        assert_eq!(window.rates(), Some(QueueRates { completed: 2.0, failed: 0.0 }));
    }

    #[test]
    fn a_long_pause_begins_a_new_window() {
        let mut window = RateWindow::default();
        window.record(0, 0, at(0));
        window.record(5, 0, at(1));
        window.record(1_000_000, 0, at(3_600));
        assert_eq!(window.rates(), None);
        window.record(1_000_001, 0, at(3_601));
        assert_eq!(window.rates(), Some(QueueRates { completed: 1.0, failed: 0.0 }));
    }

    #[test]
    fn a_store_that_is_read_rarely_has_rates() {
        let mut window = RateWindow::default();
        window.record(0, 0, at(0));
        window.record(90, 0, at(30));
        window.record(300, 0, at(60));
        assert_eq!(window.rates(), Some(QueueRates { completed: 7.0, failed: 0.0 }));
    }
}
