//! Reports of a store that is away: when users are told, and when they are told that it is back.

use std::collections::VecDeque;
use std::time::Duration;

use crate::{Machine, Time};

/// Time after which a request without an answer, or a store that only fails, is reported for the first time.
///
/// Shorter than the two seconds that users are promised, so that the report is out in time. Not zero: a connection that
/// breaks and is back at once needs no report.
pub const FIRST_REPORT_AFTER: Duration = Duration::from_millis(1_500);
/// Interval of the further reports.
pub const REPORT_INTERVAL: Duration = Duration::from_secs(30);

/// Event of a request to the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OutageInput {
    /// A request was sent that the store answers at once if it can.
    Sent,
    /// The store answered, by any answer that shows that it works.
    Answered,
    /// A request failed, and will be retried.
    Failed,
    /// A request of another kind was answered, such as a renewal beside the claims of a worker. It does not end an
    /// outage in which the requests themselves fail.
    AnsweredBeside,
    /// A request of another kind failed. It may not be repeated, so any answer ends the outage.
    FailedBeside,
}

/// Report for the user.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OutageReport {
    /// The store has been away for this long.
    Away(Duration),
    /// The store answers again; it was away for this long.
    Back(Duration),
}

/// Outage of one store, as one user of it sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Outage {
    /// Time at which the first request was sent that has had no answer since, or failed.
    since: Option<Time>,
    /// Time of the last report of this outage.
    reported: Option<Time>,
    /// The last request has failed, and its retry has not been answered yet.
    failing: bool,
    reports: VecDeque<OutageReport>,
}

impl Outage {
    fn due(&self) -> Option<Time> {
        let since = self.since?;
        Some(self.reported.map_or(since + FIRST_REPORT_AFTER, |last| last + REPORT_INTERVAL))
    }
}

impl Machine for Outage {
    type Input = OutageInput;
    type Command = OutageReport;

    fn handle(&mut self, input: OutageInput, now: Time) {
        match input {
            OutageInput::Failed => self.failing = true,
            OutageInput::Answered => self.failing = false,
            OutageInput::Sent | OutageInput::AnsweredBeside | OutageInput::FailedBeside => {}
        }
        match input {
            OutageInput::Sent | OutageInput::Failed | OutageInput::FailedBeside => {
                self.since.get_or_insert(now);
            }
            OutageInput::Answered | OutageInput::AnsweredBeside if !self.failing => {
                let since = self.since.take();
                if let (Some(since), Some(_)) = (since, self.reported.take()) {
                    self.reports.push_back(OutageReport::Back(now.since(since)));
                }
            }
            OutageInput::Answered | OutageInput::AnsweredBeside => {}
        }
        self.handle_timeout(now);
    }

    fn handle_timeout(&mut self, now: Time) {
        if let (Some(since), Some(due)) = (self.since, self.due())
            && due <= now
        {
            self.reported = Some(now);
            self.reports.push_back(OutageReport::Away(now.since(since)));
        }
    }

    fn poll_timeout(&self) -> Option<Time> {
        self.due()
    }

    fn poll_command(&mut self) -> Option<OutageReport> {
        self.reports.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Time {
        Time::ZERO + Duration::from_millis(ms)
    }

    fn reports(outage: &mut Outage) -> Vec<OutageReport> {
        std::iter::from_fn(|| outage.poll_command()).collect()
    }

    #[test]
    fn a_store_that_answers_is_never_reported() {
        let mut outage = Outage::default();
        for second in 0..100 {
            outage.handle(OutageInput::Sent, at(second * 1_000));
            outage.handle(OutageInput::Answered, at(second * 1_000 + 1_499));
            outage.handle_timeout(at(second * 1_000 + 1_500));
        }
        assert_eq!((reports(&mut outage), outage.poll_timeout()), (vec![], None));
    }

    #[test]
    fn a_failing_store_is_reported_within_two_seconds_and_then_every_thirty() {
        let mut outage = Outage::default();
        outage.handle(OutageInput::Sent, at(0));
        let mut told = Vec::new();
        for tenth in 1..=700 {
            outage.handle(OutageInput::Failed, at(tenth * 100));
            outage.handle(OutageInput::Sent, at(tenth * 100));
            told.extend(reports(&mut outage).into_iter().map(|report| (tenth * 100, report)));
        }
        let away = |ms| (ms, OutageReport::Away(Duration::from_millis(ms)));
        assert_eq!(told, [away(1_500), away(31_500), away(61_500)]);
        outage.handle(OutageInput::Answered, at(70_000));
        assert_eq!(reports(&mut outage), [OutageReport::Back(Duration::from_secs(70))]);
        assert_eq!((outage.poll_timeout(), outage.reported), (None, None));
    }

    #[test]
    fn a_request_without_an_answer_is_reported_by_a_timer() {
        let mut outage = Outage::default();
        outage.handle(OutageInput::Sent, at(0));
        assert_eq!(outage.poll_timeout(), Some(at(1_500)));
        outage.handle_timeout(at(1_499));
        assert_eq!(reports(&mut outage), []);
        outage.handle_timeout(at(1_500));
        assert_eq!(reports(&mut outage), [OutageReport::Away(FIRST_REPORT_AFTER)]);
        assert_eq!(outage.poll_timeout(), Some(at(31_500)));
    }

    #[test]
    fn an_outage_that_was_not_reported_is_not_reported_as_over() {
        let mut outage = Outage::default();
        outage.handle(OutageInput::Failed, at(0));
        outage.handle(OutageInput::Answered, at(1_000));
        assert_eq!(reports(&mut outage), []);
    }

    #[test]
    fn answers_to_other_requests_do_not_hide_a_request_that_always_fails() {
        let mut outage = Outage::default();
        for second in 0..10 {
            outage.handle(OutageInput::Failed, at(second * 1_000));
            outage.handle(OutageInput::AnsweredBeside, at(second * 1_000 + 500));
        }
        assert!(matches!(reports(&mut outage)[..], [OutageReport::Away(_)]));
        outage.handle(OutageInput::Answered, at(10_000));
        assert!(matches!(reports(&mut outage)[..], [OutageReport::Back(_)]));
    }

    #[test]
    fn any_answer_ends_the_outage_of_a_request_that_may_not_be_repeated() {
        let mut outage = Outage::default();
        outage.handle(OutageInput::FailedBeside, at(0));
        outage.handle_timeout(at(2_000));
        assert_eq!(reports(&mut outage).len(), 1);
        outage.handle(OutageInput::AnsweredBeside, at(3_000));
        assert!(matches!(reports(&mut outage)[..], [OutageReport::Back(_)]));
    }
}
