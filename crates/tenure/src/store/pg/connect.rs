//! One connection to PostgreSQL, whose requests end in time.

#[cfg(feature = "jobs")]
use std::collections::HashMap;
use std::fmt;
use std::future::{Future, poll_fn};
#[cfg(unix)]
use std::sync::Arc;
use std::time::Duration;

use tenure_core::Time;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
#[cfg(feature = "jobs")]
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

/// A parameter and its type: with both given, a statement needs neither a name nor a second round trip.
pub(crate) type Parameter<'a> = (&'a (dyn ToSql + Sync), Type);

/// Who is told of notifications: channel and payload.
pub(crate) type NotificationSender = mpsc::Sender<(String, String)>;

/// How a connection ended: the server's word for it, as a SQLSTATE, where it gave one. The channel is closed where we cut
/// the connection ourselves.
pub(crate) type SessionEnd = watch::Receiver<Option<String>>;

/// A connection, and the task that reads from it. Dropping it closes the socket, whatever is under way.
pub(crate) struct PgConnection {
    client: Client,
    reader: JoinHandle<()>,
    socket: OwnSocket,
    end: SessionEnd,
    clock: Clock,
    /// A request was begun and has not ended: nobody else may use this connection.
    interrupted: bool,
    #[cfg(feature = "jobs")]
    plans: Plans,
}

/// What the server keeps of statements that are made again and again.
#[cfg(feature = "jobs")]
#[derive(Default)]
struct Plans {
    /// Whether there may be any: only where every request reaches the same session.
    allowed: bool,
    /// By their text.
    prepared: HashMap<String, Statement>,
}

impl PgConnection {
    /// Connects, within the time that the settings give and until `by` at most. Of several servers the first that will do
    /// is taken, and each has its share of the time.
    pub(crate) async fn open(
        settings: &Settings,
        clock: &Clock,
        by: Time,
        news: Option<NotificationSender>,
    ) -> Result<Self> {
        let by = by.min(clock.now() + settings.connect_timeout);
        let mut failed = None;
        let servers = servers(settings);
        for nth in 0..servers {
            let left = by.since(clock.now()) / u32::try_from(servers - nth).unwrap_or(1);
            match Self::open_one(settings, clock, nth, clock.now() + left, news.clone()).await {
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
        news: Option<NotificationSender>,
    ) -> Result<Self> {
        let begun = clock.now();
        // Not the driver's own limit: that covers the socket, and neither TLS nor the greeting.
        let mut connection = tokio::select! {
            biased;
            opened = open(settings, nth) => {
                let (client, driver, socket) = opened?;
                let (tell, end) = watch::channel(None);
                let reader = tokio::spawn(read(driver, news, tell));
                Self {
                    client,
                    reader,
                    socket,
                    end,
                    clock: clock.clone(),
                    interrupted: false,
                    #[cfg(feature = "jobs")]
                    plans: Plans::default(),
                }
            }
            () = clock.sleep_until(by) => return Err(timed_out(clock.now().since(begun))),
        };
        let attributes = settings.config.get_target_session_attrs();
        if settings.dial.is_none() && attributes == TargetSessionAttrs::ReadWrite {
            let rows = connection.simple("SHOW transaction_read_only", by).await;
            let rows = rows.map_err(failure::nothing_done)?;
            if rows.first().and_then(|row| row.get(0)) != Some("off") {
                let message = "the server only reads, and no other that can be written to answers";
                return Err(Error::new(ErrorKind::Unavailable, message));
            }
        }
        Ok(connection)
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
        self.begin()?;
        let answer = within(&self.clock, by, self.client.query_typed(sql, parameters)).await;
        self.finish(answer, RequestStage::Asking)
    }

    /// Runs statements without parameters, one transaction unless they say otherwise.
    pub(crate) async fn run(&mut self, sql: &str, by: Time) -> Result<()> {
        self.begin()?;
        let answer = within(&self.clock, by, self.client.batch_execute(sql)).await;
        self.finish(answer, RequestStage::Asking)
    }

    /// Sends statements without parameters as one message, so that the server never waits for the rest of it; the rows of
    /// all of them.
    pub(crate) async fn simple(&mut self, sql: &str, by: Time) -> Result<Vec<SimpleQueryRow>> {
        self.begin()?;
        let answer = within(&self.clock, by, self.client.simple_query(sql)).await;
        let messages = self.finish(answer, RequestStage::Asking)?;
        Ok(messages.into_iter().filter_map(row).collect())
    }

    fn begin(&mut self) -> Result<()> {
        self.interrupted = true;
        if self.client.is_closed() {
            let message = "the connection was closed before anything was asked";
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
                Err(Error::new(ErrorKind::Unknown, format!("no answer within {waited:?}")))
            }
        }
    }

    /// Ends it at once, whoever else has a descriptor of it.
    fn abort(&self) {
        self.reader.abort();
        #[cfg(unix)]
        if let Some(socket) = &self.socket {
            socket.shutdown();
        }
    }

    /// What keeps it open in another process, where we made the socket.
    #[cfg(unix)]
    pub(crate) fn socket(&self) -> Option<&Arc<SocketHandle>> {
        self.socket.as_ref()
    }

    /// Tells of the end of this connection.
    pub(crate) fn end(&self) -> SessionEnd {
        self.end.clone()
    }

    /// Whether another request may be made on it.
    pub(crate) fn is_usable(&self) -> bool {
        !self.interrupted && !self.client.is_closed()
    }
}

#[cfg(feature = "jobs")]
impl PgConnection {
    /// Whether statements may be prepared: only where every request reaches the same session.
    pub(crate) fn allow_plans(&mut self, allowed: bool) {
        self.plans.allowed = allowed;
    }

    /// The same, with a statement that the server keeps its plan of, where that can be.
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
            // Nothing was done yet.
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

/// What the driver says, or how long it said nothing.
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

/// What keeps a connection open elsewhere, where we made its socket.
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

/// The driver tries them all.
#[cfg(not(unix))]
fn servers(_: &Settings) -> usize {
    1
}

/// Reads until the connection ends, and with it every request on it.
async fn read(
    mut driver: PgDriver,
    news: Option<NotificationSender>,
    end: watch::Sender<Option<String>>,
) {
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

fn timed_out(after: Duration) -> Error {
    let message = format!("no connection within {after:?}: is the server up?");
    Error::new(ErrorKind::Unavailable, message)
}

impl Drop for PgConnection {
    fn drop(&mut self) {
        // The driver alone would finish what was asked before it lets go of the socket.
        self.abort();
    }
}

impl fmt::Debug for PgConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("usable", &self.is_usable()).finish_non_exhaustive()
    }
}
