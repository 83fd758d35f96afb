//! Leases that end later than they can last, because the database's clock was set back since they began.

use std::collections::HashMap;
use std::time::Duration;

use crate::Time;
use crate::lease::margin;

/// Mark between the name of a worker and its lease in seconds.
pub const LEASE_MARK: char = '+';

/// Maximum number of rows that are observed at a time. The others are observed when these are settled.
const MAX_OBSERVED: usize = 1_000;

/// Name of a worker that records its lease: other workers know by it how long the lease can last at most.
///
/// ```
/// use std::time::Duration;
/// use tenure_core::jobs::{recorded_lease, worker_name};
///
/// let name = worker_name("host:71:9f2c", 0, Duration::from_millis(2_500));
/// assert_eq!(name, "host:71:9f2c:0+3");
/// assert_eq!(recorded_lease(&name), Some(Duration::from_secs(3)));
/// assert_eq!(recorded_lease("worker-7"), None);
/// ```
pub fn worker_name(process: &str, queue: u64, lease: Duration) -> String {
    let seconds = lease.as_secs() + u64::from(lease.subsec_nanos() > 0);
    format!("{process}:{queue}{LEASE_MARK}{seconds}")
}

/// Lease that the name of a worker records, rounded up to seconds.
pub fn recorded_lease(name: &str) -> Option<Duration> {
    let (_, seconds) = name.rsplit_once(LEASE_MARK)?;
    let digits = (1..=7).contains(&seconds.len()) && seconds.bytes().all(|b| b.is_ascii_digit());
    digits.then(|| seconds.parse().ok()).flatten().map(Duration::from_secs)
}

/// A held row whose lease ends later than it can last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseAhead {
    /// Id of the job.
    pub id: String,
    /// Token of the claim.
    pub token: i64,
    /// End of the lease, on the database's clock.
    pub until: i64,
    /// Worker of the claim.
    pub worker: String,
}

/// Observes rows whose lease ends later than it can last, on the observer's own clock.
///
/// The database's clock does not tell when such a lease is over. But a live worker renews its lease, which changes its
/// end. So a row that stays the same for the whole lease and its margin has a worker that has reported its loss by then,
/// or is dead.
#[derive(Debug, Default)]
pub struct LeasesAhead {
    /// By id: the row, and the time at which the answer that first showed it had arrived.
    seen: HashMap<String, (LeaseAhead, Time)>,
}

impl LeasesAhead {
    /// Notes the rows of an answer to a request that was sent at `sent` and arrived at `now`. Returns those whose worker
    /// has certainly lost them.
    pub fn observe(&mut self, rows: Vec<LeaseAhead>, sent: Time, now: Time) -> Vec<LeaseAhead> {
        let before = std::mem::take(&mut self.seen);
        let mut over = Vec::new();
        for row in rows.into_iter().take(MAX_OBSERVED) {
            // Counted from the arrival of the first answer to the sending of this request: both are inside the time
            // for which the row was unchanged.
            let since = match before.get(&row.id) {
                Some((seen, since)) if *seen == row => *since,
                _ => now,
            };
            // A worker of plain SQL records no lease, and may renew none: its row is left alone.
            let Some(lease) = recorded_lease(&row.worker) else { continue };
            if sent.since(since) >= lease + margin(lease) {
                over.push(row);
            } else {
                self.seen.insert(row.id.clone(), (row, since));
            }
        }
        over
    }

    /// Forgets all rows: an answer had none.
    pub fn clear(&mut self) {
        self.seen.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Time {
        Time::ZERO + Duration::from_secs(seconds)
    }

    fn row(until: i64) -> LeaseAhead {
        LeaseAhead { id: "1".to_owned(), token: 7, until, worker: "host:1:a:0+60".to_owned() }
    }

    #[test]
    fn an_unchanged_row_is_over_after_its_lease_and_the_margin() {
        let mut leases = LeasesAhead::default();
        assert_eq!(leases.observe(vec![row(9)], at(0), at(5)), []);
        // A minute and its sixth, from the arrival of the first answer.
        assert_eq!(leases.observe(vec![row(9)], at(74), at(80)), []);
        assert_eq!(leases.observe(vec![row(9)], at(75), at(80)), [row(9)]);
        assert_eq!(leases.observe(vec![row(9)], at(81), at(82)), [], "reported once");
    }

    #[test]
    fn a_renewal_or_another_claim_begins_the_time_anew() {
        for other in [row(10), LeaseAhead { token: 8, ..row(9) }] {
            let mut leases = LeasesAhead::default();
            leases.observe(vec![row(9)], at(0), at(0));
            assert_eq!(leases.observe(vec![other.clone()], at(50), at(50)), []);
            assert_eq!(leases.observe(vec![other.clone()], at(119), at(119)), []);
            assert_eq!(leases.observe(vec![other.clone()], at(120), at(120)), [other]);
        }
    }

    #[test]
    fn a_row_that_was_gone_meanwhile_is_observed_anew() {
        for gone in [true, false] {
            let mut leases = LeasesAhead::default();
            leases.observe(vec![row(9)], at(0), at(0));
            if gone {
                leases.observe(vec![], at(10), at(10));
            } else {
                leases.clear();
            }
            assert_eq!(leases.observe(vec![row(9)], at(100), at(100)), []);
        }
    }

    #[test]
    fn a_worker_without_a_recorded_lease_keeps_its_row() {
        let plain = LeaseAhead { worker: "worker+x".to_owned(), ..row(9) };
        let mut leases = LeasesAhead::default();
        leases.observe(vec![plain.clone()], at(0), at(0));
        assert_eq!(leases.observe(vec![plain], at(1_000_000), at(1_000_000)), []);
    }

    #[test]
    fn only_the_end_of_a_name_records_a_lease() {
        for name in ["", "+", "a+", "a+1x", "a+12345678", "a+1+", "+-1"] {
            assert_eq!(recorded_lease(name), None, "{name}");
        }
        assert_eq!(recorded_lease("a+1+300"), Some(Duration::from_secs(300)));
    }
}
