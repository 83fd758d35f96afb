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
    /// Jobs completed per second; `None` if their number is not known exactly.
    pub completed: Option<f64>,
    /// Jobs marked as failed per second; `None` if their number is not known exactly.
    pub failed: Option<f64>,
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
    completed: Option<u64>,
    failed: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Growth {
    end: Time,
    span: Duration,
    completed: Option<u64>,
    failed: Option<u64>,
}

impl RateWindow {
    /// Records the numbers of completed and failed jobs at `now`; `None` for a number that is estimated or capped, whose
    /// growth would be no rate.
    pub fn record(&mut self, completed: Option<u64>, failed: Option<u64>, now: Time) {
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
            completed: growth_of(last.completed, completed),
            failed: growth_of(last.failed, failed),
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
        let per_second = |count: fn(&Growth) -> Option<u64>| {
            let total: Option<u64> = self.growth.iter().map(count).sum();
            total.map(|total| total as f64 / seconds)
        };
        (seconds > 0.0).then(|| QueueRates {
            completed: per_second(|growth| growth.completed),
            failed: per_second(|growth| growth.failed),
        })
    }
}

fn growth_of(before: Option<u64>, now: Option<u64>) -> Option<u64> {
    Some(now?.saturating_sub(before?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(completed: f64, failed: f64) -> QueueRates {
        QueueRates { completed: Some(completed), failed: Some(failed) }
    }

    fn at(seconds: u64) -> Time {
        Time::ZERO + Duration::from_secs(seconds)
    }

    #[test]
    fn two_readings_make_a_rate() {
        let mut window = RateWindow::default();
        assert_eq!(window.rates(), None);
        window.record(Some(100), Some(7), at(1));
        assert_eq!(window.rates(), None);
        window.record(Some(120), Some(8), at(3));
        assert_eq!(window.rates(), Some(rates(10.0, 0.5)));
    }

    #[test]
    fn old_growth_leaves_the_window() {
        let mut window = RateWindow::default();
        window.record(Some(0), Some(0), at(0));
        window.record(Some(1_000), Some(0), at(1));
        for second in 2..=12 {
            window.record(Some(1_000), Some(0), at(second));
        }
        assert_eq!(window.rates(), Some(rates(0.0, 0.0)));
    }

    #[test]
    fn deleted_rows_make_no_negative_rate() {
        let mut window = RateWindow::default();
        window.record(Some(1_000), Some(5), at(0));
        window.record(Some(10), Some(0), at(1));
        window.record(Some(14), Some(0), at(2));
        assert_eq!(window.rates(), Some(rates(2.0, 0.0)));
    }

    #[test]
    fn a_long_pause_begins_a_new_window() {
        let mut window = RateWindow::default();
        window.record(Some(0), Some(0), at(0));
        window.record(Some(5), Some(0), at(1));
        window.record(Some(1_000_000), Some(0), at(3_600));
        assert_eq!(window.rates(), None);
        window.record(Some(1_000_001), Some(0), at(3_601));
        assert_eq!(window.rates(), Some(rates(1.0, 0.0)));
    }

    #[test]
    fn a_store_that_is_read_rarely_has_rates() {
        let mut window = RateWindow::default();
        window.record(Some(0), Some(0), at(0));
        window.record(Some(90), Some(0), at(30));
        window.record(Some(300), Some(0), at(60));
        assert_eq!(window.rates(), Some(rates(7.0, 0.0)));
    }

    #[test]
    fn an_estimated_number_makes_no_rate() {
        let mut window = RateWindow::default();
        window.record(None, Some(0), at(0));
        window.record(None, Some(4), at(2));
        assert_eq!(window.rates(), Some(QueueRates { completed: None, failed: Some(2.0) }));
        window.record(Some(7), Some(4), at(4));
        assert_eq!(window.rates().and_then(|rates| rates.completed), None);
    }
}
