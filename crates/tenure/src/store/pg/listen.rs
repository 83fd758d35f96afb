//! Listening for notifications, where they arrive.

use std::time::Duration;

use tenure_core::Time;
use tokio::sync::mpsc;

use super::connect::PgConnection;
use super::settings::Settings;
use crate::{Clock, Result, identity};

/// How long a notification to ourselves may take before it is clear that none arrives.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);
/// The notifications that may wait to be read: each is a hint only.
const MAX_PENDING_NOTIFICATIONS: usize = 256;

/// A connection that listens, and what it hears.
#[derive(Debug)]
pub(crate) struct NotificationListener {
    _connection: PgConnection,
    pub(crate) notifications: mpsc::Receiver<(String, String)>,
}

impl NotificationListener {
    /// Begins to listen. Whether anything arrives is to be tried: a pooler may hand out another session for every
    /// transaction.
    pub(crate) async fn begin(
        settings: &Settings,
        clock: &Clock,
        channel: &str,
        by: Time,
    ) -> Result<Self> {
        let (tell, news) = mpsc::channel(MAX_PENDING_NOTIFICATIONS);
        let mut connection = PgConnection::open(settings, clock, by, Some(tell)).await?;
        connection.run(&format!("LISTEN \"{channel}\""), by).await?;
        Ok(Self { _connection: connection, notifications: news })
    }

    /// A payload that nobody else sends.
    pub(crate) fn probe() -> Result<String> {
        Ok(format!("probe:{:016x}", u64::from_be_bytes(identity::random()?)))
    }

    /// Whether a notification of this payload, sent just now, arrives.
    pub(crate) async fn receives(&mut self, probe: &str, clock: &Clock) -> bool {
        let until = clock.now() + PROBE_TIMEOUT;
        loop {
            tokio::select! {
                told = self.notifications.recv() => match told {
                    Some((_, payload)) if payload == probe => return true,
                    Some(_) => {}
                    None => return false,
                },
                () = clock.sleep_until(until) => return false,
            }
        }
    }
}
