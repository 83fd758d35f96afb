//! `tenure run`: holds a lock while a command runs.

use std::ffi::OsString;
use std::future::pending;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use nix::sys::signal::Signal;
use tenure::store::KeySpace;
use tenure::{Client, ErrorKind, Guard, Key, LockAllRequest, LockGuards, LockRequest};
use tokio::sync::watch;
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
use crate::hold::{Hold, MAX_LOCKS};
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
    /// Hold this lock too; may be given several times. All are acquired in the order of their names, so that no two
    /// commands wait for each other, and released together. With several locks, `TENURE_TOKENS` has all tokens as JSON
    #[arg(long, value_name = "NAME", conflicts_with_all = ["limit", "max_hold"])]
    also: Vec<Key>,
    /// Send the command this signal (TERM, USR1) when a waiter requests a hand-off. Only on stores that report waiters
    #[arg(long, value_name = "SIGNAL", value_parser = signal)]
    on_request: Option<Signal>,
    #[command(flatten)]
    metrics: MetricsArgs,
    #[command(flatten)]
    output: Output,
    /// The name of the lock
    #[arg(allow_negative_numbers = true)]
    pub(crate) name: Key,
    /// The command to run, with its arguments; a `--` before it is optional. Its environment has the fencing token in
    /// `TENURE_TOKEN` and, on NATS, the revision of the record in `TENURE_REVISION`
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) command: Vec<OsString>,
}

pub(crate) fn run(arguments: &Run) -> Exit {
    let reporter = |events| Reporter::new(arguments.name.clone(), arguments.output, events);
    session::run(arguments.output, reporter, Some(&arguments.metrics), async |session| {
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

impl Run {
    /// Refuses more locks than the guardian of the command can keep.
    pub(crate) fn usage_error(&self) -> Option<String> {
        let most = MAX_LOCKS - 1;
        (self.also.len() > most).then(|| format!("--also can be given at most {most} times"))
    }

    /// Acquires the lock, or with `--also` all locks, or with `--limit` a slot. Sends the name of each lock before it is
    /// requested.
    async fn acquire(
        &self,
        client: &Client,
        begun: Instant,
        reporter: &Arc<Reporter>,
        next: watch::Sender<Key>,
    ) -> tenure::Result<LockGuards> {
        let hold = &self.hold;
        let (settings, reporter) = (hold.clone(), Arc::clone(reporter));
        let with_settings = move |lock: LockRequest| {
            let reporter = Arc::clone(&reporter);
            let lock = lock.on_outage(move |outage| reporter.outage(outage));
            request::with_settings(lock, &settings)
        };
        // `--wait` includes the time for which the store was away.
        let wait = hold.wait.map(|wait| wait.saturating_sub(begun.elapsed()));
        if let Some(limit) = hold.limit {
            let slot = with_settings(client.semaphore(&self.name, limit));
            let slot = wait.into_iter().fold(slot, LockRequest::timeout);
            let acquired =
                if hold.try_once { slot.try_acquire().await } else { slot.acquire().await };
            return acquired.map(LockGuards::from);
        }
        let all = client.lock_all(std::iter::once(&self.name).chain(&self.also));
        let all = wait.into_iter().fold(all, LockAllRequest::timeout).each(move |lock| {
            lock.key().into_iter().for_each(|key| drop(next.send_replace(key.clone())));
            with_settings(lock)
        });
        if hold.try_once { all.try_acquire().await } else { all.acquire().await }
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
            Ok(guards) => {
                let health = Arc::clone(&self.health);
                health.set_held(true);
                let exit = self.hold(&client, guards).await;
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
        let opening = session::open_store(store.connect_with(builder), self.reporter);
        let opened = session::unless_stopped(opening, &mut self.signals, self.reporter).await;
        opened.unwrap_or_else(|signal| Err(Exit::Signal(signal as i32)))
    }

    /// Refuses locks that an enclosing tenure command holds while this one runs: this one would wait forever.
    async fn reject_nesting(&mut self, client: &Client) -> Result<(), Exit> {
        for name in std::iter::once(&self.arguments.name).chain(&self.arguments.also) {
            self.reject_nested(client, name).await?;
        }
        Ok(())
    }

    async fn reject_nested(&mut self, client: &Client, name: &Key) -> Result<(), Exit> {
        let store = client.store().to_string();
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

    async fn acquire(&mut self, client: &Client, begun: Instant) -> Result<LockGuards, Exit> {
        let Run { hold, name, .. } = self.arguments;
        let space = if hold.limit.is_some() { KeySpace::Semaphore } else { KeySpace::Lock };
        self.other_kind = Some(OtherKindCheck::start(client, name, space));
        let acquired = {
            let (sender, next) = watch::channel(name.clone());
            let mut acquiring = pin!(self.arguments.acquire(client, begun, self.reporter, sender));
            let mut watching =
                pin!(waiting::show_waits(client, next, space, &hold.identity, self.reporter));
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
            Ok(Ok(guards)) => {
                let token = guards.get(name).map(Guard::fencing_token).and_then(humanize::token);
                self.reporter.event(&Event::Acquired { token, attempt: None });
                self.reporter.log_wait_over(begun.elapsed());
                Ok(guards)
            }
            Ok(Err(error)) => {
                let reason = error.chain();
                match super::exit_for(&error) {
                    Exit::NotAcquired if self.arguments.output.has_events() => {
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

    async fn hold(mut self, client: &Client, guards: LockGuards) -> Exit {
        let Some(guard) = guards.get(&self.arguments.name) else { return Exit::Failed };
        let locks = Hold::Locks { first: guard, all: &guards };
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
            let mut running = pin!(supervised.run(locks, &mut self.signals, self.reporter));
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
                self.release(guards, exit).await
            }
            CommandEnd::Lost(reason) => {
                let message = format!("lost {}: {reason}; the command was stopped", guard.key());
                self.report_loss(reason, &message);
                // The child was stopped before the deadline, so the hold may not have ended yet. Releasing it spares
                // the next holder the rest of the lease.
                let _ = guards.release().await;
                Exit::Lost
            }
        }
    }

    fn report_loss(&mut self, reason: String, message: &str) {
        if self.arguments.output.has_events() {
            self.reporter.event(&Event::Lost { reason });
        } else {
            self.reporter.error(message);
        }
    }

    /// Releases the locks. Returns `exit`, or [`Exit::Lost`] if one of them was no longer held.
    async fn release(&mut self, guards: LockGuards, exit: Exit) -> Exit {
        let keys: Vec<&str> = guards.keys().map(Key::as_str).collect();
        let key = keys.join(", ");
        let mut releasing = pin!(guards.release());
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
