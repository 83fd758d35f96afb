//! Renewals of lease rows: each hold asks for its own, and those that are due together share a statement.
//!
//! A process with a few holds renews each at once. In a process with many holds, a renewal waits for others, for at
//! most two thirds of its time limit. So a few statements renew all holds, and each renewal still gets its answer in
//! time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::Time;
use tenure_core::jobs::RenewalOutcome;
use tokio::sync::oneshot;
use tokio_postgres::types::Type;

use super::hold_name::HoldName;
use super::renewal_queue::LeaseRow;
use super::shared::LeaseShared;
use super::sql::LeaseStatements;
use crate::race::before;
use crate::store::pg::clock::{Reading, micros};
use crate::store::pg::connect::Parameter;
use crate::store::pg::probe::HeldQuestion;
use crate::store::pg::renewer::{RenewalStatement, outcomes};
use crate::{Error, ErrorKind, Result};

/// Number of holds up to which renewals are sent at once.
const FEW: usize = 8;
/// Time for which a renewal that is sent at once still waits for others of the same moment.
const MOMENT: Duration = Duration::from_millis(2);

/// Renews a hold, together with others that are due. Sets `awaited` if another claim waits for the key, else clears it.
pub(super) async fn renew(
    shared: &Arc<LeaseShared>,
    hold: &HoldName,
    awaited: &Arc<AtomicBool>,
    ttl: Duration,
    limit: Duration,
) -> Result<Reading> {
    let now = shared.clock.now();
    let (reply, answer) = oneshot::channel();
    let answer_by = now + limit;
    let patience = if shared.holds() <= FEW { MOMENT.min(limit / 4) } else { limit * 2 / 3 };
    let begin = {
        let row = LeaseRow { hold: hold.clone(), ttl, awaited: Arc::clone(awaited) };
        shared.renewer.queue().add(row, now + patience, answer_by, reply)
    };
    if begin {
        let (renewer, shared) = (Arc::clone(&shared.renewer), Arc::clone(shared));
        tokio::spawn(renewer.run(move || Some(Arc::clone(&shared))));
    } else {
        shared.renewer.wake();
    }
    match before(&shared.clock, answer_by, answer).await {
        Some(answer) => answer.unwrap_or_else(|_| {
            Err(Error::new(ErrorKind::Unknown, "the renewal was cut off with its runtime"))
        }),
        None => Err(Error::new(ErrorKind::Unknown, format!("no answer within {limit:?}"))),
    }
}

#[async_trait]
impl RenewalStatement for LeaseShared {
    type Name = LeaseRow;

    async fn renew(&self, rows: &[LeaseRow], by: Time) -> Result<(Reading, Vec<RenewalOutcome>)> {
        let spaces: Vec<i16> = rows.iter().map(|row| row.hold.space).collect();
        let keys: Vec<&str> = rows.iter().map(|row| row.hold.key.as_str()).collect();
        let numbers: Vec<i64> = rows.iter().map(|row| row.hold.number).collect();
        let secrets: Vec<&[u8]> = rows.iter().map(|row| &row.hold.secret[..]).collect();
        let ttls: Vec<i64> = rows.iter().map(|row| micros(row.ttl)).collect();
        let many = rows.iter().any(|row| row.hold.shared_row);
        let sql: fn(&LeaseStatements) -> &str =
            if many { |sql| &sql.renew_shared } else { |sql| &sql.renew };
        let mut connection = self.connection(by).await?;
        let parameters: [Parameter<'_>; 5] = [
            (&spaces, Type::INT2_ARRAY),
            (&keys, Type::TEXT_ARRAY),
            (&numbers, Type::INT8_ARRAY),
            (&secrets, Type::BYTEA_ARRAY),
            (&ttls, Type::INT8_ARRAY),
        ];
        let (answer, reading) = self.ask_on(&mut connection, sql, &parameters, by).await?;
        for found in &answer {
            let nth = usize::try_from(found.get::<_, i64>("nth")).unwrap_or_default();
            if let Some(row) = nth.checked_sub(1).and_then(|nth| rows.get(nth)) {
                row.awaited.store(found.get("awaited"), Ordering::Relaxed);
            }
        }
        // At another primary of the same timeline, the holders of shared rows may be the same as here.
        let alone: Vec<bool> = rows.iter().map(|row| !row.hold.shared_row).collect();
        let parameters: [Parameter<'_>; 4] = [
            (&spaces, Type::INT2_ARRAY),
            (&keys, Type::TEXT_ARRAY),
            (&secrets, Type::BYTEA_ARRAY),
            (&alone, Type::BOOL_ARRAY),
        ];
        let question = HeldQuestion { sql: &self.sql().held, parameters: &parameters };
        let outcomes = outcomes(rows.len(), &answer);
        let outcomes =
            self.pool.primaries().refuse(&mut connection, question, outcomes, by).await?;
        Ok((reading, outcomes))
    }
}
