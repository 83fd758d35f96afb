//! Renewals that wait to be sent.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tenure_core::Time;
use tenure_core::jobs::RenewalOutcome;
use tokio::sync::oneshot;

use super::hold_name::HoldName;
use crate::store::pg::clock::Reading;
use crate::store::pg::renewer::{BatchRenewer, RenewalQueue, RowBatch};
use crate::{Error, ErrorKind, Result};

/// Maximum number of holds per statement.
const MOST: usize = 5_000;

pub(super) type LeaseRenewer = BatchRenewer<LeaseQueue>;

/// Renewals that wait to be sent.
#[derive(Debug)]
pub(super) struct LeaseQueue {
    asked: Vec<Asked>,
    /// True while the task runs.
    collecting: bool,
    /// Number of holds of this process.
    holds: Arc<AtomicUsize>,
}

#[derive(Debug)]
struct Asked {
    row: LeaseRow,
    send_by: Time,
    answer_by: Time,
    reply: RenewalReply,
}

/// Caller of a renewal.
pub(super) type RenewalReply = oneshot::Sender<Result<Reading>>;

/// A hold, and the lease to set.
#[derive(Debug)]
pub(super) struct LeaseRow {
    pub(super) hold: HoldName,
    pub(super) ttl: Duration,
    /// Set if another claim waits for the key.
    pub(super) awaited: Arc<AtomicBool>,
}

impl LeaseQueue {
    pub(super) fn new(holds: Arc<AtomicUsize>) -> Self {
        Self { asked: Vec::new(), collecting: false, holds }
    }

    /// Adds a renewal. Returns true if the task does not run: the caller starts it.
    pub(super) fn add(
        &mut self,
        row: LeaseRow,
        send_by: Time,
        answer_by: Time,
        reply: RenewalReply,
    ) -> bool {
        self.asked.push(Asked { row, send_by, answer_by, reply });
        !std::mem::replace(&mut self.collecting, true)
    }
}

impl RenewalQueue for LeaseQueue {
    type Name = LeaseRow;
    type Ticket = RenewalReply;

    fn expire(&mut self, _: Time) {
        // The caller has its own timer. When it is due, the caller drops its end of the channel.
        self.asked.retain(|asked| !asked.reply.is_closed());
    }

    fn take_due(&mut self, now: Time) -> Vec<RowBatch<RenewalReply, LeaseRow>> {
        let mut batches = Vec::new();
        while let Some(due) = self.asked.iter().map(|asked| asked.send_by).min() {
            let all_wait = self.asked.len() >= self.holds.load(Ordering::Relaxed).min(MOST);
            if !all_wait && now < due {
                break;
            }
            let count = self.asked.len().min(MOST);
            let (many, one): (Vec<_>, Vec<_>) =
                self.asked.drain(..count).partition(|asked| asked.row.hold.shared_row);
            batches.extend([one, many].into_iter().filter(|part| !part.is_empty()).map(batch));
        }
        batches
    }

    fn next_wake(&mut self) -> Option<Time> {
        let due = self.asked.iter().map(|asked| asked.send_by).min();
        self.collecting = due.is_some();
        due
    }

    fn answered(
        &mut self,
        outcomes: impl Iterator<Item = (RenewalReply, RenewalOutcome)>,
        reading: Reading,
        _: Time,
    ) {
        for (reply, outcome) in outcomes {
            let answer = match outcome {
                RenewalOutcome::Renewed => Ok(reading),
                RenewalOutcome::PassedOver => {
                    let message = "another transaction has locked the row";
                    Err(Error::new(ErrorKind::Unavailable, message))
                }
                RenewalOutcome::Refused(_) | RenewalOutcome::Completed => {
                    Err(Error::new(ErrorKind::NotHeld, "the hold has ended, or another has it"))
                }
            };
            // Fails if the caller no longer waits.
            let _ = reply.send(answer);
        }
    }

    fn failed(&mut self, replies: Vec<RenewalReply>, error: Error, _: Time) {
        let cause = Arc::new(error);
        for reply in replies {
            let _ = reply.send(Err(Error::copy_of(&cause, "the renewal failed")));
        }
    }
}

fn batch(asked: Vec<Asked>) -> RowBatch<RenewalReply, LeaseRow> {
    let by = asked.iter().map(|asked| asked.answer_by).max().unwrap_or(Time::ZERO);
    let (tickets, rows) = asked.into_iter().map(|asked| (asked.reply, asked.row)).unzip();
    RowBatch { tickets, rows, by }
}

#[cfg(test)]
mod tests {
    use tenure_core::Key;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn queue(holds: usize) -> LeaseQueue {
        LeaseQueue::new(Arc::new(AtomicUsize::new(holds)))
    }

    /// Adds a renewal that is sent after a second at the latest.
    fn ask(queue: &mut LeaseQueue, shared_row: bool) -> oneshot::Receiver<Result<Reading>> {
        let key = Key::new("key").unwrap();
        let hold = HoldName { space: 0, key, shared_row, number: 1, secret: [0; 16] };
        let (reply, answer) = oneshot::channel();
        let row = LeaseRow { hold, ttl: SECOND, awaited: Arc::default() };
        let (send_by, answer_by) = (Time::ZERO + SECOND, Time::ZERO + 2 * SECOND);
        queue.add(row, send_by, answer_by, reply);
        answer
    }

    #[test]
    fn renewals_wait_for_each_other_until_the_first_must_be_sent() {
        let mut queue = queue(3);
        let _answers = [ask(&mut queue, false), ask(&mut queue, true)];
        assert!(queue.take_due(Time::ZERO).is_empty(), "a third hold may follow");
        assert_eq!(queue.next_wake(), Some(Time::ZERO + SECOND));
        let batches = queue.take_due(Time::ZERO + SECOND);
        assert_eq!(batches.len(), 2, "shared rows have a statement of their own");
        assert!(batches.iter().all(|batch| batch.by == Time::ZERO + 2 * SECOND));
        assert_eq!(queue.next_wake(), None);
    }

    #[test]
    fn renewals_are_sent_as_soon_as_all_holds_wait() {
        let mut queue = queue(2);
        let _answers = [ask(&mut queue, false), ask(&mut queue, false)];
        let batches = queue.take_due(Time::ZERO);
        assert_eq!(batches.iter().map(|batch| batch.rows.len()).collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn a_renewal_without_a_caller_is_not_sent() {
        let mut queue = queue(1);
        drop(ask(&mut queue, false));
        queue.expire(Time::ZERO);
        assert!(queue.take_due(Time::ZERO + SECOND).is_empty());
    }

    #[test]
    fn a_failed_statement_is_reported_to_each_of_its_callers() {
        let mut queue = queue(2);
        let answers = [ask(&mut queue, false), ask(&mut queue, false)];
        let batch = queue.take_due(Time::ZERO).pop().expect("all wait");
        queue.failed(batch.tickets, Error::new(ErrorKind::Unavailable, "cut"), Time::ZERO);
        for mut answer in answers {
            let error = answer.try_recv().expect("an answer").expect_err("it failed");
            assert_eq!(error.kind(), ErrorKind::Unavailable);
            assert!(
                std::error::Error::source(&error)
                    .is_some_and(|cause| cause.to_string().contains("cut"))
            );
        }
    }
}
