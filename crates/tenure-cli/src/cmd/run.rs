//! `tenure run`: holds a lock while a command runs.

use std::ffi::OsString;
use std::future::pending;
use std::os::unix::net::UnixStream;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use nix::sys::signal::Signal;
use tenure::store::KeySpace;
use tenure::{Client, ErrorKind, Guard, Key};
use tokio::time::Instant;

use super::{HoldContext, request};
use crate::args::hold::HoldArgs;
use crate::args::output::Output;
use crate::args::store::StoreUrl;
use crate::args::value::signal;
use crate::child::Child;
use crate::enclosing_hold::EnclosingHold;
use crate::exit::{self, Exit};
use crate::health::{HealthState, MetricsArgs};
use crate::hold::Hold;
use crate::humanize;
use crate::other_kind::OtherKindCheck;
use crate::report::{self, Event, Reporter};
use crate::signals::{self, Signals};
use crate::supervise::{ChildOutcome, HandoffAction, Supervisor};
use crate::terminal::Terminal;
use crate::waiting;

/// Time limit for leaving the queue after an abandoned wait.
const LEAVE_QUEUE_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Args)]
#[command(after_help = exit::RUN)]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) store: StoreUrl,
    #[command(flatten)]
    hold: HoldArgs,
    /// Send the command this signal (TERM, USR1) when a waiter requests a hand-off. Only on stores that report waiters
    #[arg(long, value_name = "SIGNAL", value_parser = signal)]
    on_request: Option<Signal>,
    #[command(flatten)]
    metrics: MetricsArgs,
    #[command(flatten)]
    output: Output,
    /// The name of the lock
    pub(crate) name: Key,
    /// The command to run, with its arguments; a `--` before it is optional. Its environment has the fencing token in
    /// `TENURE_TOKEN` and, on NATS, the revision of the record in `TENURE_REVISION`
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) command: Vec<OsString>,
}

pub(crate) fn run(arguments: Run) -> Exit {
    match super::listen_for_signals() {
        Ok(stream) => super::on_runtime(session(arguments, stream)),
        Err(error) => super::fail("cannot listen for signals", &error),
    }
}

async fn session(arguments: Run, stream: UnixStream) -> Exit {
    let reporter = Reporter::new(arguments.name.clone(), arguments.output);
    let exit = match Signals::new(stream) {
        Ok(signals) => {
            let health = Arc::default();
            RunSession { arguments, signals, reporter: &reporter, health, other_kind: None }
                .run()
                .await
        }
        Err(error) => {
            reporter.error(&format!("cannot listen for signals: {error}"));
            Exit::Failed
        }
    };
    reporter.clear_progress();
    reporter.flush().await;
    match exit {
        Exit::Interrupted => {
            signals::interrupt_own_group();
            Exit::Signal(Signal::SIGINT as i32)
        }
        exit => exit,
    }
}

/// A command that runs under a lock.
pub(super) struct SupervisedCommand<'a> {
    pub(super) context: HoldContext<'a>,
    pub(super) command: &'a [OsString],
    pub(super) kill_after: Duration,
    /// Time at which the hold ends even if every renewal succeeds.
    pub(super) hard_end: Option<Instant>,
    /// Slot that the command runs for, with `once`.
    pub(super) slot: Option<String>,
    pub(super) on_request: HandoffAction,
}

impl SupervisedCommand<'_> {
    /// Runs the command until it has ended. Returns the exit code if it could not be started.
    pub(super) async fn run(
        &self,
        guard: &Guard,
        signals: &mut Signals,
        reporter: &Reporter,
    ) -> Result<ChildOutcome, Exit> {
        let hold = Hold::Lock(guard);
        let mut environment = super::environment(&self.context, hold).map_err(|error| {
            reporter.error(&report::chain(&error));
            Exit::Failed
        })?;
        environment.extend(self.slot.iter().map(|slot| ("TENURE_SLOT", slot.clone())));
        // Before the child starts: lines that are still queued would be mixed into its output.
        reporter.flush().await;
        let child = Child::start(self.command, &environment, hold)
            .await
            .map_err(|error| super::report_start_error(&error, self.command, reporter))?;
        let mut supervisor = Supervisor {
            hold,
            child,
            signals,
            terminal: Terminal::open(),
            reporter,
            ttl: self.context.ttl,
            kill_after: self.kill_after,
            hard_end: self.hard_end,
            on_request: self.on_request,
            stop_pending: false,
        };
        Ok(supervisor.run().await)
    }
}

/// Resolves once the check of the other kind is done. Never resolves after that.
async fn other_kind_checked(check: &mut Option<OtherKindCheck>, reporter: &Reporter) {
    match check {
        Some(running) => {
            running.warn(reporter).await;
            *check = None;
        }
        None => pending().await,
    }
}

struct RunSession<'a> {
    arguments: Run,
    signals: Signals,
    reporter: &'a Reporter,
    health: Arc<HealthState>,
    /// Check of the other kind of the name, until it is done.
    other_kind: Option<OtherKindCheck>,
}

impl RunSession<'_> {
    async fn run(mut self) -> Exit {
        match self.arguments.metrics.start() {
            Ok(health) => self.health = health,
            Err(message) => {
                self.reporter.error(&message);
                return Exit::Failed;
            }
        }
        let connected = self.arguments.store.connect().await;
        let client = match connected {
            Ok(client) => client,
            Err(error) => {
                self.reporter.error(&report::chain(&error));
                return Exit::Failed;
            }
        };
        self.reporter.print_creation_notice(&**client.store());
        self.health.set_ready();
        let held = match self.reject_nesting(&client).await {
            Ok(()) => self.acquire(&client).await,
            Err(exit) => Err(exit),
        };
        match held {
            Ok(guard) => {
                let health = Arc::clone(&self.health);
                health.set_held(true);
                let exit = self.hold(&client, guard).await;
                health.set_held(false);
                exit
            }
            Err(exit) => exit,
        }
    }

    /// Refuses a lock that an enclosing tenure command holds while this one runs: this one would wait forever.
    async fn reject_nesting(&mut self, client: &Client) -> Result<(), Exit> {
        let (name, store) = (&self.arguments.name, client.store().to_string());
        let mut enclosing = EnclosingHold::all();
        enclosing.retain(|outer| outer.name == name.as_str() && outer.store == store);
        if enclosing.is_empty() || self.arguments.hold.limit.is_some() {
            return Ok(());
        }
        // The environment may be inherited from a hold that has ended since, for instance by a daemon. Only a hold that
        // the store still shows, with the same token, encloses this process.
        let Ok(state) = client.inspect(name).await else { return Ok(()) };
        let mut tokens = state.holders.iter().map(|holder| holder.token.to_string());
        if !tokens.any(|token| enclosing.iter().any(|outer| outer.token == token)) {
            return Ok(());
        }
        self.reporter.error(&format!(
            "{name} is already held by an enclosing tenure command, so this one would wait forever: use another name"
        ));
        Err(Exit::Failed)
    }

    async fn acquire(&mut self, client: &Client) -> Result<Guard, Exit> {
        let Run { hold, name, .. } = &self.arguments;
        let request = request::lock(hold, client, name);
        let space = if hold.limit.is_some() { KeySpace::Semaphore } else { KeySpace::Lock };
        self.other_kind = Some(OtherKindCheck::start(client, name, space));
        let acquired = {
            let mut acquiring = pin!(async {
                if hold.try_once { request.try_acquire().await } else { request.acquire().await }
            });
            let mut watching =
                pin!(waiting::show_wait(client, name, space, &hold.identity, self.reporter));
            loop {
                tokio::select! {
                    biased;
                    acquired = &mut acquiring => break Ok(acquired),
                    signal = self.signals.next() => match signal {
                        Signal::SIGINT | Signal::SIGTERM | Signal::SIGHUP | Signal::SIGQUIT => break Err(signal),
                        // Ctrl-Z suspends this process, as it suspends any waiting command.
                        Signal::SIGTSTP => drop(signals::raise_with_default_action(signal)),
                        _ => {}
                    },
                    () = other_kind_checked(&mut self.other_kind, self.reporter) => {}
                    () = &mut watching => {}
                }
            }
        };
        self.reporter.clear_progress();
        match acquired {
            Ok(Ok(guard)) => {
                let token = humanize::token(guard.fencing_token());
                self.reporter.event(&Event::Acquired { token, attempt: None });
                Ok(guard)
            }
            Ok(Err(error)) => {
                let reason = report::chain(&error);
                match super::exit_for(&error) {
                    Exit::NotAcquired if self.arguments.output.json => {
                        self.reporter.event(&Event::AcquireFailed { reason });
                    }
                    Exit::NotAcquired if self.arguments.output.quiet => {}
                    _ => self.reporter.error(&reason),
                }
                let _ = tokio::time::timeout(LEAVE_QUEUE_TIMEOUT, client.idle()).await;
                Err(super::exit_for(&error))
            }
            Err(signal) => {
                self.reporter
                    .event(&Event::Stopped { signal: Some(signal.as_str()), reason: None });
                let _ = tokio::time::timeout(LEAVE_QUEUE_TIMEOUT, client.idle()).await;
                Err(Exit::Signal(signal as i32))
            }
        }
    }

    async fn hold(mut self, client: &Client, guard: Guard) -> Exit {
        let hard_end = self.arguments.hold.max_hold.map(|max| Instant::now() + max);
        let hold = &self.arguments.hold;
        let context = HoldContext {
            client,
            name: &self.arguments.name,
            identity: &hold.identity,
            ttl: hold.ttl,
        };
        let supervised = SupervisedCommand {
            context,
            command: &self.arguments.command,
            kill_after: hold.kill_after(),
            hard_end,
            slot: None,
            on_request: self
                .arguments
                .on_request
                .map_or(HandoffAction::Report, HandoffAction::Signal),
        };
        let ended = {
            let mut running = pin!(supervised.run(&guard, &mut self.signals, self.reporter));
            loop {
                tokio::select! {
                    biased;
                    ended = &mut running => break ended,
                    () = other_kind_checked(&mut self.other_kind, self.reporter) => {}
                }
            }
        };
        let ended = match ended {
            Ok(ended) => ended,
            Err(exit) => return self.release(guard, exit).await,
        };
        match ended {
            ChildOutcome::Exited(code) => self.release(guard, Exit::Child(code)).await,
            ChildOutcome::Killed { signal, by_ctrl_c: false } => {
                self.release(guard, Exit::Signal(signal)).await
            }
            ChildOutcome::Killed { by_ctrl_c: true, .. } => {
                self.release(guard, Exit::Interrupted).await
            }
            ChildOutcome::Lost(reason) => {
                let message = format!("lost {}: {reason}; the command was stopped", guard.key());
                self.report_loss(reason, &message);
                // The child was stopped before the deadline, so the hold may not have ended yet. Releasing it spares
                // the next holder the rest of the lease.
                let _ = guard.release().await;
                Exit::Lost
            }
            ChildOutcome::GuardianDied => {
                self.reporter.error("the guardian was killed; the command was killed with it");
                self.release(guard, Exit::Failed).await
            }
        }
    }

    fn report_loss(&mut self, reason: String, message: &str) {
        if self.arguments.output.json {
            self.reporter.event(&Event::Lost { reason });
        } else {
            self.reporter.error(message);
        }
    }

    /// Releases the lock. Returns `exit`, or [`Exit::Lost`] if the lock was no longer held.
    async fn release(&mut self, guard: Guard, exit: Exit) -> Exit {
        let key = guard.key().clone();
        let mut releasing = pin!(guard.release());
        let released = loop {
            tokio::select! {
                biased;
                released = &mut releasing => break released,
                // A signal while the store does not answer ends the wait for it. The lease expires by itself.
                signal = self.signals.next() => {
                    if let Signal::SIGINT | Signal::SIGTERM | Signal::SIGHUP | Signal::SIGQUIT = signal {
                        self.reporter.error(&format!("{key} was not released: it stays held until its lease ends"));
                        return exit;
                    }
                }
            }
        };
        match released {
            Ok(()) => {
                self.reporter.event(&Event::Released);
                exit
            }
            Err(error) if error.kind() == ErrorKind::Lost => {
                let message =
                    format!("{}; the command had already ended: {exit}", report::chain(&error));
                self.report_loss(report::chain(&error), &message);
                Exit::Lost
            }
            Err(error) => {
                self.reporter.error(&report::chain(&error));
                exit
            }
        }
    }
}
