//! Claims: the statement that grants one, and its answer.

use std::sync::Arc;
use std::time::Duration;

use tenure_core::Time;
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

use super::hold::LeaseHold;
use super::hold_name::{HoldName, space_number};
use super::inspect;
use super::shared::{LeaseShared, REQUEST_TIMEOUT};
use super::sql::{LeaseStatements, MAX_SHARERS};
use crate::store::pg::clock::{Reading, Window, micros};
use crate::store::pg::connect::{Parameter, PgConnection};
use crate::store::pg::failure;
use crate::store::pg::probe::HeldQuestion;
use crate::store::{Answer, Claim, Contended, Grant, LeaseStart, Mode};
use crate::{Error, ErrorKind, Result};

/// Makes one attempt at a claim.
pub(super) async fn claim(
    shared: &Arc<LeaseShared>,
    claim: &Claim,
    limit: Duration,
) -> Result<Answer> {
    let (rows, reading, window) = send(shared, claim, limit).await?;
    match rows.first() {
        Some(row) if row.get("granted") => {
            Ok(Answer::Granted(granted(shared, claim, row, reading)))
        }
        _ if !window.contains(reading.db) => {
            let message = "the claim arrived too late, or the database's clock was set: \
                           nothing was claimed";
            Err(Error::new(ErrorKind::Unavailable, message))
        }
        _ => contended(claim, &rows).map(Answer::Contended),
    }
}

/// Removes the mark of a claim that waited.
pub(super) async fn withdraw(shared: &LeaseShared, claim: &Claim, limit: Duration) -> Result<()> {
    let by = shared.clock.now() + limit;
    let mut connection = shared.connection(by).await?;
    let sql = shared.sql();
    if !sql.marks {
        return Ok(());
    }
    let (space, key, id) =
        (space_number(claim.mode.space()), claim.key.as_str(), claim.id.to_be_bytes());
    let parameters: [(&(dyn ToSql + Sync), Type); 3] =
        [(&space, Type::INT2), (&key, Type::TEXT), (&&id[..], Type::BYTEA)];
    match connection.query(&sql.withdraw, &parameters, by).await {
        Err(error) if shared.lost_waiters(sql, &error) => Ok(()),
        withdrawn => withdrawn.map(drop),
    }
}

/// Removes marks of waiters that died at least `older_than` ago. Returns their number.
pub(super) async fn clean_marks(shared: &LeaseShared, older_than: Duration) -> Result<u64> {
    let by = shared.clock.now() + REQUEST_TIMEOUT;
    let mut connection = shared.connection(by).await?;
    let sql = shared.sql();
    if !sql.marks {
        return Ok(0);
    }
    match connection.query(&sql.clean, &[(&micros(older_than), Type::INT8)], by).await {
        Err(error) if shared.lost_waiters(sql, &error) => Ok(0),
        cleaned => cleaned.map(|rows| rows.len() as u64),
    }
}

/// Sends the claim. Returns the rows, the reading of the clock, and the interval in which the claim was valid.
async fn send(
    shared: &LeaseShared,
    claim: &Claim,
    limit: Duration,
) -> Result<(Vec<Row>, Reading, Window)> {
    let by = shared.clock.now() + limit;
    let mut connection = shared.connection(by).await.map_err(failure::nothing_done)?;
    let statements = shared.sql();
    let sent = match send_on(&mut connection, shared, statements, claim, by).await {
        Err(error) if shared.lost_waiters(statements, &error) => {
            send_on(&mut connection, shared, shared.sql(), claim, by).await
        }
        sent => sent,
    };
    let (rows, reading, window) = sent?;
    if let Some(row) = rows.first().filter(|row| row.get("granted")) {
        confirm(&mut connection, shared, claim, row.get("number"), by).await?;
    }
    Ok((rows, reading, window))
}

/// Confirms a grant, or withdraws it and returns the reason.
async fn confirm(
    connection: &mut PgConnection,
    shared: &LeaseShared,
    claim: &Claim,
    number: i64,
    by: Time,
) -> Result<()> {
    let (space, key) = (space_number(claim.mode.space()), claim.key.as_str());
    let secret = shared.secret(claim.id);
    let secret = &secret[..];
    let (spaces, keys) = (vec![space], vec![key]);
    let (secrets, alone) = (vec![secret], vec![claim.mode != Mode::Shared]);
    let parameters: [Parameter<'_>; 4] = [
        (&spaces, Type::INT2_ARRAY),
        (&keys, Type::TEXT_ARRAY),
        (&secrets, Type::BYTEA_ARRAY),
        (&alone, Type::BOOL_ARRAY),
    ];
    let question = HeldQuestion { sql: &shared.sql().held, parameters: &parameters };
    let confirmed = shared.pool.primaries().confirm_grant(connection, question, by).await;
    let reason = match confirmed {
        Ok((_, None)) => return Ok(()),
        Ok((_, Some(error))) | Err(error) => error,
    };
    let sql = shared.sql();
    let sql = if claim.mode == Mode::Exclusive { &sql.release } else { &sql.release_shared };
    let parameters: [Parameter<'_>; 4] =
        [(&space, Type::INT2), (&key, Type::TEXT), (&number, Type::INT8), (&secret, Type::BYTEA)];
    match connection.query(sql, &parameters, by).await {
        Ok(_) => Err(reason),
        Err(error) => {
            // The row may be ours until its lease ends.
            tracing::warn!(name: "tenure.withdraw_failed", key, store = %shared, %error);
            let message = "the grant does not count, and its withdrawal was not answered";
            Err(Error::new(ErrorKind::Unknown, message).because(reason))
        }
    }
}

/// Sends the claim on a connection.
async fn send_on(
    connection: &mut PgConnection,
    shared: &LeaseShared,
    sql: &LeaseStatements,
    claim: &Claim,
    by: Time,
) -> Result<(Vec<Row>, Reading, Window)> {
    let now = shared.clock.now();
    let window = shared.db_clock.window(now, by.since(now));
    let (id, secret) = (claim.id.to_be_bytes(), shared.secret(claim.id));
    let (ttl, pid) = (micros(claim.ttl), i64::from(claim.by.pid));
    let (slots, space) = (slots(claim)?, space_number(claim.mode.space()));
    let (id, secret) = (&id[..], &secret[..]);
    let key = claim.key.as_str();
    let mut parameters: Vec<(&(dyn ToSql + Sync), Type)> = vec![
        (&key, Type::TEXT),
        (&id, Type::BYTEA),
        (&secret, Type::BYTEA),
        (&ttl, Type::INT8),
        (&claim.by.id, Type::TEXT),
        (&claim.by.host, Type::TEXT),
        (&pid, Type::INT8),
        (&claim.by.note, Type::TEXT),
        (&window.from, Type::INT8),
        (&window.until, Type::INT8),
        (&window.expected, Type::INT8),
        (&window.steady, Type::INT8),
        (&window.measured, Type::INT8),
    ];
    let marks = sql.marks;
    // A free key that was used before needs only the short statement; any other answer needs the long one.
    let sql = if claim.mode == Mode::Exclusive {
        let (rows, reading) = shared.access().grant(connection, &sql.take, &parameters, by).await?;
        if !rows.is_empty() {
            return Ok((rows, reading, window));
        }
        &sql.claim
    } else {
        parameters.extend([(&slots as _, Type::INT4), (&space as _, Type::INT2)]);
        &sql.claim_shared
    };
    if marks {
        parameters.push((&claim.queue, Type::BOOL));
    }
    let (rows, reading) = shared.access().grant(connection, sql, &parameters, by).await?;
    Ok((rows, reading, window))
}

fn granted(shared: &Arc<LeaseShared>, claim: &Claim, row: &Row, reading: Reading) -> Grant {
    let (epoch, number) = (row.get("epoch"), row.get("number"));
    let name = HoldName {
        space: space_number(claim.mode.space()),
        key: claim.key.clone(),
        shared_row: claim.mode != Mode::Exclusive,
        number,
        secret: shared.secret(claim.id),
    };
    Grant {
        token: inspect::token(epoch, number),
        lease_start: LeaseStart::FromRequest,
        handoff_requested: false,
        // The number of an exclusive hold is the row's count of grants. A shared hold has a number of its own.
        grants: u64::try_from(number).ok().filter(|_| claim.mode == Mode::Exclusive),
        hold: Box::new(LeaseHold::new(shared, name, Some(reading))),
    }
}

/// Number of slots that a claim requests; `None` for a lock.
fn slots(claim: &Claim) -> Result<Option<i32>> {
    let Mode::Slot { limit } = claim.mode else { return Ok(None) };
    let max = MAX_SHARERS;
    match i32::try_from(limit) {
        Ok(slots) if slots <= max => Ok(Some(slots)),
        _ => {
            let message = format!("{limit} slots are too many for one row: the maximum is {max}");
            Err(Error::new(ErrorKind::Invalid, message))
        }
    }
}

/// Current holder and version of a contended key; an error if the semaphore has another number of slots.
fn contended(claim: &Claim, rows: &[Row]) -> Result<Contended> {
    let mut holders = Vec::new();
    let mut holder = None;
    for row in rows {
        let (Some(epoch), Some(number)) = (row.get("epoch"), row.get("number")) else { continue };
        holders.push((epoch, number));
        holder.get_or_insert_with(|| inspect::identity(row));
        if let (Mode::Slot { limit }, Some(slots)) =
            (claim.mode, row.get::<_, Option<i32>>("slots"))
            && i32::try_from(limit) != Ok(slots)
        {
            let message = format!("the semaphore is in use with {slots} slots, not {limit}");
            return Err(Error::new(ErrorKind::Invalid, message));
        }
    }
    // No holder is shown: another claim was faster and its row is not visible to this statement, or the lease has ended
    // by a clock that is not trusted yet. Retry soon.
    let version =
        if holders.is_empty() { inspect::UNSETTLED } else { inspect::version_of(holders) };
    Ok(Contended { holder, version, retry_after: None, note: None })
}
