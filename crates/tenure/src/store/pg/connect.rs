//! One connection to PostgreSQL, with a deadline for every request.

use std::collections::HashMap;
use std::fmt;
use std::future::{Future, poll_fn};
#[cfg(unix)]
use std::sync::Arc;
use std::time::Duration;

use tenure_core::Time;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_postgres::Statement;
use tokio_postgres::config::TargetSessionAttrs;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{AsyncMessage, Client, Row, SimpleQueryMessage, SimpleQueryRow};

use super::dial::PgDriver;
use super::failure::{self, RequestStage};
use super::settings::Settings;
#[cfg(unix)]
use super::socket::{self, SocketHandle};
use crate::{Clock, Error, ErrorKind, Result};

/// A parameter and its type. With the types given, a statement needs neither a name nor a second round trip.
pub(crate) type Parameter<'a> = (&'a (dyn ToSql + Sync), Type);

/// Sender for received notifications: channel and payload.
pub(crate) type NotificationSender = mpsc::Sender<(String, String)>;

/// End of a connection: the SQLSTATE with which the server ended it, or `08006` if the connection broke. The channel is
/// closed without a value if we aborted the connection ourselves.
pub(crate) type SessionEnd = watch::Receiver<Option<String>>;

/// A connection, and the task that reads from it. Dropping it closes the socket, even with a request in flight.
pub(crate) struct PgConnection {
    client: Client,
    reader: JoinHandle<()>,
    #[cfg_attr(not(unix), expect(dead_code, reason = "empty without sockets of our own"))]
    socket: OwnSocket,
    end: SessionEnd,
    clock: Clock,
    /// True while a request is in flight, and after it was interrupted: the next answer would be that of another
    /// request, so the connection must not be reused.
    interrupted: bool,
    plans: Plans,
}

/// Prepared statements of a connection.
#[derive(Default)]
struct Plans {
    /// True if statements may be prepared: only if every request reaches the same session.
    allowed: bool,
    /// Prepared statements by their SQL.
    prepared: HashMap<String, Statement>,
}

impl PgConnection {
    /// Connects within the connect timeout of the settings, and by `by` at the latest. Of several servers the first
    /// suitable one is used, and each gets an equal share of the remaining time.
    pub(crate) async fn open(
        settings: &Settings,
        clock: &Clock,
        by: Time,
        notifications: Option<NotificationSender>,
    ) -> Result<Self> {
        let by = by.min(clock.now() + settings.connect_timeout);
        let mut failed = None;
        let servers = servers(settings);
        for nth in 0..servers {
            let left = by.since(clock.now()) / u32::try_from(servers - nth).unwrap_or(1);
            match Self::open_one(settings, clock, nth, clock.now() + left, notifications.clone())
                .await
            {
                Ok(connection) => return Ok(connection),
                Err(error) => failed = Some(error),
            }
        }
        Err(failed.unwrap_or_else(|| timed_out(Duration::ZERO)))
    }

    async fn open_one(
        settings: &Settings,
        clock: &Clock,
        nth: usize,
        by: Time,
        notifications: Option<NotificationSender>,
    ) -> Result<Self> {
        let begun = clock.now();
        // The driver's own timeout is not used: it covers the socket, but neither TLS nor authentication.
        let mut connection = tokio::select! {
            biased;
            opened = open(settings, nth) => {
                let (client, driver, socket) = opened?;
                let (end_sender, end) = watch::channel(None);
                let reader = tokio::spawn(read(driver, notifications, end_sender));
                Self {
                    client,
                    reader,
                    socket,
                    end,
                    clock: clock.clone(),
                    interrupted: false,
                    plans: Plans::default(),
                }
            }
            () = clock.sleep_until(by) => return Err(timed_out(clock.now().since(begun))),
        };
        let attributes = settings.config.get_target_session_attrs();
        if settings.dial.is_none() && attributes == TargetSessionAttrs::ReadWrite {
            let rows = connection.simple("SHOW transaction_read_only", by).await;
            let rows = rows.map_err(failure::nothing_done)?;
            if rows.first().and_then(|row| row.get("transaction_read_only")) != Some("off") {
                let message = "the server is read-only, and no writable server answers";
                return Err(Error::new(ErrorKind::Unavailable, message));
            }
        }
        Ok(connection)
    }

    /// Sends one request. If no answer arrives by `by`, the connection is aborted and the outcome is unknown.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the connection unusable: [`is_usable`](Self::is_usable) is then false.
    pub(crate) async fn query(
        &mut self,
        sql: &str,
        parameters: &[Parameter<'_>],
        by: Time,
    ) -> Result<Vec<Row>> {
        self.begin()?;
        let answer = within(&self.clock, by, self.client.query_typed(sql, parameters)).await;
        self.finish(answer, RequestStage::Asking)
    }

    /// Runs statements without parameters, in one transaction unless they contain transaction commands.
    pub(crate) async fn run(&mut self, sql: &str, by: Time) -> Result<()> {
        self.begin()?;
        let answer = within(&self.clock, by, self.client.batch_execute(sql)).await;
        self.finish(answer, RequestStage::Asking)
    }

    /// Sends statements without parameters as one message, so that the server never waits for the rest of a request.
    /// Returns the rows of all statements.
    pub(crate) async fn simple(&mut self, sql: &str, by: Time) -> Result<Vec<SimpleQueryRow>> {
        self.begin()?;
        let answer = within(&self.clock, by, self.client.simple_query(sql)).await;
        let messages = self.finish(answer, RequestStage::Asking)?;
        Ok(messages.into_iter().filter_map(row).collect())
    }

    fn begin(&mut self) -> Result<()> {
        self.interrupted = true;
        if self.client.is_closed() {
            let message = "the connection was closed before the request was sent";
            return Err(Error::new(ErrorKind::Unavailable, message));
        }
        Ok(())
    }

    fn finish<T>(&mut self, answer: DriverAnswer<T>, stage: RequestStage) -> Result<T> {
        match answer {
            Ok(answer) => {
                self.interrupted = self.client.is_closed();
                answer.map_err(|error| failure::explain(error, stage))
            }
            Err(waited) => {
                self.abort();
                Err(Error::new(ErrorKind::Unknown, format!("no answer within {waited:.1?}")))
            }
        }
    }

    /// Ends the connection at once, even if another process has a descriptor of its socket.
    fn abort(&self) {
        self.reader.abort();
        #[cfg(unix)]
        if let Some(socket) = &self.socket {
            socket.shutdown();
        }
    }

    /// Handle that another process can use to keep the connection open; `None` if the caller opened the socket.
    #[cfg(unix)]
    pub(crate) fn socket(&self) -> Option<&Arc<SocketHandle>> {
        self.socket.as_ref()
    }

    /// Subscribes to the end of this connection.
    pub(crate) fn end(&self) -> SessionEnd {
        self.end.clone()
    }

    /// True if another request may be sent.
    pub(crate) fn is_usable(&self) -> bool {
        !self.interrupted && !self.client.is_closed()
    }
}

impl PgConnection {
    /// Allows or forbids prepared statements. Allow them only if every request reaches the same session.
    #[cfg(feature = "jobs")]
    pub(crate) fn allow_plans(&mut self, allowed: bool) {
        self.plans.allowed = allowed;
    }

    /// Sends one request as [`query`](Self::query) does, with a prepared statement if that is allowed.
    ///
    /// # Cancel safety
    ///
    /// As [`query`](Self::query).
    pub(crate) async fn query_again(
        &mut self,
        sql: &str,
        parameters: &[Parameter<'_>],
        by: Time,
    ) -> Result<Vec<Row>> {
        if !self.plans.allowed {
            return self.query(sql, parameters, by).await;
        }
        self.begin()?;
        let known = self.plans.prepared.get(sql).cloned();
        let statement = if let Some(statement) = known {
            statement
        } else {
            let types: Vec<Type> = parameters.iter().map(|(_, kind)| kind.clone()).collect();
            let preparing = self.client.prepare_typed(sql, &types);
            let answer = within(&self.clock, by, preparing).await;
            // Preparing executes nothing: a failure leaves no unknown outcome.
            let statement = self.finish(answer, RequestStage::Connecting)?;
            self.plans.prepared.insert(sql.to_owned(), statement.clone());
            self.begin()?;
            statement
        };
        let values: Vec<_> = parameters.iter().map(|(value, _)| *value).collect();
        let answer = within(&self.clock, by, self.client.query(&statement, &values)).await;
        self.finish(answer, RequestStage::Asking)
    }
}

/// Answer of the driver, or the time that was waited without one.
type DriverAnswer<T> = std::result::Result<std::result::Result<T, tokio_postgres::Error>, Duration>;

async fn within<T>(
    clock: &Clock,
    by: Time,
    request: impl Future<Output = std::result::Result<T, tokio_postgres::Error>>,
) -> DriverAnswer<T> {
    let begun = clock.now();
    tokio::select! {
        biased;
        answer = request => Ok(answer),
        () = clock.sleep_until(by) => Err(clock.now().since(begun)),
    }
}

fn row(message: SimpleQueryMessage) -> Option<SimpleQueryRow> {
    match message {
        SimpleQueryMessage::Row(row) => Some(row),
        _ => None,
    }
}

/// Handle of the socket, if we opened it.
#[cfg(unix)]
type OwnSocket = Option<Arc<SocketHandle>>;
#[cfg(not(unix))]
type OwnSocket = ();

#[cfg(unix)]
async fn open(settings: &Settings, nth: usize) -> Result<(Client, PgDriver, OwnSocket)> {
    let Some(dial) = &settings.dial else {
        let (client, driver, socket) = socket::connect(settings, nth).await?;
        return Ok((client, driver, Some(socket)));
    };
    let opened = dial.call().await;
    let (client, driver) =
        opened.map_err(|error| failure::explain(error, RequestStage::Connecting))?;
    Ok((client, driver, None))
}

#[cfg(unix)]
fn servers(settings: &Settings) -> usize {
    if settings.dial.is_some() { 1 } else { socket::servers(settings) }
}

#[cfg(not(unix))]
async fn open(settings: &Settings, _: usize) -> Result<(Client, PgDriver, OwnSocket)> {
    let opened = match &settings.dial {
        Some(dial) => dial.call().await,
        None => {
            let connected = settings.config.connect(settings.trust.connector()?).await;
            connected.map(|(client, connection)| (client, PgDriver::new(connection)))
        }
    };
    let (client, driver) =
        opened.map_err(|error| failure::explain(error, RequestStage::Connecting))?;
    Ok((client, driver, ()))
}

/// Returns 1: the driver itself tries all servers.
#[cfg(not(unix))]
fn servers(_: &Settings) -> usize {
    1
}

/// Reads until the connection ends, which ends every request on it.
async fn read(
    mut driver: PgDriver,
    notifications: Option<NotificationSender>,
    end: watch::Sender<Option<String>>,
) {
    while let Some(message) = poll_fn(|context| driver.poll(context)).await {
        match message {
            Ok(AsyncMessage::Notification(received)) => {
                if let Some(notifications) = &notifications {
                    // A full channel drops the notification. It is a hint only: the receiver also polls.
                    let (channel, payload) = (received.channel(), received.payload());
                    let _ = notifications.try_send((channel.to_owned(), payload.to_owned()));
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

fn timed_out(after: Duration) -> Error {
    let message = format!("no connection within {after:.1?}: is the server up?");
    Error::new(ErrorKind::Unavailable, message)
}

impl Drop for PgConnection {
    fn drop(&mut self) {
        // The driver alone would finish the request in flight before it closes the socket.
        self.abort();
    }
}

impl fmt::Debug for PgConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("usable", &self.is_usable()).finish_non_exhaustive()
    }
}
