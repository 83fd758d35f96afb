//! One connection to PostgreSQL, with a deadline for every request.

use std::collections::HashMap;
use std::fmt;
use std::future::{Future, poll_fn};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

#[cfg(feature = "jobs")]
use bytes::Bytes;
#[cfg(feature = "jobs")]
use futures_util::SinkExt as _;
use tenure_core::Time;
use tenure_core::primaries::PrimaryRun;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_postgres::Statement;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{AsyncMessage, Client, Row, SimpleQueryMessage, SimpleQueryRow};

use super::dial::PgDriver;
use super::failure::{self, RequestStage};
#[cfg(not(unix))]
use super::login::LoginPid;
#[cfg(not(unix))]
use super::settings::ServerHost;
use super::settings::{ConnectPlan, ConnectWay, PgServer};
#[cfg(unix)]
use super::socket::{self, OpenedSocket, SocketHandle};
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
    /// Process of the session, as it was announced at login; `None` if the caller opened the connection.
    login_pid: Option<i32>,
    clock: Clock,
    /// True while a request is in flight, and after it was interrupted: the next answer would be that of another
    /// request, so the connection must not be reused.
    interrupted: bool,
    plans: Plans,
    /// Server of the connection, if the settings list several.
    pub(super) listed: Option<ListedServer>,
}

/// One of several listed servers, and its run as a primary when the connection was opened; `None` for a standby.
#[derive(Clone, Debug)]
pub(crate) struct ListedServer {
    pub(crate) server: PgServer,
    /// All listed servers, this one among them.
    pub(crate) servers: Arc<[PgServer]>,
    pub(crate) run: Option<PrimaryRun>,
}

/// Prepared statements of a connection.
#[derive(Default)]
struct Plans {
    /// Set if statements may be prepared: only if every request reaches the same session.
    allowed: Option<Arc<PlanRefusals>>,
    /// Prepared statements by their SQL.
    prepared: HashMap<String, Statement>,
}

/// Refusals of prepared statements by a server, shared by the connections of a pool.
///
/// A server that lacks a statement which was prepared before, or that has another of its name, is a pooler that shares
/// its sessions. Another process may have prepared another statement under the same name, since the driver numbers them
/// from 0 in every process. So none is used after the first refusal.
#[derive(Debug, Default)]
pub(crate) struct PlanRefusals(AtomicBool);

impl PlanRefusals {
    /// Notes a refusal. True if the error is one: the request was not executed, and can be repeated.
    fn note(&self, error: &Error) -> bool {
        // invalid_sql_statement_name, duplicate_prepared_statement
        let refused = matches!(failure::code(error), Some("26000" | "42P05"));
        if refused && !self.0.swap(true, Ordering::Relaxed) {
            tracing::warn!(name: "tenure.prepare_refused", %error);
        }
        refused
    }
}

impl PgConnection {
    /// Connects to one server of the settings, or calls the closure of the caller, by `by` at the latest.
    pub(super) async fn open_one(
        way: &ConnectWay<'_>,
        clock: &Clock,
        nth: usize,
        by: Time,
        notifications: Option<NotificationSender>,
    ) -> Result<Self> {
        let begun = clock.now();
        // The driver's own timeout is not used: it covers the socket, but neither TLS nor authentication.
        tokio::select! {
            biased;
            opened = open(way, clock, nth) => {
                let DialledConnection { client, driver, socket, login_pid } = opened?;
                let (end_sender, end) = watch::channel(None);
                let reader = tokio::spawn(read(driver, notifications, end_sender));
                Ok(Self {
                    client,
                    reader,
                    socket,
                    end,
                    login_pid,
                    clock: clock.clone(),
                    interrupted: false,
                    plans: Plans::default(),
                    listed: None,
                })
            }
            () = clock.sleep_until(by) => Err(timed_out(clock.now().since(begun))),
        }
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

    /// Sends data by a `COPY … FROM STDIN` and returns the number of rows.
    #[cfg(feature = "jobs")]
    pub(crate) async fn copy_in(&mut self, sql: &str, data: Vec<Bytes>, by: Time) -> Result<u64> {
        self.begin()?;
        let copying = async {
            let mut sink = std::pin::pin!(self.client.copy_in::<_, Bytes>(sql).await?);
            for part in data {
                sink.feed(part).await?;
            }
            sink.finish().await
        };
        let answer = within(&self.clock, by, copying).await;
        self.finish(answer, RequestStage::Asking)
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

    /// True if the session of process `pid` answered the login. No pooler is in between then, so every statement reaches
    /// that session.
    pub(crate) fn logged_in_to(&self, pid: i32) -> bool {
        self.login_pid == Some(pid)
    }

    /// Subscribes to the end of this connection.
    pub(crate) fn end(&self) -> SessionEnd {
        self.end.clone()
    }

    /// Server of the connection, if the settings list several.
    pub(crate) fn listed(&self) -> Option<&ListedServer> {
        self.listed.as_ref()
    }

    /// True if another request may be sent.
    pub(crate) fn is_usable(&self) -> bool {
        !self.interrupted && !self.client.is_closed()
    }
}

impl PgConnection {
    /// Allows or forbids prepared statements. Allow them only if every request reaches the same session.
    #[cfg(feature = "jobs")]
    pub(crate) fn allow_plans(&mut self, allowed: bool, refusals: &Arc<PlanRefusals>) {
        self.plans.allowed = allowed.then(|| Arc::clone(refusals));
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
        let refusals = self.plans.allowed.clone().filter(|it| !it.0.load(Ordering::Relaxed));
        let Some(refusals) = refusals else { return self.query(sql, parameters, by).await };
        match self.query_prepared(sql, parameters, by).await {
            // The server found no plan, or could not name one: nothing was executed.
            Err(error) if refusals.note(&error) => self.query(sql, parameters, by).await,
            answered => answered,
        }
    }

    async fn query_prepared(
        &mut self,
        sql: &str,
        parameters: &[Parameter<'_>],
        by: Time,
    ) -> Result<Vec<Row>> {
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

/// A connection that was just opened.
struct DialledConnection {
    client: Client,
    driver: PgDriver,
    socket: OwnSocket,
    login_pid: Option<i32>,
}

async fn open(way: &ConnectWay<'_>, clock: &Clock, nth: usize) -> Result<DialledConnection> {
    match way {
        ConnectWay::Servers(plan) => open_server(plan, clock, nth).await,
        ConnectWay::Dial(dial) => {
            let opened = dial.call().await;
            let (client, driver) =
                opened.map_err(|error| failure::explain(error, RequestStage::Connecting))?;
            let socket = OwnSocket::default();
            Ok(DialledConnection { client, driver, socket, login_pid: None })
        }
    }
}

#[cfg(unix)]
async fn open_server(plan: &ConnectPlan, clock: &Clock, nth: usize) -> Result<DialledConnection> {
    let opened = socket::connect(plan, nth, clock).await?;
    let OpenedSocket { client, driver, handle, login_pid } = opened;
    Ok(DialledConnection { client, driver, socket: Some(handle), login_pid })
}

#[cfg(not(unix))]
async fn open_server(plan: &ConnectPlan, _: &Clock, nth: usize) -> Result<DialledConnection> {
    let login_pid = LoginPid::default();
    let mut config = plan.config(nth);
    if let Some(PgServer { host: ServerHost::Name(name), address, port }) = plan.servers.get(nth) {
        config.host(name).port(*port);
        if let Some(address) = address {
            config.hostaddr(*address);
        }
    }
    let connected = config.connect(plan.trust(nth).connector(login_pid.clone())?).await;
    let (client, connection) =
        connected.map_err(|error| failure::explain(error, RequestStage::Connecting))?;
    let driver = PgDriver::new(connection);
    // Known only if the login was encrypted: the driver opens the socket itself.
    Ok(DialledConnection { client, driver, socket: (), login_pid: login_pid.get() })
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

pub(super) fn timed_out(after: Duration) -> Error {
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
