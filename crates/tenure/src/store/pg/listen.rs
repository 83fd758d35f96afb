//! Notifications from PostgreSQL, where they can arrive.

use std::time::Duration;

use tenure_core::Time;
use tokio::sync::mpsc;

use super::connect::PgConnection;
use super::pooler;
use super::settings::Settings;
use crate::{Clock, Result, identity};

/// Time that a notification to ourselves may take; after that, notifications are taken not to arrive.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum number of unread notifications. Each is a hint only, so further ones are dropped.
const MAX_PENDING_NOTIFICATIONS: usize = 256;

/// A connection that listens, and its notifications.
#[derive(Debug)]
pub(crate) struct NotificationListener {
    _connection: PgConnection,
    pub(crate) notifications: mpsc::Receiver<(String, String)>,
}

impl NotificationListener {
    /// Starts to listen; `None` behind a pooler that shares sessions: notifications would go to another client. Use
    /// [`receives`](Self::receives) to check that they arrive.
    pub(crate) async fn begin(
        settings: &Settings,
        clock: &Clock,
        channel: &str,
        by: Time,
    ) -> Result<Option<Self>> {
        let (sender, notifications) = mpsc::channel(MAX_PENDING_NOTIFICATIONS);
        let (mut connection, binding) = pooler::open(settings, clock, by, Some(sender)).await?;
        if !binding.has_own_session() {
            return Ok(None);
        }
        connection.run(&format!("LISTEN \"{channel}\""), by).await?;
        Ok(Some(Self { _connection: connection, notifications }))
    }

    /// Random payload that no other process sends.
    pub(crate) fn probe() -> Result<String> {
        Ok(format!("probe:{:016x}", u64::from_be_bytes(identity::random()?)))
    }

    /// Waits for a notification with this payload, which was just sent; false if none arrives in time.
    pub(crate) async fn receives(&mut self, probe: &str, clock: &Clock) -> bool {
        let until = clock.now() + PROBE_TIMEOUT;
        loop {
            tokio::select! {
                received = self.notifications.recv() => match received {
                    Some((_, payload)) if payload == probe => return true,
                    Some(_) => {}
                    None => return false,
                },
                () = clock.sleep_until(until) => return false,
            }
        }
    }
}
