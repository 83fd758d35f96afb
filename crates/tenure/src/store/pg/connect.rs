//! One connection to PostgreSQL, whose requests end in time.

use std::collections::HashMap;
use std::fmt;
use std::future::{Future, poll_fn};
use std::time::Duration;

use tenure_core::Time;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_postgres::tls::MakeTlsConnect;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{AsyncMessage, Client, Row, Socket, Statement};

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
    /// What was prepared on it, by its text.
    prepared: HashMap<String, Statement>,
    /// Whether statements may be prepared: only where every request reaches the same session.
    pub(crate) prepares: bool,
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
                let (clock, prepared) = (clock.clone(), HashMap::new());
                Ok(Self { client, reader, clock, torn: false, prepared, prepares: false })
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
        self.begin()?;
        let answer = within(&self.clock, by, self.client.query_typed(sql, parameters)).await;
        self.end(answer, Stage::Asking)
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
        if !self.prepares {
            return self.query(sql, parameters, by).await;
        }
        self.begin()?;
        let known = self.prepared.get(sql).cloned();
        let statement = if let Some(statement) = known {
            statement
        } else {
            let types: Vec<Type> = parameters.iter().map(|(_, kind)| kind.clone()).collect();
            let preparing = self.client.prepare_typed(sql, &types);
            let answer = within(&self.clock, by, preparing).await;
            // Nothing was done yet.
            let statement = self.end(answer, Stage::Connecting)?;
            self.prepared.insert(sql.to_owned(), statement.clone());
            self.begin()?;
            statement
        };
        let values: Vec<_> = parameters.iter().map(|(value, _)| *value).collect();
        let answer = within(&self.clock, by, self.client.query(&statement, &values)).await;
        self.end(answer, Stage::Asking)
    }

    fn begin(&mut self) -> Result<()> {
        self.torn = true;
        if self.client.is_closed() {
            let message = "the connection was closed before anything was asked";
            return Err(Error::new(ErrorKind::Unavailable, message));
        }
        Ok(())
    }

    fn end<T>(&mut self, answer: Answer<T>, stage: Stage) -> Result<T> {
        match answer {
            Ok(answer) => {
                self.torn = self.client.is_closed();
                answer.map_err(|error| failure::explain(error, stage))
            }
            Err(waited) => {
                self.reader.abort();
                Err(Error::new(ErrorKind::Unknown, format!("no answer within {waited:?}")))
            }
        }
    }

    /// Runs statements without parameters, one transaction unless they say otherwise.
    pub(crate) async fn run(&mut self, sql: &str, by: Time) -> Result<()> {
        self.begin()?;
        let answer = within(&self.clock, by, self.client.batch_execute(sql)).await;
        self.end(answer, Stage::Asking)
    }

    /// Whether another request may be made on it.
    pub(crate) fn is_usable(&self) -> bool {
        !self.torn && !self.client.is_closed()
    }
}

/// What the driver says, or how long it said nothing.
type Answer<T> = std::result::Result<std::result::Result<T, tokio_postgres::Error>, Duration>;

async fn within<T>(
    clock: &Clock,
    by: Time,
    request: impl Future<Output = std::result::Result<T, tokio_postgres::Error>>,
) -> Answer<T> {
    let begun = clock.now();
    tokio::select! {
        biased;
        answer = request => Ok(answer),
        () = clock.sleep_until(by) => Err(clock.now().since(begun)),
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
