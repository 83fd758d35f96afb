//! The task that keeps the leases of all jobs of a queue: one for all of them.

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

/// The name of a row that is held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RowName {
    pub(super) id: String,
    /// The second half of a name that has two.
    pub(super) part: String,
    /// The token's number.
    pub(super) number: i64,
}

/// What becomes of a hold at the store.
#[async_trait]
pub(super) trait Rows: Send + Sync + 'static {
    /// Renews many; the answer says for each whether it was, in their order, and when that was.
    async fn renew(&self, names: &[RowName], by: Time) -> Result<(Reading, Vec<RenewalOutcome>)>;

    /// Gives one back that its guard was dropped of.
    async fn drop_one(&self, name: RowName);
}

/// What is known of a hold.
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
    /// Dropped without a word: to be given back, by those who can.
    dropped: Vec<Dropped>,
    /// Until when the task sleeps.
    armed: Time,
}

/// What is to be given back, and by whom it can be.
type Dropped = (RowName, Arc<dyn Rows>);

/// What is to be renewed, by number and by name.
type DueRenewals = (RenewalBatch, Vec<RowName>);

#[derive(Debug)]
struct HeldRow {
    name: RowName,
    look: watch::Sender<Look>,
    /// The database's clock when it was last renewed.
    reading: Reading,
}

/// A hold that is kept until this is dropped.
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

    /// Begins to keep a hold that `reading` granted; `None` where the answer came after the hold's own deadline.
    pub(super) fn admit(
        self: &Arc<Self>,
        name: RowName,
        reading: Reading,
        rows: Arc<dyn Rows>,
    ) -> Option<Ticket> {
        let mut state = self.lock();
        state.next += 1;
        let number = state.next;
        // The clock is read now, not taken from the reading: this process may have been stopped since the answer came.
        let deadline = state.heart.admit(number, reading.sent, self.clock.now())?;
        let (look, seen) = watch::channel(Look { deadline, lost: None });
        state.held.insert(number, HeldRow { name, look, reading });
        // The first timer of a hold is that of its renewal; the task looks only where it would come too late for that.
        let due = state.armed == Time::MAX || deadline < state.armed;
        drop(state);
        if due {
            self.wake.notify_one();
        }
        Some(Ticket { holds: Arc::clone(self), rows, number, look: seen })
    }

    /// The ids of all that are kept.
    pub(super) fn ids(&self) -> Vec<String> {
        self.lock().held.values().map(|held| held.name.id.clone()).collect()
    }

    /// Wakes the task for nobody to be there any more.
    pub(super) fn leave(&self) {
        self.wake.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, HoldsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is due, and until when to sleep.
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
    /// A lease that was counted on a clock that jumped meanwhile cannot be relied on.
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
    /// Passes the news on.
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
    /// Leaves the row alone: it was dealt with.
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

/// Keeps the holds until nobody can add to them any more. Whoever has a guard has `rows`.
pub(super) async fn keep(holds: Arc<Holds>, rows: Weak<dyn Rows>) {
    let clock = holds.clock.clone();
    loop {
        let (dropped, request, until) = holds.next();
        for (name, rows) in dropped {
            // On its own: it may have to wait for a transaction that has the row.
            tokio::spawn(async move { rows.drop_one(name).await });
        }
        let Some(rows) = rows.upgrade() else { return };
        if let Some((request, names)) = request {
            let by = clock.now() + request.limit;
            let (holds, rows) = (Arc::clone(&holds), Arc::clone(&rows));
            // On its own: the deadlines are watched meanwhile.
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

/// Resolves when a hold is lost: at its deadline, or when the database says so.
pub(super) async fn lost(clock: &Clock, look: &watch::Receiver<Look>) -> Loss {
    let mut look = look.clone();
    loop {
        let Look { deadline, lost } = *look.borrow_and_update();
        if let Some(reason) = lost {
            return reason;
        }
        // A timer of our own: the news may be behind a runtime that nobody drives.
        if until(clock, &mut look, deadline).await {
            return look.borrow().lost.unwrap_or(Loss::Expired);
        }
    }
}

/// Whether that instant came before there was news.
pub(super) async fn until(clock: &Clock, look: &mut watch::Receiver<Look>, end: Time) -> bool {
    tokio::select! {
        biased;
        // Nobody keeps it any more: it is over, or dealt with.
        changed = look.changed() => changed.is_err(),
        () = clock.sleep_until(end) => true,
    }
}

#[cfg(test)]
mod tests {
    use tenure_core::lease::LeaseTerms;

    use super::*;

    /// A store that is never asked.
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
