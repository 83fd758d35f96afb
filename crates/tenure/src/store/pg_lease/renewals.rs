//! Batched renewals: many holds in one statement.
//!
//! A process with a few holds renews each at once. In a process with many holds, a renewal waits for others, for at
//! most two thirds of its time limit. So a few statements renew all holds, and each renewal still gets its answer in
//! time.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tenure_core::Time;
use tokio::sync::{Notify, oneshot};
use tokio_postgres::types::Type;

use super::hold::HoldName;
use super::shared::LeaseShared;
use crate::store::pg::clock::{Reading, micros};
use crate::{Error, ErrorKind, Result};

/// Number of holds up to which renewals are sent at once.
const FEW: usize = 8;
/// Time for which a renewal that is sent at once still waits for others of the same moment.
const MOMENT: Duration = Duration::from_millis(2);
/// Maximum number of holds per statement.
const MOST: usize = 5_000;

/// Renewals that wait to be sent.
#[derive(Debug, Default)]
pub(super) struct Renewals {
    queue: Mutex<RenewalQueue>,
    more: Notify,
}

#[derive(Debug, Default)]
struct RenewalQueue {
    asked: Vec<Asked>,
    collecting: bool,
}

#[derive(Debug)]
struct Asked {
    hold: HoldName,
    ttl: Duration,
    send_by: Time,
    answer_by: Time,
    reply: oneshot::Sender<Result<Reading>>,
}

impl Renewals {
    fn queue(&self) -> MutexGuard<'_, RenewalQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Renews a hold, together with others that are due.
pub(super) async fn renew(
    shared: &Arc<LeaseShared>,
    hold: &HoldName,
    ttl: Duration,
    limit: Duration,
) -> Result<Reading> {
    let now = shared.clock.now();
    let patience = if shared.holds() <= FEW { MOMENT.min(limit / 4) } else { limit * 2 / 3 };
    let (reply, answer) = oneshot::channel();
    let (send_by, answer_by) = (now + patience, now + limit);
    let asked = Asked { hold: hold.clone(), ttl, send_by, answer_by, reply };
    let begin = {
        let mut queue = shared.renewals.queue();
        queue.asked.push(asked);
        !std::mem::replace(&mut queue.collecting, true)
    };
    if begin {
        tokio::spawn(collect(Arc::clone(shared)));
    } else {
        shared.renewals.more.notify_one();
    }
    tokio::select! {
        biased;
        answer = answer => answer.unwrap_or_else(|_| {
            Err(Error::new(ErrorKind::Unknown, "the renewal was cut off with its runtime"))
        }),
        () = shared.clock.sleep_until(answer_by) => {
            Err(Error::new(ErrorKind::Unknown, format!("no answer within {limit:?}")))
        }
    }
}

/// Collects renewals until the first one must be sent, sends them in batches, and ends when none is left.
async fn collect(shared: Arc<LeaseShared>) {
    let renewals = &shared.renewals;
    loop {
        let due = {
            let mut queue = renewals.queue();
            // A renewal whose caller is gone is not sent.
            queue.asked.retain(|asked| !asked.reply.is_closed());
            let Some(due) = queue.asked.iter().map(|asked| asked.send_by).min() else {
                queue.collecting = false;
                return;
            };
            let everybody = queue.asked.len() >= shared.holds().min(MOST);
            (!everybody && shared.clock.now() < due).then_some(due)
        };
        if let Some(due) = due {
            tokio::select! {
                () = renewals.more.notified() => {}
                () = shared.clock.sleep_until(due) => {}
            }
            continue;
        }
        let batch = {
            let mut queue = renewals.queue();
            let some = queue.asked.len().min(MOST);
            queue.asked.drain(..some).collect::<Vec<_>>()
        };
        let (many, one): (Vec<_>, Vec<_>) =
            batch.into_iter().partition(|asked| asked.hold.shared_row);
        for part in [one, many].into_iter().filter(|part| !part.is_empty()) {
            // In a task of its own: a statement that blocks must not delay the next batch.
            tokio::spawn(send(Arc::clone(&shared), part));
        }
    }
}

async fn send(shared: Arc<LeaseShared>, batch: Vec<Asked>) {
    let answer_by = batch.iter().map(|asked| asked.answer_by).max().unwrap_or(Time::ZERO);
    match ask(&shared, &batch, answer_by).await {
        Ok((reading, outcomes)) => {
            for (asked, outcome) in batch.into_iter().zip(outcomes) {
                let answer = outcome.map(|()| reading);
                let _ = asked.reply.send(answer);
            }
        }
        Err(error) => {
            let (kind, cause) = (error.kind(), Arc::new(error));
            for asked in batch {
                let error = Error::new(kind, "the renewal failed").because(Arc::clone(&cause));
                let _ = asked.reply.send(Err(error));
            }
        }
    }
}

async fn ask(
    shared: &LeaseShared,
    batch: &[Asked],
    by: Time,
) -> Result<(Reading, Vec<Result<()>>)> {
    let spaces: Vec<i16> = batch.iter().map(|asked| asked.hold.space).collect();
    let keys: Vec<&str> = batch.iter().map(|asked| asked.hold.key.as_str()).collect();
    let numbers: Vec<i64> = batch.iter().map(|asked| asked.hold.number).collect();
    let secrets: Vec<&[u8]> = batch.iter().map(|asked| &asked.hold.secret[..]).collect();
    let ttls: Vec<i64> = batch.iter().map(|asked| micros(asked.ttl)).collect();
    let many = batch.iter().any(|asked| asked.hold.shared_row);
    let sql = if many { &shared.sql.renew_shared } else { &shared.sql.renew };
    let (rows, reading) = shared
        .ask(
            sql,
            &[
                (&spaces, Type::INT2_ARRAY),
                (&keys, Type::TEXT_ARRAY),
                (&numbers, Type::INT8_ARRAY),
                (&secrets, Type::BYTEA_ARRAY),
                (&ttls, Type::INT8_ARRAY),
            ],
            by,
        )
        .await?;
    let not_held = || Err(Error::new(ErrorKind::NotHeld, "the hold has ended, or another has it"));
    let mut outcomes: Vec<Result<()>> = batch.iter().map(|_| not_held()).collect();
    for row in rows {
        let nth = usize::try_from(row.get::<_, i64>(1)).unwrap_or_default();
        let Some(outcome) = nth.checked_sub(1).and_then(|nth| outcomes.get_mut(nth)) else {
            continue;
        };
        if row.get(2) {
            *outcome = Ok(());
        } else if row.get(3) {
            let message = "another transaction has locked the row";
            *outcome = Err(Error::new(ErrorKind::Unavailable, message));
        }
    }
    Ok((reading, outcomes))
}
