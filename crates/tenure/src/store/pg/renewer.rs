//! Batched renewals: the holds of many callers in one statement.
//!
//! A [`RenewalQueue`] decides which holds are due together, and when. [`BatchRenewer`] does the rest, for lease rows, jobs
//! and checkpoints alike. It wakes when the queue needs it, sends each batch in a task of its own with its time limit,
//! and passes the outcome of the statement to every hold of the batch. Deadlines come first, always: before a batch is
//! taken, and before an answer is applied.

use std::sync::{Arc, MutexGuard};

use async_trait::async_trait;
use tenure_core::Time;
use tenure_core::jobs::RenewalOutcome;
use tenure_core::keeper::Loss;
use tokio::sync::Notify;
use tokio_postgres::Row;

use super::clock::Reading;
use crate::mutex::Mutex;
use crate::race::race;
use crate::{Clock, Error, Result};

/// Statement that renews many rows of a table.
#[async_trait]
pub(crate) trait RenewalStatement: Send + Sync + 'static {
    /// Name of a row.
    type Name: Send + Sync + 'static;

    /// Renews the rows, with an answer until `by`. Returns the database's clock and one outcome per row, in their order.
    async fn renew(&self, rows: &[Self::Name], by: Time) -> Result<(Reading, Vec<RenewalOutcome>)>;
}

/// Renewals that wait to be sent, or holds that are renewed again and again.
pub(crate) trait RenewalQueue: Send + 'static {
    /// Name of a row, for the statement.
    type Name: Send + Sync + 'static;
    /// Hold or request that gets the outcome for a row.
    type Ticket: Send + 'static;

    /// Ends everything whose deadline has passed at `now`.
    fn expire(&mut self, now: Time);

    /// Takes the batches that are due at `now`.
    fn take_due(&mut self, now: Time) -> Vec<RowBatch<Self::Ticket, Self::Name>>;

    /// Instant of the next call; `None` ends the task.
    fn next_wake(&mut self) -> Option<Time>;

    /// Applies the outcomes of a batch to its holds.
    fn answered(
        &mut self,
        outcomes: impl Iterator<Item = (Self::Ticket, RenewalOutcome)>,
        reading: Reading,
        now: Time,
    );

    /// Handles a batch without a clear answer.
    fn failed(&mut self, tickets: Vec<Self::Ticket>, error: Error, now: Time);
}

/// Rows that are renewed in one statement.
pub(crate) struct RowBatch<T, N> {
    /// One per row, in the same order.
    pub(crate) tickets: Vec<T>,
    pub(crate) rows: Vec<N>,
    /// Time limit of the statement.
    pub(crate) by: Time,
}

/// A queue of renewals, and the task that sends them.
#[derive(Debug)]
pub(crate) struct BatchRenewer<Q> {
    queue: Mutex<Q>,
    wake: Notify,
    clock: Clock,
}

impl<Q> BatchRenewer<Q> {
    pub(crate) fn new(queue: Q, clock: Clock) -> Arc<Self> {
        Arc::new(Self { queue: Mutex::new(queue), wake: Notify::new(), clock })
    }

    pub(crate) fn queue(&self) -> MutexGuard<'_, Q> {
        self.queue.lock()
    }

    #[cfg(feature = "jobs")]
    pub(crate) fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Wakes the task, because the queue has changed.
    pub(crate) fn wake(&self) {
        self.wake.notify_one();
    }
}

impl<Q: RenewalQueue> BatchRenewer<Q> {
    /// Sends the renewals that are due, until the queue ends the task or `statement` returns `None`.
    ///
    /// The statement is asked for at each turn and not kept: what it belongs to may end meanwhile.
    pub(crate) async fn run<S>(self: Arc<Self>, statement: impl Fn() -> Option<Arc<S>>)
    where
        S: RenewalStatement<Name = Q::Name> + ?Sized,
    {
        loop {
            let (batches, until) = {
                let mut queue = self.queue();
                let now = self.clock.now();
                queue.expire(now);
                (queue.take_due(now), queue.next_wake())
            };
            let Some(statement) = statement() else { return };
            for batch in batches {
                // In a task of its own: a statement that blocks must delay neither a deadline nor the next batch.
                tokio::spawn(Arc::clone(&self).send(batch, Arc::clone(&statement)));
            }
            drop(statement);
            let Some(until) = until else { return };
            race(self.wake.notified(), self.clock.sleep_until(until)).await;
        }
    }

    async fn send<S>(self: Arc<Self>, batch: RowBatch<Q::Ticket, Q::Name>, statement: Arc<S>)
    where
        S: RenewalStatement<Name = Q::Name> + ?Sized,
    {
        let RowBatch { tickets, rows, by } = batch;
        let answer = statement.renew(&rows, by).await;
        {
            let mut queue = self.queue();
            let now = self.clock.now();
            // A hold whose deadline has passed is lost, even if its renewal was granted: its guard has reported the
            // loss since the deadline.
            queue.expire(now);
            match answer {
                Ok((reading, outcomes)) => {
                    queue.answered(tickets.into_iter().zip(outcomes), reading, now);
                }
                Err(error) => queue.failed(tickets, error, now),
            }
        }
        self.wake();
    }
}

/// Reads the outcome of each renewal, in the order of the request. Of the columns, `nth` is the
/// number of the row in the request; `passed_over` is true if another transaction has locked it.
pub(crate) fn outcomes(count: usize, rows: &[Row]) -> Vec<RenewalOutcome> {
    outcomes_with(count, rows, |_| RenewalOutcome::Refused(Loss::Taken))
}

/// Like [`outcomes`], with `refused` to read from a row why it refused its renewal.
pub(crate) fn outcomes_with(
    count: usize,
    rows: &[Row],
    refused: impl Fn(&Row) -> RenewalOutcome,
) -> Vec<RenewalOutcome> {
    let mut outcomes = vec![RenewalOutcome::Refused(Loss::Taken); count];
    for row in rows {
        let nth = usize::try_from(row.get::<_, i64>("nth")).unwrap_or_default();
        let Some(outcome) = nth.checked_sub(1).and_then(|nth| outcomes.get_mut(nth)) else {
            continue;
        };
        if row.get("renewed") {
            *outcome = RenewalOutcome::Renewed;
        } else if row.get("passed_over") {
            *outcome = RenewalOutcome::PassedOver;
        } else {
            *outcome = refused(row);
        }
    }
    outcomes
}
