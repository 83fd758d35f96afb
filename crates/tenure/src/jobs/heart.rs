//! Renewal of the leases of all jobs of a queue: one task per queue.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::Time;
use tenure_core::jobs::{Heart, RenewalBatch, RenewalEvent, RenewalOutcome};
use tenure_core::keeper::Loss;
use tenure_core::lease::Lease;
use tokio::sync::{Notify, watch};

use crate::store::pg::clock::Reading;
use crate::{Clock, Result};

/// Identity of a held row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RowName {
    pub(super) id: String,
    /// Second part of a name of two parts; empty for jobs.
    pub(super) part: String,
    /// Number of the fencing token.
    pub(super) number: i64,
}

/// Operations of a table on the rows that it holds.
#[async_trait]
pub(super) trait Rows: Send + Sync + 'static {
    /// Renews many rows. Returns the database's clock and one outcome per row, in their order.
    async fn renew(&self, names: &[RowName], by: Time) -> Result<(Reading, Vec<RenewalOutcome>)>;

    /// Releases a row whose guard was dropped.
    async fn drop_one(&self, name: RowName);
}

/// State of a hold, as its guard sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look {
    pub(super) deadline: Time,
    pub(super) lost: Option<Loss>,
}

/// All holds of a queue.
pub(super) struct Holds {
    state: Mutex<HoldsState>,
    wake: Notify,
    clock: Clock,
    ttl: Duration,
}

struct HoldsState {
    heart: Heart,
    held: HashMap<u64, HeldRow>,
    next: u64,
    /// Rows whose guard was dropped without an outcome: the task releases them.
    dropped: Vec<Dropped>,
    /// Time until which the task sleeps.
    armed: Time,
}

/// A row to release, and the table that releases it.
type Dropped = (RowName, Arc<dyn Rows>);

/// Renewals that are due, by ticket number and by row.
type DueRenewals = (RenewalBatch, Vec<RowName>);

#[derive(Debug)]
struct HeldRow {
    name: RowName,
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
    pub(super) fn new(lease: Lease, clock: Clock) -> Arc<Self> {
        let state = HoldsState {
            heart: Heart::new(lease),
            held: HashMap::new(),
            next: 0,
            dropped: Vec::new(),
            armed: Time::MAX,
        };
        Arc::new(Self { state: Mutex::new(state), wake: Notify::new(), clock, ttl: lease.ttl() })
    }

    /// Starts to renew a hold that was granted at `reading`; `None` if the answer arrived after the deadline of the
    /// lease.
    pub(super) fn admit(
        self: &Arc<Self>,
        name: RowName,
        reading: Reading,
        rows: Arc<dyn Rows>,
    ) -> Option<Ticket> {
        let mut state = self.lock();
        state.next += 1;
        let number = state.next;
        // The clock is read now, not taken from the reading: this process may have been suspended since the answer
        // arrived.
        let deadline = state.heart.admit(number, reading.sent, self.clock.now())?;
        let (look, seen) = watch::channel(Look { deadline, lost: None });
        state.held.insert(number, HeldRow { name, look, reading });
        // The task is woken only if it sleeps past this deadline. Otherwise it wakes in time by itself, and a wake-up
        // per claim is saved.
        let due = state.armed == Time::MAX || deadline < state.armed;
        drop(state);
        if due {
            self.wake.notify_one();
        }
        Some(Ticket { holds: Arc::clone(self), rows, number, look: seen })
    }

    /// Ids of all held rows.
    pub(super) fn ids(&self) -> Vec<String> {
        self.lock().held.values().map(|held| held.name.id.clone()).collect()
    }

    /// Wakes the task, so that it notices that its table is gone and ends.
    pub(super) fn leave(&self) {
        self.wake.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, HoldsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Dropped rows to release, renewals that are due, and the time until which to sleep.
    fn next(&self) -> (Vec<Dropped>, Option<DueRenewals>, Time) {
        let mut state = self.lock();
        let now = self.clock.now();
        state.heart.handle_timeout(now);
        let request = state.heart.poll_request(now).map(|request| {
            let held = |ticket: &u64| state.held.get(ticket).map(|held| held.name.clone());
            let names = request.tickets.iter().filter_map(held).collect();
            (request, names)
        });
        state.tell();
        state.armed = state.heart.poll_timeout().unwrap_or(Time::MAX);
        (std::mem::take(&mut state.dropped), request, state.armed)
    }

    fn answered(&self, request: &RenewalBatch, answer: Result<(Reading, Vec<RenewalOutcome>)>) {
        let mut state = self.lock();
        let now = self.clock.now();
        match answer {
            Ok((reading, verdicts)) => {
                let mut judged = Vec::with_capacity(verdicts.len());
                for (ticket, verdict) in request.tickets.iter().zip(verdicts) {
                    let verdict = match state.held.get_mut(ticket) {
                        Some(held) if verdict == RenewalOutcome::Renewed => {
                            held.judge(reading, self.ttl)
                        }
                        _ => verdict,
                    };
                    judged.push((*ticket, verdict));
                }
                state.heart.answered(judged, now);
            }
            Err(_) => state.heart.failed(now),
        }
        state.tell();
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

impl HoldsState {
    /// Publishes new deadlines and losses to the guards.
    fn tell(&mut self) {
        while let Some(news) = self.heart.poll_news() {
            let (ticket, change) = match news {
                RenewalEvent::Extended { ticket, deadline } => (ticket, Ok(deadline)),
                RenewalEvent::Lost { ticket, loss } => (ticket, Err(loss)),
            };
            let Some(held) = self.held.get(&ticket) else { continue };
            held.look.send_modify(|look| match change {
                Ok(deadline) => look.deadline = deadline,
                Err(loss) => look.lost = Some(loss),
            });
            if let Err(reason) = change {
                let RowName { id, part, number } = &held.name;
                tracing::warn!(name: "tenure.job_lost", id, part, token = number, %reason);
            }
        }
    }
}

impl Ticket {
    /// Stops renewals of a row whose outcome is recorded; dropping the ticket then releases nothing.
    pub(super) fn dealt_with(&self) {
        let mut state = self.holds.lock();
        state.heart.dismiss(self.number);
        state.held.remove(&self.number);
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut state = self.holds.lock();
        state.heart.dismiss(self.number);
        if let Some(held) = state.held.remove(&self.number) {
            state.dropped.push((held.name, Arc::clone(&self.rows)));
            drop(state);
            self.holds.wake.notify_one();
        }
    }
}

/// Renews the holds until `rows` is dropped. Every guard keeps its table alive, so no hold is left behind.
pub(super) async fn keep(holds: Arc<Holds>, rows: Weak<dyn Rows>) {
    let clock = holds.clock.clone();
    loop {
        let (dropped, request, until) = holds.next();
        for (name, rows) in dropped {
            // In a task of its own: the release may block on a transaction that has locked the row.
            tokio::spawn(async move { rows.drop_one(name).await });
        }
        let Some(rows) = rows.upgrade() else { return };
        if let Some((request, names)) = request {
            let by = clock.now() + request.limit;
            let (holds, rows) = (Arc::clone(&holds), Arc::clone(&rows));
            // In a task of its own: this loop must watch the deadlines while the request is in flight.
            tokio::spawn(async move {
                let answer = rows.renew(&names, by).await;
                if let Err(error) = &answer {
                    tracing::warn!(name: "tenure.renew_failed", %error, holds = names.len());
                }
                holds.answered(&request, answer);
                holds.wake.notify_one();
            });
        }
        drop(rows);
        tokio::select! {
            () = holds.wake.notified() => {}
            () = clock.sleep_until(until) => {}
        }
    }
}

/// Resolves when a hold is lost: at its deadline, or when the database refuses a renewal.
pub(super) async fn lost(clock: &Clock, look: &watch::Receiver<Look>) -> Loss {
    let mut look = look.clone();
    loop {
        let Look { deadline, lost } = *look.borrow_and_update();
        if let Some(reason) = lost {
            return reason;
        }
        // A timer of its own: the renewal task may run on a runtime that is no longer driven, and would report nothing.
        if until(clock, &mut look, deadline).await {
            return look.borrow().lost.unwrap_or(Loss::Expired);
        }
    }
}

/// Waits for `end` or a change. True if `end` came first, or the hold is no longer renewed.
pub(super) async fn until(clock: &Clock, look: &mut watch::Receiver<Look>, end: Time) -> bool {
    tokio::select! {
        biased;
        // The sender is gone: the hold has ended, or its outcome is recorded.
        changed = look.changed() => changed.is_err(),
        () = clock.sleep_until(end) => true,
    }
}

#[cfg(test)]
mod tests {
    use tenure_core::lease::LeaseTerms;

    use super::*;

    /// A table that gets no renewal.
    struct Silent;

    #[async_trait]
    impl Rows for Silent {
        async fn renew(&self, _: &[RowName], _: Time) -> Result<(Reading, Vec<RenewalOutcome>)> {
            unreachable!("nothing is due")
        }

        async fn drop_one(&self, _: RowName) {}
    }

    #[test]
    fn a_grant_that_was_read_after_its_deadline_is_no_hold() {
        let (clock, hand) = Clock::manual();
        let lease = Lease::new(LeaseTerms::new(Duration::from_secs(12))).unwrap();
        let holds = Holds::new(lease, clock.clone());
        let name = RowName { id: "1".to_owned(), part: String::new(), number: 1 };
        let reading = Reading { sent: clock.now(), replied: clock.now(), db: 0 };
        let admit = || holds.admit(name.clone(), reading, Arc::new(Silent));
        hand.advance(Duration::from_secs(9));
        assert!(admit().is_some());
        hand.advance(Duration::from_secs(1));
        assert!(admit().is_none(), "ten of twelve seconds, the margin is two");
        assert_eq!(holds.ids(), Vec::<String>::new());
    }
}
