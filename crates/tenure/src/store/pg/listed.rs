//! Choice among the servers that the settings list.
//!
//! All of them are asked at the same time, because two may be primaries: after a fail-over the former primary may still
//! be up. The newer one is used, see [`tenure_core::primaries`].

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tenure_core::Time;
use tenure_core::primaries::{PrimaryRun, Standing, standing};

use super::connect::{ListedServer, NotificationSender, PgConnection, timed_out};
use super::role::ServerRole;
use super::settings::{CONNECT_TIMEOUT, ConnectPlan, ConnectWay, PgServer, Settings};
use crate::{Clock, Error, ErrorKind, Result};

/// Time for which the answers of the other servers are awaited, once a suitable one has answered.
const OTHERS_GRACE: Duration = Duration::from_millis(300);

/// Opens a connection within the connect timeout of the settings, and by `by` at the latest. Of several servers the
/// newest primary is used, or else the first suitable server.
///
/// The credentials are read anew. Once a connection was opened, their denial is a transient error, and the same
/// credentials are offered again only after a pause.
pub(crate) async fn open(
    settings: &Settings,
    clock: &Clock,
    by: Time,
    notifications: Option<NotificationSender>,
) -> Result<PgConnection> {
    open_preferring(None, settings, clock, by, notifications).await
}

/// As [`open`]. Of several primaries that nothing orders, `preferred` is used if it is one of them: the rows of holds
/// that go on are there.
pub(crate) async fn open_preferring(
    preferred: Option<&PgServer>,
    settings: &Settings,
    clock: &Clock,
    by: Time,
    notifications: Option<NotificationSender>,
) -> Result<PgConnection> {
    let denials = settings.denials();
    let way = settings.way().map_err(|error| denials.unreadable(error))?;
    let credentials = way.fingerprint(denials.hasher());
    denials.check(credentials, clock.now())?;
    let timeout = match &way {
        ConnectWay::Dial(_) => CONNECT_TIMEOUT,
        ConnectWay::Servers(plan) => plan.connect_timeout,
    };
    let by = by.min(clock.now() + timeout);
    let opened = match &way {
        ConnectWay::Servers(plan) if plan.servers.len() > 1 => {
            open_newest(preferred, &way, plan, clock, by, notifications).await
        }
        ConnectWay::Servers(plan) => open_only(&way, plan, clock, by, notifications).await,
        ConnectWay::Dial(_) => PgConnection::open_one(&way, clock, 0, by, notifications).await,
    };
    denials.note(opened, credentials, clock.now())
}

/// Connects to the only server.
async fn open_only(
    way: &ConnectWay<'_>,
    plan: &ConnectPlan,
    clock: &Clock,
    by: Time,
    notifications: Option<NotificationSender>,
) -> Result<PgConnection> {
    let mut connection = PgConnection::open_one(way, clock, 0, by, notifications).await?;
    if plan.wanted != super::settings::WantedServer::Any {
        ServerRole::of(&mut connection, by).await?.check(plan.wanted)?;
    }
    Ok(connection)
}

/// Connects to all servers, and keeps the connection to the newest primary.
async fn open_newest(
    preferred: Option<&PgServer>,
    way: &ConnectWay<'_>,
    plan: &ConnectPlan,
    clock: &Clock,
    by: Time,
    notifications: Option<NotificationSender>,
) -> Result<PgConnection> {
    let mut opening: FuturesUnordered<_> = (0..plan.servers.len())
        .map(|nth| {
            let notifications = notifications.clone();
            async move { (nth, open_listed(way, plan, nth, clock, by, notifications).await) }
        })
        .collect();
    let (mut opened, mut failed) = (Vec::new(), Vec::new());
    let (begun, mut until) = (clock.now(), by);
    loop {
        let next = tokio::select! {
            biased;
            next = opening.next() => next,
            () = clock.sleep_until(until) => None,
        };
        match next {
            None => break,
            Some((nth, Ok(connection))) => {
                if opened.is_empty() {
                    until = by.min(clock.now() + OTHERS_GRACE);
                }
                opened.push((nth, connection));
            }
            Some((nth, Err(error))) => failed.push((nth, error)),
        }
    }
    opened.sort_unstable_by_key(|(nth, _)| *nth);
    let runs: Vec<Option<PrimaryRun>> = opened.iter().map(|(_, it)| run_of(it)).collect();
    let preferred = opened.iter().position(|(_, it)| it.listed().map(|it| &it.server) == preferred);
    match best(&runs, preferred) {
        Some(best) => Ok(opened.swap_remove(best).1),
        None => Err(reason(failed).unwrap_or_else(|| timed_out(clock.now().since(begun)))),
    }
}

/// Connects to one of several servers, and asks for its role.
pub(super) async fn open_listed(
    way: &ConnectWay<'_>,
    plan: &ConnectPlan,
    nth: usize,
    clock: &Clock,
    by: Time,
    notifications: Option<NotificationSender>,
) -> Result<PgConnection> {
    let mut connection = PgConnection::open_one(way, clock, nth, by, notifications).await?;
    let role = ServerRole::of(&mut connection, by).await?;
    role.check(plan.wanted)?;
    let servers: Arc<[PgServer]> = plan.servers.clone().into();
    let server = servers.get(nth).cloned();
    connection.listed = server.map(|server| ListedServer { server, servers, run: role.run });
    Ok(connection)
}

/// Opens a second connection to the server of `first`.
pub(crate) async fn open_beside(
    first: &PgConnection,
    settings: &Settings,
    clock: &Clock,
    by: Time,
) -> Result<PgConnection> {
    let Some(listed) = first.listed() else { return open(settings, clock, by, None).await };
    let way = settings.way()?;
    let nth = match &way {
        ConnectWay::Servers(plan) => plan.servers.iter().position(|it| *it == listed.server),
        ConnectWay::Dial(_) => Some(0),
    };
    let Some(nth) = nth else {
        let message = format!("{} is no longer listed", listed.server);
        return Err(Error::new(ErrorKind::Unavailable, message));
    };
    PgConnection::open_one(&way, clock, nth, by, None).await
}

fn run_of(connection: &PgConnection) -> Option<PrimaryRun> {
    connection.listed().and_then(|listed| listed.run)
}

/// Index of the server to use: the preferred or else the first primary that no other supersedes, or else the first
/// server. `None` stands for a standby.
fn best(runs: &[Option<PrimaryRun>], preferred: Option<usize>) -> Option<usize> {
    let primaries = || runs.iter().enumerate().filter_map(|(nth, run)| Some((nth, (*run)?)));
    let newest = || {
        let is_newest =
            |run: PrimaryRun| !matches!(standing(run, primaries()), Standing::Superseded { .. });
        primaries().filter(move |(_, run)| is_newest(*run)).map(|(nth, _)| nth)
    };
    newest().find(|nth| Some(*nth) == preferred).or(newest().next()).or(if runs.is_empty() {
        None
    } else {
        Some(0)
    })
}

/// Reason that no server can be used. A denial counts only if every server denied: after a denial the same credentials
/// are offered again only after a pause, which must not delay the connect to a server that is being restarted.
fn reason(failed: Vec<(usize, Error)>) -> Option<Error> {
    let first =
        failed.into_iter().min_by_key(|(nth, error)| (error.kind() == ErrorKind::Denied, *nth));
    first.map(|(_, error)| error)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn primary(timeline: i64, started: i64) -> PrimaryRun {
        PrimaryRun { system: 1, timeline, started }
    }

    #[test]
    fn the_newest_primary_is_used_and_of_equals_the_first() {
        assert_eq!(best(&[], None), None);
        assert_eq!(best(&[None, None], None), Some(0));
        assert_eq!(best(&[None, Some(primary(1, 1))], None), Some(1));
        assert_eq!(best(&[Some(primary(1, 1)), None, Some(primary(2, 3))], None), Some(2));
        assert_eq!(best(&[Some(primary(2, 3)), Some(primary(1, 1))], None), Some(0));
        assert_eq!(
            best(&[Some(primary(1, 1)), Some(primary(2, 2)), Some(primary(2, 3))], None),
            Some(1)
        );
        let unordered = [None, Some(primary(2, 2)), Some(primary(2, 3)), Some(primary(1, 1))];
        assert_eq!(best(&unordered, Some(2)), Some(2), "its holds go on");
        assert_eq!(best(&unordered, Some(3)), Some(1), "an old primary is not used");
    }

    #[test]
    fn a_denial_counts_only_if_every_server_denied() {
        let error = |kind| Error::new(kind, "it fails");
        let (denied, down) = (ErrorKind::Denied, ErrorKind::Unavailable);
        let found = |kinds: &[ErrorKind]| {
            let failed = kinds.iter().map(|kind| error(*kind)).enumerate();
            reason(failed.collect()).map(|error| error.kind())
        };
        assert_eq!(found(&[]), None);
        assert_eq!(found(&[denied, denied]), Some(denied));
        assert_eq!(found(&[denied, down]), Some(down));
    }
}
