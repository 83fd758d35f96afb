//! Leases of the jobs of one process: renewed in batches, lost one by one.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::Time;
use crate::keeper::Loss;
use crate::lease::Lease;

/// Keeps many holds that have the same lease.
///
/// When the first hold is due, all holds that fall due within half an interval are renewed with it. So a few requests
/// per interval serve all holds, however their claims were spread. At most one request is in flight, and a request
/// never delays the report that a deadline has passed.
#[derive(Clone, Debug)]
pub struct HeartbeatSchedule {
    lease: Lease,
    beats: BTreeMap<u64, Beat>,
    /// Time at which the request in flight was sent.
    asking: Option<Time>,
    /// After a failure: no request before this instant.
    not_before: Time,
    news: VecDeque<RenewalEvent>,
}

#[derive(Clone, Copy, Debug)]
struct Beat {
    deadline: Time,
    renew_at: Time,
    /// Part of the request in flight.
    asked: bool,
}

/// Request to renew these holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RenewalBatch {
    /// Holds to renew.
    pub tickets: Vec<u64>,
    /// Time limit of the request.
    pub limit: Duration,
}

/// Outcome of the renewal of one hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RenewalOutcome {
    /// The hold was renewed.
    Renewed,
    /// The hold is no longer ours, for this reason.
    Refused(Loss),
    /// The job is completed under the token of this hold, by a statement of the work itself. No other worker can claim
    /// it.
    Completed,
    /// No outcome: another session is writing the row. The renewal is retried.
    PassedOver,
}

/// Event for the owner of a hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RenewalEvent {
    /// The hold is valid until a new deadline.
    Extended {
        /// Extended hold.
        ticket: u64,
        /// New deadline.
        deadline: Time,
    },
    /// The hold was lost, and is no longer kept.
    Lost {
        /// Lost hold.
        ticket: u64,
        /// Reason of the loss.
        loss: Loss,
    },
    /// The work has completed its job itself. The hold is no longer kept, and its work has no deadline any longer.
    Completed {
        /// Completed hold.
        ticket: u64,
    },
}

impl HeartbeatSchedule {
    /// Creates a keeper without holds.
    pub const fn new(lease: Lease) -> Self {
        Self {
            lease,
            beats: BTreeMap::new(),
            asking: None,
            not_before: Time::ZERO,
            news: VecDeque::new(),
        }
    }

    /// Number of holds.
    pub fn len(&self) -> usize {
        self.beats.len()
    }

    /// True if there are no holds.
    pub fn is_empty(&self) -> bool {
        self.beats.is_empty()
    }

    /// Begins to keep a hold that was granted by a request sent at `sent`, and returns its deadline. Returns `None`,
    /// and keeps nothing, if the answer came after the deadline: such a grant must be released and not returned to the
    /// caller.
    pub fn admit(&mut self, ticket: u64, sent: Time, now: Time) -> Option<Time> {
        let deadline = self.lease.deadline(sent, now);
        if now >= deadline {
            return None;
        }
        let beat = Beat { deadline, renew_at: self.lease.renew_at(sent), asked: false };
        self.beats.insert(ticket, beat);
        Some(deadline)
    }

    /// Stops keeping a hold. Returns true if it was kept until now.
    pub fn dismiss(&mut self, ticket: u64) -> bool {
        self.beats.remove(&ticket).is_some()
    }

    /// Next request to the store, if one is due.
    pub fn poll_request(&mut self, now: Time) -> Option<RenewalBatch> {
        if self.asking.is_some() || now < self.not_before {
            return None;
        }
        self.beats.values().find(|beat| beat.renew_at <= now)?;
        let soon = now + self.lease.renew_every().unwrap_or_default() / 2;
        let mut tickets = Vec::new();
        let mut first_end = Time::MAX;
        for (ticket, beat) in &mut self.beats {
            if beat.renew_at <= soon {
                beat.asked = true;
                first_end = first_end.min(beat.deadline);
                tickets.push(*ticket);
            }
        }
        self.asking = Some(now);
        let limit = self.lease.request_limit().min(first_end.since(now));
        Some(RenewalBatch { tickets, limit })
    }

    /// Handles the answer. A requested hold that is not in the answer was passed over.
    pub fn answered(
        &mut self,
        verdicts: impl IntoIterator<Item = (u64, RenewalOutcome)>,
        now: Time,
    ) {
        let Some(sent) = self.asking.take() else { return };
        // This comes first: a hold whose deadline has passed is lost, even if its renewal was granted. Its guard has
        // reported the loss since the deadline, and to extend the hold now would revive it.
        self.handle_timeout(now);
        for (ticket, verdict) in verdicts {
            let Some(beat) = self.beats.get_mut(&ticket).filter(|beat| beat.asked) else {
                continue;
            };
            match verdict {
                RenewalOutcome::Renewed => {
                    beat.asked = false;
                    beat.deadline = self.lease.deadline(sent, now);
                    beat.renew_at = self.lease.renew_at(sent);
                    let deadline = beat.deadline;
                    self.news.push_back(RenewalEvent::Extended { ticket, deadline });
                }
                RenewalOutcome::Refused(loss) => {
                    self.beats.remove(&ticket);
                    self.news.push_back(RenewalEvent::Lost { ticket, loss });
                }
                RenewalOutcome::Completed => {
                    self.beats.remove(&ticket);
                    self.news.push_back(RenewalEvent::Completed { ticket });
                }
                RenewalOutcome::PassedOver => {}
            }
        }
        if self.forget_request() {
            self.not_before = now + self.lease.retry_pause();
        }
        self.handle_timeout(now);
    }

    /// Handles a request without a clear answer.
    pub fn failed(&mut self, now: Time) {
        self.asking = None;
        self.forget_request();
        self.not_before = now + self.lease.retry_pause();
        self.handle_timeout(now);
    }

    /// Handles the deadlines that have passed at `now`.
    pub fn handle_timeout(&mut self, now: Time) {
        let news = &mut self.news;
        self.beats.retain(|ticket, beat| {
            let lives = now < beat.deadline;
            if !lives {
                news.push_back(RenewalEvent::Lost { ticket: *ticket, loss: Loss::Expired });
            }
            lives
        });
    }

    /// Instant of the next call.
    pub fn poll_timeout(&self) -> Option<Time> {
        let due = |beat: &Beat| match self.asking {
            None => beat.deadline.min(beat.renew_at.max(self.not_before)),
            Some(_) => beat.deadline,
        };
        self.beats.values().map(due).min()
    }

    /// Removes the next event.
    pub fn poll_news(&mut self) -> Option<RenewalEvent> {
        self.news.pop_front()
    }

    /// Clears the marks of the request in flight. Returns true if some requested holds got no outcome.
    fn forget_request(&mut self) -> bool {
        let mut vain = false;
        for beat in self.beats.values_mut() {
            vain |= std::mem::take(&mut beat.asked);
        }
        vain
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Random;
    use crate::lease::LeaseTerms;

    const MINUTE: Duration = Duration::from_secs(60);

    /// Five minutes, a heartbeat every minute, a margin of fifty seconds.
    fn heart() -> HeartbeatSchedule {
        let terms = LeaseTerms { keep_alive: Some(5), ..LeaseTerms::new(MINUTE * 5) };
        HeartbeatSchedule::new(Lease::new(terms).unwrap())
    }

    fn at(seconds: u64) -> Time {
        Time::ZERO + Duration::from_secs(seconds)
    }

    fn news(heart: &mut HeartbeatSchedule) -> Vec<RenewalEvent> {
        std::iter::from_fn(|| heart.poll_news()).collect()
    }

    fn all(request: &RenewalBatch, verdict: RenewalOutcome) -> Vec<(u64, RenewalOutcome)> {
        request.tickets.iter().map(|ticket| (*ticket, verdict)).collect()
    }

    #[test]
    fn renewal_batch_includes_jobs_that_are_due_soon() {
        let mut heart = heart();
        for nth in 0..60 {
            heart.admit(nth, at(nth), at(nth));
        }
        assert_eq!(heart.poll_timeout(), Some(at(60)));
        assert_eq!(heart.poll_request(at(59)), None);
        let request = heart.poll_request(at(60)).unwrap();
        assert_eq!(request.tickets.len(), 31, "claimed half an interval ago or before");
        assert_eq!(heart.poll_request(at(60)), None, "one at a time");
        heart.answered(all(&request, RenewalOutcome::Renewed), at(61));
        assert_eq!(news(&mut heart).len(), 31);
        assert_eq!(heart.poll_timeout(), Some(at(60 + 31)));
    }

    #[test]
    fn a_thousand_jobs_need_three_requests_an_interval_at_most() {
        let mut random = Random::new(4);
        let mut heart = heart();
        for nth in 0..1_000 {
            let claimed = at(random.below(60));
            heart.admit(nth, claimed, claimed);
        }
        let (mut now, mut requests) = (Time::ZERO, 0);
        while now < at(60 * 21) {
            now = heart.poll_timeout().unwrap();
            if let Some(request) = heart.poll_request(now) {
                requests += 1;
                heart.answered(
                    all(&request, RenewalOutcome::Renewed),
                    now + Duration::from_millis(20),
                );
            }
            assert!(
                news(&mut heart).iter().all(|news| matches!(news, RenewalEvent::Extended { .. }))
            );
        }
        assert!(requests <= 20 * 3, "{requests} in 20 intervals");
    }

    #[test]
    fn refused_renewal_loses_the_job_and_skipped_renewal_is_retried() {
        let mut heart = heart();
        for ticket in 1..=3 {
            heart.admit(ticket, at(0), at(0));
        }
        let request = heart.poll_request(at(60)).unwrap();
        let verdicts = [
            (1, RenewalOutcome::Refused(Loss::Taken)),
            (2, RenewalOutcome::PassedOver),
            (3, RenewalOutcome::Renewed),
            (9, RenewalOutcome::Renewed),
        ];
        heart.answered(verdicts, at(61));
        let extended = RenewalEvent::Extended { ticket: 3, deadline: at(60 + 250) };
        assert_eq!(
            news(&mut heart),
            [RenewalEvent::Lost { ticket: 1, loss: Loss::Taken }, extended]
        );
        assert_eq!(request.limit, Duration::from_secs(30));
        assert_eq!(heart.poll_request(at(62)), None, "not at once");
        let again = heart.poll_timeout().unwrap();
        assert!(again > at(61) && again < at(120), "{again:?}");
        assert_eq!(heart.poll_request(again).unwrap().tickets, [2]);
    }

    #[test]
    fn completed_job_has_no_deadline_and_is_not_renewed() {
        let mut heart = heart();
        heart.admit(1, at(0), at(0));
        heart.poll_request(at(60)).unwrap();
        heart.answered([(1, RenewalOutcome::Completed)], at(61));
        assert_eq!(news(&mut heart), [RenewalEvent::Completed { ticket: 1 }]);
        heart.handle_timeout(at(9_999));
        assert_eq!((news(&mut heart), heart.poll_timeout()), (vec![], None), "not lost later");
    }

    #[test]
    fn a_job_is_lost_at_its_deadline_even_if_the_answer_finds_it_completed() {
        let mut heart = heart();
        heart.admit(1, at(0), at(0));
        heart.poll_request(at(240)).unwrap();
        heart.answered([(1, RenewalOutcome::Completed)], at(250));
        assert_eq!(news(&mut heart), [RenewalEvent::Lost { ticket: 1, loss: Loss::Expired }]);
    }

    #[test]
    fn only_a_clear_answer_extends_and_a_request_that_hangs_delays_no_loss() {
        let mut heart = heart();
        heart.admit(1, at(0), at(1));
        heart.admit(2, at(30), at(31));
        let mut now = at(60);
        while now < at(200) {
            heart.poll_request(now).unwrap();
            heart.failed(now + Duration::from_secs(1));
            assert_eq!(news(&mut heart), []);
            now = heart.poll_timeout().unwrap();
        }
        heart.poll_request(now).unwrap();
        assert_eq!(heart.poll_timeout(), Some(at(250)), "counted from the request of the claim");
        heart.handle_timeout(at(250));
        assert_eq!(news(&mut heart), [RenewalEvent::Lost { ticket: 1, loss: Loss::Expired }]);
        // A late answer has no effect on a hold that was already lost.
        heart.answered([(1, RenewalOutcome::Renewed), (2, RenewalOutcome::Renewed)], at(251));
        let deadline = now + Duration::from_secs(250);
        assert_eq!(news(&mut heart), [RenewalEvent::Extended { ticket: 2, deadline }]);
    }

    #[test]
    fn an_answer_past_the_deadline_extends_nothing() {
        let mut heart = heart();
        heart.admit(1, at(0), at(0));
        heart.admit(2, at(200), at(200));
        let request = heart.poll_request(at(240)).unwrap();
        assert_eq!(request.tickets, [1, 2]);
        assert_eq!(request.limit, Duration::from_secs(10), "no longer than the first hold lasts");
        // The process was stopped past the first hold's deadline, and handles the answer before the timer.
        heart.answered(all(&request, RenewalOutcome::Renewed), at(250));
        let extended = RenewalEvent::Extended { ticket: 2, deadline: at(240 + 250) };
        assert_eq!(
            news(&mut heart),
            [RenewalEvent::Lost { ticket: 1, loss: Loss::Expired }, extended]
        );
        assert_eq!(heart.len(), 1);
    }

    #[test]
    fn a_grant_past_its_own_deadline_is_not_kept() {
        let mut heart = heart();
        assert_eq!(heart.admit(1, at(0), at(249)), Some(at(250)));
        assert_eq!(heart.admit(2, at(0), at(250)), None);
        assert_eq!((heart.len(), news(&mut heart)), (1, vec![]));
    }

    #[test]
    fn removed_job_is_neither_renewed_nor_reported_lost() {
        let mut heart = heart();
        heart.admit(1, at(0), at(0));
        heart.admit(2, at(0), at(0));
        assert!(heart.dismiss(1));
        assert!(!heart.dismiss(1));
        let request = heart.poll_request(at(60)).unwrap();
        assert_eq!(request.tickets, [2]);
        assert!(heart.dismiss(2), "while the request is under way");
        heart.answered(all(&request, RenewalOutcome::Renewed), at(61));
        heart.handle_timeout(at(9_999));
        assert_eq!((news(&mut heart), heart.len(), heart.poll_timeout()), (vec![], 0, None));
    }
}
