//! Release of a job whose worker is dead, by another process.

use std::sync::Arc;
use std::time::Duration;

use tokio_postgres::types::Type;

use super::detached::run_detached;
use super::guard::sanitize_error;
use super::shared::QueueShared;
use super::worker::JobOutcome;
use super::{Job, Queue};
use crate::store::pg::connect::Parameter;
use crate::{ErrorKind, Result};

/// Pause after a request without an answer.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

/// Identity of a claim: the values that fence every write to its job. It is no secret, and ends nothing by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClaimIdentity {
    /// Id of the job.
    pub job: String,
    /// Number of the claim, as stored in the column `lease_token`.
    pub lease_token: i64,
    /// Name of the worker in the column `locked_by`.
    pub worker: String,
}

impl ClaimIdentity {
    /// The claim of this worker with this number.
    pub fn new(job: impl Into<String>, lease_token: i64, worker: impl Into<String>) -> Self {
        Self { job: job.into(), lease_token, worker: worker.into() }
    }
}

impl Queue {
    /// Identity of the claim of a job of this queue, to pass to another process.
    pub fn claim_identity(&self, job: &Job) -> ClaimIdentity {
        ClaimIdentity::new(job.id(), job.lease_token(), self.worker())
    }

    /// Ends the claim of a worker that is dead, without waiting for its lease. The caller must know that the worker is
    /// dead and that nothing of its work is left: the job can be claimed at once.
    ///
    /// The attempt counts, as when the lease of a dead worker ends: a job that kills every worker must end as failed.
    /// The outcome is `Retried` with the reason, `Failed` if the attempts are used up, and `Lost` if the claim has ended
    /// by itself, in which case nothing was changed. While the server cannot be reached, the request is retried for
    /// `limit`.
    ///
    /// # Errors
    ///
    /// `Unknown` or `Unavailable` if no definite answer arrived in time: the job is available when its lease ends, at
    /// the latest. `Denied` without the right to change the table.
    ///
    /// # Cancel safety
    ///
    /// The job is released even if the future is dropped.
    pub async fn release_dead(
        &self,
        claim: &ClaimIdentity,
        why: &str,
        limit: Duration,
    ) -> Result<JobOutcome> {
        let (shared, claim, why) = (Arc::clone(&self.0), claim.clone(), sanitize_error(why));
        let released = run_detached(async move { shared.release_dead(&claim, &why, limit).await });
        released.await.map_err(|error| self.at(error))
    }
}

impl QueueShared {
    async fn release_dead(
        &self,
        claim: &ClaimIdentity,
        why: &str,
        limit: Duration,
    ) -> Result<JobOutcome> {
        let ClaimIdentity { job, lease_token, worker } = claim;
        let end = self.db.clock.now() + limit;
        // Without a delay the statement can be repeated: applied twice, it leaves the row as applied once.
        let no_delay = 0_i64;
        let parameters: [Parameter<'_>; 5] = [
            (job, Type::TEXT),
            (lease_token, Type::INT8),
            (worker, Type::TEXT),
            (&why, Type::TEXT),
            (&no_delay, Type::INT8),
        ];
        let row = loop {
            let error = match self.db.ask(&self.sql.retry, &parameters, self.db.by()).await {
                Ok((mut rows, _)) => break rows.pop(),
                Err(error) => error,
            };
            let retry = matches!(error.kind(), ErrorKind::Unknown | ErrorKind::Unavailable)
                || error.is_marked_transient();
            let again = self.db.clock.now() + RETRY_PAUSE;
            if !retry || again >= end {
                return Err(error);
            }
            self.db.clock.sleep_until(again).await;
        };
        Ok(match row {
            None => JobOutcome::Lost("the claim has ended by itself".to_owned()),
            Some(row) if row.get("failed") => JobOutcome::Failed(why.to_owned()),
            Some(_) => {
                // Idle workers would find the job by their next poll; a failure of this request costs only that time.
                let notified =
                    self.db.ask(&self.sql.notify, &[(&"", Type::TEXT)], self.db.by()).await;
                if let Err(error) = notified {
                    tracing::warn!(name: "tenure.request_failed", %error);
                }
                JobOutcome::Retried(why.to_owned())
            }
        })
    }
}
