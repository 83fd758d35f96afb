//! One connection to PostgreSQL, whose requests end in time.

use std::fmt;
use std::future::poll_fn;
use std::time::Duration;

use tenure_core::Time;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_postgres::tls::MakeTlsConnect;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{AsyncMessage, Client, Row, SimpleQueryMessage, SimpleQueryRow, Socket};

use super::dial::Driver;
use super::failure::{self, Stage};
use super::settings::Settings;
use crate::{Clock, Error, ErrorKind, Result};

/// A parameter and its type: with both given, a statement needs neither a name nor a second round trip.
pub(crate) type Parameter<'a> = (&'a (dyn ToSql + Sync), Type);

/// Who is told of notifications: channel and payload.
pub(crate) type News = mpsc::Sender<(String, String)>;

/// How a connection ended: the server's word for it, as a SQLSTATE, where it gave one. The channel is closed where we cut
/// the connection ourselves.
pub(crate) type End = watch::Receiver<Option<String>>;

/// A connection, and the task that reads from it. Dropping it closes the socket, whatever is under way.
pub(crate) struct Connection {
    client: Client,
    reader: JoinHandle<()>,
    end: End,
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
        let by = by.min(clock.now() + settings.connect_timeout);
        let begun = clock.now();
        // Not the driver's own limit: that covers the socket, and neither TLS nor the greeting.
        tokio::select! {
            biased;
            opened = open(settings) => {
                let (client, driver) = opened?;
                let (tell, end) = watch::channel(None);
                let reader = tokio::spawn(read(driver, news, tell));
                Ok(Self { client, reader, end, clock: clock.clone(), torn: false })
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

    /// Sends statements without parameters as one message, so that the server never waits for the rest of it; the rows of
    /// all of them.
    pub(crate) async fn simple(&mut self, sql: &str, by: Time) -> Result<Vec<SimpleQueryRow>> {
        if self.client.is_closed() {
            self.torn = true;
            let message = "the connection was closed before anything was asked";
            return Err(Error::new(ErrorKind::Unavailable, message));
        }
        self.torn = true;
        let begun = self.clock.now();
        tokio::select! {
            biased;
            answer = self.client.simple_query(sql) => {
                self.torn = self.client.is_closed();
                let messages = answer.map_err(|error| failure::explain(error, Stage::Asking))?;
                Ok(messages.into_iter().filter_map(row).collect())
            }
            () = self.clock.sleep_until(by) => {
                self.reader.abort();
                let waited = self.clock.now().since(begun);
                Err(Error::new(ErrorKind::Unknown, format!("no answer within {waited:?}")))
            }
        }
    }

    /// Tells of the end of this connection.
    pub(crate) fn end(&self) -> End {
        self.end.clone()
    }

    /// Whether another request may be made on it.
    pub(crate) fn is_usable(&self) -> bool {
        !self.torn && !self.client.is_closed()
    }
}

fn row(message: SimpleQueryMessage) -> Option<SimpleQueryRow> {
    match message {
        SimpleQueryMessage::Row(row) => Some(row),
        _ => None,
    }
}

async fn open(settings: &Settings) -> Result<(Client, Driver)> {
    let opened = match &settings.dial {
        Some(dial) => dial.call().await,
        None => over(settings, settings.trust.connector()?).await,
    };
    opened.map_err(|error| failure::explain(error, Stage::Connecting))
}

async fn over<T>(
    settings: &Settings,
    tls: T,
) -> std::result::Result<(Client, Driver), tokio_postgres::Error>
where
    T: MakeTlsConnect<Socket> + Send,
    T::Stream: Send + 'static,
    T::TlsConnect: Send,
    <T::TlsConnect as tokio_postgres::tls::TlsConnect<Socket>>::Future: Send,
{
    let (client, connection) = settings.config.connect(tls).await?;
    Ok((client, Driver::new(connection)))
}

/// Reads until the connection ends, and with it every request on it.
async fn read(mut driver: Driver, news: Option<News>, end: watch::Sender<Option<String>>) {
    while let Some(message) = poll_fn(|context| driver.poll(context)).await {
        match message {
            Ok(AsyncMessage::Notification(told)) => {
                if let Some(news) = &news {
                    // Who cannot keep up misses a hint: the poll is there for that.
                    let _ = news.try_send((told.channel().to_owned(), told.payload().to_owned()));
                }
            }
            Ok(_) => {}
            Err(error) => {
                let code = error.code().map_or("08006", |code| code.code());
                end.send_replace(Some(code.to_owned()));
                return;
            }
        }
    }
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
