//! Other primaries among the listed servers, beside the primary that grants.
//!
//! After each grant, and with each renewal, the other listed servers are asked for their role. A grant is therefore never
//! made at two primaries by processes that reach all listed servers. Let one be granted at the older primary, and the
//! other at the newer. If the first then found that the other server is no primary, it was granted before the promotion;
//! so the second, which asks the older primary after its own grant, finds that hold and withdraws.
//!
//! Other requests are checked beforehand, once per [`CHECK_INTERVAL`]: what is written to an old primary is lost when
//! that server becomes a standby.
//!
//! A server that does not answer cannot be asked: the grant counts without it. With one listed server nothing is asked.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tenure_core::Time;
use tenure_core::jobs::RenewalOutcome;
use tenure_core::keeper::Loss;
use tenure_core::primaries::{PrimaryRun, Standing, standing};

use super::connect::{ListedServer, PgConnection};
use super::failure;
use super::probe::{HeldQuestion, ServerProbe};
use super::role::ServerRole;
use super::settings::{ConnectWay, PgServer, Settings};
use crate::mutex::Mutex;
use crate::store::Finding;
use crate::{Clock, Error, ErrorKind, Result};

/// Least time in which the other servers can be asked.
const LEAST_TIME: Duration = Duration::from_millis(20);
/// Time for which the answers of the other servers are good enough for a request that neither grants nor renews.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Other primaries, as the holders and claimers of one store see them.
#[derive(Debug)]
pub(crate) struct Primaries {
    settings: Settings,
    clock: Clock,
    /// One probe per server that was ever listed.
    probes: Mutex<Vec<Arc<ServerProbe>>>,
    verdict: Mutex<Verdict>,
    /// Last message to the log; empty if there was nothing to report.
    reported: Mutex<String>,
}

/// Result of the last look at the other servers.
#[derive(Clone, Copy, Debug, Default)]
struct Verdict {
    /// Newest primary, if the primaries could be ordered.
    newest: Option<PrimaryRun>,
    /// True if the primary that was looked from must not grant.
    must_not_grant: bool,
    /// Time before the other servers were asked.
    asked: Option<Time>,
}

/// A primary beside the own one.
#[derive(Debug)]
struct OtherPrimary {
    probe: Arc<ServerProbe>,
    run: PrimaryRun,
}

/// Outcome of a check after a renewal.
pub(crate) enum RenewalCheck {
    /// The rows with these numbers, from 1, are held at another primary, too. The others are held here alone.
    Done(Vec<usize>),
    /// A newer primary is up: the holds on this one have ended.
    Superseded(Error),
}

/// Roles of the other listed servers, as seen from one primary.
#[derive(Debug)]
enum PrimaryView {
    /// It may grant what these older primaries do not hold.
    Newest { older: Vec<OtherPrimary> },
    /// It must not grant, and its holds have ended, for the reason of this error.
    Superseded(Error),
    /// It must not grant, for the reason of this error. Its holds go on, unless they are held at one of `with`, too.
    Unordered { with: Vec<OtherPrimary>, error: Error },
}

impl PrimaryView {
    /// Older primaries, whose holds must be respected; an error if the server must not grant.
    fn grants(self) -> Result<Vec<OtherPrimary>> {
        match self {
            Self::Newest { older } => Ok(older),
            Self::Superseded(error) | Self::Unordered { error, .. } => Err(error),
        }
    }
}

impl Primaries {
    pub(crate) fn new(settings: Settings, clock: Clock) -> Self {
        Self {
            settings,
            clock,
            probes: Mutex::default(),
            verdict: Mutex::default(),
            reported: Mutex::default(),
        }
    }

    /// False if the last look found a newer primary than that of the connection.
    pub(crate) fn is_current(&self, connection: &PgConnection) -> bool {
        let own = connection.listed().and_then(|listed| listed.run);
        let newest = self.verdict.lock().newest;
        let (Some(own), Some(newest)) = (own, newest) else { return true };
        !matches!(standing(own, [(0, newest)]), Standing::Superseded { .. })
    }

    /// Returns false if the connection leads to an old primary. Call it before a request that neither grants nor renews.
    ///
    /// # Errors
    ///
    /// `Unavailable` if no time is left.
    pub(crate) async fn check_current(
        &self,
        connection: &mut PgConnection,
        by: Time,
    ) -> Result<bool> {
        let asked = self.verdict.lock().asked;
        let is_fresh = |asked: Time| self.clock.now().since(asked) < CHECK_INTERVAL;
        if connection.listed().is_none() || asked.is_some_and(is_fresh) {
            return Ok(self.is_current(connection));
        }
        Ok(!matches!(self.look(connection, by).await?, PrimaryView::Superseded(_)))
    }

    /// Fails if the last look found a reason to grant nothing, and it still holds. Call it before a claim, so that a
    /// claim that would be withdrawn is not made.
    pub(crate) async fn check_claim(&self, connection: &mut PgConnection, by: Time) -> Result<()> {
        let must_not_grant = self.verdict.lock().must_not_grant;
        if must_not_grant {
            self.look(connection, by).await?.grants()?;
        }
        Ok(())
    }

    /// Checks a grant that was just made on `connection`. Returns the numbers, from 1, of the rows that must be
    /// withdrawn, and the older primary at which the last of them is held.
    ///
    /// # Errors
    ///
    /// `Unavailable` if the whole grant must be withdrawn, because the server must not grant.
    pub(crate) async fn confirm_grant(
        &self,
        connection: &mut PgConnection,
        question: HeldQuestion<'_>,
        by: Time,
    ) -> Result<(Vec<usize>, Option<Error>)> {
        let (mut held, mut error) = (Vec::new(), None);
        for other in self.look(connection, by).await?.grants()? {
            let found = other.probe.held(question, by).await?;
            if !found.is_empty() {
                error = Some(other.held_error());
                held.extend(found);
            }
        }
        Ok((held, error))
    }

    /// Checks holds that were just renewed on `connection`.
    ///
    /// # Errors
    ///
    /// `Unavailable` if another primary does not answer the question.
    pub(crate) async fn confirm_renewal(
        &self,
        connection: &mut PgConnection,
        question: HeldQuestion<'_>,
        by: Time,
    ) -> Result<RenewalCheck> {
        let mut held = Vec::new();
        match self.look(connection, by).await? {
            PrimaryView::Newest { .. } => {}
            PrimaryView::Superseded(error) => return Ok(RenewalCheck::Superseded(error)),
            PrimaryView::Unordered { with, .. } => {
                for other in with {
                    held.extend(other.probe.held(question, by).await?);
                }
            }
        }
        Ok(RenewalCheck::Done(held))
    }

    /// Checks rows that were just renewed on `connection`, and refuses those that are held at another primary, too.
    ///
    /// # Errors
    ///
    /// `Unavailable` if a newer primary is up: the rows must be renewed there.
    pub(crate) async fn refuse(
        &self,
        connection: &mut PgConnection,
        question: HeldQuestion<'_>,
        mut outcomes: Vec<RenewalOutcome>,
        by: Time,
    ) -> Result<Vec<RenewalOutcome>> {
        match self.confirm_renewal(connection, question, by).await? {
            RenewalCheck::Superseded(error) => return Err(error),
            RenewalCheck::Done(held) => {
                for nth in held {
                    if let Some(outcome) = nth.checked_sub(1).and_then(|nth| outcomes.get_mut(nth))
                    {
                        *outcome = RenewalOutcome::Refused(Loss::Taken);
                    }
                }
            }
        }
        Ok(outcomes)
    }

    /// Asks the other listed servers for their roles.
    ///
    /// # Errors
    ///
    /// `Unavailable` if no time is left, or if a connection through a pooler reached a standby. A server that does not
    /// answer is no error.
    async fn look(&self, connection: &mut PgConnection, by: Time) -> Result<PrimaryView> {
        let Some(ListedServer { server, servers, run: Some(own) }) = connection.listed().cloned()
        else {
            return Ok(PrimaryView::Newest { older: Vec::new() });
        };
        let asked = self.clock.now();
        if by.since(asked) < LEAST_TIME {
            let message = "no time is left to ask the other servers for their roles";
            return Err(Error::new(ErrorKind::Unavailable, message));
        }
        let others = servers.iter().filter(|it| **it != server).map(|it| self.probe(it));
        let questions = others.map(|probe| async move {
            let run = probe.role(by).await.ok()?;
            run.map(|run| OtherPrimary { probe, run })
        });
        let others: Vec<OtherPrimary> = join_all(questions).await.into_iter().flatten().collect();
        let runs = || others.iter().enumerate().map(|(nth, other)| (nth, other.run));
        let mut own = own;
        let mut found = standing(own, runs());
        if matches!(found, Standing::Unordered { .. }) {
            // Behind a pooler the server may have been restarted since this connection was opened. Its present run is
            // then the same as that of another listed pooler.
            own = current_run(connection, by).await?;
            found = standing(own, runs());
        }
        Ok(self.judge(found, &shown(&server, own), own, others, asked))
    }

    /// Keeps and reports the result of a look.
    fn judge(
        &self,
        found: Standing,
        own_shown: &str,
        own: PrimaryRun,
        others: Vec<OtherPrimary>,
        asked: Time,
    ) -> PrimaryView {
        let pick = |others: Vec<OtherPrimary>, picked: &[usize]| -> Vec<OtherPrimary> {
            let picked = |(nth, other)| picked.contains(&nth).then_some(other);
            others.into_iter().enumerate().filter_map(picked).collect()
        };
        let (view, newest, report) = match found {
            Standing::Newest { older } => {
                let older = pick(others, &older);
                let warning = older.first().map(|old| {
                    format!("{own_shown} is used, and the older primary {old} is still up")
                });
                (PrimaryView::Newest { older }, Some(own), warning.unwrap_or_default())
            }
            Standing::Superseded { by } => {
                let newer = pick(others, &[by]);
                let (name, run) = newer
                    .first()
                    .map_or((String::new(), None), |it| (it.to_string(), Some(it.run)));
                let message = format!(
                    "{own_shown} is an old primary, and is not used: {name} was promoted since"
                );
                let error = Error::new(ErrorKind::Unavailable, message.clone());
                (PrimaryView::Superseded(error), run, message)
            }
            Standing::Unordered { with } => {
                let with = pick(others, &with);
                let message = unordered(own_shown, own, &with);
                let error = Error::new(ErrorKind::Unavailable, message.clone());
                (PrimaryView::Unordered { with, error }, None, message)
            }
        };
        let must_not_grant = !matches!(view, PrimaryView::Newest { .. });
        *self.verdict.lock() = Verdict { newest, must_not_grant, asked: Some(asked) };
        self.report(report);
        view
    }

    /// Reports a change of what the last look found.
    fn report(&self, message: String) {
        let mut reported = self.reported.lock();
        if *reported == message {
            return;
        }
        if message.is_empty() {
            tracing::info!(name: "tenure.primaries", store = %self.settings, "one primary is up");
        } else {
            tracing::warn!(name: "tenure.primaries", store = %self.settings, "{message}");
        }
        *reported = message;
    }

    /// Probe of a server.
    fn probe(&self, server: &PgServer) -> Arc<ServerProbe> {
        let mut probes = self.probes.lock();
        if let Some(known) = probes.iter().find(|probe| probe.server == *server) {
            return Arc::clone(known);
        }
        let probe = ServerProbe::new(server.clone(), self.settings.clone(), self.clock.clone());
        probes.push(Arc::clone(&probe));
        probe
    }

    /// Finding for `tenure doctor` about the listed servers; `None` if the caller opens the connections.
    pub(crate) async fn finding(&self, by: Time) -> Result<Option<Finding>> {
        const WHAT: &str = "listed servers";
        let servers = match self.settings.way()? {
            ConnectWay::Servers(plan) if plan.servers.len() > 1 => plan.servers,
            ConnectWay::Servers(_) => {
                let detail = "one: a second primary would not be noticed; if the server has standbys, list them too";
                return Ok(Some(Finding::ok(WHAT, detail)));
            }
            ConnectWay::Dial(_) => return Ok(None),
        };
        let probes: Vec<Arc<ServerProbe>> = servers.iter().map(|it| self.probe(it)).collect();
        let roles = join_all(probes.iter().map(|probe| probe.role(by))).await;
        let mut primaries = Vec::new();
        let shown = probes.iter().zip(&roles).map(|(probe, role)| match role {
            Ok(Some(run)) => {
                primaries.push((&probe.server, *run));
                format!("{}, a primary", shown(&probe.server, *run))
            }
            Ok(None) => format!("{}, a standby", probe.server),
            Err(error) => format!("{}, no answer ({})", probe.server, error.chain()),
        });
        let detail = shown.collect::<Vec<_>>().join("; ");
        let runs = || primaries.iter().map(|(_, run)| *run).enumerate();
        let standings: Vec<Standing> = runs().map(|(_, run)| standing(run, runs())).collect();
        let is_unordered = |it: &Standing| matches!(it, Standing::Unordered { .. });
        let has_older =
            |it: &Standing| matches!(it, Standing::Newest { older } if !older.is_empty());
        Ok(Some(if standings.iter().any(is_unordered) {
            Finding::failed(WHAT, detail).advise(
                "nothing orders two primaries of the same timeline: nothing is granted until one is stopped",
            )
        } else if standings.iter().any(has_older) {
            Finding::warning(WHAT, detail).advise("stop the older primary, or make it a standby")
        } else if roles.iter().any(std::result::Result::is_err) {
            Finding::warning(WHAT, detail)
                .advise("a server that does not answer cannot be ruled out as a second primary")
        } else {
            Finding::ok(WHAT, detail)
        }))
    }
}

impl OtherPrimary {
    /// Error for a grant of something that is held at this older primary.
    fn held_error(&self) -> Error {
        let message = format!(
            "the lock is still held at the older primary {self}, and can be granted when that hold ends"
        );
        Error::new(ErrorKind::Unavailable, message)
    }
}

/// Present run of the primary that a connection reaches.
async fn current_run(connection: &mut PgConnection, by: Time) -> Result<PrimaryRun> {
    let run = ServerRole::of(connection, by).await?.run.ok_or_else(|| failure::standby(true))?;
    if let Some(listed) = &mut connection.listed {
        listed.run = Some(run);
    }
    Ok(run)
}

impl std::fmt::Display for OtherPrimary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&shown(&self.probe.server, self.run))
    }
}

fn shown(server: &PgServer, run: PrimaryRun) -> String {
    format!("{server} (timeline {})", run.timeline)
}

fn unordered(own_shown: &str, own: PrimaryRun, with: &[OtherPrimary]) -> String {
    let others = with.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ");
    if with.iter().any(|other| other.run.system != own.system) {
        return format!(
            "{own_shown} and {others} are primaries of different clusters: list the servers of one cluster"
        );
    }
    format!(
        "{own_shown} and {others} are both primaries, and nothing tells which is right: neither grants until one is \
         stopped"
    )
}
