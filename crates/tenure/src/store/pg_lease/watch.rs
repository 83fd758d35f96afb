//! Watches of lease rows.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::{Key, Time};
use tokio_postgres::types::Type;

use super::inspect::{LeaseHolder, UNSETTLED, version_of};
use super::shared::LeaseShared;
use crate::store::Version;
use crate::store::pg::clock::Reading;
use crate::store::pg::settings::Settings;
use crate::store::pg::watch::{self, PolledVersions, WatchKey, WatchRegistry, Watched};
use crate::{Clock, Result};

/// Pause before a claim without an answer is retried.
const UNSETTLED_RETRY_PAUSE: Duration = Duration::from_millis(40);

/// Resolves when the version of the key differs from `since`.
pub(super) async fn changed(
    shared: &Arc<LeaseShared>,
    space: i16,
    key: &Key,
    since: Version,
) -> Result<()> {
    if since == UNSETTLED {
        let clock = &shared.clock;
        clock.sleep_until(clock.now() + UNSETTLED_RETRY_PAUSE).await;
        return Ok(());
    }
    watch::changed(shared, (space, key.clone()), since).await
}

#[async_trait]
impl Watched for LeaseShared {
    fn watch(&self) -> &WatchRegistry {
        &self.watch
    }

    fn clock(&self) -> &Clock {
        &self.clock
    }

    fn settings(&self) -> &Settings {
        self.pool.settings()
    }

    fn channel(&self) -> String {
        self.table.channel()
    }

    fn poll(&self) -> Option<Duration> {
        self.poll
    }

    fn is_closed(&self) -> bool {
        self.pool.is_closed()
    }

    async fn notify(&self, payload: &str, by: Time) -> Result<()> {
        let mut connection = self.connection(by).await?;
        connection.query(&self.sql().notify, &[(&payload, Type::TEXT)], by).await.map(drop)
    }

    async fn read_versions(&self, names: &[WatchKey], by: Time) -> Result<PolledVersions> {
        let spaces: Vec<i16> = names.iter().map(|(space, _)| *space).collect();
        let keys: Vec<&str> = names.iter().map(|(_, key)| key.as_str()).collect();
        let parameters = [
            (&spaces as &(dyn tokio_postgres::types::ToSql + Sync), Type::INT2_ARRAY),
            (&keys, Type::TEXT_ARRAY),
        ];
        let (rows, reading) = self.ask(|sql| &sql.inspect_holders, &parameters, by).await?;
        let Reading { sent, replied, db } = reading;
        let (mut next_end, mut found) = (None::<i64>, HashMap::<WatchKey, Vec<(i64, i64)>>::new());
        for shown in LeaseHolder::all(&rows) {
            next_end = Some(next_end.map_or(shown.until, |end| end.min(shown.until)));
            let holders = found.entry((shown.space, shown.key)).or_default();
            holders.push((shown.epoch, shown.number));
        }
        let left =
            next_end.map(|end| Duration::from_micros(end.saturating_sub(db).max(0).unsigned_abs()));
        let versions =
            names.iter().map(|name| version_of(found.remove(name).unwrap_or_default())).collect();
        Ok(PolledVersions { versions, next_end: left, round_trip: replied.since(sent) })
    }
}
