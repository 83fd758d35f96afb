//! The statements that enqueue jobs.

use std::collections::HashMap;

use tokio_postgres::types::{ToSql, Type};

use super::job::{Enqueued, NewJob};
use super::shared::QueueShared;
use crate::store::pg::clock::micros;
use crate::{Error, ErrorKind, Result};

impl QueueShared {
    /// Enqueues jobs in one statement, and returns one result per job in their order.
    pub(super) async fn enqueue(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        let payloads: Vec<&str> = jobs.iter().map(|job| job.payload.as_str()).collect();
        let priorities: Vec<i32> = jobs.iter().map(|job| job.priority).collect();
        let delays: Vec<i64> = jobs.iter().map(|job| micros(job.delay)).collect();
        let attempts: Vec<i32> = jobs.iter().map(|job| job.max_attempts).collect();
        let keys: Vec<Option<&str>> = jobs.iter().map(|job| job.unique_key.as_deref()).collect();
        let notify = jobs.iter().any(|job| job.delay.is_zero());
        let parameters: [(&(dyn ToSql + Sync), Type); 6] = [
            (&payloads, Type::TEXT_ARRAY),
            (&priorities, Type::INT4_ARRAY),
            (&delays, Type::INT8_ARRAY),
            (&attempts, Type::INT4_ARRAY),
            (&keys, Type::TEXT_ARRAY),
            (&notify, Type::BOOL),
        ];
        let (rows, _) = self.db.ask(&self.sql.enqueue, &parameters, self.db.by()).await?;
        self.restart_scan();
        let mut new: HashMap<String, String> = HashMap::new();
        let mut unnamed = Vec::new();
        for row in &rows {
            match row.get::<_, Option<String>>("unique_key") {
                Some(key) => drop(new.insert(key, row.get("id"))),
                None => unnamed.push(row.get("id")),
            }
        }
        let known = self.existing(jobs, &new).await?;
        let mut unnamed = unnamed.into_iter();
        let enqueued = |job: &NewJob| match &job.unique_key {
            None => Some(Enqueued { id: unnamed.next()?, new: true }),
            Some(key) => match new.remove(key) {
                Some(id) => Some(Enqueued { id, new: true }),
                None => Some(Enqueued { id: known.get(key)?.clone(), new: false }),
            },
        };
        let all: Option<Vec<Enqueued>> = jobs.iter().map(enqueued).collect();
        // The open job of that key ended between the two statements: the first did not insert, the second finds no row.
        let gone = "the open job of the same unique key ended while this one was enqueued: enqueue it again";
        all.ok_or_else(|| Error::new(ErrorKind::Contention, gone))
    }

    /// Ids of the open jobs, by unique key, that kept jobs of `jobs` from being inserted. A key may occur twice in
    /// `jobs`.
    async fn existing(
        &self,
        jobs: &[NewJob],
        new: &HashMap<String, String>,
    ) -> Result<HashMap<String, String>> {
        let named: Vec<&str> = jobs.iter().filter_map(|job| job.unique_key.as_deref()).collect();
        if named.len() == new.len() {
            return Ok(HashMap::new());
        }
        let parameters: [(&(dyn ToSql + Sync), Type); 1] = [(&named, Type::TEXT_ARRAY)];
        let (rows, _) = self.db.ask(&self.sql.existing, &parameters, self.db.by()).await?;
        Ok(rows.iter().map(|row| (row.get("unique_key"), row.get("id"))).collect())
    }
}
