//! `tenure run`: holds a lock while a command runs.

use std::ffi::OsString;
use std::future::pending;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use nix::sys::signal::Signal;
use tenure::store::KeySpace;
use tenure::{Client, ErrorKind, Guard, Key};
use tokio::time::Instant;

use super::request;
use super::session::{self, Session};
use super::supervised_command::{CommandEnd, HoldContext, SupervisedCommand};
use crate::args::hold::HoldArgs;
use crate::args::output::Output;
use crate::args::store::StoreUrl;
use crate::args::value::signal;
use crate::enclosing_hold::EnclosingHold;
use crate::exit::{self, Exit};
use crate::health::{HealthState, MetricsArgs};
use crate::hold::Hold;
use crate::humanize;
use crate::other_kind::OtherKindCheck;
use crate::report::{Event, Reporter};
use crate::signals::{self, Signals};
use crate::supervise::HandoffAction;
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

pub(crate) fn run(arguments: &Run) -> Exit {
    let reporter = || Reporter::new(arguments.name.clone(), arguments.output);
    session::run(reporter, Some(&arguments.metrics), async |session| {
        let Session { signals, reporter, health } = session;
        let reporter = &reporter;
        RunSession { arguments, signals, reporter, health, other_kind: None }.run().await
    })
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
    arguments: &'a Run,
    signals: Signals,
    reporter: &'a Arc<Reporter>,
    health: Arc<HealthState>,
    /// Check of the other kind of the name, until it is done.
    other_kind: Option<OtherKindCheck>,
}

impl RunSession<'_> {
    async fn run(mut self) -> Exit {
        let begun = Instant::now();
        let client = match self.open_store().await {
            Ok(client) => client,
            Err(exit) => return exit,
        };
        self.health.set_ready();
        let held = match self.reject_nesting(&client).await {
            Ok(()) => self.acquire(&client, begun).await,
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

    /// Opens the store. One that is away is waited for, as long as the lock would be.
    async fn open_store(&mut self) -> Result<Client, Exit> {
        let Run { store, hold, .. } = self.arguments;
        let builder = session::client_builder(hold.patience(), self.reporter);
        let mut opening = pin!(session::open_store(store.connect_with(builder), self.reporter));
        loop {
            tokio::select! {
                biased;
                opened = &mut opening => return opened,
                signal = self.signals.next() => if signals::asks_to_stop(signal) {
                    self.reporter
                        .event(&Event::Stopped { signal: Some(signal.as_str()), reason: None });
                    return Err(Exit::Signal(signal as i32));
                }
            }
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

    async fn acquire(&mut self, client: &Client, begun: Instant) -> Result<Guard, Exit> {
        let Run { hold, name, .. } = self.arguments;
        let mut request = request::lock(hold, client, name);
        if let Some(wait) = hold.wait {
            // `--wait` includes the time for which the store was away.
            request = request.timeout(wait.saturating_sub(begun.elapsed()));
        }
        let reporter = Arc::clone(self.reporter);
        let request = request.on_outage(move |outage| reporter.outage(outage));
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
                self.reporter.log_wait_over(begun.elapsed());
                Ok(guard)
            }
            Ok(Err(error)) => {
                let reason = error.chain();
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
            let mut running =
                pin!(supervised.run(Hold::Lock(&guard), &mut self.signals, self.reporter));
            loop {
                tokio::select! {
                    biased;
                    ended = &mut running => break ended,
                    () = other_kind_checked(&mut self.other_kind, self.reporter) => {}
                }
            }
        };
        match ended {
            CommandEnd::NotStarted(exit) | CommandEnd::Ended { exit, .. } => {
                self.release(guard, exit).await
            }
            CommandEnd::Lost(reason) => {
                let message = format!("lost {}: {reason}; the command was stopped", guard.key());
                self.report_loss(reason, &message);
                // The child was stopped before the deadline, so the hold may not have ended yet. Releasing it spares
                // the next holder the rest of the lease.
                let _ = guard.release().await;
                Exit::Lost
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
                    if signals::asks_to_stop(signal) {
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
                let message = format!("{}; the command had already ended: {exit}", error.chain());
                self.report_loss(error.chain(), &message);
                Exit::Lost
            }
            Err(error) => {
                self.reporter.error(&error.chain());
                exit
            }
        }
    }
}
