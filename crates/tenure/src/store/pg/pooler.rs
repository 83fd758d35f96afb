//! Poolers between this process and the server.
//!
//! A pooler in transaction mode runs each transaction of a connection on any of its sessions, and others use the same
//! sessions in between. Session locks, prepared statements and LISTEN need a session of their own, so its absence is
//! found before anything is set: the statements here change nothing, and leave no trace in a pool.

use tenure_core::{Random, Time};

use super::connect::{NotificationSender, PgConnection};
use super::failure;
use super::listed;
use super::settings::Settings;
use crate::store::Finding;
use crate::{Clock, Error, ErrorKind, Result, identity};

/// Statements on two connections, in random order, that must all run on the two sessions of the first two.
const PROBES: u32 = 24;

/// Relation between a connection and the sessions of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SessionBinding {
    /// The server itself answers, on one session.
    Direct,
    /// A pooler or proxy is in between, and keeps one session per connection.
    SessionPool,
    /// A pooler is in between, and connections share sessions.
    Shared,
}

impl SessionBinding {
    /// True if every statement of the connection runs on the same session, and no other connection uses it.
    pub(crate) fn has_own_session(self) -> bool {
        self != Self::Shared
    }
}

/// Examines a new connection whose first statement ran on the session of process `pid`.
///
/// Each connection through a pooler is examined, at the cost of a second connection: the mode of a pool can be changed
/// while a process uses it.
///
/// # Errors
///
/// `Unavailable` if a pooler is in between, and a second connection, which is needed to examine it, is not answered.
pub(crate) async fn examine(
    connection: &mut PgConnection,
    pid: i32,
    settings: &Settings,
    clock: &Clock,
    by: Time,
) -> Result<SessionBinding> {
    if connection.logged_in_to(pid) {
        return Ok(SessionBinding::Direct);
    }
    let probed = async {
        let mut other = listed::open_beside(connection, settings, clock, by).await?;
        shares_sessions(connection, &mut other, by).await
    };
    match probed.await {
        Ok(true) => Ok(SessionBinding::Shared),
        Ok(false) => Ok(SessionBinding::SessionPool),
        Err(error) => {
            let message = "a pooler may be in between, and a second connection, which would show its mode, is not \
                           answered: raise the size of the pool, or connect to the server itself";
            Err(failure::nothing_done(Error::new(ErrorKind::Unavailable, message).because(error)))
        }
    }
}

/// True if a statement of one connection ran on a session of the other, or on a new one.
///
/// An idle pool gives its last or its first free session to the next statement, and a busy one gives any: in random
/// order, neither keeps two connections on two sessions for long.
async fn shares_sessions(one: &mut PgConnection, two: &mut PgConnection, by: Time) -> Result<bool> {
    let mut random = Random::new(u64::from_be_bytes(identity::random()?));
    let mut sides = [(one, None), (two, None)];
    for probe in 0..PROBES {
        let side = usize::from(if probe < 2 { probe == 1 } else { random.chance(0.5) });
        let pid = backend_pid(sides[side].0, by).await?;
        let before = sides[side].1.replace(pid);
        if sides[1 - side].1 == Some(pid) || before.is_some_and(|before| before != pid) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Opens a connection, and examines it.
pub(crate) async fn open(
    settings: &Settings,
    clock: &Clock,
    by: Time,
    notifications: Option<NotificationSender>,
) -> Result<(PgConnection, SessionBinding)> {
    let mut connection = listed::open(settings, clock, by, notifications).await?;
    let pid = backend_pid(&mut connection, by).await.map_err(failure::nothing_done)?;
    let binding = examine(&mut connection, pid, settings, clock, by).await?;
    Ok((connection, binding))
}

/// Process of the session on which this statement runs.
async fn backend_pid(connection: &mut PgConnection, by: Time) -> Result<i32> {
    let rows = connection.simple("SELECT pg_backend_pid() AS pid", by).await?;
    let pid = rows.first().and_then(|row| row.get("pid")).and_then(|pid| pid.parse().ok());
    pid.ok_or_else(|| Error::new(ErrorKind::Unknown, "the server sent an unexpected answer"))
}

/// Name of the pooler that is in between.
pub(crate) async fn name(settings: &Settings, clock: &Clock, by: Time) -> &'static str {
    // A server knows the option. PgBouncer refuses the login in its own words.
    let settings = settings.with_value("options", "-c tenure.probe=1");
    match listed::open(&settings, clock, by, None).await {
        Err(refused) if refused.chain().contains("unsupported startup parameter") => "PgBouncer",
        _ => "a pooler",
    }
}

/// Error for locks of sessions that are shared. `pooler` is its [`name`].
pub(crate) fn shared_sessions_error(pooler: &str) -> Error {
    let message = format!(
        "{pooler} in transaction mode is in between, and would grant one lock to several clients: connect to the \
         server itself, or to a pool in session mode, or use lease rows (postgres://)"
    );
    Error::new(ErrorKind::Misconfigured, message)
}

/// Finding for `tenure doctor`. A store that needs sessions of its own has refused shared ones before.
pub(crate) async fn finding(settings: &Settings, clock: &Clock, by: Time) -> Result<Finding> {
    const WHAT: &str = "pooler";
    let (_, binding) = open(settings, clock, by, None).await?;
    if binding == SessionBinding::Direct {
        return Ok(Finding::ok(WHAT, "none, the server itself answers"));
    }
    if binding == SessionBinding::SessionPool && settings.is_dialled() {
        // The caller opens the connections: whether a pooler is in between is not known.
        return Ok(Finding::ok(WHAT, "none that shares sessions"));
    }
    let name = name(settings, clock, by).await;
    Ok(match binding {
        SessionBinding::Shared => Finding::ok(
            WHAT,
            format!("{name} in transaction mode: waiters poll, because no notification arrives"),
        ),
        _ => Finding::ok(WHAT, format!("{name} in session mode")),
    })
}
