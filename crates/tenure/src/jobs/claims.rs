//! Claims: the statements that claim jobs, for many callers at once.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tenure_core::jobs::{JobOrder, SetAside};
use tenure_core::{FencingToken, Time};
use tokio_postgres::Row;
use tokio_postgres::types::{FromSql, ToSql, Type};

use super::batcher::repeat_error;
use super::heart::{RowName, Rows};
use super::job::{Job, JobData};
use super::options::REQUEST_TIMEOUT;
use super::pending_progress::PendingProgress;
use super::set_aside::{JobSetAside, is_fault_of_row};
use super::shared::{ClaimedJob, MAX_BATCH_JOBS, QueueShared};
use crate::mutex::Mutex;
use crate::store::pg::clock::{Reading, micros};
use crate::store::pg::failure;
use crate::store::pg::pool::PooledConnection;
use crate::store::pg::probe::HeldQuestion;
use crate::{Error, ErrorKind, Result};

/// Time during which a claim may resume at the position where the last claim ended, instead of scanning from the top.
///
/// A job of a higher priority that is enqueued meanwhile is overtaken for at most this time.
const RESUME_WINDOW: Duration = Duration::from_millis(50);

/// Maximum number of rows that are claimed one by one after a statement failed because of a row.
const MAX_ROWS_ONE_BY_ONE: i64 = 100;

/// Time for which jobs that are held at an older primary are left out of claims.
const ELSEWHERE_WINDOW: Duration = Duration::from_secs(1);
/// Maximum number of such jobs. Beyond it, claims find nothing until some of those jobs are free.
const MAX_ELSEWHERE: usize = 1_000;

impl QueueShared {
    /// Serves claim requests batch by batch until none waits. Jobs whose caller is gone are dropped, which releases
    /// them.
    pub(super) async fn serve_claims(self: Arc<Self>) {
        while let Some(mut batch) = self.claim_batches.next_batch() {
            batch.retain(|request| !request.reply.is_closed());
            let limit =
                batch.iter().map(|request| request.limit).sum::<usize>().min(MAX_BATCH_JOBS);
            if limit > 0 {
                match self.claim(limit).await {
                    Ok(jobs) => {
                        let mut jobs = jobs.into_iter();
                        for request in batch {
                            let share = jobs.by_ref().take(request.limit).collect();
                            drop(request.reply.send(Ok(share)));
                        }
                    }
                    Err(error) => {
                        let errors = repeat_error(error, batch.len());
                        for (request, error) in batch.into_iter().zip(errors) {
                            drop(request.reply.send(Err(error)));
                        }
                    }
                }
            }
        }
    }

    async fn claim(self: &Arc<Self>, limit: usize) -> Result<Vec<ClaimedJob>> {
        if self.unanswered_claim.load(Ordering::Relaxed) {
            self.release_unanswered().await?;
        }
        self.refresh_controls().await?;
        if self.sweep_is_due() {
            self.sweep().await?;
        }
        if self.controls.is_paused() {
            return Ok(Vec::new());
        }
        let claims = self.claims.read().await;
        let claimed = match self.claim_rows(limit).await {
            Err(error) if is_fault_of_row(&error) => self.claim_one_by_one(limit, error).await,
            answered => answered,
        };
        drop(claims);
        let is_unknown = matches!(&claimed, Err(error) if error.kind() == ErrorKind::Unknown);
        if self.unanswered_claim.load(Ordering::Relaxed)
            && !is_unknown
            && let Err(error) = self.release_unanswered().await
        {
            // The next claim does it.
            tracing::debug!(name: "tenure.release_failed", store = %self.db, %error);
        }
        claimed
    }

    async fn claim_rows(self: &Arc<Self>, limit: usize) -> Result<Vec<ClaimedJob>> {
        let mut claimed = self.claim_resuming(limit).await?;
        while claimed.len() < limit {
            let aside = self.left_out();
            let from = if aside.is_empty() { ClaimStart::Top } else { ClaimStart::Except(&aside) };
            match self.claim_from(limit - claimed.len(), from).await {
                Ok(more) => claimed.extend(more),
                // The jobs that were claimed matter more than the error of a later statement.
                Err(_) if !claimed.is_empty() => break,
                Err(error) => return Err(error),
            }
            // A row that is left out since took the place of another in the answer.
            if self.left_out().len() <= aside.len() {
                break;
            }
        }
        Ok(claimed)
    }

    /// Ids of the rows that claims leave out at present.
    fn left_out(&self) -> Vec<String> {
        let now = self.db.clock.now();
        let mut ids = self.set_aside.ids(now);
        let state = self.state();
        let elsewhere = state.elsewhere.as_ref().filter(|(_, until)| now < *until);
        ids.extend(elsewhere.iter().flat_map(|(ids, _)| ids).cloned());
        ids
    }

    /// Leaves out rows that are held at an older primary, for a while: the jobs behind them must not wait for them.
    fn leave_out(&self, ids: Vec<String>) {
        let now = self.db.clock.now();
        let mut state = self.state();
        let known = state.elsewhere.take().filter(|(_, until)| now < *until);
        let (mut elsewhere, until) = known.unwrap_or_else(|| (Vec::new(), now + ELSEWHERE_WINDOW));
        elsewhere.extend(ids);
        elsewhere.truncate(MAX_ELSEWHERE);
        state.elsewhere = Some((elsewhere, until));
    }

    /// Claims row by row after a statement failed because of a row, and sets aside the rows whose claims fail.
    async fn claim_one_by_one(
        self: &Arc<Self>,
        limit: usize,
        error: Error,
    ) -> Result<Vec<ClaimedJob>> {
        let (max_rows, aside) = (MAX_ROWS_ONE_BY_ONE, self.set_aside.ids(self.db.clock.now()));
        let parameters: [(&(dyn ToSql + Sync), Type); 2] =
            [(&max_rows, Type::INT8), (&aside, Type::TEXT_ARRAY)];
        let (rows, _) = self.db.ask(&self.sql.candidates, &parameters, self.db.by()).await?;
        let (mut claimed, mut failed) = (Vec::new(), Vec::new());
        for id in rows.iter().filter_map(|row| row.try_get::<_, String>("id").ok()) {
            match self.claim_from(1, ClaimStart::One(&id)).await {
                Ok(more) => claimed.extend(more),
                Err(error) if is_fault_of_row(&error) => failed.push((id, error)),
                // The jobs that were claimed matter more than the error of a later statement.
                Err(_) if !claimed.is_empty() => break,
                Err(error) => return Err(error),
            }
            if SetAside::is_fault_of_table(claimed.len(), failed.len()) {
                return Err(error);
            }
            if claimed.len() >= limit {
                break;
            }
        }
        for (id, error) in failed {
            let why = failure::server_message(&error).unwrap_or_else(|| error.to_string());
            self.set_row_aside(id, format!("its claim fails: {why}"));
        }
        Ok(claimed)
    }

    fn set_row_aside(&self, id: String, reason: String) {
        let job = JobSetAside { queue: self.db.table.shown(), id, reason };
        self.set_aside.add(&job, self.db.clock.now());
    }

    /// Claims from the position where the last claim ended; nothing if that was longer ago than [`RESUME_WINDOW`].
    async fn claim_resuming(self: &Arc<Self>, limit: usize) -> Result<Vec<ClaimedJob>> {
        let resume_from = self.state().resume_from.clone();
        if !self.left_out().is_empty() {
            return Ok(Vec::new());
        }
        match resume_from.filter(|(_, until)| self.db.clock.now() < *until) {
            Some((place, until)) => self.claim_from(limit, ClaimStart::At(&place, until)).await,
            None => Ok(Vec::new()),
        }
    }

    async fn claim_from(
        self: &Arc<Self>,
        limit: usize,
        from: ClaimStart<'_>,
    ) -> Result<Vec<ClaimedJob>> {
        let (ttl, max_rows) = (micros(self.db.lease.ttl()), i64::try_from(limit).unwrap_or(1));
        let mut parameters: Vec<(&(dyn ToSql + Sync), Type)> =
            vec![(&self.db.worker, Type::TEXT), (&ttl, Type::INT8), (&max_rows, Type::INT8)];
        let sql = match &from {
            ClaimStart::Top => &self.sql.claim,
            ClaimStart::Except(ids) => {
                parameters.push((ids, Type::TEXT_ARRAY));
                &self.sql.claim_except
            }
            ClaimStart::One(id) => {
                parameters.push((id, Type::TEXT));
                &self.sql.claim_one
            }
            ClaimStart::At(place, _) => {
                parameters.push((&place.priority, Type::INT8));
                parameters.push((&place.created_at, Type::INT8));
                parameters.push((&place.id, Type::TEXT));
                &self.sql.claim_on
            }
        };
        let by = self.db.clock.now() + self.db.lease.request_limit().min(REQUEST_TIMEOUT);
        let answer = self.db.grant(sql, &parameters, by).await;
        let (mut connection, rows, reading) = answer.inspect_err(|error| {
            if error.kind() == ErrorKind::Unknown {
                self.unanswered_claim.store(true, Ordering::Relaxed);
            }
        })?;
        let elsewhere = match self.held_elsewhere(&mut connection, &rows, by).await {
            Ok(elsewhere) => elsewhere,
            Err(error) => {
                self.withdraw(&mut connection, rows.iter()).await;
                return Err(error);
            }
        };
        let is_elsewhere = |row: &&Row| row.try_get("id").is_ok_and(|id| elsewhere.contains(&id));
        self.withdraw(&mut connection, rows.iter().filter(is_elsewhere)).await;
        drop(connection);
        let mut read = self.read_rows(&rows);
        read.sort_by(|a, b| a.order.cmp(&b.order));
        let readable = read.len();
        let last = read.last().filter(|row| row.can_resume && rows.len() == limit);
        let last = last.filter(|_| elsewhere.is_empty());
        self.state().resume_from = last.map(|last| {
            let until = match from {
                ClaimStart::At(_, until) => until,
                _ => self.db.clock.now() + RESUME_WINDOW,
            };
            (last.order.clone(), until)
        });
        let ours = read.into_iter().filter(|row| !elsewhere.contains(&row.order.id));
        let jobs: Vec<ClaimedJob> = ours.filter_map(|row| self.admit(row, reading)).collect();
        if jobs.len() + elsewhere.len() < rows.len() {
            // The answer arrived after the deadline of these leases, or they are set aside: no worker may start on them.
            // The next claim releases them, and their attempts do not count, as after a claim without an answer.
            self.unanswered_claim.store(true, Ordering::Relaxed);
            if jobs.is_empty() && elsewhere.is_empty() && readable > 0 {
                let message = "the answer to the claim arrived after the deadline of its lease";
                return Err(Error::new(ErrorKind::Unknown, message));
            }
        }
        if !elsewhere.is_empty() {
            self.leave_out(elsewhere);
        }
        Ok(jobs)
    }

    /// Withdraws claims that do not count, at the server that granted them.
    async fn withdraw(
        &self,
        connection: &mut PooledConnection<'_>,
        rows: impl Iterator<Item = &Row>,
    ) {
        let name = |row: &Row| -> Option<(String, i64)> {
            Some((row.try_get("id").ok()?, row.try_get("lease_token").ok()?))
        };
        let (ids, numbers): (Vec<String>, Vec<i64>) = rows.filter_map(name).unzip();
        if ids.is_empty() {
            return;
        }
        let parameters: [(&(dyn ToSql + Sync), Type); 3] =
            [(&ids, Type::TEXT_ARRAY), (&numbers, Type::INT8_ARRAY), (&self.db.worker, Type::TEXT)];
        if let Err(error) = connection.query(&self.sql.clean_up, &parameters, self.db.by()).await {
            // The next claim tries again.
            tracing::warn!(name: "tenure.withdraw_failed", store = %self.db, %error);
            self.unanswered_claim.store(true, Ordering::Relaxed);
        }
    }

    /// Ids of claimed rows that are held by a claim at an older primary. An error means that no claimed row counts.
    async fn held_elsewhere(
        &self,
        connection: &mut PooledConnection<'_>,
        rows: &[Row],
        by: Time,
    ) -> Result<Vec<String>> {
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        let ids: Vec<&str> = rows.iter().filter_map(|row| row.try_get("id").ok()).collect();
        let parameters: [(&(dyn ToSql + Sync), Type); 2] =
            [(&ids, Type::TEXT_ARRAY), (&self.db.worker, Type::TEXT)];
        let question = HeldQuestion { sql: &self.sql.held, parameters: &parameters };
        let (held, _) = self.db.confirm(connection, question, by).await?;
        let id = |nth: usize| nth.checked_sub(1).and_then(|nth| ids.get(nth).copied());
        let mut elsewhere: Vec<String> =
            held.into_iter().filter_map(id).map(str::to_owned).collect();
        if connection.listed().is_some() {
            // Rows of this worker at the other primary are not in the answer. If it still runs one of these jobs, a
            // second run must not begin: both claims may even have the same token.
            let own = ids.iter().filter(|id| self.holds.holds(id, ""));
            elsewhere.extend(own.map(|id| (*id).to_owned()));
        }
        Ok(elsewhere)
    }

    /// Reads claimed rows, and sets aside those that cannot be read.
    fn read_rows(&self, rows: &[Row]) -> Vec<ClaimedRow> {
        let mut read = Vec::with_capacity(rows.len());
        for row in rows {
            match ClaimedRow::read(row) {
                Ok(row) => read.push(row),
                Err(reason) => {
                    // Without its id, a row cannot be left out. It stays claimed until its lease ends, and is failed when
                    // its attempts are used up.
                    let id = row.try_get("id").unwrap_or_else(|_| "(unreadable)".to_owned());
                    self.set_row_aside(id, reason);
                }
            }
        }
        read
    }

    /// Starts to renew a claimed row; `None` if the deadline of its lease has passed already.
    fn admit(self: &Arc<Self>, row: ClaimedRow, reading: Reading) -> Option<ClaimedJob> {
        let ClaimedRow { order: JobOrder { id, .. }, number, .. } = row;
        let name = RowName { id: id.clone(), part: String::new(), number, progress: None };
        let rows: Arc<dyn Rows> = Arc::<Self>::clone(self);
        let progress = Arc::<PendingProgress>::default();
        let ticket = self.holds.admit(name, Arc::clone(&progress), reading, rows)?;
        let data = JobData {
            id,
            payload: row.payload,
            meta: row.meta,
            attempt: row.attempt,
            max_attempts: row.max_attempts,
            number,
            token: FencingToken::new(row.epoch, number.unsigned_abs()),
            clock: self.db.clock.clone(),
            stop_grace: self.db.lease.stop_grace(),
            look: ticket.look.clone(),
            progress,
            result: Mutex::new(None),
            optional: self.optional,
            pid: std::process::id(),
        };
        Some(ClaimedJob { ticket, job: Job(Arc::new(data)) })
    }

    /// Releases the rows that a claim without an answer may have locked.
    async fn release_unanswered(&self) -> Result<()> {
        // Waits for claims in flight, whose rows are not in `holds` yet.
        let exclusive = self.claims.write().await;
        let known = self.holds.ids();
        let parameters: [(&(dyn ToSql + Sync), Type); 2] =
            [(&self.db.worker, Type::TEXT), (&known, Type::TEXT_ARRAY)];
        let (rows, _) = self.db.ask(&self.sql.unanswered, &parameters, self.db.by()).await?;
        if !rows.is_empty() {
            // In the order of ids, as in `complete_named`.
            let name = |row: &Row| Some((row.try_get("id").ok()?, row.get("lease_token")));
            let mut names: Vec<(String, i64)> = rows.iter().filter_map(name).collect();
            names.sort_unstable();
            let (ids, numbers): (Vec<String>, Vec<i64>) = names.into_iter().unzip();
            let parameters: [(&(dyn ToSql + Sync), Type); 3] = [
                (&ids, Type::TEXT_ARRAY),
                (&numbers, Type::INT8_ARRAY),
                (&self.db.worker, Type::TEXT),
            ];
            self.db.ask(&self.sql.clean_up, &parameters, self.db.by()).await?;
        }
        self.unanswered_claim.store(false, Ordering::Relaxed);
        drop(exclusive);
        Ok(())
    }
}

/// Rows that a claim considers.
#[derive(Clone, Copy)]
enum ClaimStart<'a> {
    /// All, in the order of claims.
    Top,
    /// Those from this position, until this time.
    At(&'a JobOrder<String>, Time),
    /// All but these.
    Except(&'a [String]),
    /// Only this one.
    One(&'a str),
}

/// A claimed row.
struct ClaimedRow {
    order: JobOrder<String>,
    /// True if a claim can resume at this position.
    can_resume: bool,
    payload: String,
    meta: Option<String>,
    attempt: u32,
    max_attempts: Option<u32>,
    number: i64,
    epoch: u64,
}

impl ClaimedRow {
    /// Reads a row; the reason if it cannot be read.
    fn read(row: &Row) -> std::result::Result<Self, String> {
        let count = |n: i32| u32::try_from(n).unwrap_or_default();
        let number = column(row, "lease_token")?;
        if number == i64::MAX {
            return Err("its lease_token is the largest number, and cannot grow".to_owned());
        }
        let payload: Option<String> = column(row, "payload")?;
        Ok(Self {
            order: JobOrder {
                priority: column(row, "priority")?,
                created_at: column(row, "created_at")?,
                id: column(row, "id")?,
            },
            can_resume: column::<Option<bool>>(row, "can_resume")?.unwrap_or_default(),
            payload: payload.unwrap_or_else(|| "null".to_owned()),
            meta: column(row, "meta")?,
            attempt: count(column(row, "attempts")?),
            max_attempts: column::<Option<i32>>(row, "max_attempts")?.map(count),
            number,
            epoch: column::<i64>(row, "epoch")?.unsigned_abs(),
        })
    }
}

/// Value of a column; the reason if it cannot be read, such as text that is no UTF-8.
fn column<'a, T: FromSql<'a>>(row: &'a Row, name: &str) -> std::result::Result<T, String> {
    row.try_get(name).map_err(|error| {
        let cause = std::error::Error::source(&error).map(ToString::to_string);
        format!("its {name} cannot be read: {}", cause.unwrap_or_else(|| error.to_string()))
    })
}
