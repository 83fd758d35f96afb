//! Questions to one of several listed servers: its role, and what is held there.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tenure_core::Time;
use tenure_core::primaries::PrimaryRun;
use tokio::task::JoinHandle;
use tokio_postgres::Row;

use super::connect::{Parameter, PgConnection};
use super::denial::DenialLog;
use super::failure;
use super::role::ServerRole;
use super::settings::{ConnectWay, PgServer, Settings};
use crate::{Clock, Error, ErrorKind, Result};

/// Maximum time to ask a server for its role, if the request has twice as much left.
const ASK_LIMIT: Duration = Duration::from_secs(1);
/// The same for a server that did not answer last time. One that is up again answers in this time, unless its link is
/// slow: then a later question finds it connected.
const AWAY_LIMIT: Duration = Duration::from_millis(250);
/// Maximum time to connect. A shorter one would never reach a server behind a slow link, a longer one would keep trying
/// an address from before the server came back.
const CONNECT_LIMIT: Duration = Duration::from_secs(3);

/// A question to another primary: which of the rows of a request are held there by another holder. The answer has the
/// column `nth`, the number of such a row in the request, from 1.
#[derive(Clone, Copy)]
pub(crate) struct HeldQuestion<'a> {
    pub(crate) sql: &'a str,
    pub(crate) parameters: &'a [Parameter<'a>],
}

/// A listed server, with a connection that is kept for the next question.
#[derive(Debug)]
pub(super) struct ServerProbe {
    pub(super) server: PgServer,
    settings: Settings,
    clock: Clock,
    /// Denials by this server: the same credentials are offered again only after a pause.
    denials: DenialLog,
    state: tokio::sync::Mutex<ProbeState>,
    /// True if the last question was not answered.
    away: AtomicBool,
}

#[derive(Debug, Default)]
struct ProbeState {
    connection: Option<PgConnection>,
    /// Connects while no question waits for it.
    connecting: Option<JoinHandle<Result<PgConnection>>>,
    /// Answer to the last question, and the time at which it was asked.
    last: Option<(Time, LastAnswer)>,
}

#[derive(Clone, Copy, Debug)]
enum LastAnswer {
    /// Run of a primary; `None` for a standby.
    Role(Option<PrimaryRun>),
    Missing,
}

impl ServerProbe {
    pub(super) fn new(server: PgServer, settings: Settings, clock: Clock) -> Arc<Self> {
        Arc::new(Self {
            server,
            settings,
            clock,
            denials: DenialLog::after_a_connect(),
            state: tokio::sync::Mutex::default(),
            away: AtomicBool::new(false),
        })
    }

    /// Asks for the role; `None` for a standby. The question is sent after this call begins.
    pub(super) async fn role(self: &Arc<Self>, by: Time) -> Result<Option<PrimaryRun>> {
        let begun = self.clock.now();
        let limit = if self.away.load(Ordering::Relaxed) { AWAY_LIMIT } else { ASK_LIMIT };
        // A server that is away must not use up the time of the request.
        let until = begun + limit.min(by.since(begun) / 2);
        let mut state = tokio::select! {
            biased;
            state = self.state.lock() => state,
            () = self.clock.sleep_until(until) => return Err(self.no_answer()),
        };
        // Many holds ask at the same moment. Without this, each of them would wait for a server that is away, one after
        // the other, until leases end.
        if let Some((asked, answer)) = state.last
            && asked >= begun
        {
            return match answer {
                LastAnswer::Role(run) => Ok(run),
                LastAnswer::Missing => Err(self.no_answer()),
            };
        }
        let asked = self.clock.now();
        let answer = self.ask(&mut state, until, by).await;
        let last = answer.as_ref().map_or(LastAnswer::Missing, |run| LastAnswer::Role(*run));
        state.last = Some((asked, last));
        drop(state);
        self.report(&answer);
        answer
    }

    async fn ask(
        self: &Arc<Self>,
        state: &mut ProbeState,
        until: Time,
        by: Time,
    ) -> Result<Option<PrimaryRun>> {
        if let Some(mut connection) = state.connection.take().filter(PgConnection::is_usable) {
            // Only half of the time: a connection may have broken silently, and another one is then opened.
            let half = self.clock.now() + until.since(self.clock.now()) / 2;
            if let Ok(role) = ServerRole::of(&mut connection, half).await {
                state.connection = Some(connection);
                return Ok(role.run);
            }
        }
        let mut connecting = state.connecting.take().unwrap_or_else(|| {
            let probe = Arc::clone(self);
            tokio::spawn(async move { probe.connect().await })
        });
        let connected = tokio::select! {
            biased;
            connected = &mut connecting => connected,
            () = self.clock.sleep_until(until) => {
                state.connecting = Some(connecting);
                return Err(self.no_answer());
            }
        };
        let mut connection = connected.map_err(|_| self.no_answer())??;
        // A round trip more than planned, so that a connection that was opened at the last moment is not wasted.
        let until = until.max(self.clock.now() + AWAY_LIMIT).min(by);
        let role = ServerRole::of(&mut connection, until).await?;
        state.connection = Some(connection);
        Ok(role.run)
    }

    async fn connect(&self) -> Result<PgConnection> {
        let way = self.settings.way()?;
        let ConnectWay::Servers(plan) = &way else { return Err(self.no_answer()) };
        let Some(nth) = plan.servers.iter().position(|it| *it == self.server) else {
            let message = format!("{} is no longer listed", self.server);
            return Err(Error::new(ErrorKind::Unavailable, message));
        };
        let credentials = way.fingerprint(self.denials.hasher());
        self.denials.check(credentials, self.clock.now())?;
        let by = self.clock.now() + CONNECT_LIMIT;
        let opened = PgConnection::open_one(&way, &self.clock, nth, by, None).await;
        self.denials.note(opened, credentials, self.clock.now())
    }

    /// Reports that the server has gone away, or is back.
    fn report(&self, answer: &Result<Option<PrimaryRun>>) {
        let (server, store) = (&self.server, &self.settings);
        match (answer, self.away.swap(answer.is_err(), Ordering::Relaxed)) {
            (Err(error), false) => tracing::warn!(
                name: "tenure.listed_server_away", %store, %server, error = error.chain(),
                "a listed server does not answer: a second primary there would not be noticed"
            ),
            (Ok(_), true) => {
                tracing::info!(name: "tenure.listed_server_back", %store, %server, "it answers again");
            }
            _ => {}
        }
    }

    /// Numbers of the rows that are held there by another holder.
    ///
    /// # Errors
    ///
    /// `Unavailable` if the server does not answer.
    pub(super) async fn held(&self, question: HeldQuestion<'_>, by: Time) -> Result<Vec<usize>> {
        let mut state = tokio::select! {
            biased;
            state = self.state.lock() => state,
            () = self.clock.sleep_until(by) => return Err(self.no_answer()),
        };
        let Some(connection) = state.connection.as_mut() else { return Err(self.no_answer()) };
        let rows = match connection.query(question.sql, question.parameters, by).await {
            // There is no such table: nothing is held.
            Err(error) if matches!(failure::code(&error), Some("42P01" | "3F000")) => Vec::new(),
            answer => answer.map_err(failure::nothing_done)?,
        };
        let number = |row: &Row| usize::try_from(row.get::<_, i64>("nth")).unwrap_or_default();
        Ok(rows.iter().map(number).collect())
    }

    fn no_answer(&self) -> Error {
        Error::new(ErrorKind::Unavailable, format!("{} did not answer in time", self.server))
    }
}
