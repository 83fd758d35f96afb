//! `tenure lead`: takes part in an election; a command runs while leading.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::future::{pending, ready};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use nix::sys::signal::Signal;
use tenure::election::{
    Election, ElectionState, Event as ElectionEvent, Events, Leader, Leadership, StateChange,
    StopReason,
};
use tenure::store::HolderState;
use tenure::{Client, ErrorKind, Key};

use super::request;
use super::session::{self, Session};
use super::supervised_command::{CommandEnd, HoldContext, SupervisedCommand};
use crate::args::election::ElectionArgs;
use crate::args::output::Output;
use crate::args::store::{AdvisoryKeyArgs, StoreUrl};
use crate::exit::{self, Exit};
use crate::health::{HealthState, MetricsArgs};
use crate::hold::Hold;
use crate::humanize;
use crate::notify::ServiceManager;
use crate::report::{Event, Reporter};
use crate::signals::{self, Signals};
use crate::supervise::HandoffAction;

/// Time limit for leaving the election.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time for which the end of the command is delayed by the cleanup of a claim that waited.
const WITHDRAW_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause after a failed request for the current leader.
const OBSERVE_RETRY_DELAY: Duration = Duration::from_secs(1);

#[derive(Args)]
#[command(after_help = exit::LEAD)]
pub(crate) struct Lead {
    #[command(flatten)]
    pub(crate) store: StoreUrl,
    #[command(flatten)]
    pub(crate) pair: AdvisoryKeyArgs,
    #[command(flatten)]
    election: ElectionArgs,
    #[command(flatten)]
    metrics: MetricsArgs,
    #[command(flatten)]
    output: Output,
    /// The name of the election; omitted with --key1 and --key2
    #[arg(required_unless_present = "key1", allow_negative_numbers = true)]
    name: Option<Key>,
    /// The command to run while leading; without a command, every transition is logged. Its environment has the fencing
    /// token in `TENURE_TOKEN` and, on NATS, the revision of the record in `TENURE_REVISION`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
}

impl Lead {
    /// Takes the name of the election. If --key1 and --key2 name it, the first word belongs to the command.
    fn take_name(&mut self) -> Key {
        match (self.pair.key(), self.name.take()) {
            (Some(key), word) => {
                self.command.splice(0..0, word.map(|word| word.as_str().into()));
                key
            }
            (None, Some(name)) => name,
            (None, None) => unreachable!("clap requires one of the two"),
        }
    }
}

pub(crate) fn run(mut arguments: Lead) -> Exit {
    let name = arguments.take_name();
    let reporter = |events| {
        Reporter::new(name.clone(), arguments.output, events).with_pair(arguments.pair.numbers())
    };
    session::run(arguments.output, reporter, Some(&arguments.metrics), async |mut session| {
        match begin(&arguments, &name, &mut session).await {
            Ok(participant) => {
                LeadSession::new(&arguments, &name, participant, session).run().await
            }
            Err(exit) => exit,
        }
    })
}

/// A started election, and the streams that its participant reads.
struct Participant {
    client: Client,
    election: Election,
    events: Events,
    leader: Leader,
}

/// Starts the election. Reports an error and returns its exit code.
async fn begin(arguments: &Lead, name: &Key, session: &mut Session) -> Result<Participant, Exit> {
    let reporter = &session.reporter;
    let builder = session::client_builder(Some(Duration::MAX), reporter);
    let connecting = arguments.pair.connect(&arguments.store, builder);
    let opening = session::open_store(connecting, reporter);
    let opened = session::unless_stopped(opening, &mut session.signals, reporter).await;
    let client = opened.unwrap_or(Err(Exit::Success))?;
    let started = async {
        let outages = Arc::clone(reporter);
        let request = request::election(&arguments.election, &client, name);
        let election = request.on_outage(move |outage| outages.outage(outage)).build()?;
        let leader = client.leader(name)?;
        let events = election.events();
        election.start().await?;
        Ok((election, leader, events))
    };
    let (election, leader, events) = started.await.map_err(|error: tenure::Error| {
        reporter.error(&error.chain());
        super::exit_for(&error)
    })?;
    session.health.set_ready();
    Ok(Participant { client, election, events, leader })
}

struct LeadSession<'a> {
    arguments: &'a Lead,
    name: &'a Key,
    client: Client,
    election: Election,
    events: Events,
    /// Events that were reported while the command ran, and are yet to be acted on.
    pending_events: VecDeque<ElectionEvent>,
    leader: Leader,
    manager: Option<ServiceManager>,
    signals: Signals,
    log: EventLog,
}

/// Reports the events of the election, with the state that the reports need.
struct EventLog {
    reporter: Arc<Reporter>,
    health: Arc<HealthState>,
    /// Number of the current claim, counted from the last leadership.
    attempt: u32,
    /// This participant leads, or led until the transition whose errors are being reported.
    leading: bool,
    /// True while a lost leadership may still recover within its grace.
    reconnecting: bool,
    /// True after a recovery that is not reported yet, because its loss may follow.
    recovered: bool,
    /// Reason to leave the election, if it is not a request to stop.
    leave_reason: Option<&'static str>,
}

/// Input of the event loop.
enum LeadEvent {
    Election(Option<ElectionEvent>),
    Signal(Signal),
    Leader(Option<HolderState>),
    /// Another participant waits to lead, and `--step-down-on-request` is given.
    HandoffRequested,
}

impl<'a> LeadSession<'a> {
    fn new(arguments: &'a Lead, name: &'a Key, participant: Participant, session: Session) -> Self {
        let Participant { client, election, events, leader } = participant;
        let Session { signals, reporter, health } = session;
        Self {
            arguments,
            name,
            client,
            election,
            events,
            pending_events: VecDeque::new(),
            leader,
            manager: ServiceManager::from_environment(),
            signals,
            log: EventLog {
                reporter,
                health,
                attempt: 1,
                leading: false,
                reconnecting: false,
                recovered: false,
                leave_reason: None,
            },
        }
    }

    async fn run(mut self) -> Exit {
        let exit = self.event_loop().await;
        if let Some(manager) = &self.manager {
            manager.stopping();
        }
        if let Err(error) = self.election.shutdown(SHUTDOWN_TIMEOUT).await {
            self.log.reporter.error(&error.chain());
        }
        self.report_remaining_events().await;
        // A participant that followed may have left a mark in the store, which is withdrawn now.
        let _ = tokio::time::timeout(WITHDRAW_TIMEOUT, self.client.idle()).await;
        exit
    }

    async fn event_loop(&mut self) -> Exit {
        loop {
            match self.next_event().await {
                LeadEvent::Election(None) => return Exit::Failed,
                LeadEvent::Election(Some(ElectionEvent::Acquired(leadership))) => {
                    if let Some(exit) = self.run_command(&leadership).await {
                        return exit;
                    }
                }
                LeadEvent::Election(Some(ElectionEvent::StateChange(change)))
                    if is_recovery(change) =>
                {
                    let Some(leadership) = self.election.leadership() else { continue };
                    self.log.set_leadership(&leadership, self.manager.as_ref());
                    if let Some(exit) = self.run_command(&leadership).await {
                        return exit;
                    }
                }
                LeadEvent::Election(Some(ElectionEvent::Stopped(why))) => {
                    return exit_for_stop(&why);
                }
                LeadEvent::Signal(Signal::SIGINT | Signal::SIGTERM) => return Exit::Success,
                LeadEvent::Signal(signal @ (Signal::SIGHUP | Signal::SIGQUIT)) => {
                    return Exit::Signal(signal as i32);
                }
                LeadEvent::Signal(Signal::SIGTSTP) => {
                    // While this process is suspended its lease expires, and another participant leads.
                    let _ = signals::raise_with_default_action(Signal::SIGTSTP);
                }
                LeadEvent::Election(Some(_)) | LeadEvent::Signal(_) => {}
                LeadEvent::Leader(leader) => self.report_leader(leader.as_ref()),
                LeadEvent::HandoffRequested => {
                    self.log.reporter.log(&Event::HandoffRequested);
                    if let Err(error) = self.election.step_down(SHUTDOWN_TIMEOUT).await {
                        self.log.reporter.error(&error.chain());
                    }
                }
            }
        }
    }

    async fn next_event(&mut self) -> LeadEvent {
        if let Some(event) = self.pending_events.pop_front() {
            return LeadEvent::Election(Some(event));
        }
        let leader = async {
            if self.manager.is_none() {
                return pending().await;
            }
            loop {
                match self.leader.changed().await {
                    Ok(leader) => return leader,
                    Err(_) => tokio::time::sleep(OBSERVE_RETRY_DELAY).await,
                }
            }
        };
        let leadership = self.election.leadership();
        let handoff_requested = async {
            match leadership.filter(|_| self.arguments.election.step_down_on_request) {
                Some(leadership) => leadership.handoff_requested().await,
                None => pending().await,
            }
        };
        tokio::select! {
            biased;
            event = self.log.next(&mut self.events, self.manager.as_ref()) => LeadEvent::Election(event),
            signal = self.signals.next() => LeadEvent::Signal(signal),
            () = handoff_requested => LeadEvent::HandoffRequested,
            leader = leader => LeadEvent::Leader(leader),
        }
    }

    /// Runs the command, if there is one, while leading. Returns the exit code, or `None` if the election continues.
    async fn run_command(&mut self, leadership: &Leadership) -> Option<Exit> {
        let Lead { election, command, .. } = self.arguments;
        if command.is_empty() {
            return None;
        }
        let ttl = election.ttl(self.client.store().capabilities().min_ttl);
        let name = self.name;
        let hold = Hold::Lead(leadership);
        let supervised = SupervisedCommand {
            context: HoldContext { client: &self.client, name, identity: &election.identity, ttl },
            command,
            kill_after: election.kill_after(ttl),
            hard_end: None,
            slot: None,
            on_request: if election.step_down_on_request {
                HandoffAction::Stop
            } else {
                HandoffAction::Ignore
            },
        };
        let reporter = Arc::clone(&self.log.reporter);
        let (pending_events, log, manager) =
            (&mut self.pending_events, &mut self.log, self.manager.as_ref());
        let mut running = pin!(supervised.run(hold, &mut self.signals, &reporter));
        let ended = loop {
            tokio::select! {
                biased;
                ended = &mut running => break ended,
                Some(event) = log.next(&mut self.events, manager) => pending_events.push_back(event),
            }
        };
        match ended {
            CommandEnd::NotStarted(exit) => {
                self.log.leave_reason = Some("the command could not be started");
                Some(exit)
            }
            CommandEnd::Ended { exit, stop_requested } => {
                self.log.leave_reason = (!stop_requested).then_some("the command ended");
                Some(exit)
            }
            CommandEnd::Lost(reason) => {
                if leadership.is_held() {
                    self.log
                        .reporter
                        .error(&format!("stepping down: {reason}; the command was stopped"));
                    let _ = self.election.step_down(SHUTDOWN_TIMEOUT).await;
                }
                None
            }
        }
    }

    /// Reports the events that the shutdown of the election emits.
    async fn report_remaining_events(&mut self) {
        let limit = Duration::from_millis(200);
        while let Ok(Some(event)) =
            tokio::time::timeout(limit, self.log.next(&mut self.events, self.manager.as_ref()))
                .await
        {
            if let ElectionEvent::Stopped(_) = event {
                return;
            }
        }
    }

    fn report_leader(&self, leader: Option<&HolderState>) {
        if let Some(manager) = &self.manager {
            manager.status(&match leader {
                None => "no leader".to_owned(),
                Some(state) if Some(state.token) == self.election.fencing_token() => {
                    "leading".to_owned()
                }
                Some(state) => {
                    format!("standing by: {} leads", humanize::identity(state.by.as_ref()))
                }
            });
        }
    }
}

/// True for a leadership that recovered within its grace. No other event reports this.
fn is_recovery(change: StateChange) -> bool {
    (change.from, change.to) == (ElectionState::Reconnecting, ElectionState::Leader)
}

/// Exit code for an election that stopped by itself.
fn exit_for_stop(why: &StopReason) -> Exit {
    match why {
        StopReason::TermOver => Exit::Lost,
        StopReason::GaveUp => Exit::NotAcquired,
        StopReason::Failed(error) if error.kind() == ErrorKind::Invalid => Exit::Usage,
        _ => Exit::Failed,
    }
}

impl EventLog {
    /// Records that this participant leads, from now on or again.
    fn set_leadership(&mut self, leadership: &Leadership, manager: Option<&ServiceManager>) {
        self.leading = true;
        self.health.set_leadership(leadership.clone());
        if let Some(manager) = manager {
            manager.status("leading");
        }
    }

    /// Next event of the election, reported.
    ///
    /// A recovery during which another participant led is reported by the election as a change of the state, a loss and
    /// a new term. It sends these at once, so a recovery whose loss is not there yet has none.
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time.
    async fn next(
        &mut self,
        events: &mut Events,
        manager: Option<&ServiceManager>,
    ) -> Option<ElectionEvent> {
        let sent = tokio::select! {
            biased;
            event = events.next() => Some(event),
            () = ready(()), if self.recovered => None,
        };
        let event = if let Some(event) = sent {
            event
        } else {
            self.report_recovery();
            events.next().await
        };
        if let Some(event) = &event {
            self.report(event, manager);
        }
        event
    }

    fn report_recovery(&mut self) {
        if std::mem::take(&mut self.recovered) {
            self.reporter.log_recovery();
        }
    }

    /// Reports an event of the election to the log and to the service manager.
    fn report(&mut self, occurred: &ElectionEvent, manager: Option<&ServiceManager>) {
        if let ElectionEvent::Lost(_) = occurred {
            self.recovered = false;
        }
        self.report_recovery();
        let event = match occurred {
            ElectionEvent::Acquired(leadership) => {
                self.set_leadership(leadership, manager);
                let attempt = std::mem::replace(&mut self.attempt, 1);
                Event::Acquired {
                    token: humanize::token(leadership.fencing_token()),
                    attempt: Some(attempt),
                }
            }
            ElectionEvent::Released => Event::Released,
            ElectionEvent::Lost(lost) => {
                self.leading = false;
                Event::Lost { reason: lost.reason.to_string() }
            }
            ElectionEvent::AcquireFailed(failed) => {
                self.attempt = failed.attempt.saturating_add(1);
                let reason = format!("another participant leads (attempt {})", failed.attempt);
                Event::AcquireFailed { reason }
            }
            ElectionEvent::StateChange(change) => {
                if let (Some(manager), ElectionState::Stopped) = (manager, change.from) {
                    manager.ready();
                }
                self.leading =
                    change.to == ElectionState::Leader || change.from == ElectionState::Leader;
                self.reconnecting = change.to == ElectionState::Reconnecting;
                self.recovered = is_recovery(*change);
                Event::StateChange { from: change.from.to_string(), to: change.to.to_string() }
            }
            // The loss itself, which the next event reports. Only pgleaderlock's log has it twice.
            ElectionEvent::Error(error)
                if error.kind() == ErrorKind::Lost
                    && !self.reconnecting
                    && !self.reporter.speaks_as_pgleaderlock() =>
            {
                return;
            }
            ElectionEvent::Error(error) => {
                Event::Error { message: error.chain(), health_check: self.leading }
            }
            ElectionEvent::Stopped(why) => {
                // Leaving the election because of the command is a requested stop to the election.
                let left = self.leave_reason.filter(|_| matches!(why, StopReason::Requested));
                let reason = left.map_or_else(|| why.to_string(), str::to_owned);
                Event::Stopped { signal: None, reason: Some(reason) }
            }
            ElectionEvent::Missed(number) => Event::Error {
                message: format!("{number} events were missed"),
                health_check: false,
            },
            _ => return,
        };
        self.reporter.log(&event);
    }
}
