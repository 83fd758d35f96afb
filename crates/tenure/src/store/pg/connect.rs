//! One connection to PostgreSQL, whose requests end in time.

use std::fmt;
use std::future::poll_fn;
use std::time::Duration;

use tenure_core::Time;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_postgres::tls::MakeTlsConnect;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{AsyncMessage, Client, Row, Socket};

use super::failure::{self, Stage};
use super::settings::Settings;
use crate::{Clock, Error, ErrorKind, Result};

/// A parameter and its type: with both given, a statement needs neither a name nor a second round trip.
pub(crate) type Parameter<'a> = (&'a (dyn ToSql + Sync), Type);

/// Who is told of notifications: channel and payload.
pub(crate) type News = mpsc::Sender<(String, String)>;

/// A connection, and the task that reads from it. Dropping it closes the socket, whatever is under way.
pub(crate) struct Connection {
    client: Client,
    reader: JoinHandle<()>,
    clock: Clock,
    /// A request was begun and has not ended: nobody else may use this connection.
    torn: bool,
}

impl Connection {
    /// Connects, within the time that the settings give and until `by` at most.
    pub(crate) async fn open(
        settings: &Settings,
        clock: &Clock,
        by: Time,
        news: Option<News>,
    ) -> Result<Self> {
        let tls = settings.trust.connector()?;
        let by = by.min(clock.now() + settings.connect_timeout);
        let begun = clock.now();
        // Not the driver's own limit: that covers the socket, and neither TLS nor the greeting.
        tokio::select! {
            biased;
            opened = open(settings, tls, news) => {
                let (client, reader) = opened?;
                Ok(Self { client, reader, clock: clock.clone(), torn: false })
            }
            () = clock.sleep_until(by) => Err(too_slow(clock.now().since(begun))),
        }
    }

    /// Makes one request. Where no answer comes until `by` the connection is cut off and the outcome is unknown.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the connection unusable: [`is_usable`](Self::is_usable) says so.
    pub(crate) async fn query(
        &mut self,
        sql: &str,
        parameters: &[Parameter<'_>],
        by: Time,
    ) -> Result<Vec<Row>> {
        if self.client.is_closed() {
            self.torn = true;
            let message = "the connection was closed before anything was asked";
            return Err(Error::new(ErrorKind::Unavailable, message));
        }
        self.torn = true;
        let begun = self.clock.now();
        tokio::select! {
            biased;
            answer = self.client.query_typed(sql, parameters) => {
                self.torn = self.client.is_closed();
                answer.map_err(|error| failure::explain(error, Stage::Asking))
            }
            () = self.clock.sleep_until(by) => {
                self.reader.abort();
                let waited = self.clock.now().since(begun);
                Err(Error::new(ErrorKind::Unknown, format!("no answer within {waited:?}")))
            }
        }
    }

    /// Runs statements without parameters, one transaction unless they say otherwise.
    pub(crate) async fn run(&mut self, sql: &str, by: Time) -> Result<()> {
        self.torn = true;
        tokio::select! {
            biased;
            done = self.client.batch_execute(sql) => {
                self.torn = self.client.is_closed();
                done.map_err(|error| failure::explain(error, Stage::Asking))
            }
            () = self.clock.sleep_until(by) => {
                self.reader.abort();
                Err(Error::new(ErrorKind::Unknown, "no answer in time"))
            }
        }
    }

    /// Whether another request may be made on it.
    pub(crate) fn is_usable(&self) -> bool {
        !self.torn && !self.client.is_closed()
    }
}

async fn open<T>(
    settings: &Settings,
    tls: T,
    news: Option<News>,
) -> Result<(Client, JoinHandle<()>)>
where
    T: MakeTlsConnect<Socket> + Send,
    T::Stream: Send + 'static,
    T::TlsConnect: Send,
    <T::TlsConnect as tokio_postgres::tls::TlsConnect<Socket>>::Future: Send,
{
    let connected = settings.config.connect(tls).await;
    let (client, mut connection) =
        connected.map_err(|error| failure::explain(error, Stage::Connecting))?;
    let reader = tokio::spawn(async move {
        // Ends when the connection does, and with it every request on it.
        while let Some(Ok(message)) = poll_fn(|context| connection.poll_message(context)).await {
            if let (AsyncMessage::Notification(told), Some(news)) = (message, &news) {
                // Who cannot keep up misses a hint: the poll is there for that.
                let _ = news.try_send((told.channel().to_owned(), told.payload().to_owned()));
            }
        }
    });
    Ok((client, reader))
}

fn too_slow(after: Duration) -> Error {
    let message = format!("no connection within {after:?}: is the server up?");
    Error::new(ErrorKind::Unavailable, message)
}

impl Drop for Connection {
    fn drop(&mut self) {
        // The driver alone would finish what was asked before it lets go of the socket.
        self.reader.abort();
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("usable", &self.is_usable()).finish_non_exhaustive()
    }
}
