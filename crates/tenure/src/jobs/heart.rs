//! Renewal of the leases of all jobs of a queue: one task per queue.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::Time;
use tenure_core::jobs::{HeartbeatSchedule, RenewalBatch, RenewalEvent, RenewalOutcome};
use tenure_core::keeper::Loss;
use tenure_core::lease::Lease;
use tokio::runtime::Handle as Runtime;
use tokio::sync::watch;

use super::pending_progress::PendingProgress;
use crate::race::before;
use crate::store::pg::clock::Reading;
use crate::store::pg::renewer::{BatchRenewer, RenewalQueue, RenewalStatement, RowBatch};
use crate::{Clock, Error};

/// Identity of a held row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RowName {
    pub(super) id: String,
    /// Second part of a name of two parts; empty for jobs.
    pub(super) part: String,
    /// Number of the fencing token.
    pub(super) number: i64,
    /// Progress that a renewal stores.
    pub(super) progress: Option<String>,
}

/// Operations of a table on the rows that it holds.
#[async_trait]
pub(super) trait Rows: RenewalStatement<Name = RowName> {
    /// Releases a row whose guard was dropped.
    async fn drop_one(&self, name: RowName);
}

/// State of a hold, as its guard sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look {
    pub(super) deadline: Time,
    pub(super) lost: Option<Loss>,
    /// The row was completed with the token of this hold. Then it is neither lost nor has it a deadline.
    pub(super) completed: bool,
}

/// All holds of a queue.
pub(super) struct Holds {
    renewer: Arc<BatchRenewer<HeldRows>>,
    /// Runtime of the task, on which rows of dropped guards are released.
    runtime: Runtime,
}

struct HeldRows {
    heart: HeartbeatSchedule,
    held: HashMap<u64, HeldRow>,
    next: u64,
    /// Time until which the task sleeps.
    armed: Time,
    ttl: Duration,
}

#[derive(Debug)]
struct HeldRow {
    name: RowName,
    progress: Arc<PendingProgress>,
    look: watch::Sender<Look>,
    /// Database clock at the last renewal.
    reading: Reading,
}

/// Keeps a hold renewed until it is dropped, which releases the row.
pub(super) struct Ticket {
    holds: Arc<Holds>,
    rows: Arc<dyn Rows>,
    number: u64,
    pub(super) look: watch::Receiver<Look>,
}

impl Holds {
    /// Creates an empty set of holds. Must be called within a runtime.
    pub(super) fn new(lease: Lease, clock: Clock) -> Arc<Self> {
        let rows = HeldRows {
            heart: HeartbeatSchedule::new(lease),
            held: HashMap::new(),
            next: 0,
            armed: Time::MAX,
            ttl: lease.ttl(),
        };
        let renewer = BatchRenewer::new(rows, clock);
        Arc::new(Self { renewer, runtime: Runtime::current() })
    }

    /// Starts the task that renews the holds until `rows` is dropped. Every guard keeps its table alive, so no hold is
    /// left behind.
    pub(super) fn keep(&self, rows: Weak<dyn Rows>) {
        self.runtime.spawn(Arc::clone(&self.renewer).run(move || rows.upgrade()));
    }

    /// Starts to renew a hold that was granted at `reading`; `None` if the answer arrived after the deadline of the
    /// lease.
    pub(super) fn admit(
        self: &Arc<Self>,
        name: RowName,
        progress: Arc<PendingProgress>,
        reading: Reading,
        rows: Arc<dyn Rows>,
    ) -> Option<Ticket> {
        let mut state = self.renewer.queue();
        state.next += 1;
        let number = state.next;
        // The clock is read now, not taken from the reading: this process may have been suspended since the answer
        // arrived.
        let deadline = state.heart.admit(number, reading.sent, self.renewer.clock().now())?;
        let (look, seen) = watch::channel(Look { deadline, lost: None, completed: false });
        state.held.insert(number, HeldRow { name, progress, look, reading });
        // The task is woken only if it sleeps past this deadline. Otherwise it wakes in time by itself, and a wake-up
        // per claim is saved.
        let due = state.armed == Time::MAX || deadline < state.armed;
        drop(state);
        if due {
            self.renewer.wake();
        }
        Some(Ticket { holds: Arc::clone(self), rows, number, look: seen })
    }

    /// Ids of all held rows.
    pub(super) fn ids(&self) -> Vec<String> {
        self.renewer.queue().held.values().map(|held| held.name.id.clone()).collect()
    }

    /// True if a row of this name is held.
    pub(super) fn holds(&self, id: &str, part: &str) -> bool {
        self.renewer.queue().held.values().any(|it| it.name.id == id && it.name.part == part)
    }

    /// Wakes the task, so that it notices that its table is gone and ends.
    pub(super) fn leave(&self) {
        self.renewer.wake();
    }
}

impl RenewalQueue for HeldRows {
    type Name = RowName;
    type Ticket = u64;

    fn expire(&mut self, now: Time) {
        self.heart.handle_timeout(now);
        self.tell();
    }

    fn take_due(&mut self, now: Time) -> Vec<RowBatch<u64, RowName>> {
        let request = self.heart.poll_request(now).map(|RenewalBatch { tickets, limit }| {
            let held = |ticket: &u64| {
                let HeldRow { name, progress, .. } = self.held.get(ticket)?;
                Some(RowName { progress: progress.take(), ..name.clone() })
            };
            let rows = tickets.iter().filter_map(held).collect();
            RowBatch { tickets, rows, by: now + limit }
        });
        request.into_iter().collect()
    }

    fn next_wake(&mut self) -> Option<Time> {
        self.armed = self.heart.poll_timeout().unwrap_or(Time::MAX);
        Some(self.armed)
    }

    fn answered(
        &mut self,
        outcomes: impl Iterator<Item = (u64, RenewalOutcome)>,
        reading: Reading,
        now: Time,
    ) {
        let mut judged = Vec::with_capacity(outcomes.size_hint().0);
        for (ticket, outcome) in outcomes {
            let renewed = outcome == RenewalOutcome::Renewed;
            let outcome = match self.held.get_mut(&ticket) {
                Some(held) => {
                    held.progress.answered(renewed);
                    if renewed { held.judge(reading, self.ttl) } else { outcome }
                }
                None => outcome,
            };
            judged.push((ticket, outcome));
        }
        self.heart.answered(judged, now);
        self.tell();
    }

    fn failed(&mut self, tickets: Vec<u64>, error: Error, now: Time) {
        tracing::warn!(name: "tenure.renew_failed", %error, holds = tickets.len());
        for held in tickets.iter().filter_map(|ticket| self.held.get(ticket)) {
            held.progress.answered(false);
        }
        self.heart.failed(now);
        self.tell();
    }
}

impl HeldRow {
    /// Refuses a renewal if the database's clock jumped since the last one: the lease may have ended meanwhile.
    fn judge(&mut self, reading: Reading, ttl: Duration) -> RenewalOutcome {
        let jump = self.reading.jump_beyond(&reading, ttl);
        self.reading = reading;
        if jump.is_some() {
            RenewalOutcome::Refused(Loss::ClockJump)
        } else {
            RenewalOutcome::Renewed
        }
    }
}

impl HeldRows {
    /// Publishes new deadlines and losses to the guards.
    fn tell(&mut self) {
        while let Some(news) = self.heart.poll_news() {
            let (ticket, change) = match news {
                RenewalEvent::Extended { ticket, deadline } => (ticket, Ok(deadline)),
                RenewalEvent::Lost { ticket, loss } => (ticket, Err(loss)),
                RenewalEvent::Completed { ticket } => {
                    self.complete(ticket);
                    continue;
                }
            };
            let Some(held) = self.held.get(&ticket) else { continue };
            held.look.send_modify(|look| match change {
                Ok(deadline) => look.deadline = deadline,
                Err(loss) => look.lost = Some(loss),
            });
            if let Err(reason) = change {
                let RowName { id, part, number, .. } = &held.name;
                tracing::warn!(name: "tenure.job_lost", id, part, token = number, %reason);
            }
        }
    }
}

impl HeldRows {
    /// Forgets a row that was completed, and reports it to its guard. Dropping the ticket then releases nothing.
    fn complete(&mut self, ticket: u64) {
        self.heart.dismiss(ticket);
        if let Some(held) = self.held.remove(&ticket) {
            held.look.send_modify(|look| look.completed = true);
        }
    }
}

impl Ticket {
    /// Records that the row was completed with the token of this hold, by a statement of the work itself.
    pub(super) fn completed_elsewhere(&self) {
        self.holds.renewer.queue().complete(self.number);
    }

    /// Stops renewals of a row whose outcome is recorded; dropping the ticket then releases nothing.
    pub(super) fn dealt_with(&self) {
        let mut state = self.holds.renewer.queue();
        state.heart.dismiss(self.number);
        state.held.remove(&self.number);
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let held = {
            let mut state = self.holds.renewer.queue();
            state.heart.dismiss(self.number);
            state.held.remove(&self.number)
        };
        if let Some(held) = held {
            let rows = Arc::clone(&self.rows);
            // In a task of its own: the release may block on a transaction that has locked the row. By the handle of
            // the runtime: a guard may be dropped outside of it.
            self.holds.runtime.spawn(async move { rows.drop_one(held.name).await });
        }
    }
}

/// Resolves when a hold is lost: at its deadline, or when the database refuses a renewal.
pub(super) async fn lost(clock: &Clock, look: &watch::Receiver<Look>) -> Loss {
    let mut look = look.clone();
    loop {
        let Look { deadline, lost, completed } = *look.borrow_and_update();
        if completed {
            return std::future::pending().await;
        }
        if let Some(reason) = lost {
            return reason;
        }
        // A timer of its own: the renewal task may run on a runtime that is no longer driven, and would report nothing.
        if until(clock, &mut look, deadline).await {
            match *look.borrow() {
                // The sender is gone because the row is completed.
                Look { completed: true, .. } => {}
                Look { lost, .. } => return lost.unwrap_or(Loss::Expired),
            }
        }
    }
}

/// Resolves when the work of a hold has completed its row itself. Never resolves if it does not.
pub(super) async fn completed(look: &watch::Receiver<Look>) {
    if look.clone().wait_for(|look| look.completed).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// Waits for `end` or a change. True if `end` came first, or the hold is no longer renewed.
pub(super) async fn until(clock: &Clock, look: &mut watch::Receiver<Look>, end: Time) -> bool {
    // An error means that the sender is gone: the hold has ended, or its outcome is recorded.
    !matches!(before(clock, end, look.changed()).await, Some(Ok(())))
}

#[cfg(test)]
mod tests {
    use tenure_core::lease::LeaseTerms;
    use tokio::sync::{mpsc, oneshot};

    use super::*;
    use crate::Result;

    /// A table that gets no renewal.
    struct Silent;

    #[async_trait]
    impl RenewalStatement for Silent {
        type Name = RowName;

        async fn renew(&self, _: &[RowName], _: Time) -> Result<(Reading, Vec<RenewalOutcome>)> {
            unreachable!("nothing is due")
        }
    }

    #[async_trait]
    impl Rows for Silent {
        async fn drop_one(&self, _: RowName) {}
    }

    #[tokio::test]
    async fn a_grant_that_was_read_after_its_deadline_is_no_hold() {
        let (clock, hand) = Clock::manual();
        let lease = Lease::new(LeaseTerms::new(Duration::from_secs(12))).unwrap();
        let holds = Holds::new(lease, clock.clone());
        let name = RowName { id: "1".to_owned(), part: String::new(), number: 1, progress: None };
        let reading = Reading { sent: clock.now(), replied: clock.now(), db: 0 };
        let admit = || holds.admit(name.clone(), Arc::default(), reading, Arc::new(Silent));
        hand.advance(Duration::from_secs(9));
        assert!(admit().is_some());
        hand.advance(Duration::from_secs(1));
        assert!(admit().is_none(), "ten of twelve seconds, the margin is two");
        assert_eq!(holds.ids(), Vec::<String>::new());
    }

    type RenewalAnswer = Result<(Reading, Vec<RenewalOutcome>)>;

    /// A table whose renewals the test answers.
    struct Answered(mpsc::UnboundedSender<oneshot::Sender<RenewalAnswer>>);

    #[async_trait]
    impl RenewalStatement for Answered {
        type Name = RowName;

        async fn renew(&self, _: &[RowName], _: Time) -> RenewalAnswer {
            let (answer, answered) = oneshot::channel();
            self.0.send(answer).expect("the test waits");
            answered.await.expect("the test answers")
        }
    }

    #[async_trait]
    impl Rows for Answered {
        async fn drop_one(&self, _: RowName) {}
    }

    /// Lets all other tasks of the test run until they wait.
    async fn settle() {
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_hold_is_lost_at_its_deadline_even_if_its_renewal_is_answered_later() {
        let (clock, hand) = Clock::manual();
        let lease = Lease::new(LeaseTerms::new(Duration::from_secs(12))).unwrap();
        let holds = Holds::new(lease, clock.clone());
        let (asked, mut requests) = mpsc::unbounded_channel();
        let rows: Arc<dyn Rows> = Arc::new(Answered(asked));
        holds.keep(Arc::downgrade(&rows));
        let name = RowName { id: "1".to_owned(), part: String::new(), number: 1, progress: None };
        let reading = || Reading { sent: clock.now(), replied: clock.now(), db: 0 };
        let ticket = holds.admit(name, Arc::default(), reading(), Arc::clone(&rows)).unwrap();
        let deadline = ticket.look.borrow().deadline;
        settle().await;
        hand.advance(Duration::from_secs(4));
        settle().await;
        let answer = requests.try_recv().expect("a renewal is due");
        hand.advance(Duration::from_secs(6));
        settle().await;
        assert_eq!(
            ticket.look.borrow().lost,
            Some(Loss::Expired),
            "while the renewal is in flight"
        );
        assert!(answer.send(Ok((reading(), vec![RenewalOutcome::Renewed]))).is_ok());
        settle().await;
        assert_eq!(ticket.look.borrow().deadline, deadline);
        assert_eq!(Arc::strong_count(&rows), 2, "the answer was handled");
    }
}
