//! Completions: the statements that complete jobs, for many callers at once.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use tenure_core::Time;
use tokio_postgres::types::Type;

use super::batcher::repeat_error;
use super::shared::{CompleteRequest, QueueShared};
use crate::Result;
use crate::store::pg::connect::Parameter;

/// Timeout of a batched completion. If another transaction has locked one of its rows, the whole batch waits for that
/// row; after the timeout each job is completed in a statement of its own.
const BATCH_COMPLETE_TIMEOUT: Duration = Duration::from_secs(3);

impl QueueShared {
    /// Serves completion requests batch by batch until none waits.
    pub(super) async fn serve_completions(self: Arc<Self>) {
        while let Some(batch) = self.completion_batches.next_batch() {
            match self.complete_batch(&batch).await {
                Ok(done) => {
                    for request in batch {
                        let completed = done.contains(&request.id);
                        drop(request.reply.send(Ok(completed)));
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

    /// Completes a batch and returns the ids of the completed jobs.
    async fn complete_batch(&self, batch: &[CompleteRequest]) -> Result<HashSet<String>> {
        let by = self.db.clock.now() + self.db.lease.request_limit().min(BATCH_COMPLETE_TIMEOUT);
        if let [CompleteRequest { id, number, .. }] = batch {
            let parameters: [Parameter<'_>; 3] =
                [(id, Type::TEXT), (number, Type::INT8), (&self.db.worker, Type::TEXT)];
            let (rows, _) = self.db.ask(&self.sql.complete, &parameters, by).await?;
            return Ok(rows.iter().map(|_| id.clone()).collect());
        }
        let mut names: Vec<(&str, i64)> =
            batch.iter().map(|request| (request.id.as_str(), request.number)).collect();
        self.complete_named(&mut names, by).await
    }

    /// Completes rows by id and token, and returns the ids of the completed rows.
    ///
    /// The rows are named in the order of their ids. Two batches that overlap, as when a late worker completes jobs
    /// that another worker has claimed since, then lock the rows in one order and do not deadlock.
    pub(super) async fn complete_named(
        &self,
        names: &mut [(&str, i64)],
        by: Time,
    ) -> Result<HashSet<String>> {
        names.sort_unstable();
        let (ids, numbers): (Vec<&str>, Vec<i64>) = names.iter().copied().unzip();
        let parameters: [Parameter<'_>; 3] =
            [(&ids, Type::TEXT_ARRAY), (&numbers, Type::INT8_ARRAY), (&self.db.worker, Type::TEXT)];
        let (rows, _) = self.db.ask(&self.sql.complete_many, &parameters, by).await?;
        Ok(rows.iter().map(|row| row.get("id")).collect())
    }
}
