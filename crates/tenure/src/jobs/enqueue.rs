//! The statements that enqueue jobs.

use std::collections::HashMap;

use tokio_postgres::types::Type;
use tokio_postgres::{GenericClient, Row};

use super::job::{Enqueued, NewJob};
use super::shared::QueueShared;
use crate::store::pg::clock::micros;
use crate::store::pg::connect::Parameter;
use crate::store::pg::failure::{self, RequestStage};
use crate::{Error, ErrorKind, Result};

impl QueueShared {
    /// Enqueues jobs in one statement, and returns one result per job in their order.
    pub(super) async fn enqueue(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        let values = JobValues::of(&jobs.iter());
        let extended = self.needs_optional_columns(jobs)?;
        let sql = if extended { &self.sql.enqueue_extended } else { &self.sql.enqueue };
        let sent = self.db.ask(sql, &values.parameters(extended), self.db.by()).await;
        let new = NewIds::read(&sent?.0);
        self.restart_scan();
        let known = match new.keys_to_look_up(jobs) {
            None => HashMap::new(),
            Some(keys) => {
                let parameters: [Parameter<'_>; 1] = [(&keys, Type::TEXT_ARRAY)];
                let sent = self.db.ask(&self.sql.existing, &parameters, self.db.by()).await;
                ids_by_key(&sent?.0)
            }
        };
        new.results(jobs, &known)
    }

    /// Enqueues jobs as part of the caller's transaction.
    pub(super) async fn enqueue_in(
        &self,
        transaction: &impl GenericClient,
        jobs: &[NewJob],
    ) -> Result<Vec<Enqueued>> {
        let explain = |error| failure::explain(error, RequestStage::Asking);
        let values = JobValues::of(&jobs.iter());
        let extended = self.needs_optional_columns(jobs)?;
        let sql = if extended { &self.sql.enqueue_extended_in } else { &self.sql.enqueue_in };
        let sent = transaction.query_typed(sql, &values.parameters(extended)).await;
        let new = NewIds::read(&sent.map_err(explain)?);
        let known = match new.keys_to_look_up(jobs) {
            None => HashMap::new(),
            Some(keys) => {
                let parameters: [Parameter<'_>; 1] = [(&keys, Type::TEXT_ARRAY)];
                let sent = transaction.query_typed(&self.sql.existing, &parameters).await;
                ids_by_key(&sent.map_err(explain)?)
            }
        };
        new.results(jobs, &known)
    }

    /// True if a job has a value of an optional column. Fails if the table has no such column.
    pub(super) fn needs_optional_columns(&self, jobs: &[NewJob]) -> Result<bool> {
        let grouped = jobs.iter().any(|job| job.group_key.is_some());
        let described = jobs.iter().any(|job| job.meta.is_some());
        if grouped && !self.optional.group_key {
            return Err(self.db.column_is_missing("group_key"));
        }
        if described && self.optional.meta.is_none() {
            return Err(self.db.column_is_missing("meta"));
        }
        Ok(grouped || described)
    }
}

/// Jobs as the columns of one statement.
pub(super) struct JobValues<'a> {
    payloads: Vec<&'a str>,
    priorities: Vec<i32>,
    delays: Vec<i64>,
    attempts: Vec<i32>,
    keys: Vec<Option<&'a str>>,
    notify: bool,
    groups: Vec<Option<&'a str>>,
    metadata: Vec<Option<String>>,
}

impl<'a> JobValues<'a> {
    pub(super) fn of(jobs: &(impl Iterator<Item = &'a NewJob> + Clone)) -> Self {
        Self {
            payloads: jobs.clone().map(|job| job.payload.as_str()).collect(),
            priorities: jobs.clone().map(|job| job.priority).collect(),
            delays: jobs.clone().map(|job| micros(job.delay)).collect(),
            attempts: jobs.clone().map(|job| job.max_attempts).collect(),
            keys: jobs.clone().map(|job| job.unique_key.as_deref()).collect(),
            notify: jobs.clone().any(|job| job.delay.is_zero()),
            groups: jobs.clone().map(|job| job.group_key.as_deref()).collect(),
            metadata: jobs.clone().map(|job| job.meta.as_ref().map(ToString::to_string)).collect(),
        }
    }

    /// Parameters of the statement that enqueues, and with `extended` those of optional columns.
    pub(super) fn parameters(&self, extended: bool) -> Vec<Parameter<'_>> {
        let mut parameters: Vec<Parameter<'_>> = vec![
            (&self.payloads, Type::TEXT_ARRAY),
            (&self.priorities, Type::INT4_ARRAY),
            (&self.delays, Type::INT8_ARRAY),
            (&self.attempts, Type::INT4_ARRAY),
            (&self.keys, Type::TEXT_ARRAY),
            (&self.notify, Type::BOOL),
        ];
        if extended {
            parameters.push((&self.groups, Type::TEXT_ARRAY));
            parameters.push((&self.metadata, Type::TEXT_ARRAY));
        }
        parameters
    }
}

/// Ids of the rows that a statement inserted.
struct NewIds {
    by_key: HashMap<String, String>,
    /// Of jobs without a unique key, in their order.
    unnamed: Vec<String>,
}

impl NewIds {
    fn read(rows: &[Row]) -> Self {
        let (mut by_key, mut unnamed) = (HashMap::new(), Vec::new());
        for row in rows {
            match row.get::<_, Option<String>>("unique_key") {
                Some(key) => drop(by_key.insert(key, row.get("id"))),
                None => unnamed.push(row.get("id")),
            }
        }
        Self { by_key, unnamed }
    }

    /// Unique keys whose open jobs may have kept jobs of `jobs` from being inserted; `None` if all were inserted. A key
    /// may occur twice in `jobs`.
    fn keys_to_look_up<'a>(&self, jobs: &'a [NewJob]) -> Option<Vec<&'a str>> {
        let keys: Vec<&str> = jobs.iter().filter_map(|job| job.unique_key.as_deref()).collect();
        (keys.len() != self.by_key.len()).then_some(keys)
    }

    /// One result per job. `known` has the ids of open jobs by their unique keys.
    fn results(
        mut self,
        jobs: &[NewJob],
        known: &HashMap<String, String>,
    ) -> Result<Vec<Enqueued>> {
        let mut unnamed = self.unnamed.into_iter();
        let enqueued = |job: &NewJob| match &job.unique_key {
            None => Some(Enqueued { id: unnamed.next()?, new: true }),
            Some(key) => match self.by_key.remove(key) {
                Some(id) => Some(Enqueued { id, new: true }),
                None => Some(Enqueued { id: known.get(key)?.clone(), new: false }),
            },
        };
        let all: Option<Vec<Enqueued>> = jobs.iter().map(enqueued).collect();
        // The open job of that key ended between the two statements: the first did not insert, the second finds no row.
        let gone = "the open job of the same unique key ended while this one was enqueued: enqueue it again";
        all.ok_or_else(|| Error::new(ErrorKind::Contention, gone))
    }
}

fn ids_by_key(rows: &[Row]) -> HashMap<String, String> {
    rows.iter().map(|row| (row.get("unique_key"), row.get("id"))).collect()
}
