//! Claims: the statements that claim jobs, for many callers at once.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tenure_core::jobs::JobOrder;
use tenure_core::{FencingToken, Time};
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

use super::batcher::repeat_error;
use super::heart::{RowName, Rows};
use super::job::{Job, JobData};
use super::options::REQUEST_TIMEOUT;
use super::shared::{ClaimedJob, MAX_BATCH_JOBS, QueueShared};
use crate::store::pg::clock::{Reading, micros};
use crate::{Error, ErrorKind, Result};

/// Time during which a claim may resume at the position where the last claim ended, instead of scanning from the top.
///
/// A job of a higher priority that is enqueued meanwhile is overtaken for at most this time.
const RESUME_WINDOW: Duration = Duration::from_millis(50);

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
        if self.sweep_is_due() {
            self.sweep().await?;
        }
        let claims = self.claims.read().await;
        let mut claimed = self.claim_resuming(limit).await?;
        if claimed.len() < limit {
            let left = limit - claimed.len();
            match self.claim_from(left, None).await {
                Ok(more) => claimed.extend(more),
                // The jobs that were claimed matter more than the error of the second statement.
                Err(_) if !claimed.is_empty() => {}
                Err(error) => return Err(error),
            }
        }
        drop(claims);
        Ok(claimed)
    }

    /// Claims from the position where the last claim ended; nothing if that was longer ago than [`RESUME_WINDOW`].
    async fn claim_resuming(self: &Arc<Self>, limit: usize) -> Result<Vec<ClaimedJob>> {
        let resume_from = self.state().resume_from.clone();
        match resume_from.filter(|(_, until)| self.db.clock.now() < *until) {
            Some((place, until)) => self.claim_from(limit, Some((&place, until))).await,
            None => Ok(Vec::new()),
        }
    }

    async fn claim_from(
        self: &Arc<Self>,
        limit: usize,
        from: Option<(&JobOrder<String>, Time)>,
    ) -> Result<Vec<ClaimedJob>> {
        let (ttl, max_rows) = (micros(self.db.lease.ttl()), i64::try_from(limit).unwrap_or(1));
        let mut parameters: Vec<(&(dyn ToSql + Sync), Type)> =
            vec![(&self.db.worker, Type::TEXT), (&ttl, Type::INT8), (&max_rows, Type::INT8)];
        let sql = match from {
            None => &self.sql.claim,
            Some((place, _)) => {
                parameters.push((&place.priority, Type::INT8));
                parameters.push((&place.created_at, Type::INT8));
                parameters.push((&place.id, Type::TEXT));
                &self.sql.claim_on
            }
        };
        let by = self.db.clock.now() + self.db.lease.request_limit().min(REQUEST_TIMEOUT);
        let answer = self.db.grant(sql, &parameters, by).await;
        let (rows, reading) = answer.inspect_err(|error| {
            if error.kind() == ErrorKind::Unknown {
                self.unanswered_claim.store(true, Ordering::Relaxed);
            }
        })?;
        let mut placed: Vec<(JobOrder<String>, &Row)> =
            rows.iter().map(|row| (place(row), row)).collect();
        placed.sort_by(|a, b| a.0.cmp(&b.0));
        let last = placed.last().map(|(place, _)| place.clone()).filter(|_| rows.len() == limit);
        self.state().resume_from = last.map(|last| {
            let until =
                from.map_or_else(|| self.db.clock.now() + RESUME_WINDOW, |(_, until)| until);
            (last, until)
        });
        let jobs: Vec<ClaimedJob> =
            placed.into_iter().filter_map(|(_, row)| self.admit(row, reading)).collect();
        if jobs.len() < rows.len() {
            // The answer arrived after the deadline of these leases: no worker may start on them. The next claim
            // releases them, and their attempts do not count, as after a claim without an answer.
            self.unanswered_claim.store(true, Ordering::Relaxed);
            if jobs.is_empty() {
                let message = "the answer to the claim arrived after the deadline of its lease";
                return Err(Error::new(ErrorKind::Unknown, message));
            }
        }
        Ok(jobs)
    }

    /// Starts to renew a claimed row; `None` if the deadline of its lease has passed already.
    fn admit(self: &Arc<Self>, row: &Row, reading: Reading) -> Option<ClaimedJob> {
        let (id, number): (String, i64) = (row.get("id"), row.get("lease_token"));
        let count = |n: i32| u32::try_from(n).unwrap_or_default();
        let name = RowName { id: id.clone(), part: String::new(), number };
        let rows: Arc<dyn Rows> = Arc::<Self>::clone(self);
        let ticket = self.holds.admit(name, reading, rows)?;
        let (epoch, low) = (row.get::<_, i64>("epoch").unsigned_abs(), number.unsigned_abs());
        let data = JobData {
            id,
            payload: row.get::<_, Option<String>>("payload").unwrap_or_else(|| "null".to_owned()),
            attempt: count(row.get("attempts")),
            max_attempts: row.get::<_, Option<i32>>("max_attempts").map(count),
            number,
            token: FencingToken::new(epoch, low),
            clock: self.db.clock.clone(),
            stop_grace: self.db.lease.stop_grace(),
            look: ticket.look.clone(),
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
            let mut names: Vec<(&str, i64)> =
                rows.iter().map(|row| (row.get("id"), row.get("lease_token"))).collect();
            names.sort_unstable();
            let (ids, numbers): (Vec<&str>, Vec<i64>) = names.into_iter().unzip();
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

/// Position of a claimed row in the order of claims.
fn place(row: &Row) -> JobOrder<String> {
    JobOrder { priority: row.get("priority"), created_at: row.get("created_at"), id: row.get("id") }
}
