//! Listening for notifications, where they arrive.

use std::time::Duration;

use tenure_core::Time;
use tokio::sync::mpsc;

use super::connect::Connection;
use super::settings::Settings;
use crate::{Clock, Result, identity};

/// How long a notification to ourselves may take before it is clear that none arrives.
const PROBE: Duration = Duration::from_secs(1);
/// The notifications that may wait to be read: each is a hint only.
const NEWS: usize = 256;

/// A connection that listens, and what it hears.
#[derive(Debug)]
pub(crate) struct Listening {
    _connection: Connection,
    pub(crate) news: mpsc::Receiver<(String, String)>,
}

impl Listening {
    /// Begins to listen. Whether anything arrives is to be tried: a pooler may hand out another session for every
    /// transaction.
    pub(crate) async fn begin(
        settings: &Settings,
        clock: &Clock,
        channel: &str,
        by: Time,
    ) -> Result<Self> {
        let (tell, news) = mpsc::channel(NEWS);
        let mut connection = Connection::open(settings, clock, by, Some(tell)).await?;
        connection.run(&format!("LISTEN \"{channel}\""), by).await?;
        Ok(Self { _connection: connection, news })
    }

    /// A payload that nobody else sends.
    pub(crate) fn probe() -> Result<String> {
        Ok(format!("probe:{:016x}", u64::from_be_bytes(identity::random()?)))
    }

    /// Whether a notification of this payload, sent just now, arrives.
    pub(crate) async fn hears(&mut self, probe: &str, clock: &Clock) -> bool {
        let until = clock.now() + PROBE;
        loop {
            tokio::select! {
                told = self.news.recv() => match told {
                    Some((_, payload)) if payload == probe => return true,
                    Some(_) => {}
                    None => return false,
                },
                () = clock.sleep_until(until) => return false,
            }
        }
    }
}
